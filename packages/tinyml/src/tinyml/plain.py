"""The whole idea on tensors: fewer bytes by sharing values, by a grid, by zeros, by low rank.

Nothing of the package is used here. It is the first thing to read, and the package's tests hold the
real thing against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# --- Fewer values: k-means (Han et al., "Deep Compression", 2016, section 3) -------------------


def kmeans(weights: Tensor, bits: int, iterations: int = 100) -> tuple[Tensor, Tensor]:
    """2^bits shared values and, for each weight, which one it is: Lloyd's algorithm."""
    flat = weights.flatten()
    # From evenly spaced quantiles every cluster starts with as many weights as any other.
    shares = (torch.arange(2**bits) + 0.5) / 2**bits
    centroids = flat.sort().values[(shares * len(flat)).long()]
    for _ in range(iterations):
        codes = (flat[:, None] - centroids).abs().argmin(1)  # [N, K] -> [N], the nearest one
        sums = torch.zeros_like(centroids).index_add(0, codes, flat)
        counts = torch.bincount(codes, minlength=len(centroids))
        centroids = torch.where(counts > 0, sums / counts.clamp(min=1), centroids)  # their mean
    return centroids, codes.view(weights.shape)


def centroid_gradient(gradient: Tensor, codes: Tensor, count: int) -> Tensor:
    """A shared value moves every weight that uses it, so its gradient is the sum of theirs."""
    return torch.zeros(count, dtype=gradient.dtype).index_add(
        0, codes.flatten(), gradient.flatten()
    )


# --- Even steps: r = S (q - Z) (Jacob et al., 2018, section 2.1) -------------------------------


def grid(low: float, high: float, bits: int) -> tuple[float, int]:
    """The step S and the code Z of zero for values from `low` to `high`."""
    qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    low, high = min(low, 0.0), max(high, 0.0)  # zero needs a code: padding and ReLU are exact then
    step = (high - low) / (qmax - qmin)
    return step, int(min(max(round(qmin - low / step), qmin), qmax))


def quantize(values: Tensor, step: float, zero: int, bits: int) -> Tensor:
    """q = round(r / S) + Z, what is outside of the range cut off."""
    qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return ((values / step).round() + zero).clamp(qmin, qmax).long()


def dequantize(codes: Tensor, step: float, zero: int) -> Tensor:
    """r = S (q - Z)."""
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
    """int8 (m, k) times int8 (n, k): sums of whole numbers, brought to the next layer's scale.

    sum S_w q_w S_x (q_x - Z_x) = S_out (q_out - Z_out), so q_out is the sum times the constant
    S_w S_x / S_out = multiplier / 2^shift, rounded. Cutting at -128 is the ReLU if Z_out = -128.
    """
    sums = (x.long() - zero_in) @ weight.long().t() + bias
    rounded = (sums * multiplier + (1 << (shift - 1))) >> shift
    return (rounded + zero_out).clamp(-128, 127)


def rounded_to_train(weight: Tensor, step: float, bits: int) -> Tensor:
    """Rounded going forward; the gradient passes as if it were not (straight through)."""
    top = 2 ** (bits - 1) - 1
    clipped = (weight / step).clamp(-top, top)  # outside of the range the gradient is zero
    return step * (clipped + (clipped.round() - clipped).detach())


# --- Zeros: what is smallest goes --------------------------------------------------------------


def magnitude_mask(weight: Tensor, sparsity: float) -> Tensor:
    """True for all but the share `sparsity` of smallest weights."""
    order = weight.abs().flatten().argsort(stable=True)
    mask = torch.ones(weight.numel(), dtype=torch.bool)
    mask[order[: round(sparsity * weight.numel())]] = False
    return mask.view(weight.shape)


def remove_channels(
    values: Tensor, first: Tensor, second: Tensor, keep: int
) -> tuple[Tensor, Tensor]:
    """Return two layers (h, in) and (out, h) without the channels that add least to the outputs.

    `values` (batch, h) are those of the channels for typical inputs.
    """
    kept = (values.norm(dim=0) * second.norm(dim=0)).argsort(descending=True)[:keep].sort().values
    return first[kept], second[:, kept]


# --- Low rank: W + (alpha / r) B A (Hu et al., 2021) -------------------------------------------


def lora(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """y = W x + (alpha / r) B (A x), with A (r, in) and B (out, r); r (in + out) numbers train.

    B starts at zero and A does not: dB = G (A x)^T moves at once and the function starts as it was.
    """
    return x @ weight.t() + alpha / len(a) * (x @ a.t()) @ b.t()


def lora_merged(weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """One matrix that does the same."""
    return weight + alpha / len(a) * b @ a
