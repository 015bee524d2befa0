"""The minimal implementation on tensors: shared values, an even grid, zeros and low rank.

Read this file first. The package's tests compare the real implementation with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# --- Fewer values: k-means (Han et al., "Deep Compression", 2016, section 3) -------------------


def kmeans(weights: Tensor, bits: int, iterations: int = 100) -> tuple[Tensor, Tensor]:
    """Return 2^bits shared values and the index of each weight's value (Lloyd's algorithm)."""
    flat = weights.flatten()
    # The initial values are evenly spaced quantiles, so most of them lie where most weights are.
    quantiles = (torch.arange(2**bits) + 0.5) / 2**bits
    centroids = flat.sort().values[(quantiles * len(flat)).long()]
    for _ in range(iterations):
        codes = (flat[:, None] - centroids).abs().argmin(1)  # [N, K] -> [N], the nearest value
        sums = torch.zeros_like(centroids).index_add(0, codes, flat)
        counts = torch.bincount(codes, minlength=len(centroids))
        means = sums / counts.clamp(min=1)
        centroids = torch.where(counts > 0, means, centroids)
    return centroids, codes.view(weights.shape)


def centroid_gradient(gradient: Tensor, codes: Tensor, count: int) -> Tensor:
    """Return the gradient of each shared value: the sum of the gradients of its weights."""
    zeros = torch.zeros(count, dtype=gradient.dtype)
    return zeros.index_add(0, codes.flatten(), gradient.flatten())


# --- Even steps: r = S (q - Z) (Jacob et al., 2018, section 2.1) -------------------------------


def grid(low: float, high: float, bits: int) -> tuple[float, int]:
    """Return the step S and the code Z of zero for values from `low` to `high`."""
    qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    low, high = min(low, 0.0), max(high, 0.0)  # with a code for zero, padding and ReLU are exact
    step = (high - low) / (qmax - qmin) or 1.0  # any step represents zeros
    return step, int(min(max(round(qmin - low / step), qmin), qmax))


def quantize(values: Tensor, step: float, zero: int, bits: int) -> Tensor:
    """Return q = round(r / S) + Z, clamped to the range of codes."""
    qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return ((values / step).round() + zero).clamp(qmin, qmax).long()


def dequantize(codes: Tensor, step: float, zero: int) -> Tensor:
    """Return r = S (q - Z)."""
    return step * (codes - zero)


def integer_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    zero_in: int,
    multiplier: int,
    shift: int,
    zero_out: int,
) -> Tensor:
    """Multiply int8 (m, k) by int8 (n, k) and rescale the integer sums for the next layer.

    sum S_w q_w S_x (q_x - Z_x) = S_out (q_out - Z_out), and S_w S_x / S_out = multiplier / 2^shift.
    If Z_out = -128, clamping at -128 is the ReLU.
    """
    sums = (x.long() - zero_in) @ weight.long().t() + bias
    rounded = (sums * multiplier + (1 << (shift - 1))) >> shift
    return (rounded + zero_out).clamp(-128, 127)


def rounded_to_train(weight: Tensor, step: float, bits: int) -> Tensor:
    """Round the weight in the forward pass and pass its gradient through (straight-through)."""
    top = 2 ** (bits - 1) - 1
    clipped = (weight / step).clamp(-top, top)  # outside of the range the gradient is zero
    return step * (clipped + (clipped.round() - clipped).detach())


# --- Zeros: remove the smallest weights ---------------------------------------------------------


def magnitude_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Return a mask that is False for the smallest weights, a fraction `sparsity` of all."""
    order = weight.abs().flatten().argsort(stable=True)
    mask = torch.ones(weight.numel(), dtype=torch.bool)
    mask[order[: round(sparsity * weight.numel())]] = False
    return mask.view(weight.shape)


def remove_channels(
    values: Tensor, first: Tensor, second: Tensor, keep: int
) -> tuple[Tensor, Tensor]:
    """Remove the least important hidden channels between two layers (h, in) and (out, h).

    `values` (batch, h) are the values of the channels for typical inputs.
    """
    contribution = values.norm(dim=0) * second.norm(dim=0)
    selected = contribution.argsort(descending=True)[:keep].sort().values
    return first[selected], second[:, selected]


# --- Low rank: W + (alpha / r) B A (Hu et al., 2021) -------------------------------------------


def lora(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Return y = W x + (alpha / r) B (A x), with A (r, in) and B (out, r).

    B starts at zero and A does not, so the function is unchanged at first. With the gradient G of
    y, the gradient of B is (alpha / r) G (A x)^T, which is not zero.
    """
    return x @ weight.t() + alpha / len(a) * (x @ a.t()) @ b.t()


def lora_merged(weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Return the single weight matrix that computes the same function."""
    return weight + alpha / len(a) * b @ a
