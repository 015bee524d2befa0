"""Which layers of a model hold the weights, each weight once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
PRUNABLE: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS)
QUANTIZABLE: tuple[type[nn.Module], ...] = (*PRUNABLE, nn.Embedding)


def layers_of(model: nn.Module, kinds: Sequence[type[nn.Module]]) -> dict[str, nn.Module]:
    """The layers of these kinds by name; of layers that share one weight, the first."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, tuple(kinds)) and isinstance(weight, nn.Parameter):
            if id(weight) not in seen:
                found[name] = model.get_submodule(name)
            seen.add(id(weight))
    if not found:
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{type(model).__name__} has no layer of the kinds {wanted}")
    return found


class CompressedWeight(nn.Module):
    """How a weight is stored, in place of the dense one: `forward(x)` makes it from tensor `x`.

    It is a parametrization in the sense of `torch.nn.utils.parametrize`, so `layer.weight` is still
    the dense weight for whoever reads it, and any layer can have one.
    """

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The tensor to train or keep in place of `weight`."""
        raise NotImplementedError


def compress_weights(
    model: nn.Module,
    kinds: Sequence[type[nn.Module]],
    compress: Callable[[str, nn.Module], CompressedWeight | None],
) -> nn.Module:
    """Give every layer of `kinds` the compressed weight that `compress(name, layer)` returns.

    Layers that share a weight share its compressed form. None leaves a layer as it is.
    """
    sharing: dict[int, list[nn.Module]] = {}
    chosen = layers_of(model, kinds)
    for layer in model.modules():
        if isinstance(getattr(layer, "weight", None), nn.Parameter):
            sharing.setdefault(id(layer.weight), []).append(layer)
    for name, layer in chosen.items():
        compressed = compress(name, layer)
        if compressed is None:
            continue
        for other in (same := sharing[id(layer.weight)]):
            parametrize.register_parametrization(other, "weight", compressed, unsafe=True)
        first, *rest = (cast(Any, other).parametrizations.weight for other in same)
        for other in rest:
            other.original = first.original
    return model


def compressed_weight(layer: nn.Module) -> CompressedWeight | None:
    """The compressed weight of a layer, if it has one."""
    if not parametrize.is_parametrized(layer, "weight"):
        return None
    last = cast(Any, layer).parametrizations.weight[-1]
    return last if isinstance(last, CompressedWeight) else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module's own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def empty_like_nothing(weight: Tensor) -> Tensor:
    """What stands for a dense weight that is not kept: no elements, same type and device."""
    return torch.empty(0, dtype=weight.dtype, device=weight.device)
