"""Step 2: compute attention without its matrix of scores (flashattn2)."""

import torch
from flashattn2 import explain, flash_attention
from model import HEADS, WIDTH, save_lines

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, HEADS, 2048, WIDTH // HEADS)
out = flash_attention(q, k, v, is_causal=True)

scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
mask = torch.ones(2048, 2048).triu(1).bool()
expected = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v.double()

print(explain(q, k, v, is_causal=True))
print(f"largest error against float64: {(out - expected).abs().max():.1e}")
lengths = [4**k for k in range(3, 9)]
save_lines(
    "attend",
    {
        "matrix of scores": [(n, 4 * HEADS * n**2 / 2**20) for n in lengths],
        "what flashattn2 saves": [(n, 4 * (4 * WIDTH + HEADS) * n / 2**20) for n in lengths],
    },
)
print(f"the matrix of scores would take {4 * HEADS * 2048**2 / 2**20:.0f} MiB")
