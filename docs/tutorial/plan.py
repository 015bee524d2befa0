"""Step 1: count parameters, compute and memory before anything runs (accounting)."""

from dataclasses import replace

from accounting import Transformer, flops, parameters, peak_memory
from model import CONTEXT, HEADS, LAYERS, ROWS, VOCABULARY, WIDTH, Decoder, save_lines

shape = Transformer(
    layers=LAYERS,
    d_model=WIDTH,
    heads=HEADS,
    d_ff=4 * WIDTH,
    vocab_size=VOCABULARY,
    positions=CONTEXT,
    gated_mlp=False,
    norm="layernorm",
)
counted = parameters(shape).total
built = sum(p.numel() for p in Decoder().parameters())
assert counted == built

print(parameters(shape))
print(f"parameters: {counted:,} counted, {built:,} built")
print(f"a training step: {flops(shape, batch=ROWS, seq=CONTEXT).total / 1e9:.2f} GFLOP")
memory = peak_memory(shape, batch=ROWS, seq=CONTEXT)
print(f"peak memory of a training step: {memory.total / 2**20:.1f} MiB")

sizes = [2**k for k in range(10)]
curves = {}
for context in (16, 64, 256):
    # Longer texts need a longer table of positions.
    longer = replace(shape, positions=max(context, CONTEXT))
    curves[f"{context} tokens"] = [
        (rows, peak_memory(longer, batch=rows, seq=context).total / 2**20) for rows in sizes
    ]
save_lines("plan", curves)
