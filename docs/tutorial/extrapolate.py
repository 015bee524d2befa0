"""Step 6: predict the loss of a larger model from small runs (scaling)."""

import scaling
import torch
from model import (
    CONTEXT,
    ROWS,
    Decoder,
    compute_held_out_loss,
    compute_loss,
    draw_batch,
    load_trained_model,
    save_lines,
)

# The model of step 4, without its embeddings, and its tokens: two ranks, 400 steps.
LARGE = 115_328
TOKENS = 2 * 400 * ROWS * CONTEXT

rows = {"N": [], "D": [], "loss": []}
for width in (16, 24, 32, 48):
    for steps in (50, 100, 200):
        torch.manual_seed(0)
        model = Decoder(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
        for step in range(steps):
            compute_loss(model, *draw_batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        embeddings = model.embedding.weight.numel() + model.positions.weight.numel()
        rows["N"].append(sum(p.numel() for p in model.parameters()) - embeddings)
        rows["D"].append(steps * ROWS * CONTEXT)
        rows["loss"].append(compute_held_out_loss(model))
# These models are smaller than any that `load_runs` expects, so the units are stated.
runs = scaling.load_runs(rows, units={"parameters": 1, "tokens": 1})
fit = scaling.fit_parametric(runs)
law = fit.law
print(f"L = {law.E:.2f} + {law.A:.3g} / N^{law.alpha:.2f} + {law.B:.3g} / D^{law.beta:.2f}")
lines = {}
for parameters, tokens, loss in zip(rows["N"], rows["D"], rows["loss"], strict=True):
    lines.setdefault(f"{parameters:,} parameters", []).append((tokens, loss))
lines[f"law, {LARGE:,} parameters"] = [
    (tokens, float(law.predict(LARGE, tokens))) for tokens in (*sorted({*rows["D"]}), TOKENS)
]
save_lines("extrapolate", lines)
measured = compute_held_out_loss(load_trained_model())
predicted = float(law.predict(LARGE, TOKENS))
print(f"N = {LARGE:,}, D = {TOKENS:,}: predicted {predicted:.2f}, measured {measured:.2f}")
