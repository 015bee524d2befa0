"""The independent reference of the audit: `plain.py`, run on a few rows at a time.

It computes in the dtype of the weights. Except for `measure.distance`, it shares no code with the
code under test. Torch provides only tensor operations and autograd.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmsys_suite import plain
from llmsys_suite.measure.distance import compute_distance, find_largest_distance
from llmsys_suite.plain import AdamW, Weights, compute_logits, compute_loss

__all__ = ["AdamW", "compute_distance", "compute_loss", "find_largest_distance"]

#: The bytes of a text, or an array of its tokens.
Tokens = Any
#: Maximum bytes of one layer's attention scores. A batch is split into parts of at most this size,
#: but of at least one row each.
SCORE_BYTES = 2**22
#: Distances of gradients are relative to the gradient's norm plus this fraction of the norm of all
#: gradients. If the terms of a gradient cancel, its rounding error is relative to the terms, not to
#: their sum. For example, the gradients of q and k are zero if all tokens are equal. Their measured
#: errors are at most 2.1e-8 of the norm of all gradients, and CANCELLED * GRADIENT is 1e-7.
CANCELLED = 0.02


def compute_gradients(
    weights: Weights, tokens_BT: Tensor, targets_BT: Tensor, heads: int
) -> tuple[float, Weights]:
    """Return the mean loss and its gradient, computed on a few rows at a time to save memory."""
    mean = 0.0
    summed = {name: torch.zeros_like(w) for name, w in weights.items()}
    for fraction, tokens, targets in _split_rows(tokens_BT, targets_BT, heads):
        loss, part = plain.backpropagate(weights, tokens, targets, heads)
        mean += fraction * loss
        for name, g in part.items():
            summed[name] += fraction * g
    return mean, summed


def compute_norm(tensors: Weights) -> float:
    """Return the 2-norm of all elements of the tensors."""
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))


def compute_rounding_floor(gradients: Weights) -> float:
    """Return the `floor` of distances of gradients or moments, some of whose terms cancel."""
    return CANCELLED * compute_norm(gradients)


@torch.no_grad()
def compute_mean_loss(weights: Weights, tokens_BT: Tensor, targets_BT: Tensor, heads: int) -> float:
    """Return the loss, computed on a few rows at a time to save memory."""
    parts = _split_rows(tokens_BT, targets_BT, heads)
    return sum(fraction * float(compute_loss(weights, x, y, heads)) for fraction, x, y in parts)


def _split_rows(
    tokens_BT: Tensor, targets_BT: Tensor, heads: int
) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield (fraction of all rows, tokens, targets) for each part of the batch."""
    rows, context = tokens_BT.shape
    part_rows = max(1, SCORE_BYTES // (8 * heads * context**2))
    parts = zip(tokens_BT.split(part_rows), targets_BT.split(part_rows), strict=True)
    for tokens, targets in parts:
        yield len(tokens) / rows, tokens, targets


def compute_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal softmax(q k^T / sqrt(K)) v, of shape (B, H, T, K)."""
    rows = []
    for t in range(q.shape[2]):
        scores = (k[:, :, : t + 1] * q[:, :, t : t + 1]).sum(-1) / math.sqrt(q.shape[-1])
        rows.append((scores.softmax(-1)[..., None] * v[:, :, : t + 1]).sum(2))
    return torch.stack(rows, 2)


def compute_patterns(weights: Weights, tokens_BT: Tensor, heads: int) -> list[Tensor]:
    """Return the attention weights of each layer, of shape (B, H, T, T)."""
    attention: list[Tensor] = []
    compute_logits(weights, tokens_BT, heads, attention)
    return attention


def build_evenly_spaced_batch(text: Tokens, rows: int, context: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (rows, context) of windows at equal distances in a text."""
    stride = (len(text) - context - 1) // rows
    windows = torch.tensor([list(text[i * stride : i * stride + context + 1]) for i in range(rows)])
    return windows[:, :-1], windows[:, 1:]


def draw_batch(
    text: Tokens, rows: int, context: int, seed: int, step: int
) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of windows at the offsets that the run draws from (seed, step).

    With 2^28 windows or more, each offset is computed from two random numbers below 2^24.
    """
    num_offsets = len(text) - context - 1
    if num_offsets < 2**28:
        return plain.draw_batch(text, rows, context, seed, step)
    twister = np.random.MT19937()
    twister._legacy_seeding((seed * 1_000_003 + step) % 2**32)
    drawn = (twister.random_raw(2 * rows) % 2**24).reshape(rows, 2)
    starts = [int(high << 24 | low) % num_offsets for high, low in drawn.tolist()]
    windows = torch.tensor([list(text[start : start + context + 1]) for start in starts])
    return windows[:, :-1], windows[:, 1:]


def compute_row_digests(rows: tuple[Tensor, Tensor]) -> list[str]:
    """Return twelve hexadecimal digits of the SHA-256 of each row, with four bytes per token."""
    digests = []
    for row in zip(*rows, strict=True):
        x, y = (np.array(part.tolist(), "<i4").tobytes() for part in row)
        digests.append(hashlib.sha256(x + b"\0" + y).hexdigest()[:12])
    return digests
