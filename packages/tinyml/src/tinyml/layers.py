"""Which layers of a model hold the weights, each weight once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def by_layer(
    given: Mapping[str, Any], layers: Mapping[str, nn.Module], model: nn.Module
) -> dict[str, nn.Module]:
    """The layers that `given` names; a name that is none of them is an error."""
    if unknown := sorted(given.keys() - layers.keys()):
        firsts = {id(layer.weight): name for name, layer in layers.items()}
        shared = {
            name: firsts[id(module.weight)]
            for name, module in model.named_modules()
            if name in unknown and id(getattr(module, "weight", None)) in firsts
        }
        why = "".join(f"; {n!r} shares the weight of {first!r}" for n, first in shared.items())
        raise ValueError(f"no such layer: {unknown}; there are {sorted(layers)}{why}")
    return {name: layer for name, layer in layers.items() if name in given}


def check_bits(bits: int, what: str, least: int = 1) -> None:
    """Refuse what is not a whole number of bits that a code can have."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not least <= bits <= 8:
        raise ValueError(f"{bits} bits; {what} {least} to 8, a whole number")


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that holds nan or inf, by name."""
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} holds nan or inf, of which nothing can be kept or removed")


class CompressedWeight(nn.Module):
    """How a weight is stored, in place of the dense one: `forward(x)` makes it from tensor `x`.

    It is a parametrization in the sense of `torch.nn.utils.parametrize`, so `layer.weight` is still
    the dense weight for whoever reads it, and any layer can have one.
    """

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The tensor to train or keep in place of `weight`."""
        raise NotImplementedError

    def format(self) -> list[int]:
        """The whole numbers that the stored codes cannot be read without."""
        raise NotImplementedError

    def get_extra_state(self) -> Tensor:
        """The format, so that a state dict holds all that it takes to read it."""
        return torch.tensor(self.format(), dtype=torch.int16)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse the codes of another format, which would be read as other numbers."""
        if state.tolist() != self.format():
            raise RuntimeError(
                f"the state dict holds a {type(self).__name__} of format {state.tolist()}, the "
                f"model one of {self.format()}; compress the model as the saved one was"
            )


def compress_weights(
    model: nn.Module,
    kinds: Sequence[type[nn.Module]],
    compress: Callable[[str, nn.Module], CompressedWeight | None],
) -> nn.Module:
    """Give every layer of `kinds` the compressed weight that `compress(name, layer)` returns.

    Layers that share a weight share its compressed form. None leaves a layer as it is. All of the
    compressed weights are made before the first is put in, so an error changes nothing.
    """
    sharing: dict[int, list[nn.Module]] = {}
    chosen = layers_of(model, kinds)
    for layer in model.modules():
        if isinstance(getattr(layer, "weight", None), nn.Parameter):
            sharing.setdefault(id(layer.weight), []).append(layer)
    made = {name: compress(name, layer) for name, layer in chosen.items()}
    for name, compressed in made.items():
        layer = chosen[name]
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
