"""Minimal implementation of the suite: train a decoder on bytes in one process, measure and check.

Torch provides only tensor operations and autograd. In float64 this file is the audit's reference.
"""

import math
import time

import numpy as np
import torch
from torch import Tensor

Weights = dict[str, Tensor]


def batch(text: bytes, rows: int, context: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (rows, context) of windows at offsets drawn from (seed, step)."""
    twister = np.random.MT19937()
    twister._legacy_seeding((seed * 1_000_003 + step) % 2**32)
    starts = (int(x) % (len(text) - context - 1) for x in twister.random_raw(rows))
    windows = torch.tensor([list(text[s : s + context + 1]) for s in starts])
    return windows[:, :-1], windows[:, 1:]


def logits(w: Weights, tokens_BT: Tensor, heads: int, maps: list[Tensor] | None = None) -> Tensor:
    """Return logits (B, T, V); append the attention pattern of each block to `maps`."""
    x_BTD = w["embedding.weight"][tokens_BT]
    for block in (f"blocks.{i}." for i in range((len(w) - 3) // 9)):
        y_BTD = norm(x_BTD, w[block + "attention_norm.weight"])
        qkv = (y_BTD @ w[f"{block}attention.{part}.weight"].T for part in "qkv")
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv)
        scores_BHTT = rotate(q) @ rotate(k).transpose(-2, -1) / math.sqrt(q.shape[-1])
        position = torch.arange(x_BTD.shape[1], device=q.device)
        pattern_BHTT = softmax(scores_BHTT.where(position[:, None] >= position, -math.inf))
        if maps is not None:
            maps.append(pattern_BHTT)
        mixed_BTD = (pattern_BHTT @ v).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + mixed_BTD @ w[block + "attention.out.weight"].T
        y_BTD = norm(x_BTD, w[block + "ffn_norm.weight"])
        gate, up = (y_BTD @ w[f"{block}ffn.{part}.weight"].T for part in ("gate", "up"))
        hidden = gate / (1 + (-gate).exp()) * up
        x_BTD = x_BTD + hidden @ w[block + "ffn.down.weight"].T
    return norm(x_BTD, w["norm.weight"]) @ w["head.weight"].T


def loss(w: Weights, tokens_BT: Tensor, targets_BT: Tensor, heads: int) -> Tensor:
    """Return the mean cross-entropy per token, in nats."""
    z_BTV = logits(w, tokens_BT, heads)
    top = z_BTV.amax(-1, keepdim=True)
    normalizer = top + (z_BTV - top).exp().sum(-1, keepdim=True).log()
    return (normalizer - z_BTV.gather(-1, targets_BT[..., None])).mean()


def norm(x_BTD: Tensor, gain: Tensor) -> Tensor:
    """Return x divided by its root mean square, times `gain` (Zhang and Sennrich 2019)."""
    return x_BTD / ((x_BTD**2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def softmax(x: Tensor) -> Tensor:
    """Return exp(x) divided by its sum along the last dim."""
    return (e := (x - x.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True)


def rotate(x_BHTK: Tensor) -> Tensor:
    """Rotate each pair (i, i + K/2) by position x 10,000^(-2i/K) (Su et al. 2021, section 3.2)."""
    half = x_BHTK.shape[-1] // 2
    position, i = (torch.arange(n, dtype=torch.float64) for n in (x_BHTK.shape[2], half))
    angle = (position[:, None] * 10_000.0 ** (-i / half)).to(x_BHTK.device)
    cos, sin = angle.cos().to(x_BHTK), angle.sin().to(x_BHTK)
    first, second = x_BHTK.split(half, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def gradients(w: Weights, tokens: Tensor, targets: Tensor, heads: int) -> tuple[float, Weights]:
    """Return the loss and its gradient with respect to every weight."""
    leaves = {name: x.detach().requires_grad_() for name, x in w.items()}
    value = loss(leaves, tokens, targets, heads)
    slopes = torch.autograd.grad(value, list(leaves.values()))
    return float(value.detach()), dict(zip(leaves, slopes, strict=True))


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with torch's default constants."""

    def __init__(self, w: Weights, rate: float, decay: float = 0.01) -> None:
        self.rate = rate
        self.decay = decay
        self.t = 0
        self.m, self.v = ({n: torch.zeros_like(x) for n, x in w.items()} for _ in range(2))

    def step(self, w: Weights, gradients: Weights) -> Weights:
        """Return the weights after one step."""
        self.t += 1
        for name, g in gradients.items():
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g * g
            m, v = self.m[name] / (1 - 0.9**self.t), self.v[name] / (1 - 0.999**self.t)
            w = w | {name: w[name] - self.rate * (m / (v.sqrt() + 1e-8) + self.decay * w[name])}
        return w


def train(
    w: Weights, text: bytes, heads: int, steps: int, rate: float, shape: tuple[int, int]
) -> tuple[Weights, list[tuple[float, float]]]:
    """Train on batches of `shape` (rows, context); return weights and (loss, seconds) per step."""
    optimizer, measured = AdamW(w, rate), []
    for step in range(steps):
        start_time = time.perf_counter()
        value, slopes = gradients(w, *batch(text, *shape, 0, step), heads)
        w = optimizer.step(w, slopes)
        measured.append((value, time.perf_counter() - start_time))
    return w, measured


def check(w: Weights, tokens: Tensor, targets: Tensor, heads: int) -> float:
    """Return the relative error of the gradient g, by finite differences of the loss along g."""
    _, g = gradients(w, tokens, targets, heads)
    up, down = ({n: w[n] + sign * 1e-4 * g[n] for n in w} for sign in (1, -1))
    rise = float(loss(up, tokens, targets, heads) - loss(down, tokens, targets, heads))
    return abs(rise / (2e-4 * sum(float((x * x).sum()) for x in g.values())) - 1)
