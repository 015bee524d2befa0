"""Minimal implementation of the suite: train a decoder on bytes in one process, measure and check.

The audit runs this file on float64 weights as its reference, and repeats trainings with it.
"""

import math
import time

import numpy as np
import torch
from torch import Tensor

Weights = dict[str, Tensor]


def draw_batch(text: bytes, rows: int, context: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (rows, context) of windows at offsets drawn from (seed, step)."""
    twister = np.random.MT19937()
    twister._legacy_seeding((seed * 1_000_003 + step) % 2**32)  # like torch.manual_seed
    starts = (int(x) % (len(text) - context - 1) for x in twister.random_raw(rows))
    windows = torch.tensor([list(text[s : s + context + 1]) for s in starts])
    return windows[:, :-1], windows[:, 1:]


def compute_logits(
    w: Weights, tokens: Tensor, heads: int, patterns: list[Tensor] | None = None
) -> Tensor:
    """Return logits (B, T, V); append the attention (B, H, T, T) of each block to `patterns`."""
    x_BTD = w["embedding.weight"][tokens]
    for block in (f"blocks.{i}." for i in range((len(w) - 3) // 9)):  # 9 weights per block, 3 more
        y_BTD = norm(x_BTD, w[block + "attention_norm.weight"])
        qkv = (y_BTD @ w[f"{block}attention.{part}.weight"].T for part in "qkv")
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv)
        scores_BHTT = rotate(q) @ rotate(k).transpose(-2, -1) / math.sqrt(q.shape[-1])
        position = torch.arange(tokens.shape[1], device=q.device)
        pattern_BHTT = scores_BHTT.where(position[:, None] >= position, -math.inf).softmax(-1)
        if patterns is not None:
            patterns.append(pattern_BHTT)
        mixed_BTD = (pattern_BHTT @ v).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + mixed_BTD @ w[block + "attention.out.weight"].T
        y_BTD = norm(x_BTD, w[block + "ffn_norm.weight"])
        gate, up = (y_BTD @ w[f"{block}ffn.{part}.weight"].T for part in ("gate", "up"))
        hidden = gate / (1 + (-gate).exp()) * up  # silu(gate) * up
        x_BTD = x_BTD + hidden @ w[block + "ffn.down.weight"].T
    return norm(x_BTD, w["norm.weight"]) @ w["head.weight"].T


def compute_loss(w: Weights, tokens: Tensor, targets: Tensor, heads: int) -> Tensor:
    """Return the mean cross-entropy per token, in nats."""
    z_BTV = compute_logits(w, tokens, heads)
    return (z_BTV.logsumexp(-1, keepdim=True) - z_BTV.gather(-1, targets[..., None])).mean()


def norm(x_BTD: Tensor, gain: Tensor) -> Tensor:
    """Return x divided by its root mean square, times `gain` (Zhang and Sennrich 2019)."""
    return x_BTD / ((x_BTD**2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def rotate(x_BHTK: Tensor) -> Tensor:
    """Rotate each pair (i, i + K/2) by position * 10,000^(-2i/K) radians (Su et al. 2021)."""
    half = x_BHTK.shape[-1] // 2
    position = torch.arange(x_BHTK.shape[2], dtype=torch.float64)
    angle = position[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos().to(x_BHTK), angle.sin().to(x_BHTK)
    first, second = x_BHTK.split(half, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def backpropagate(w: Weights, tokens: Tensor, targets: Tensor, heads: int) -> tuple[float, Weights]:
    """Return the loss and its gradient with respect to every weight."""
    leaves = {name: x.detach().requires_grad_() for name, x in w.items()}
    loss = compute_loss(leaves, tokens, targets, heads)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return float(loss.detach()), dict(zip(leaves, grads, strict=True))


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with torch's default constants."""

    def __init__(self, w: Weights, learning_rate: float, decay: float = 0.01) -> None:
        self.learning_rate = learning_rate
        self.decay = decay
        self.t = 0
        self.m = {n: torch.zeros_like(x) for n, x in w.items()}
        self.v = {n: torch.zeros_like(x) for n, x in w.items()}

    def step(self, w: Weights, grads: Weights) -> Weights:
        """Return the weights after one step."""
        self.t += 1
        updated = dict(w)
        for n, g in grads.items():
            self.m[n] = 0.9 * self.m[n] + 0.1 * g
            self.v[n] = 0.999 * self.v[n] + 0.001 * g * g
            m = self.m[n] / (1 - 0.9**self.t)
            v = self.v[n] / (1 - 0.999**self.t)
            updated[n] = w[n] - self.learning_rate * (m / (v.sqrt() + 1e-8) + self.decay * w[n])
        return updated


def train(
    w: Weights, text: bytes, heads: int, steps: int, learning_rate: float, shape: tuple[int, int]
) -> tuple[Weights, list[tuple[float, float]]]:
    """Train on batches of `shape` (rows, context); return weights and (loss, seconds) per step."""
    optimizer = AdamW(w, learning_rate)
    measured = []
    for step in range(steps):
        start_time = time.perf_counter()
        loss, grads = backpropagate(w, *draw_batch(text, *shape, seed=0, step=step), heads)
        w = optimizer.step(w, grads)
        measured.append((loss, time.perf_counter() - start_time))
    return w, measured


def check_gradients(w: Weights, tokens: Tensor, targets: Tensor, heads: int) -> float:
    """Return the relative error of |g|^2, the slope of the loss along g, by central differences."""
    _, g = backpropagate(w, tokens, targets, heads)
    plus, minus = ({n: w[n] + h * g[n] for n in w} for h in (1e-4, -1e-4))
    higher, lower = (float(compute_loss(x, tokens, targets, heads)) for x in (plus, minus))
    squares = sum(float((x * x).sum()) for x in g.values())
    return abs((higher - lower) / (2e-4 * squares) - 1)
