"""What the audit holds a run against: a decoder, a sampler and AdamW, written out in float64.

Notable: nothing here is shared with what it checks. Attention, normalisation, rotation and loss are
their formulas; the sampler draws its Mersenne twister from numpy and cuts its rows from the bytes;
the optimizer is the paper's. Torch differentiates and multiplies, no more.

Shape suffixes: B batch, T tokens, D d_model, H heads, K head_dim, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Weights = dict[str, Tensor]
EPSILON = 1e-5  # of the norms
BASE = 10_000.0  # of the rotation
#: A batch goes through in so many rows at a time that its scores stay below this.
SCORE_BYTES = 2**28


def logits(
    weights: Weights, tokens_BT: Tensor, heads: int, patterns: list[Tensor] | None = None
) -> Tensor:
    """(B, T, V), block after block; each block's attention is put into `patterns`."""
    x_BTD = weights["embedding.weight"][tokens_BT]
    layer = 0
    while f"blocks.{layer}.attention.q.weight" in weights:
        attended_BTD, pattern_BHTT = _attend(weights, f"blocks.{layer}.", x_BTD, heads)
        if patterns is not None:
            patterns.append(pattern_BHTT)
        x_BTD = x_BTD + attended_BTD
        x_BTD = x_BTD + _feed(weights, f"blocks.{layer}.ffn", x_BTD)
        layer += 1
    return _norm(x_BTD, weights["norm.weight"]) @ weights["head.weight"].T


def loss(weights: Weights, tokens_BT: Tensor, targets_BT: Tensor, heads: int) -> Tensor:
    """Mean over tokens of log sum exp(logits) less the target's logit."""
    z_BTV = logits(weights, tokens_BT, heads)
    top = z_BTV.max(-1).values
    normaliser = top + (z_BTV - top[..., None]).exp().sum(-1).log()
    return (normaliser - z_BTV.gather(-1, targets_BT[..., None])[..., 0]).mean()


def gradients(
    weights: Weights, tokens_BT: Tensor, targets_BT: Tensor, heads: int
) -> tuple[float, Weights]:
    """The loss and its derivative by every weight, a few rows at a time."""
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    rows, context = tokens_BT.shape
    some = max(1, SCORE_BYTES // (8 * heads * context**2))
    total, summed = 0.0, {name: torch.zeros_like(w) for name, w in weights.items()}
    for begin in range(0, rows, some):
        cut = slice(begin, begin + some)
        share = len(tokens_BT[cut]) / rows
        part = share * loss(leaves, tokens_BT[cut], targets_BT[cut], heads)
        for name, g in zip(leaves, torch.autograd.grad(part, list(leaves.values())), strict=True):
            summed[name] += g
        total += float(part.detach())
    return total, summed


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K)) v over positions not after the query's; (B, H, T, K)."""
    rows = []
    for t in range(q.shape[2]):
        scores = (k[:, :, : t + 1] * q[:, :, t : t + 1]).sum(-1) / math.sqrt(q.shape[-1])
        rows.append((softmax(scores)[..., None] * v[:, :, : t + 1]).sum(2))
    return torch.stack(rows, 2)


def softmax(x: Tensor) -> Tensor:
    """exp(x) over its sum, along the last dim."""
    e = (x - x.max(-1, keepdim=True).values).exp()
    return e / e.sum(-1, keepdim=True)


class AdamW:
    """Loshchilov and Hutter 2019, algorithm 2, with torch's default constants."""

    def __init__(self, weights: Weights, rate: float, decay: float = 0.01) -> None:
        self.rate, self.decay, self.t = rate, decay, 0
        self.m = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.v = {name: torch.zeros_like(w) for name, w in weights.items()}

    def step(self, weights: Weights, gradients: Weights) -> Weights:
        """The weights one step further."""
        self.t += 1
        after = {}
        for name, g in gradients.items():
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g * g
            m = self.m[name] / (1 - 0.9**self.t)
            v = self.v[name] / (1 - 0.999**self.t)
            w = weights[name]
            after[name] = w - self.rate * (m / (v.sqrt() + 1e-8) + self.decay * w)
        return after


def row_starts(length: int, rows: int, context: int, seed: int, step: int) -> list[int]:
    """Where the rows of a global batch begin in a text of `length` bytes."""
    twister = np.random.MT19937()
    twister._legacy_seeding((seed * 1_000_003 + step) % 2**32)
    return [int(x) % (length - context - 1) for x in twister.random_raw(rows)]


