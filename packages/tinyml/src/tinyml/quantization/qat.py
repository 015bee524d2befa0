"""Quantization-aware training: the forward pass rounds, and the gradient passes through."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from tinyml.compressed_weight import get_compressed_weight
from tinyml.conversion import check_supported, compress_weights, install_weight
from tinyml.layers import QUANTIZABLE, get_weight, is_conv1d
from tinyml.quantization.grid_weight import GridWeight
from tinyml.quantization.rounded_weight import RoundedWeight
from tinyml.validation import check_bits, check_finite


def prepare_qat(
    model: nn.Module,
    bits: int = 4,
    *,
    group_size: int | None = None,
    learn_scale: bool = False,
    layers: Sequence[type[nn.Module]] | type[nn.Module] = QUANTIZABLE,
    protect: Sequence[str] = (),
) -> nn.Module:
    """Return a copy of `model` for training, whose layers compute with rounded weights.

    The grids are symmetric, with 2 to 8 `bits`, and one step per output or per group of
    `group_size` inputs. A step follows the largest weight, or is trained if `learn_scale` is True.
    Layers of the types in `layers` are rounded, except those that `protect` names. After training,
    `convert` returns the model with stored integers.
    """
    check_bits(bits, "a symmetric grid", least=2)

    def compress(layer: nn.Module, bits: int) -> RoundedWeight:
        return RoundedWeight(get_weight(layer), bits, group_size, learn_scale, is_conv1d(layer))

    return compress_weights(model, layers, bits, compress, protect)


@torch.no_grad()
def convert(model: nn.Module) -> nn.Module:
    """Return a copy of a model from `prepare_qat` with the same rounded weights, as stored codes.

    Raise `ValueError` if no layer has a rounded weight, or if a weight is not finite.
    """
    check_supported(model)
    model = copy.deepcopy(model)
    is_converted = False
    for layer in list(model.modules()):
        rounded = get_compressed_weight(layer)
        # `install_weight` also converts the other layers that share the weight.
        if isinstance(rounded, RoundedWeight):
            weight = cast(Any, layer).parametrizations.weight.original.detach()
            check_finite("the trained weights", weight)
            rows, grid = rounded.compute_rows_and_grid(weight)
            stored = GridWeight.from_codes(
                grid.quantize(rows), grid, weight, rounded.bits, transposed=rounded.transposed
            )
            install_weight(model, layer, stored)
            is_converted = True
    if not is_converted:
        raise ValueError("expected a model from prepare_qat, got one without rounded layers")
    return model
