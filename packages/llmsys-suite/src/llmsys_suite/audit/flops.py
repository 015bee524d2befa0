"""FLOPs of a training step of the reference, counted by torch."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from llmsys_suite.audit import reference
from llmsys_suite.plain import Weights


def count_flops(weights: Weights, rows: int, context: int, heads: int) -> tuple[int, int]:
    """Return the FLOPs of a training step: all, and without masked products.

    They are counted on the meta device. Attention's products are the only batched ones. Under a
    causal mask they need T (T + 1) / 2 of the T^2 pairs.
    """
    leaves = {name: w.detach().to("meta").requires_grad_() for name, w in weights.items()}
    tokens = torch.zeros(rows, context, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        loss = reference.loss(leaves, tokens, tokens, heads)
        loss.backward()
    total = counter.get_total_flops()
    by_operator = counter.get_flop_counts()["Global"]
    batched = sum(n for operator, n in by_operator.items() if "bmm" in str(operator))
    return total, total - batched * (context - 1) // (2 * context)
