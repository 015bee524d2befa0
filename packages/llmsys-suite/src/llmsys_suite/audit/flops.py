"""FLOPs of a training step of the reference, counted by torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from llmsys_suite.audit import reference
from llmsys_suite.plain import Weights


@dataclass(frozen=True)
class Flops:
    """FLOPs of a step: executed, and useful (without masked products)."""

    executed: int
    useful: int


def count_flops(weights: Weights, rows: int, context: int, heads: int) -> Flops:
    """Count the FLOPs of a training step on the meta device.

    Attention's products are the only batched ones. Under a causal mask they need T (T + 1) / 2 of
    the T^2 pairs.
    """
    leaves = {name: w.detach().to("meta").requires_grad_() for name, w in weights.items()}
    tokens = torch.zeros(rows, context, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        loss = reference.loss(leaves, tokens, tokens, heads)
        loss.backward()
    total = counter.get_total_flops()
    masked = _batched(counter) * (context - 1) // (2 * context)
    return Flops(total, total - masked)


def _batched(counter: FlopCounterMode) -> int:
    by_operator = counter.get_flop_counts()["Global"]
    return sum(n for operator, n in by_operator.items() if "bmm" in str(operator))
