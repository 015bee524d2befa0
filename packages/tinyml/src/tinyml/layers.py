"""Which layers of a model hold the weights, each weight once."""

from __future__ import annotations

import copy
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tinyml.whole_state import guarded_loading

T = TypeVar("T")
CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
PRUNABLE: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS)
QUANTIZABLE: tuple[type[nn.Module], ...] = (*PRUNABLE, nn.Embedding)


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D: a linear layer whose weight is (in, out)."""
    return type(module).__name__.removeprefix("Parametrized") == "Conv1D" and hasattr(module, "nf")


def is_of(module: nn.Module, kinds: Sequence[type[nn.Module]]) -> bool:
    """Whether a layer is of one of these kinds; a Conv1D is a linear layer."""
    return isinstance(module, tuple(kinds)) or (nn.Linear in kinds and is_conv1d(module))


def weight_of(layer: nn.Module) -> Tensor:
    """The dense weight, whatever it is stored as."""
    return cast(Tensor, layer.weight).detach()


def outputs_first(layer: nn.Module, weight: Tensor) -> Tensor:
    """A tensor of the weight's shape with the layer's outputs as its first dimension."""
    return weight.t() if is_conv1d(layer) else weight


def layers_of(
    model: nn.Module, kinds: Sequence[type[nn.Module]], protect: Sequence[str] = ()
) -> dict[str, nn.Module]:
    """The layers of these kinds by name; of layers that share one weight, the first.

    A weight that is compressed counts as much as a dense one. A weight of a layer that `protect`
    names (see `guarded`) is left out, whoever else has it.
    """
    found: dict[str, nn.Module] = {}
    held = guarded(model, protect)
    seen = {identity(m) for n, m in model.named_modules() if n in held} - {None}
    for name, module in model.named_modules():
        if is_of(module, kinds) and (key := identity(module)) is not None:
            if key not in seen:
                found[name] = model.get_submodule(name)
            seen.add(key)
    if not found:
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{type(model).__name__} has no layer of the kinds {wanted}")
    return found


def guarded(model: nn.Module, protect: Sequence[str]) -> set[str]:
    """The modules that `protect` names, and all inside them.

    A name is a module's whole one, or some of its parts between dots: "lm_head", "layers.0",
    "q_proj". One that fits no module is an error.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    held: set[str] = set()
    for wanted in [protect] if isinstance(protect, str) else protect:
        if not (fits := {name for name in names if f".{wanted}." in f".{name}."}):
            like = nearest(wanted, names)
            raise ValueError(f"protect: no layer has a name like {wanted!r}{like}")
        held |= fits
    return held


def nearest(name: str, known: Iterable[str]) -> str:
    """What may have been meant by a name that is not known, as the end of a message."""
    alike = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; {alike[0]!r} may be meant" if alike else ""


def identity(layer: nn.Module) -> int | None:
    """What layers that share a weight have in common; None without a weight that is ours."""
    if (compressed := compressed_weight(layer)) is not None:
        return id(compressed)
    weight = layer._parameters.get("weight")
    return None if weight is None else id(weight)


def by_layer(
    given: Mapping[str, Any], layers: Mapping[str, nn.Module], model: nn.Module
) -> dict[str, nn.Module]:
    """The layers that `given` names; a name that is none of them is an error."""
    if unknown := sorted(given.keys() - layers.keys()):
        firsts = {identity(layer): name for name, layer in layers.items()}
        shared = {
            name: firsts[identity(module)]
            for name, module in model.named_modules()
            if name in unknown and identity(module) in firsts
        }
        why = "".join(f"; {n!r} shares the weight of {first!r}" for n, first in shared.items())
        why = why or nearest(unknown[0], layers)
        raise ValueError(f"no such layer: {unknown}; there are {sorted(layers)}{why}")
    return {name: layer for name, layer in layers.items() if name in given}


