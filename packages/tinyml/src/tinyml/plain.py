"""A minimal implementation of k-means, uniform quantization, magnitude pruning and LoRA.

Read this file first. The package's tests compare the real implementation with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# --- K-means quantization (Han et al., "Deep Compression", 2016, section 3) ---------------------


def kmeans(weights: Tensor, bits: int, iterations: int = 100) -> tuple[Tensor, Tensor]:
    """Return 2^bits centroids and the index of each weight's centroid (Lloyd's algorithm)."""
    flat = weights.flatten()
    # The initial centroids are evenly spaced quantiles, so they are dense where weights are dense.
    quantiles = (torch.arange(2**bits) + 0.5) / 2**bits
    centroids = flat.sort().values[(quantiles * len(flat)).long()]
    for _ in range(iterations):
        codes = (flat[:, None] - centroids).abs().argmin(1)  # [N, K] -> [N], the nearest centroid
        sums = torch.zeros_like(centroids).index_add(0, codes, flat)
        counts = torch.bincount(codes, minlength=len(centroids))
        means = sums / counts.clamp(min=1)
        centroids = torch.where(counts > 0, means, centroids)
    return centroids, codes.view(weights.shape)


def compute_centroid_gradient(gradient: Tensor, codes: Tensor, num_centroids: int) -> Tensor:
    """Return the gradient of each centroid: the sum of the gradients of its weights."""
    zeros = torch.zeros(num_centroids, dtype=gradient.dtype)
    return zeros.index_add(0, codes.flatten(), gradient.flatten())


# --- Uniform quantization: r = S (q - Z) (Jacob et al., 2018, section 2.1) ----------------------


def choose_grid(minimum: float, maximum: float, bits: int) -> tuple[float, int]:
    """Return the step S and the code Z of zero for values from `minimum` to `maximum`."""
    qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    low, high = min(minimum, 0.0), max(maximum, 0.0)  # padding and ReLU need a code of zero
    step = (high - low) / (qmax - qmin) or 1.0  # any step represents zeros
    return step, int(min(max(round(qmin - low / step), qmin), qmax))


def quantize(values: Tensor, step: float, zero: int, bits: int) -> Tensor:
    """Return q = round(r / S) + Z, clamped to the range of codes."""
    qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return ((values / step).round() + zero).clamp(qmin, qmax).long()


def dequantize(codes: Tensor, step: float, zero: int) -> Tensor:
    """Return r = S (q - Z)."""
    return step * (codes - zero)


def compute_integer_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    zero_in: int,
    multiplier: int,
    shift: int,
    zero_out: int,
) -> Tensor:
    """Return the int8 codes (m, n) of the outputs, from int8 `x` (m, k) and `weight` (n, k).

    S_w S_x (sum q_w (q_x - Z_x) + bias) = S_out (q_out - Z_out). `bias` is an integer in units of
    S_w S_x, and S_w S_x / S_out = multiplier / 2^shift. If Z_out = -128, the clamp is the ReLU.
    """
    sums = (x.long() - zero_in) @ weight.long().t() + bias
    rounded = (sums * multiplier + (1 << (shift - 1))) >> shift
    return (rounded + zero_out).clamp(-128, 127)


def fake_quantize(weight: Tensor, step: float, bits: int) -> Tensor:
    """Return the rounded weight; its gradient is that of the clipped weight (straight-through)."""
    qmax = 2 ** (bits - 1) - 1
    clipped = (weight / step).clamp(-qmax, qmax)  # outside of the range the gradient is zero
    return step * (clipped + (clipped.round() - clipped).detach())


# --- Magnitude pruning --------------------------------------------------------------------------


def compute_magnitude_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Return a mask, False for the fraction `sparsity` of weights with the smallest magnitudes."""
    order = weight.abs().flatten().argsort(stable=True)
    mask = torch.ones(weight.numel(), dtype=torch.bool)
    mask[order[: round(sparsity * weight.numel())]] = False
    return mask.view(weight.shape)


def remove_channels(
    activations: Tensor, first_weight: Tensor, second_weight: Tensor, num_kept: int
) -> tuple[Tensor, Tensor]:
    """Return the weights of two layers, (h, in) and (out, h), with the `num_kept` best channels h.

    `activations` (batch, h) are the values of the channels for typical inputs.
    """
    importance = activations.norm(dim=0) * second_weight.norm(dim=0)
    remaining = importance.argsort(descending=True)[:num_kept].sort().values
    return first_weight[remaining], second_weight[:, remaining]


# --- LoRA: W + (alpha / r) B A (Hu et al., 2021) ------------------------------------------------


def apply_lora(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Return y = W x + (alpha / r) B (A x), with A (r, in) and B (out, r).

    B starts at zero and A does not, so the function is unchanged at first. With the gradient G of
    y, the gradient of B is (alpha / r) G (A x)^T, which is not zero.
    """
    return x @ weight.t() + alpha / len(a) * (x @ a.t()) @ b.t()


def merge_lora(weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Return the single weight matrix that computes the same function as `apply_lora`."""
    return weight + alpha / len(a) * b @ a
