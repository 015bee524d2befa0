"""Weight-bearing layers of a model, and the parametrizations that compress their weights."""

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
    """Return True if a module is transformers' `Conv1D`: a linear layer with a weight (in, out)."""
    return type(module).__name__.removeprefix("Parametrized") == "Conv1D" and hasattr(module, "nf")


def is_of(module: nn.Module, kinds: Sequence[type[nn.Module]]) -> bool:
    """Return True if a layer is one of `kinds`; a `Conv1D` counts as a linear layer."""
    return isinstance(module, tuple(kinds)) or (nn.Linear in kinds and is_conv1d(module))


def weight_of(layer: nn.Module) -> Tensor:
    """Return the dense weight of a layer, decompressed if necessary."""
    return cast(Tensor, layer.weight).detach()


def outputs_first(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return a tensor of the weight's shape with the layer's outputs as its first dimension."""
    return weight.t() if is_conv1d(layer) else weight


def layers_of(
    model: nn.Module, kinds: Sequence[type[nn.Module]], protect: Sequence[str] = ()
) -> dict[str, nn.Module]:
    """Return the layers of these kinds by name; a shared weight is listed under its first layer.

    Compressed weights count like dense ones. A weight is left out if any layer that uses it is
    named by `protect` (see `guarded`).
    """
    layers: dict[str, nn.Module] = {}
    protected = guarded(model, protect)
    seen = {identity(m) for n, m in model.named_modules() if n in protected} - {None}
    for name, module in model.named_modules():
        if is_of(module, kinds) and (key := identity(module)) is not None:
            if key not in seen:
                layers[name] = model.get_submodule(name)
            seen.add(key)
    if not layers:
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{type(model).__name__} has no layer of the kinds {wanted}")
    return layers


def guarded(model: nn.Module, protect: Sequence[str]) -> set[str]:
    """Return the names of the modules that `protect` names, and of all modules inside them.

    A name is the full name of a module or some of its dot-separated parts: "lm_head",
    "layers.0", "q_proj". Raise `ValueError` if a name matches no module.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    protected: set[str] = set()
    for wanted in [protect] if isinstance(protect, str) else protect:
        if not (fits := {name for name in names if f".{wanted}." in f".{name}."}):
            like = nearest(wanted, names)
            raise ValueError(f"protect: no layer has a name like {wanted!r}{like}")
        protected |= fits
    return protected


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests the known name closest to `name`."""
    alike = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; {alike[0]!r} may be meant" if alike else ""


def identity(layer: nn.Module) -> int | None:
    """Return a key that layers with a shared weight have in common; None without a weight."""
    if (compressed := compressed_weight(layer)) is not None:
        return id(compressed)
    weight = layer._parameters.get("weight")
    return None if weight is None else id(weight)


def by_layer(
    settings: Mapping[str, Any], layers: Mapping[str, nn.Module], model: nn.Module
) -> dict[str, nn.Module]:
    """Return the layers that `settings` names; raise `ValueError` if a name is unknown."""
    if unknown := sorted(settings.keys() - layers.keys()):
        firsts = {identity(layer): name for name, layer in layers.items()}
        shared = {
            name: firsts[identity(module)]
            for name, module in model.named_modules()
            if name in unknown and identity(module) in firsts
        }
        why = "".join(f"; {n!r} shares the weight of {first!r}" for n, first in shared.items())
        why = why or nearest(unknown[0], layers)
        raise ValueError(f"no such layer: {unknown}; there are {sorted(layers)}{why}")
    return {name: layer for name, layer in layers.items() if name in settings}


def for_each(
    settings: T | Mapping[str, T], layers: Mapping[str, nn.Module], model: nn.Module
) -> dict[str, T]:
    """Return the setting of each layer: one value for all layers, or a value per named layer."""
    if not isinstance(settings, Mapping):
        return dict.fromkeys(layers, settings)
    by_layer(settings, layers, model)
    return dict(settings)


def check_bits(bits: int, what: str, least: int = 1) -> None:
    """Raise `ValueError` unless `bits` is an integer from `least` to 8."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not least <= bits <= 8:
        raise ValueError(f"expected a whole number ({what} {least} to 8 bits), got {bits} bits")


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` if a tensor contains NaN or infinity."""
    if not torch.isfinite(tensor).all():
        raise ValueError(f"expected finite values in {name}, got nan or inf")


def some(batches: Sequence[T]) -> Sequence[T]:
    """Return the calibration batches; raise `ValueError` if there are none."""
    if isinstance(batches, Tensor) or not batches:
        raise ValueError("expected a list with at least one batch of inputs to calibrate on")
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
    """A stored form of a weight, as a parametrization: `forward(x)` computes the dense weight.

    `layer.weight` remains the dense weight for all code that reads it, and any layer with a weight
    can be compressed (see `torch.nn.utils.parametrize`).
    """

    def __init__(self) -> None:
        super().__init__()
        cast(Any, self).register_state_dict_pre_hook(_refuse_save_pretrained)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the tensor to store or train in place of `weight`."""
        raise NotImplementedError

    def rounded(self, weight: Tensor) -> Tensor:
        """Return the dense weight that results from storing `weight` in this format."""
        return weight

    def format(self) -> list[int]:
        """Return the integers that are needed to interpret the stored codes."""
        raise NotImplementedError

    def get_extra_state(self) -> Tensor:
        """Return the format, so that a state dict contains everything needed to read the codes."""
        return torch.tensor(self.format(), dtype=torch.int16)

    def set_extra_state(self, state: Tensor) -> None:
        """Raise `RuntimeError` if the state dict has another format."""
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
    """Replace the weight of every layer of `kinds` by `compress(name, layer)`, in place.

    Layers that share a weight share its compressed form. A layer for which `compress` returns None
    is unchanged. All compressed weights are computed before the first is installed, so an error
    leaves the model unchanged.
    """
    chosen = layers_of(model, kinds, protect)
    for name, layer in chosen.items():
        check_finite(f"{name}.weight".lstrip("."), weight_of(layer))
    stored = {name: compress(name, layer) for name, layer in chosen.items()}
    for name, compressed in stored.items():
        if compressed is None:
            continue
        sharing = make_dense(model, chosen[name])
        for other in sharing:
            put_on(other, "weight", compressed)
        first, *others = (cast(Any, other).parametrizations.weight for other in sharing)
        for other in others:
            other.original = first.original
    return guarded_loading(model)


def put_on(layer: nn.Module, name: str, stored: nn.Module) -> nn.Module:
    """Register a parametrization and keep the layer picklable, unlike torch's function."""
    parametrize.register_parametrization(layer, name, stored, unsafe=True)
    cast(Any, type(layer)).__reduce_ex__ = _reduced
    return layer


def _reduced(layer: Any, _: Any) -> tuple[Any, ...]:
    return _blank, (type(layer).__bases__[0], list(layer.parametrizations)), layer.__dict__


def _blank(kind: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """Return an empty layer of the class that torch creates for these parametrizations."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name in names:
        layer.register_parameter(name, nn.Parameter(torch.empty(0)))
        put_on(layer, name, nn.Identity())
    return layer


def make_dense(model: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """Make a layer's weight a parameter again; return all layers of `model` that share it."""
    sharing = [m for m in model.modules() if identity(m) == identity(layer)]
    if compressed_weight(layer) is not None:
        weight = nn.Parameter(weight_of(layer).clone())
        for shared in sharing:
            # torch.nn.utils.parametrize.remove_parametrizations would also affect every copy
            # of the model, because the copies share the generated class.
            shared.__class__ = type(shared).__bases__[0]
            del shared._modules["parametrizations"]
            shared.register_parameter("weight", weight)
    return sharing


def compressed_weight(layer: nn.Module) -> CompressedWeight | None:
    """Return the compressed weight of a layer, or None if its weight is dense."""
    if "parametrizations" not in layer._modules or not parametrize.is_parametrized(layer, "weight"):
        return None
    last = cast(Any, layer).parametrizations.weight[-1]
    return last if isinstance(last, CompressedWeight) else None


class Replacement(nn.Module):
    """A module of this package that replaces a linear layer or an embedding."""

    def __init__(self) -> None:
        super().__init__()
        cast(Any, self).register_state_dict_pre_hook(_refuse_save_pretrained)

    def restored(self) -> nn.Module:
        """Return a plain layer with the dense weight that this module computes with."""
        raise NotImplementedError


def plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy of `model` in which every `Replacement` is a plain layer again."""
    model = copy.deepcopy(model)
    replacements: dict[nn.Module, nn.Module] = {
        module: module.restored() for module in model.modules() if isinstance(module, Replacement)
    }
    return with_modules(model, replacements)


def dense_copy(model: nn.Module, kinds: Sequence[type[nn.Module]] = (nn.Module,)) -> nn.Module:
    """Return a plain copy in which the layers of these kinds have dense parameters as weights."""
    model = plain_copy(model)
    for layer in list(model.modules()):
        if is_of(layer, kinds) and compressed_weight(layer) is not None:
            make_dense(model, layer)
    return model


def with_modules(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules of `model` in place; return the model, or its replacement."""
    if model in replacements:
        return replacements[model]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, name, replacements[child])
    return model


def stamp_of(*tensors: Tensor) -> list[tuple[int, int]]:
    """Return a value that changes when one of these tensors is replaced or modified in place."""
    # A tensor created in inference mode has no version counter.
    return [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode, then restore the mode of every module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def empty_like_nothing(weight: Tensor) -> Tensor:
    """Return a placeholder without elements for a dense weight that is not stored."""
    return torch.empty(0, dtype=weight.dtype, device=weight.device)
