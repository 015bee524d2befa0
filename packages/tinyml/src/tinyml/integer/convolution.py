"""Exact convolutions of int8, by whichever way is fastest on the machine at hand.

Notable: the ways of `quantization.products`, for windows. Patches are gathered with the channels
last, where a row of a window is one run of bytes; as floats the library's own convolution is taken,
exact while no partial sum can pass 2^24.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyml.integer.graph import Geometry
from tinyml.quantization.products import EXACT_IN_FLOAT32, fastest

_LARGEST = 128


@dataclass(frozen=True)
class ConvolutionChoice:
    """The way that is taken for a shape class, and what it was measured against."""

    shape: tuple[int, ...]
    """images (to the next power of two), channels, height, width, filters."""
    way: str
    milliseconds: dict[str, float]
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        times = sorted(self.milliseconds.items(), key=lambda item: item[1])
        listed = ", ".join(f"{name} {ms:.3g} ms" for name, ms in times)
        wrong = f"; wrong here: {', '.join(self.wrong)}" if self.wrong else ""
        return f"{' x '.join(map(str, self.shape))}: {self.way} ({listed}{wrong})"


class Int8Filters:
    """int8 filters (out, in / groups, rows, columns) that many images are convolved with."""

    def __init__(self, codes: Tensor, geometry: Geometry) -> None:
        self.codes, self.geometry = codes, geometry
        self._kept: dict[str, Any] = {}

    def convolve(self, images: Tensor, fill: int) -> Tensor:
        """int8 images, padded with `fill` -> exact sums (n, out, height, width)."""
        rows, columns = self.geometry.padding
        if rows or columns:
            images = F.pad(images, (columns, columns, rows, rows), value=fill)
        if not len(images):
            return float64(self, images)
        return WAYS[self.choice(images).way](self, images)

    def choice(self, padded: Tensor) -> ConvolutionChoice:
        """The way for images like these, measured if it is the first time."""
        count = 1 << (len(padded) - 1).bit_length()
        shape = (count, *padded.shape[1:], len(self.codes))
        key = shape, self.geometry, torch.get_num_threads(), str(padded.device)
        if key not in _chosen:
            _chosen[key] = self._measure(shape, padded)
        return _chosen[key]

    def keep(self, way: str, make: Callable[[], Any]) -> Any:
        """What `way` makes of the filters, once."""
        if way not in self._kept:
            self._kept[way] = make()
        return self._kept[way]

    @torch.no_grad()
    def _measure(self, shape: tuple[int, ...], padded: Tensor) -> ConvolutionChoice:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, self.codes.shape, generator=generator).bool()
        hard = Int8Filters(torch.where(signs, 127, -127).to(self.codes), self.geometry)
        hard.codes[: len(signs) // 2] = 127
        ends = torch.randint(0, 2, padded[:2].shape, generator=generator).bool()
        trials = [torch.where(ends, 127, -128).to(padded), torch.full_like(padded[:2], -128)]
        exact = [float64(hard, trial) for trial in trials]
        ways: dict[str, Callable[[], Tensor]] = {}
        wrong = []
        for name, way in WAYS.items():
            try:
                sums = [way(hard, trial).double() for trial in trials]
            except (RuntimeError, AttributeError):  # this build or geometry has no such product
                continue
            if all(map(torch.equal, sums, exact)):
                ways[name] = lambda way=way: way(self, padded)  # type: ignore[misc]
            else:
                wrong.append(name)
        times = fastest(ways)
        best = min(times, key=lambda name: times[name])
        self._kept = {name: kept for name, kept in self._kept.items() if name == best}
        return ConvolutionChoice(shape, best, times, tuple(wrong))


_chosen: dict[Any, ConvolutionChoice] = {}


def forget_choices() -> None:
    """Measure every shape class again."""
    _chosen.clear()


def float64(filters: Int8Filters, images: Tensor) -> Tensor:
    """The plainest way, right everywhere: 53 bits hold any sum."""
    g = filters.geometry
    weight = filters.codes.double()
    return F.conv2d(images.double(), weight, None, g.stride, 0, g.dilation, g.groups)


def _float32(filters: Int8Filters, images: Tensor) -> Tensor:
    """Float32, over as many input channels at a time as are exact."""
    g = filters.geometry
    last = torch.channels_last
    parts = filters.keep("float32", lambda: _parts(filters.codes))
    if len(parts) > 1 and g.groups > 1:
        raise RuntimeError("the channels of a group are too many for float32")
    total: Tensor | None = None
    for first, weight in parts:
        inputs = images if len(parts) == 1 else images[:, first : first + weight.shape[1]]
        floats = inputs.to(torch.float32, memory_format=last)
        sums = F.conv2d(floats, weight, None, g.stride, 0, g.dilation, g.groups)
        if len(parts) == 1:
            return sums
        total = sums.double() if total is None else total.add_(sums)
    assert total is not None
    return total


def _parts(codes: Tensor) -> list[tuple[int, Tensor]]:
    sums = codes.short().abs().sum((2, 3), dtype=torch.int64)  # (out, in)
    edges, total = [0], torch.zeros(len(codes), dtype=torch.int64)
    for channel, column in enumerate(sums.unbind(1)):
        if channel > edges[-1] and int((total + column).amax()) * _LARGEST > EXACT_IN_FLOAT32:
            edges.append(channel)
            total = torch.zeros_like(total)
        total = total + column
    weights = codes.float().contiguous(memory_format=torch.channels_last)
    return [(a, weights[:, a:b]) for a, b in itertools.pairwise([*edges, codes.shape[1]])]


def _int8_patches(filters: Int8Filters, images: Tensor) -> Tensor:
    """Windows as rows, channels last, and one product of int8 matrices."""
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
    """oneDNN's convolution, which takes unsigned inputs: the codes moved up by 128."""
    g = filters.geometry
    out, shape = len(filters.codes), list(images.shape)
    operators: Any = torch.ops.onednn

    def pack() -> tuple[Tensor, Tensor, Tensor]:
        ones = torch.ones(out)
        packed = operators.qconv_prepack(
            filters.codes, ones, 1.0, 128, list(g.stride), [0, 0], list(g.dilation), g.groups, shape
        )
        return packed, ones, torch.zeros(out, dtype=torch.int64)

    packed, ones, zeros = filters.keep("int8 library", pack)
    moved = images.view(torch.uint8).bitwise_xor(128).contiguous(memory_format=torch.channels_last)
    sums: Tensor = operators.qconv2d_pointwise(
        moved, 1.0, 128, packed, ones, zeros, None, list(g.stride), [0, 0], list(g.dilation),
        g.groups, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return sums


WAYS: dict[str, Callable[[Int8Filters, Tensor], Tensor]] = {
    "int8 library": _int8_library,
    "int8 patches": _int8_patches,
    "float32": _float32,
    "float64": float64,
}