def batch(text: bytes, rows: int, context: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a global batch."""
    starts = row_starts(len(text), rows, context, seed, step)
    windows = torch.tensor([list(text[s : s + context + 1]) for s in starts])
    return windows[:, :-1], windows[:, 1:]


def spread(text: bytes, rows: int, context: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of rows that lie evenly over a text."""
    stride = (len(text) - context - 1) // rows
    windows = torch.tensor([list(text[i * stride :][: context + 1]) for i in range(rows)])
    return windows[:, :-1], windows[:, 1:]


def row_digests(text: bytes, rows: int, context: int, seed: int, step: int) -> list[str]:
    """What `digest` says of each row of a global batch."""
    starts = row_starts(len(text), rows, context, seed, step)
    return [digest(text[s : s + context], text[s + 1 : s + context + 1]) for s in starts]


def digest(tokens: bytes, targets: bytes) -> str:
    """One row, in twelve letters."""
    return hashlib.sha256(tokens + b"\0" + targets).hexdigest()[:12]


def distance(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| over |expected|, in the 2-norm; infinite where a shape differs."""
    if actual.shape != expected.shape:
        return math.inf
    expected = expected.double()
    away = (actual.detach().to(expected) - expected).norm()
    whole = expected.norm()
    return float(away / whole) if whole > 0 else (0.0 if away == 0 else math.inf)


def furthest(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest distance over all names, and where: "name: |actual| beside |expected|"."""
    if missing := expected.keys() ^ actual.keys():
        return math.inf, f"{min(missing)}: on one side only"
    found = {name: distance(actual[name], expected[name]) for name in expected}
    name = max(found, key=lambda n: math.inf if math.isnan(found[n]) else found[n])
    norms = (float(side[name].detach().double().norm()) for side in (actual, expected))
    return found[name], "{}: norm {:.9g} beside {:.9g}".format(name, *norms)


def patterns(weights: Weights, tokens_BT: Tensor, heads: int) -> list[Tensor]:
    """Each layer's attention (B, H, T, T)."""
    kept: list[Tensor] = []
    logits(weights, tokens_BT, heads, kept)
    return kept


def _attend(weights: Weights, block: str, x_BTD: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    x_BTD = _norm(x_BTD, weights[block + "attention_norm.weight"])
    q, k, v = (
        (x_BTD @ weights[f"{block}attention.{part}.weight"].T)
        .unflatten(-1, (heads, -1))
        .transpose(1, 2)
        for part in "qkv"
    )
    scores_BHTT = _turn(q) @ _turn(k).transpose(-2, -1) / math.sqrt(q.shape[-1])
    position = torch.arange(x_BTD.shape[1], device=q.device)
    scores_BHTT = scores_BHTT.where(position[:, None] >= position, -math.inf)
    pattern_BHTT = softmax(scores_BHTT)
    mixed_BTD = (pattern_BHTT @ v).transpose(1, 2).flatten(2)
    return mixed_BTD @ weights[block + "attention.out.weight"].T, pattern_BHTT


def _feed(weights: Weights, ffn: str, x_BTD: Tensor) -> Tensor:
    x_BTD = _norm(x_BTD, weights[ffn + "_norm.weight"])
    gate = x_BTD @ weights[ffn + ".gate.weight"].T
    hidden = gate / (1 + (-gate).exp()) * (x_BTD @ weights[ffn + ".up.weight"].T)
    return hidden @ weights[ffn + ".down.weight"].T


def _norm(x_BTD: Tensor, gain: Tensor) -> Tensor:
    return x_BTD / ((x_BTD**2).mean(-1, keepdim=True) + EPSILON).sqrt() * gain


def _turn(x_BHTK: Tensor) -> Tensor:
    """Pair (i, i + K/2) turned by position x base^(-2i/K), as one complex product."""
    half = x_BHTK.shape[-1] // 2
    place = torch.arange(x_BHTK.shape[2], dtype=torch.float64, device=x_BHTK.device)
    i = torch.arange(half, dtype=torch.float64, device=x_BHTK.device)
    angle = place[:, None] * BASE ** (-i / half)
    first, second = x_BHTK[..., :half], x_BHTK[..., half:]
    cos, sin = angle.cos().to(x_BHTK), angle.sin().to(x_BHTK)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
