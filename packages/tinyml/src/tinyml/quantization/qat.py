"""Train with the rounding in place, so that the weights settle where rounding does no harm.

Notable:
- without `batches` layers act with rounded weights; with them every value is rounded too, where an
  `IntegerModel` rounds it (see `integer.training`);
- with `learn_scale` the steps are parameters too;
- what is trained is what is stored: `convert` gives the same outputs to the bit, or integers within
  one step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tinyml.integer.training import IntegerTraining
from tinyml.layers import (
    QUANTIZABLE,
    CompressedWeight,
    check_bits,
    compress_weights,
    compressed_weight,
    is_conv1d,
    plain_copy,
    weight_of,
)
from tinyml.quantization.grid import Granularity, granularity_of
from tinyml.quantization.grid_weight import GridWeight
from tinyml.quantization.rounded_weight import RoundedWeight


def prepare_qat(
    model: nn.Module,
    bits: int = 4,
    *,
    granularity: Granularity | None = None,
    group_size: int | None = None,
    learn_scale: bool = False,
    layers: Sequence[type[nn.Module]] = QUANTIZABLE,
    protect: Sequence[str] = (),
    batches: Sequence[Tensor] | None = None,
    activation_bits: int = 8,
) -> nn.Module:
    """A copy of `model` to train, whose layers act with rounded weights. See `convert`.

    With `batches` of inputs, from which ranges are taken, values are rounded too, to
    `activation_bits`: the copy is the model's graph as an `IntegerModel` has it, all of its weights
    rounded by channel, batch normalization folded in and dropout left out.
    """
    kind = granularity_of(granularity, group_size)
    check_bits(bits, "symmetric training takes", least=2)
    if batches is not None:
        if kind != "channel" or protect or layers is not QUANTIZABLE:
            raise ValueError(
                "with batches the whole network becomes integers, with one scale a channel: no "
                "granularity, no groups, no layers and nothing to protect"
            )
        return IntegerTraining(model, batches, bits, activation_bits, learn_scale)

    def compress(name: str, layer: nn.Module) -> CompressedWeight:
        weight, transposed = weight_of(layer), is_conv1d(layer)
        return RoundedWeight(weight, bits, kind, group_size, learn_scale, transposed)

    return compress_weights(plain_copy(model), layers, compress, protect)


@torch.no_grad()
def convert(model: nn.Module) -> nn.Module:
    """A copy of a model from `prepare_qat` that stores whole numbers instead of the weights.

    One that was prepared with batches becomes an `IntegerModel`.
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
        raise ValueError("no layer trains with rounding; prepare_qat(model) makes such a model")
    stored: dict[int, GridWeight] = {}
    for layer in layers.values():
        rounded = cast(RoundedWeight, compressed_weight(layer))
        weight = cast(Any, layer).parametrizations.weight.original.detach()
        if id(rounded) not in stored:
            rows, grid = rounded.grid(weight)
            stored[id(rounded)] = GridWeight(
                grid.quantize(rows), grid, weight, rounded.bits, transposed=rounded.transposed
            )
        # Exchanged in place: taking a parametrization off would take it off the original too,
        # because torch gives both copies of a layer one class.
        slot = cast(Any, layer).parametrizations.weight
        slot[0] = stored[id(rounded)]
        slot.original = nn.Parameter(slot[0].right_inverse(weight), weight.requires_grad)
    return model
