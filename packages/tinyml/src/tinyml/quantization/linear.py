"""Linear quantization: weights on uniform grids, and linear layers that multiply their codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from tinyml.conversion import compress_weights, make_plain_copy
from tinyml.layers import QUANTIZABLE, find_protected, get_weight, is_conv1d, put_outputs_first
from tinyml.quantization.fastest_linear import FastestLinear, install_fastest_linears
from tinyml.quantization.grid import as_rows, compute_grid, widen
from tinyml.quantization.grid_weight import GridWeight
from tinyml.quantization.int4 import Int4Linear
from tinyml.quantization.int8 import Int8Linear
from tinyml.validation import Progress


@torch.inference_mode(mode=False)  # inference tensors do not count their modifications
@torch.no_grad()
def quantize(
    model: nn.Module,
    bits: int | Mapping[str, int] = 8,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    activations: Literal["float", "dynamic", "auto"] = "float",
    layers: Sequence[type[nn.Module]] | type[nn.Module] = QUANTIZABLE,
    protect: Sequence[str] = (),
    progress: Progress | None = None,
) -> nn.Module:
    """Return a copy of `model` whose weights are `bits`-bit integers on a uniform grid.

    There is one scale per output channel (row), or per group of `group_size` inputs; with
    symmetric=False there is also a zero point, and `bits` may be 1. Layers of the types in `layers`
    are quantized, except those that `protect` names. With activations="float", `bits` may be a
    mapping from layer names to bits, and other layers are unchanged. The model is then smaller but
    not faster.

    activations="dynamic" requires bits=8 and replaces linear layers only. It also rounds their
    inputs to int8 and multiplies integers (see `Int8Linear`), bit-identically on all machines.

    activations="auto" requires bits=8 or 4 and replaces linear layers only. For each number of
    tokens, a layer uses the product of its codes if this was measured to be clearly faster.
    Otherwise, and inside torch.compile, it uses float, which needs a dense weight in memory. Layers
    without a clearly faster product are unchanged. With 4 bits, `group_size` is 32 by default. With
    this default, layers are also unchanged if their number of inputs is not a multiple of 32.

    With "auto" or "dynamic", `progress(name, done, total)` is called after each linear layer.
    """
    if activations not in ("float", "dynamic", "auto"):
        raise ValueError(f"expected activations 'float', 'dynamic' or 'auto', got {activations!r}")
    layers = (layers,) if isinstance(layers, type) else layers
    if activations != "float" and nn.Linear not in layers:
        raise ValueError(
            f"expected nn.Linear in layers for activations={activations!r}, which replaces linear "
            f"layers only, got {list(layers)}"
        )
    if activations == "float":
        compress = partial(_round_to_grid, group_size=group_size, symmetric=symmetric)
        return compress_weights(model, layers, bits, compress, protect)
    is_auto = activations == "auto"
    make_layer: Callable[[nn.Module], FastestLinear | None]
    if is_auto and bits == 4:
        make_layer = partial(_make_int4, group_size=group_size, symmetric=symmetric)
    elif bits == 8 and group_size is None and symmetric:
        make_layer = partial(Int8Linear, may_stay_float=is_auto)
    else:
        alternative = ", or bits=4," if is_auto else ""
        raise ValueError(
            f"expected bits=8 with one symmetric scale per channel{alternative} for "
            f"{activations=}, got {bits=}, {group_size=}, {symmetric=}"
        )
    protected = find_protected(model, protect)
    return install_fastest_linears(make_plain_copy(model), make_layer, protected, progress)


def _make_int4(layer: nn.Module, group_size: int | None, symmetric: bool) -> Int4Linear | None:
    """Return the layer with 4-bit weights, or None if 32 does not divide its number of inputs."""
    if group_size is None and put_outputs_first(layer, get_weight(layer)).shape[1] % 32:
        return None
    grid = _round_to_grid(layer, 4, 32 if group_size is None else group_size, symmetric)
    return Int4Linear(grid, cast(Tensor | None, layer.bias))


def _round_to_grid(
    layer: nn.Module, bits: int, group_size: int | None, symmetric: bool
) -> GridWeight:
    """Return the weight of a layer, rounded to the nearest codes."""
    weight = get_weight(layer)
    rows = as_rows(widen(put_outputs_first(layer, weight)), group_size)
    grid = compute_grid(rows, bits, symmetric=symmetric).round_scales(weight.dtype)
    return GridWeight.from_codes(
        grid.quantize(rows), grid, weight, bits, transposed=is_conv1d(layer)
    )
