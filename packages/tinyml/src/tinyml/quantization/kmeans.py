"""Weights as palettes: at most 2^b shared values and a b-bit code per weight.

In one dimension a cluster is an interval. After one sort and prefix sums, an iteration of Lloyd's
algorithm costs k binary searches, so it can run until no value changes its cluster. If it starts
at evenly spaced centroids, the final error can be several times the optimum. Therefore Lloyd's
algorithm starts at the exact optimum for a summary of the values, found by dynamic programming
(Wang and Song, "Ckmeans.1d.dp", 2011). The gradient of a palette value is the sum of the gradients
of its weights ("Deep Compression", Han et al., 2016, section 3.3).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tinyml.compressed_weight import CompressedWeight
from tinyml.conversion import compress_weights
from tinyml.layers import QUANTIZABLE, get_weight
from tinyml.quantization.pack import pack, unpack
from tinyml.validation import check_bits, check_strided


def kmeans_quantize(
    model: nn.Module,
    bits: int | Mapping[str, int],
    *,
    layers: Sequence[type[nn.Module]] = QUANTIZABLE,
    protect: Sequence[str] = (),
) -> nn.Module:
    """Return a copy of `model` in which the weights of each layer have at most 2^bits values.

    Layers of the types in `layers` are compressed. `bits` may be a mapping from layer names to
    bits; other layers, and those that `protect` names, are unchanged. The palettes can be trained
    like any parameter; the codes do not change. Zeros of pruned weights are clustered like other
    values and move with their centroid. If the row `padding_idx` of an embedding is zero, it stays
    zero, even if the palette has no zero.
    """

    def compress(layer: nn.Module, bits: int) -> Palette:
        check_bits(bits, "a palette")
        weight = get_weight(layer)
        padding_idx = getattr(layer, "padding_idx", None)
        zero_row = None
        if padding_idx is not None and not weight[padding_idx].any():
            zero_row = torch.tensor([padding_idx], device=weight.device)
        palette, codes = kmeans(weight, 2**bits)
        return Palette([bits, *weight.shape], pack(codes, bits), palette, zero_row)

    return compress_weights(model, layers, bits, compress, protect)


class Palette(CompressedWeight):
    """A weight as a trainable palette and packed `codes`, the indices of palette values."""

    codes: Tensor
    #: The index of the row that is zero for any palette, (1,), or None.
    zero_row: Tensor | None

    def __init__(
        self, form: Sequence[int], codes: Tensor, palette: Tensor, zero_row: Tensor | None
    ) -> None:
        """Create a palette from its `format()` and its tensors."""
        super().__init__()
        self.bits, *shape = form
        self.shape = torch.Size(shape)
        self._palette = palette
        self.register_buffer("codes", codes)
        self.register_buffer("zero_row", zero_row)

    def make_trainable_tensor(self, weight: Tensor) -> Tensor:
        """Return the palette, converted to the dtype and device of `weight`."""
        return self._palette.to(weight)

    def format(self) -> list[int]:
        """Return the bits per code and the shape of the weight."""
        return [self.bits, *self.shape]

    def forward(self, palette: Tensor) -> Tensor:
        """Return the dense weight."""
        codes = unpack(self.codes, self.bits, self.shape.numel())
        dense = palette.index_select(0, codes.int()).view(self.shape)
        return dense if self.zero_row is None else dense.index_fill(0, self.zero_row, 0)


#: The largest number of clusters, for codes of 8 bits.
_MAX_CLUSTERS = 256
_MAX_ITERATIONS = 10_000
#: The largest number of distinct values that are clustered without a summary.
_MAX_POINTS_WITHOUT_SUMMARY = 1024
#: The number of intervals of equal count in a summary, and of intervals of equal width.
_SUMMARY_BINS = 512


@torch.no_grad()
def kmeans(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the centroids of `values`, and the index of each value's centroid.

    Lloyd's algorithm starts at the optimum for a summary of the values and runs to its fixed point,
    for at most 10,000 iterations. If at most 1024 values are distinct, the summary is the values
    themselves, and the result is optimal. Otherwise the summary is the means of 512 to 1023
    intervals.

    The min(k, distinct values) centroids are float64 and ascending. The indices are int16 and have
    the shape of `values`, so `centroids[indices.int()]` are the rounded values.
    """
    if not 1 <= k <= _MAX_CLUSTERS:
        raise ValueError(f"expected 1 to {_MAX_CLUSTERS} clusters, got {k}")
    check_strided("values", values)
    if not values.numel() or not torch.isfinite(values).all():
        raise ValueError("expected at least one value, all of them finite, got none, nan or inf")
    if values.is_complex():
        raise ValueError(f"expected real values, got {values.dtype}")
    # Sorting takes half the time in float32, which represents all 16- and 32-bit floats.
    fits_float32 = values.is_floating_point() and values.dtype != torch.float64
    flat = values.reshape(-1).to(torch.float32 if fits_float32 else torch.float64)
    # On a CPU, sorting in numpy uses vector instructions, and sorting in torch does not.
    is_on_cpu = flat.device.type == "cpu"
    ordered = torch.from_numpy(np.sort(flat.numpy())) if is_on_cpu else flat.sort().values
    sums = _compute_sums_from_zero(ordered)
    if not sums[[0, -1]].isfinite().all():
        raise ValueError("expected values whose sum is finite in float64, got larger ones")
    if int((ordered[1:] != ordered[:-1]).sum()) < _MAX_POINTS_WITHOUT_SUMMARY:
        points, counts = torch.unique_consecutive(ordered, return_counts=True)
        if points.numel() <= k:
            codes = torch.bucketize(flat, points)
            return points.double(), codes.to(torch.int16).view(values.shape)
    else:
        points, counts = _summarize(ordered, sums, _SUMMARY_BINS)
    centroids = find_best_centroids(points.double(), counts, k)
    edges = None
    for _ in range(_MAX_ITERATIONS):
        inner = torch.searchsorted(ordered, _compute_boundaries(centroids, ordered), right=True)
        new_edges = torch.cat([inner.new_zeros(1), inner, inner.new_tensor([ordered.numel()])])
        if edges is not None and torch.equal(new_edges, edges):
            break
        edges, counts = new_edges, new_edges.diff()
        means = sums[edges].diff() / counts.clamp(min=1)
        # The centroid of an empty cluster is unchanged; values may still move to it.
        centroids = torch.where(counts > 0, means, centroids).sort().values
    codes = torch.bucketize(flat, _compute_boundaries(centroids, flat), out_int32=True)
    return centroids, codes.to(torch.int16).view(values.shape)


