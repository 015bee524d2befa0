"""Linear quantization of a model: which weights, how many bits, which product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from tinyml.layers import (
    QUANTIZABLE,
    CompressedWeight,
    compress_weights,
    for_each,
    guarded,
    is_conv1d,
    layers_of,
    outputs_first,
    plain_copy,
    weight_of,
)
from tinyml.quantization.fastest import with_fastest_linears
from tinyml.quantization.grid import Granularity, Observer, as_rows, granularity_of, grid_of
from tinyml.quantization.grid_weight import GridWeight
from tinyml.quantization.int4 import Int4Linear
from tinyml.quantization.int8 import with_int8_linears


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
    that is fastest here. "auto", with 8 or 4 bits, is for speed: linear layers (and embeddings tied
    to them) by what is measured to be fastest here for so many tokens, float32 among it, for which
    a dense weight is kept beside; a layer that nothing computes faster than float stays as it was.
    4 bits are in groups, of 32 inputs unless said otherwise. Weights alone are only smaller.
    """
    if activations == "auto" and bits == 4:
        group_size = 32 if granularity is None and group_size is None else group_size
    granularity = granularity_of(granularity, group_size)
    model = plain_copy(model)

    def gridded(layer: nn.Module, width: int) -> GridWeight:
        weight = weight_of(layer)
        rows = as_rows(outputs_first(layer, weight).float(), granularity, group_size)
        grid = grid_of(rows, width, symmetric=symmetric, observer=observer).stored_as(weight.dtype)
        codes, transposed = grid.quantize(rows), is_conv1d(layer)
        return GridWeight(codes, grid, weight, width, transposed=transposed)

    if activations == "auto" and bits == 4:

        def packed(_: str, layer: nn.Module) -> Int4Linear | None:
            table = Int4Linear(gridded(layer, 4), cast(Tensor | None, layer.bias))
            return table if table.gains() else None

        return with_fastest_linears(model, packed, guarded(model, protect))
    if activations in ("dynamic", "auto"):
        if bits != 8 or granularity != "channel" or not symmetric:
            raise ValueError(
                f"activations={activations!r} takes bits=8, one symmetric scale a channel; "
                f"got bits={bits}, granularity={granularity!r}, symmetric={symmetric}"
            )
        return with_int8_linears(model, observer, activations, guarded(model, protect))
    if activations != "float":
        raise ValueError(f"activations is {activations!r}; 'float', 'dynamic' or 'auto'")
    widths = for_each(bits, layers_of(model, layers, protect), model)

    def compress(name: str, layer: nn.Module) -> CompressedWeight | None:
        if name not in widths:
            return None
        return gridded(layer, widths[name])

    return compress_weights(model, layers, compress, protect)
