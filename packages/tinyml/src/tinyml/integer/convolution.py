"""Exact convolutions of int8 by the fastest implementation on this machine.

The implementations are those of `quantization.products`, applied to windows. Patches are gathered
with the channels last, so that each row of a window is contiguous. The float32 implementation uses
torch's own convolution on parts of the channels whose sums cannot exceed 2^24.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyml.integer.steps import Geometry
from tinyml.quantization.products import EXACT_IN_FLOAT32, Exact, ends

_LARGEST = 128


class Int8Filters(Exact):
    """int8 filters (out, in / groups, rows, columns) for padded images (n, in, height, width)."""

    def __init__(self, codes: Tensor, geometry: Geometry) -> None:
        super().__init__(codes)
        self.geometry = geometry
        self._parts: list[slice] | None = None

    @property
    def parts(self) -> list[slice]:
        """Return slices of the input channels whose sums are exact in float32."""
        if self._parts is None:
            self._parts = _parts(self.codes)
        return self._parts

    def implementations(self) -> dict[str, Callable[[Any, Tensor], Tensor]]:
        """Return the implementations in this file."""
        return IMPLEMENTATIONS

    def shape_of(self, inputs: Tensor) -> tuple[int, ...]:
        """Return images (rounded up to a power of two), channels, height, width and filters."""
        count = 1 << (len(inputs) - 1).bit_length() if len(inputs) else 0
        return count, *inputs.shape[1:], len(self.codes)

    def details(self) -> object:
        """Return the geometry and the number of parts, which determine the library's kernel."""
        return self.geometry, len(self.parts)

    def hardest(self, inputs: Tensor) -> list[tuple[Exact, Tensor]]:
        """Return pairs of filters and images whose sums are extreme, or large and odd.

        The layer's own filters are included, because extreme filters are split into more parts.
        """
        codes = ends(self.codes, -127, 127, 0)
        codes[: (len(codes) + 1) // 2] = 127
        hard = Int8Filters(codes, self.geometry)
        lowest, highest = (torch.full_like(inputs, end) for end in (-128, 127))
        trials = [ends(inputs, -128, 127, 1), lowest, ends(inputs, 126, 127, 2)]
        return [*((hard, trial) for trial in trials), (self, lowest), (self, highest)]

    def padded(self, images: Tensor, fill: int) -> Tensor:
        """Return the images padded with `fill`, as the product expects them."""
        rows, columns = self.geometry.padding
        return (
            F.pad(images, (columns, columns, rows, rows), value=fill) if rows or columns else images
        )


def float64(filters: Int8Filters, images: Tensor) -> Tensor:
    """Compute the reference result in float64, whose 53 bits are exact for every sum."""
    g = filters.geometry
    weight = filters.codes.double()
    return F.conv2d(images.double(), weight, None, g.stride, 0, g.dilation, g.groups)


def _float32(filters: Int8Filters, images: Tensor) -> Tensor:
    """Compute in float32, over as many input channels at a time as are exact."""
    g, last = filters.geometry, torch.channels_last
    if g.groups > 1 < len(filters.parts):
        # A part of each group is not a contiguous slice of the images.
        return float64(filters, images)

    def weights() -> list[Tensor]:
        whole = filters.codes.float().contiguous(memory_format=last)
        return [whole[:, part] for part in filters.parts]

    def part(inputs: Tensor, weight: Tensor) -> Tensor:
        floats = inputs.to(torch.float32, memory_format=last)
        return F.conv2d(floats, weight, None, g.stride, 0, g.dilation, g.groups)

    return _added(filters, images, filters.keep("float32", weights), part)


def _added(
    filters: Int8Filters,
    images: Tensor,
    weights: Sequence[Any],
    product: Callable[[Tensor, Any], Tensor],
) -> Tensor:
    """Return the sum of the products of all parts of the channels, each exact in float32."""
    if len(weights) == 1:
        return product(images, weights[0])
    sums = (product(images[:, part], w) for part, w in zip(filters.parts, weights, strict=True))
    return functools.reduce(lambda total, part_sum: total.add_(part_sum), sums, next(sums).double())


def _parts(codes: Tensor) -> list[slice]:
    """Return slices of the input channels such that no sum over a slice exceeds 2^24."""
    sums = codes.short().abs().sum((2, 3), dtype=torch.int64)  # (out, in)
    edges, total = [0], torch.zeros(len(codes), dtype=torch.int64)
    for channel, column in enumerate(sums.unbind(1)):
        if channel > edges[-1] and int((total + column).amax()) * _LARGEST > EXACT_IN_FLOAT32:
            edges.append(channel)
            total = torch.zeros_like(total)
        total = total + column
    return [slice(a, b) for a, b in itertools.pairwise([*edges, codes.shape[1]])]


def _int8_patches(filters: Int8Filters, images: Tensor) -> Tensor:
    """Compute one product of int8 matrices, with windows as rows and channels last."""
    g = filters.geometry
    if g.groups > 1 or g.dilation != (1, 1):
        raise RuntimeError("patches are for one group without dilation")
    out, channels, *_ = filters.codes.shape
    if min(out, channels * g.kernel[0] * g.kernel[1]) < 16:
        raise RuntimeError("too small for the int8 product")
    weight = filters.keep(
        "int8 patches", lambda: filters.codes.permute(0, 2, 3, 1).reshape(out, -1).contiguous()
    )
    last = images.permute(0, 2, 3, 1).contiguous()  # [N, H, W, C]
    windows = last.unfold(1, g.kernel[0], g.stride[0]).unfold(2, g.kernel[1], g.stride[1])
    count, height, width = windows.shape[:3]
    rows = windows.permute(0, 1, 2, 4, 5, 3).reshape(count * height * width, -1)
    return torch._int_mm(rows, weight.t()).view(count, height, width, out).permute(0, 3, 1, 2)


def _int8_library(filters: Int8Filters, images: Tensor) -> Tensor:
    """Compute with OneDNN's convolution, which takes unsigned inputs: the codes plus 128.

    The int32 sums are returned as float32, so they are also split into parts.
    """
    g = filters.geometry
    if g.groups > 1 < len(filters.parts):
        return float64(filters, images)
    ones, zeros = torch.ones(len(filters.codes)), torch.zeros(len(filters.codes), dtype=torch.int64)
    operators: Any = torch.ops.onednn

    def packed(part: slice) -> Tensor:
        codes, (n, _, *size) = filters.codes[:, part].contiguous(), images.shape
        prepacked: Tensor = operators.qconv_prepack(
            codes,
            ones,
            1.0,
            128,
            list(g.stride),
            [0, 0],
            list(g.dilation),
            g.groups,
            [n, codes.shape[1] * g.groups, *size],
        )
        return prepacked

    def part(moved: Tensor, weight: Tensor) -> Tensor:
        sums: Tensor = operators.qconv2d_pointwise(
            moved.contiguous(memory_format=torch.channels_last),
            1.0,
            128,
            weight,
            ones,
            zeros,
            None,
            list(g.stride),
            [0, 0],
            list(g.dilation),
            g.groups,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return sums

    weights = filters.keep("int8 library", lambda: [packed(part) for part in filters.parts])
    return _added(filters, images.view(torch.uint8).bitwise_xor(128), weights, part)


IMPLEMENTATIONS: dict[str, Callable[[Int8Filters, Tensor], Tensor]] = {
    "int8 library": _int8_library,
    "int8 patches": _int8_patches,
    "float32": _float32,
    "float64": float64,
}