def _compute_sums_from_zero(ordered: Tensor) -> Tensor:
    """Return sums (n + 1,) whose differences are the sums of ranges of n sorted values.

    Each entry is the sum of the values between zero and the position of the entry. In sums from the
    least value, a large negative value would absorb the values after it.
    """
    num_negative = int(torch.searchsorted(ordered, ordered.new_zeros(1)))
    sums = torch.zeros(ordered.numel() + 1, dtype=torch.float64, device=ordered.device)
    torch.cumsum(ordered[num_negative:], 0, dtype=torch.float64, out=sums[num_negative + 1 :])
    # Work in place, because large tensors take long to allocate.
    negative_sums = sums[:num_negative]
    negative_sums.copy_(ordered[:num_negative].flip(0)).neg_().cumsum_(0)
    negative_sums.copy_(negative_sums.flip(0))
    return sums


def _compute_boundaries(centroids: Tensor, like: Tensor) -> Tensor:
    """Return the midpoints of neighboring centroids, rounded down to the dtype of `like`.

    A value of this dtype is at most the midpoint if and only if it is at most the rounded midpoint.
    """
    midpoints = (centroids[1:] + centroids[:-1]) / 2
    rounded = midpoints.to(like)
    below = torch.nextafter(rounded, torch.full_like(rounded, -torch.inf))
    return torch.where(rounded.double() > midpoints, below, rounded)


@torch.no_grad()
def find_best_centroids(points: Tensor, counts: Tensor, k: int) -> Tensor:
    """Return the min(k, n) centroids with the least squared error for n sorted points with counts.

    cost[c][i] = min over j of cost[c - 1][j - 1] + the error of points j..i around their mean. This
    takes k n^2 steps and memory for about 2 n^2 numbers, so n should be at most several thousand.
    """
    n = points.numel()
    k = min(k, n)
    # Squares of scaled points neither overflow nor vanish.
    error = _compute_interval_errors(points / points.abs().max(), counts)
    cost = error[:, 0]
    starts = []
    total = torch.empty_like(error)
    for _ in range(k - 1):
        # The last cluster is points j..i; the points before j are already clustered.
        before = torch.cat([cost.new_full((1,), torch.inf), cost[:-1]])
        start = torch.add(error, before, out=total).argmin(1)
        cost = total.gather(1, start[:, None])[:, 0]
        starts.append(start)
    edges = [n]
    for start in reversed(starts):
        edges.append(int(start[edges[-1] - 1]))
    edges = [0, *reversed(edges[1:]), n]
    weighted = points * counts
    intervals = itertools.pairwise(edges)
    return torch.stack([weighted[a:b].sum() / counts[a:b].sum() for a, b in intervals])


def _summarize(ordered: Tensor, sums: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Return the means and counts of intervals of the sorted values.

    Their edges are the edges of `bins` intervals of equal count together with the edges of `bins`
    intervals of equal width. The number of intervals is between `bins` and `2 * bins - 1`.
    """
    first, last = float(ordered[0]), float(ordered[-1])
    widths = torch.linspace(first, last, bins + 1, dtype=torch.float64, device=ordered.device)
    by_width = torch.searchsorted(ordered, widths[1:-1].to(ordered))
    by_count = torch.arange(bins + 1, device=ordered.device) * ordered.numel() // bins
    edges = torch.unique(torch.cat([by_width, by_count]))
    counts = edges.diff()
    return sums[edges].diff() / counts, counts


def _compute_interval_errors(points: Tensor, counts: Tensor) -> Tensor:
    """Return error[i, j], the squared error of the points j..i around their mean; inf if j > i.

    Each point is added to the means and errors of all intervals that end at it (Welford's update).
    Differences of prefix sums would lose the errors of small points next to an outlier.
    """
    n = points.numel()
    errors = np.full((n, n), np.inf)
    mean, weight, error = np.zeros((3, n))
    # Loops over small arrays are faster in numpy.
    pairs = zip(points.tolist(), counts.tolist(), strict=True)
    for i, (point, count) in enumerate(pairs, 1):
        distance = point - mean[:i]
        fraction = count / (weight[:i] + count)
        error[:i] += distance * distance * weight[:i] * fraction
        mean[:i] += distance * fraction
        weight[:i] += count
        errors[i - 1, :i] = error[:i]
    return torch.from_numpy(errors).to(points.device)
