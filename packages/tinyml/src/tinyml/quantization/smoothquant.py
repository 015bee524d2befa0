"""SmoothQuant: part of the range of large inputs moves into the weights before int8 rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tinyml.conversion import dense_copy, evaluation_mode
from tinyml.layers import (
    layers_of,
    outputs_first,
    protected_modules,
    weight_identity,
    weight_of,
)
from tinyml.quantization.calibration import watch_inputs
from tinyml.quantization.int8 import with_int8_linears
from tinyml.validation import check_finite, require_batches


@torch.no_grad()
def smoothquant(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    alpha: float = 0.5,
    activations: Literal["dynamic", "auto"] = "dynamic",
    protect: Sequence[str] = (),
) -> nn.Module:
    """Return `quantize(model, activations=...)` of a model whose inputs were smoothed first.

    Each input is divided by s = max|x|^alpha / max|w|^(1 - alpha), and its weights are multiplied
    by s, so that the weights take over part of the inputs' range (Xiao et al., "SmoothQuant", 2023,
    equation 4). Layers that share their weight with another layer are not smoothed.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"expected 0 <= alpha <= 1, got {alpha}")
    model, divide = dense_copy(model, (nn.Linear,)), {}
    layers = layers_of(model, (nn.Linear,), protect)
    shared = [weight_identity(module) for module in model.modules()]

    largest: dict[str, Tensor] = {}

    def note(name: str, inputs: Tensor) -> None:
        if len(inputs):
            most = inputs.float().abs().amax(0)
            largest[name] = torch.maximum(most, largest.get(name, most))

    with evaluation_mode(model):
        watch_inputs(model, require_batches(batches), layers, note)
    for name, most in largest.items():
        weight = outputs_first(layers[name], weight_of(layers[name])).float()
        check_finite(f"{name}.weight", weight)
        check_finite(f"the inputs of {name}", most)
        most = without_dead_inputs(most).clamp(min=1e-5)
        if shared.count(weight_identity(layers[name])) == 1:
            divide[name] = most**alpha / weight.abs().amax(0).clamp(min=1e-5) ** (1 - alpha)
    return with_int8_linears(model, activations, protected_modules(model, protect), divide)


def without_dead_inputs(size: Tensor) -> Tensor:
    """Return the sizes of a layer's inputs with zeros replaced by the median of the other sizes.

    Calibration says nothing about the size of an input that was always zero. A factor of almost
    zero would round its weights to zero, or divide its next value by almost zero.
    """
    alive = size > 0
    return torch.where(alive, size, size[alive].median() if alive.any() else torch.ones_like(size))
