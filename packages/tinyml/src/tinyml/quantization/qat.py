"""Quantization-aware training: the forward pass rounds, and the gradient passes through.

Without `batches`, layers compute with rounded weights. With `batches`, every value is rounded as
well, where an `IntegerModel` rounds (see `integer.training`). With `learn_scale` the steps of the
grids are parameters. `convert` returns a model with identical outputs, or, for integers, outputs
within one step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tinyml.compressed_weight import CompressedWeight, compressed_weight
from tinyml.conversion import compress_weights, plain_copy
from tinyml.integer.training import IntegerTraining
from tinyml.layers import QUANTIZABLE, is_conv1d, weight_of
from tinyml.quantization.grid_weight import GridWeight
from tinyml.quantization.rounded_weight import RoundedWeight
from tinyml.validation import check_bits


def prepare_qat(
    model: nn.Module,
    bits: int = 4,
    *,
    group_size: int | None = None,
    learn_scale: bool = False,
    layers: Sequence[type[nn.Module]] = QUANTIZABLE,
    protect: Sequence[str] = (),
    batches: Sequence[Tensor] | None = None,
    activation_bits: int = 8,
) -> nn.Module:
    """Return a copy of `model` for training, whose layers compute with rounded weights.

    `convert` returns the model with stored integers after training.

    With `batches` of inputs, on which ranges are measured, values are rounded too, to
    `activation_bits` bits. The copy is then the model's graph as an `IntegerModel` has it: all
    weights are rounded per channel, batch normalization is folded in, and dropout is left out.
    """
    check_bits(bits, "symmetric training takes", least=2)
    if batches is not None:
        if group_size is not None or protect or layers is not QUANTIZABLE:
            raise ValueError(
                "with batches the whole network is quantized with one scale per channel; remove "
                "group_size, layers and protect, or remove batches"
            )
        return IntegerTraining(model, batches, bits, activation_bits, learn_scale)

    def compress(name: str, layer: nn.Module) -> CompressedWeight:
        weight, transposed = weight_of(layer), is_conv1d(layer)
        return RoundedWeight(weight, bits, group_size, learn_scale, transposed)

    return compress_weights(plain_copy(model), layers, compress, protect)


@torch.no_grad()
def convert(model: nn.Module) -> nn.Module:
    """Return a copy of a model from `prepare_qat` with integer weights.

    If `prepare_qat` received `batches`, return an `IntegerModel`.
    """
    if isinstance(model, IntegerTraining):
        return model.integers()
    model = copy.deepcopy(model)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(compressed_weight(layer), RoundedWeight)
    }
    if not layers:
        raise ValueError("expected a model from prepare_qat, got one without rounded layers")
    stored: dict[int, GridWeight] = {}
    for layer in layers.values():
        rounded = cast(RoundedWeight, compressed_weight(layer))
        original = cast(Any, layer).parametrizations.weight.original
        weight = original.detach()
        if id(rounded) not in stored:
            rows, grid = rounded.grid(weight)
            stored[id(rounded)] = GridWeight(
                grid.quantize(rows), grid, weight, rounded.bits, transposed=rounded.transposed
            )
        # Replaced in place: torch's removal of a parametrization would also affect the original,
        # because both copies of a layer share the generated class.
        slot = cast(Any, layer).parametrizations.weight
        slot[0] = stored[id(rounded)]
        slot.original = nn.Parameter(slot[0].right_inverse(weight), original.requires_grad)
    return model
