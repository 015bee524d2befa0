"""Weights on an even grid, packed: what is stored of r = S (q - Z).

Notable: the layer stays the layer it was. Its weight becomes a parametrization that unpacks the
codes whenever the weight is read, so any layer that holds a weight can be compressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from tinyml.layers import (
    QUANTIZABLE,
    CompressedWeight,
    by_layer,
    compress_weights,
    empty_like_nothing,
    guarded,
    is_conv1d,
    layers_of,
    outputs_first,
    plain_copy,
    weight_of,
)
from tinyml.quantization.grid import Granularity, Grid, Observer, as_rows, grid_of
from tinyml.quantization.int8 import with_int8_linears
from tinyml.quantization.pack import pack, unpack


class GridWeight(CompressedWeight):
    """A weight as packed codes, scales and zero points."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    divide: Tensor | None

    def __init__(
        self, codes: Tensor, grid: Grid, weight: Tensor, bits: int, *, transposed: bool = False,
        divide: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        # What is stored of each input is so many times its weights: divided when it is read.
        self.register_buffer("divide", None if divide is None else divide.to(weight.dtype))
        self.transposed = transposed  # the weight is (in, out), its rows are of (out, in)
        self.bits, self.shape, self.rows = bits, weight.shape, codes.shape
        self.low = grid.low
        self.register_buffer("codes", pack(codes - grid.low, bits))
        self.register_buffer("scale", grid.scale.to(weight.dtype))
        zero = (
            None if not grid.zero.any() else grid.zero.to(torch.int8 if grid.low else torch.uint8)
        )
        self.register_buffer("zero", zero)

    @staticmethod
    def restore(
        weight: Tensor,
        codes: Tensor,
        *,
        bits: int,
        rows: Sequence[int],
        low: int,
        scale: Tensor,
        zero: Tensor | None,
        transposed: bool = False,
        divide: Tensor | None = None,
    ) -> GridWeight:
        """What was saved, in place of a weight of this shape."""
        grid = Grid(scale, torch.zeros_like(scale) if zero is None else zero, low, low)
        codes_like = torch.full((*rows,), low)
        made = GridWeight(codes_like, grid, weight, bits, transposed=transposed, divide=divide)
        made.codes = codes
        return made

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Nothing: the codes are what is kept."""
        return empty_like_nothing(weight)

    def rounded(self, weight: Tensor) -> Tensor:
        """On the best grid of this form."""
        first = (weight.t() if self.transposed else weight).float()
        first = first if self.divide is None else first * self.divide
        grid = grid_of(first.reshape(self.rows), self.bits, symmetric=self.zero is None)
        made = GridWeight(
            grid.quantize(first.reshape(self.rows)), grid, weight, self.bits,
            transposed=self.transposed, divide=self.divide,
        )  # fmt: skip
        dense: Tensor = made(weight)
        return dense

    def format(self) -> list[int]:
        """Bits and the lowest code."""
        return [self.bits, self.low]

    def whole_numbers(self) -> Tensor:
        """q, int16, as rows."""
        count = self.shape.numel()
        return (unpack(self.codes, self.bits, count).to(torch.int16) + self.low).view(self.rows)

    def forward(self, _: Tensor) -> Tensor:
        """The dense weight."""
        codes = self.whole_numbers()
        if self.zero is not None:
            codes = codes - self.zero.to(torch.int16)
        dense = (self.scale * codes).view(self.shape[::-1] if self.transposed else self.shape)
        dense = dense if self.divide is None else dense / self.divide
        return dense.t() if self.transposed else dense


@torch.no_grad()
def quantize(
    model: nn.Module,
    bits: int | Mapping[str, int] = 8,
    *,
    granularity: Granularity | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    observer: Observer = "minmax",
    activations: Literal["float", "dynamic", "auto"] = "float",
    layers: Sequence[type[nn.Module]] = QUANTIZABLE,
    protect: Sequence[str] = (),
) -> nn.Module:
    """A copy of `model` whose weights are `bits`-bit whole numbers on a grid.

    One scale for each output channel (row), unless `group_size` or `granularity` says otherwise.
    `bits` may be given by layer name; other layers, and those that `protect` names, stay.
    activations="dynamic" also rounds the inputs of linear layers to int8 as they come and
    multiplies whole numbers (see `Int8Linear`), with the same bits everywhere, by the exact product
    that is fastest here. "auto" does so only where it is measured to be faster than float32 here.
    Weights alone are only smaller.
    """
    granularity = granularity or ("group" if group_size else "channel")
    model = plain_copy(model)
    if activations == "auto" and bits == 4:
        # The module imports what is above: a linear layer of such weights.
        from tinyml.quantization.int4 import with_int4_linears

        return with_int4_linears(
            quantize(
                model, 4, granularity="group", group_size=group_size or 32, symmetric=symmetric,
                observer=observer, layers=layers, protect=protect,
            )
        )  # fmt: skip
    if activations in ("dynamic", "auto"):
        if bits != 8 or granularity != "channel" or not symmetric:
            raise ValueError(
                f"activations={activations!r} takes bits=8, one symmetric scale a channel; "
                f"got bits={bits}, granularity={granularity!r}, symmetric={symmetric}"
            )
        return with_int8_linears(model, observer, activations, guarded(model, protect))
    if activations != "float":
        raise ValueError(f"activations is {activations!r}; 'float', 'dynamic' or 'auto'")

    if isinstance(bits, Mapping):
        by_layer(bits, layers_of(model, layers, protect), model)

    def compress(name: str, layer: nn.Module) -> CompressedWeight | None:
        width = bits.get(name) if isinstance(bits, Mapping) else bits
        if width is None:
            return None
        weight = weight_of(layer)
        rows = as_rows(outputs_first(layer, weight).float(), granularity, group_size)
        grid = grid_of(rows, width, symmetric=symmetric, observer=observer).stored_as(weight.dtype)
        return GridWeight(grid.quantize(rows), grid, weight, width, transposed=is_conv1d(layer))

    return compress_weights(model, layers, compress, protect)
