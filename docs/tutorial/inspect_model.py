"""Step 7: look at what each layer contributes to the prediction (interp)."""

import torch
from interp import logit_lens, record
from model import HELD_OUT, LAYERS, draw_batch, load_trained_model, save_lines

model = load_trained_model()
tokens, targets = draw_batch(0, text=HELD_OUT)
sites = ["blocks:input", *(f"blocks.{i}" for i in range(LAYERS))]
with record(model, *sites) as stream, torch.no_grad():
    model(tokens)
lens = logit_lens({site: stream[site] for site in sites}, model.norm, model.head, targets=targets)
losses = (-lens.target_log_probability).flatten(1).mean(1).tolist()
for site, loss in zip(sites, losses, strict=True):
    print(f"loss with {site} as the last layer: {loss:.2f} nats per byte")
save_lines("inspect", {"logit lens": list(enumerate(losses))})
