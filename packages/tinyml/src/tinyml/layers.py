"""Layers of a model that have weights: their types, names and shared weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyml.compressed_weight import get_compressed_weight
from tinyml.validation import check_finite, format_names, suggest_name

T = TypeVar("T")
CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
PRUNABLE: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS)
QUANTIZABLE: tuple[type[nn.Module], ...] = (*PRUNABLE, nn.Embedding)


def is_conv1d(module: nn.Module) -> bool:
    """Return True for transformers' `Conv1D`, which is a linear layer with a weight (in, out)."""
    return type(module).__name__.removeprefix("Parametrized") == "Conv1D" and hasattr(module, "nf")


def is_instance_of(module: nn.Module, kinds: Sequence[type[nn.Module]]) -> bool:
    """Return True if a layer is one of `kinds`; a `Conv1D` counts as a linear layer."""
    return isinstance(module, tuple(kinds)) or (nn.Linear in kinds and is_conv1d(module))


def get_weight(layer: nn.Module) -> Tensor:
    """Return the dense weight of a layer, computed from its codes if it is compressed."""
    return cast(Tensor, layer.weight).detach()


@torch.no_grad()
def is_product(layer: nn.Module, call: Callable[[Tensor], Any]) -> bool:
    """Return True if `call` returns the product with the layer's weight, plus the bias.

    Two inputs are checked. `call` is the layer with its hooks, or its `forward`. The `forward` of a
    subclass may normalize or scale the outputs. Return False if `call` raises an exception.
    """
    weight = get_weight(layer)
    try:
        matrix = put_outputs_first(layer, weight)
        inputs = torch.linspace(-1, 1, 2 * matrix.shape[1]).to(weight).view(2, -1)
        expected = F.linear(inputs, matrix, cast(Tensor | None, layer.bias))
        outputs = call(inputs)
        error = (outputs - expected).float().norm()
    except Exception:  # a forward with other arguments or results may raise any exception
        return False
    # 16-bit results differ by up to 2^-8.
    return outputs.shape == expected.shape and bool(error <= 0.01 * expected.float().norm())


def check_weights(layers: Mapping[str, nn.Module]) -> None:
    """Raise `ValueError` if a weight is empty, not finite or not of `FLOAT_TYPES`."""
    for layer_name, layer in layers.items():
        name = f"{layer_name}.weight".lstrip(".")
        weight = get_weight(layer)
        if not weight.numel():
            raise ValueError(
                f"expected weights with elements, got {name} of shape {tuple(weight.shape)}; "
                "exclude its layer with protect"
            )
        check_finite(name, weight)


def put_outputs_first(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return a tensor of the weight's shape with the layer's outputs as its first dimension."""
    return weight.t() if is_conv1d(layer) else weight


def find_layers(
    model: nn.Module,
    kinds: Sequence[type[nn.Module]] | type[nn.Module],
    protect: Sequence[str] = (),
) -> dict[str, nn.Module]:
    """Return the layers of these kinds by name; a shared weight is listed under its first layer.

    Layers with compressed weights are included. Layers are left out if other code computes their
    weight, as `weight_norm` does, or if `protect` names a layer that uses their weight (see
    `find_protected`). Raise `ValueError` if no layer remains.
    """
    kinds = tuple(kinds) if isinstance(kinds, Iterable) else (kinds,)
    for kind in kinds:
        if not isinstance(kind, type):
            raise TypeError(f"expected types of layers, such as nn.Linear, got {kind!r}")
    layers: dict[str, nn.Module] = {}
    protected = find_protected(model, protect)
    excluded = identify_weights(model, protected)
    for name, module in model.named_modules():
        key = identify_weight(module) if is_instance_of(module, kinds) else None
        if key is not None and key not in excluded:
            layers[name] = module
            excluded.add(key)
    if not layers:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(
            f"expected a {type(model).__name__} with weights in layers of the kinds {names}, got "
            f"none{' outside of protect' if protect else ''}{name_computed_weights(model, kinds)}"
        )
    return layers


def name_computed_weights(model: nn.Module, kinds: Sequence[type[nn.Module]]) -> str:
    """Return the end of an error message about layers of `kinds` whose weight is not stored."""
    computed = [
        name or "the model"
        for name, module in model.named_modules()
        if is_instance_of(module, kinds) and identify_weight(module) is None
    ]
    if not computed:
        return ""
    return (
        f"; other code computes the weight of {format_names(computed)}, as weight_norm does: "
        "remove the parametrization to make it a parameter"
    )


def find_protected(model: nn.Module, protect: Sequence[str]) -> set[str]:
    """Return the names of the modules that `protect` names, and of all modules inside them.

    A name is the full name of a module or some consecutive dot-separated parts of it: "lm_head",
    "layers.0", "q_proj". Raise `ValueError` if a name matches no module.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    protected: set[str] = set()
    for entry in [protect] if isinstance(protect, str) else protect:
        matches = {name for name in names if f".{entry}." in f".{name}."}
        if not matches:
            raise ValueError(
                f"expected names of modules in protect, got {entry!r}{suggest_name(entry, names)}"
            )
        protected |= matches
    return protected


def identify_weight(layer: nn.Module) -> int | None:
    """Return a key that is equal for layers with a shared weight; None without a stored weight."""
    compressed = get_compressed_weight(layer)
    if compressed is not None:
        return id(compressed)
    weight = layer._parameters.get("weight")
    return None if weight is None else id(weight)


def identify_weights(model: nn.Module, names: Collection[str]) -> set[int | None]:
    """Return the identities of the weights of the modules with these names."""
    modules = model.named_modules(remove_duplicate=False)
    return {identify_weight(module) for name, module in modules if name in names} - {None}


def match_settings(settings: T | Mapping[str, T], layers: Mapping[str, nn.Module]) -> dict[str, T]:
    """Return the setting of each layer by name; `settings` is one for all layers, or a mapping.

    Layers that a mapping does not name are left out. Raise `ValueError` if a name is unknown.
    """
    if not isinstance(settings, Mapping):
        return dict.fromkeys(layers, settings)
    if unknown := sorted(settings.keys() - layers.keys()):
        raise ValueError(
            f"expected layer names among {sorted(layers)}, got {unknown[0]!r}"
            f"{suggest_name(unknown[0], layers)}; a shared weight has its first layer's name"
        )
    return {name: settings[name] for name in layers if name in settings}