def for_each(
    given: T | Mapping[str, T], layers: Mapping[str, nn.Module], model: nn.Module
) -> dict[str, T]:
    """What each layer gets, of one for all or of some by name; the others are left out."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(layers, given)
    by_layer(given, layers, model)
    return dict(given)


def check_bits(bits: int, what: str, least: int = 1) -> None:
    """Refuse what is not a whole number of bits that a code can have."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not least <= bits <= 8:
        raise ValueError(f"{bits} bits; {what} {least} to 8, a whole number")


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that holds nan or inf, by name."""
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} holds nan or inf, of which nothing can be kept or removed")


def some(batches: Sequence[T]) -> Sequence[T]:
    """The batches to calibrate on, of which there has to be one."""
    if isinstance(batches, Tensor) or not batches:
        raise ValueError("at least one batch of inputs, in a list, is needed to calibrate on")
    return batches


_RANDOM_IF_MISSING = ("transformers", "diffusers")


def _refuse_save_pretrained(*_: Any) -> None:
    """Raise if the state dict is made for `save_pretrained`: its names are not the model's own.

    `from_pretrained` builds the uncompressed model, ignores names that it does not know and fills
    the missing weights with random numbers.
    """
    frame = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_name == "save_pretrained" and package in _RANDOM_IF_MISSING:
            raise ValueError(
                "expected a plain model for save_pretrained, got adapters or compressed weights, "
                "which from_pretrained would replace with random weights; save a model with "
                "adapters after tinyml.merge_and_unload(model), or its adapters with "
                "tinyml.save_lora, and a compressed model with tinyml.save"
            )
        frame = cast(Any, frame.f_back)


class CompressedWeight(nn.Module):
    """How a weight is stored, in place of the dense one: `forward(x)` makes it from tensor `x`.

    It is a parametrization in the sense of `torch.nn.utils.parametrize`, so `layer.weight` is still
    the dense weight for whoever reads it, and any layer can have one.
    """

    def __init__(self) -> None:
        super().__init__()
        cast(Any, self).register_state_dict_pre_hook(_refuse_save_pretrained)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The tensor to train or keep in place of `weight`."""
        raise NotImplementedError

    def rounded(self, weight: Tensor) -> Tensor:
        """A dense weight of this shape as it would be if it were stored so."""
        return weight

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
    protect: Sequence[str] = (),
) -> nn.Module:
    """Give every layer of `kinds` the compressed weight that `compress(name, layer)` returns.

    Layers that share a weight share its compressed form. None leaves a layer as it is. All of the
    compressed weights are made before the first is put in, so an error changes nothing.
    """
    chosen = layers_of(model, kinds, protect)
    for name, layer in chosen.items():
        check_finite(f"{name}.weight".lstrip("."), weight_of(layer))
    made = {name: compress(name, layer) for name, layer in chosen.items()}
    for name, compressed in made.items():
        if compressed is None:
            continue
        same = make_dense(model, chosen[name])
        for other in same:
            put_on(other, "weight", compressed)
        first, *rest = (cast(Any, other).parametrizations.weight for other in same)
        for other in rest:
            other.original = first.original
    return guarded_loading(model)


def put_on(layer: nn.Module, name: str, stored: nn.Module) -> nn.Module:
    """Put a parametrization on a layer, which can be pickled then, as torch's own cannot."""
    parametrize.register_parametrization(layer, name, stored, unsafe=True)
    cast(Any, type(layer)).__reduce_ex__ = _reduced
    return layer


def _reduced(layer: Any, _: Any) -> tuple[Any, ...]:
    return _blank, (type(layer).__bases__[0], list(layer.parametrizations)), layer.__dict__


def _blank(kind: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """A layer of the class that torch makes for parametrizations of these names, to be filled."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name in names:
        layer.register_parameter(name, nn.Parameter(torch.empty(0)))
        put_on(layer, name, nn.Identity())
    return layer


def make_dense(model: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """The layers of `model` that share this one's weight, which is a parameter again."""
    same = [m for m in model.modules() if identity(m) == identity(layer)]
    if compressed_weight(layer) is not None:
        weight = nn.Parameter(weight_of(layer).clone())
        for each in same:
            # Taking the parametrization off by torch's function would take it off every copy of
            # the model too, because they share the class that was made for it.
            each.__class__ = type(each).__bases__[0]
            del each._modules["parametrizations"]
            each.register_parameter("weight", weight)
    return same


def compressed_weight(layer: nn.Module) -> CompressedWeight | None:
    """The compressed weight of a layer, if it has one."""
    if "parametrizations" not in layer._modules or not parametrize.is_parametrized(layer, "weight"):
        return None
    last = cast(Any, layer).parametrizations.weight[-1]
    return last if isinstance(last, CompressedWeight) else None


class Replacement(nn.Module):
    """A layer of our own in place of a linear layer or an embedding."""

    def __init__(self) -> None:
        super().__init__()
        cast(Any, self).register_state_dict_pre_hook(_refuse_save_pretrained)

    def restored(self) -> nn.Module:
        """A plain layer with the dense weight that is computed with, where there is one."""
        raise NotImplementedError


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` to compress, in which every replacement is a plain layer again."""
    model = copy.deepcopy(model)
    made: dict[nn.Module, nn.Module] = {
        module: module.restored() for module in model.modules() if isinstance(module, Replacement)
    }
    return with_modules(model, made)


def dense_copy(model: nn.Module, kinds: Sequence[type[nn.Module]] = (nn.Module,)) -> nn.Module:
    """A plain copy in which layers of these kinds have a dense weight, a parameter, again."""
    model = plain_copy(model)
    for layer in list(model.modules()):
        if is_of(layer, kinds) and compressed_weight(layer) is not None:
            make_dense(model, layer)
    return model


def with_modules(model: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """`model` with other modules in the place of some, itself perhaps among them."""
    if model in made:
        return made[model]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in made:
                setattr(parent, name, made[child])
    return model


def stamp_of(*tensors: Tensor) -> list[tuple[int, int]]:
    """What changes whenever one of these holds other numbers."""
    # A tensor that was made in inference mode counts no versions.
    return [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors]


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
