"""Insertion of adapters into a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tinyml.adapters.lora import LoRA
from tinyml.adapters.parameter_lora import (
    ParameterLoRA,
    find_parameter_adapters,
    install_parameter_adapters,
    make_parameter_adapter,
    match_parameters,
)
from tinyml.conversion import Replacement, check_supported, replace_modules
from tinyml.layers import find_protected, is_instance_of
from tinyml.validation import suggest_name


def add_lora(
    model: nn.Module,
    rank: int = 8,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Iterable[str] | None = None,
    parameters: Iterable[str] = (),
    protect: Sequence[str] = (),
) -> nn.Module:
    """Freeze `model` and add an adapter to every linear layer, in place; return the model.

    The update of a weight is multiplied by `alpha` / `rank`; `alpha` is `rank` by default.
    `targets` selects layers whose name equals an entry or ends with a dot and the entry: "q_proj"
    selects "blocks.0.q_proj". Every entry must match a layer. `model` itself and layers that
    `protect` names are not adapted. A layer that the model contains twice has one adapter. An error
    leaves the model unchanged.

    `parameters` selects single parameters by the ends of their names, such as
    "experts.gate_up_proj" for fused experts; layers are then adapted only if `targets` names them.
    The update of a parameter is merged by `merge_and_unload` only. `dropout` applies to the inputs
    of the updates of linear layers in training mode. A new adapter has the mode of its layer.
    Single parameters have no dropout, as in peft.
    """
    require_no_adapters(model)
    names = (parameters,) if isinstance(parameters, str) else tuple(parameters)
    alpha_or_rank = float(rank if alpha is None else alpha)
    single = {
        (module, key): make_parameter_adapter(model, module, key, rank, alpha_or_rank)
        for module, key in match_parameters(model, names)
    }
    protected = find_protected(model, protect)
    listed = (targets,) if isinstance(targets, str) else targets
    entries = None if listed is None else tuple(listed)
    chosen: list[nn.Module] = []
    if entries is not None or not names:
        chosen = _select_layers(model, entries, protected)
    if dropout and not chosen:
        raise ValueError(
            f"expected dropout=0 for single parameters, got dropout={dropout}, which would have no "
            "effect; pass dropout=0, or name linear layers in targets"
        )
    return insert_adapters(
        model, chosen, lambda base: LoRA(base, rank, alpha=alpha, dropout=dropout), single
    )


def insert_adapters(
    model: nn.Module,
    children: Iterable[nn.Module],
    make: Callable[[nn.Module], LoRA],
    parameters: Mapping[tuple[str, str], ParameterLoRA],
) -> nn.Module:
    """Freeze `model` and replace each of `children` by the adapter that `make` returns, in place.

    `parameters` maps (module name, parameter name) to the adapter of a single parameter. All
    adapters are created before the first is installed, so an error leaves the model unchanged. A
    layer that the model contains twice has one adapter in both positions, because its weight is
    merged once. Return the model.
    """
    check_supported(model)
    children = list(children)
    for module, name in parameters:
        if model.get_submodule(module) in children:
            raise ValueError(
                f"expected one adapter per weight, got adapters of the layer {module!r} and of its "
                f"parameter {name!r}; leave one of them out"
            )
    weights = {child._parameters.get("weight") for child in children}
    _check_ties(model, weights | {model.get_parameter(".".join(name)) for name in parameters})
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        replacements: dict[nn.Module, nn.Module] = {child: make(child) for child in children}
    except Exception:
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad)
        raise
    for parameter in trained:
        parameter.requires_grad_(False)
    install_parameter_adapters(model, parameters)
    return replace_modules(model, replacements)


def _check_ties(model: nn.Module, adapted: Collection[Tensor | None]) -> None:
    """Raise `ValueError` for adapted weights that `from_pretrained` may tie again after a merge.

    A configuration can untie only input embeddings from heads, and only all such pairs together.
    Some models, such as T5, and the code of users tie other weights as well.
    """
    for module in model.modules():
        if not hasattr(module, "save_pretrained"):
            continue
        names: dict[Tensor, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        for weight, tied in names.items():
            if weight not in adapted or len(tied) == 1:
                continue
            if len(tied) > 2 or not find_tying_configs(module) or not _is_head(module, weight):
                raise ValueError(
                    "expected adapters of weights that a configuration can untie, got an adapter "
                    f"of the weight that {tied} share; exclude the layers with protect, or copy "
                    "the weight into each layer first"
                )


def _is_head(model: nn.Module, weight: Tensor) -> bool:
    """Return True if `weight` is the input embedding and the head of a model from transformers.

    This model may be a part of `model`, such as a decoder or the model in a wrapper.
    """
    for module in model.modules():
        try:
            layers = module.get_input_embeddings(), module.get_output_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):  # the module has no embedding
            continue
        if all(getattr(layer, "weight", None) is weight for layer in layers):
            return True
    return False


def find_tying_configs(model: nn.Module) -> list[Any]:
    """Return the transformers configurations that tie embeddings and heads."""
    configs = []
    for module in model.modules():
        config = getattr(module, "config", None)
        for candidate in (config, getattr(config, "text_config", None)):
            if getattr(candidate, "tie_word_embeddings", False):
                configs.append(candidate)
    return configs


def _select_layers(
    model: nn.Module, targets: tuple[str, ...] | None, protected: set[str]
) -> list[nn.Module]:
    """Return the linear layers to adapt.

    A layer that the model contains twice is left out if one of its names is protected.
    """
    chosen: dict[nn.Module, None] = {}
    unmatched = set(targets or ())
    named_modules = list(model.named_modules(remove_duplicate=False))
    protected_layers = {module for name, module in named_modules if name in protected}
    for name, module in named_modules:
        matching = [t for t in targets or () if name == t or name.endswith(f".{t}")]
        if module in protected_layers or (targets is not None and not matching):
            continue
        if isinstance(module, Replacement):
            raise ValueError(
                f"expected layers that adapters can update, got {type(module).__name__} at "
                f"{name or 'the root'}; quantize with activations='float', or exclude it with "
                "protect"
            )
        if name and is_instance_of(module, (nn.Linear,)):
            chosen[module] = None
            unmatched -= set(matching)
    layers = f"linear layers{' outside of protect' if protected else ''}"
    if unmatched:
        known = [
            name.rpartition(".")[2]
            for name, module in named_modules
            if is_instance_of(module, (nn.Linear,)) and module not in protected_layers
        ]
        raise ValueError(
            f"expected ends of the names of {layers} as targets, got {sorted(unmatched)}"
            f"{suggest_name(min(unmatched), known)}; adapt other layers with parameters="
        )
    if not chosen:
        raise ValueError(
            f"expected {layers} inside the {type(model).__name__}, got none; to adapt a single "
            "layer, put it into a module, or use tinyml.LoRA(layer)"
        )
    return list(chosen)


def require_no_adapters(model: nn.Module) -> None:
    """Raise `ValueError` if a layer or a single parameter of `model` has an adapter."""
    layers = [name for name, layer in model.named_modules() if isinstance(layer, LoRA)]
    if names := sorted([*layers, *find_parameter_adapters(model)]):
        raise ValueError(
            f"expected a model without adapters, got an adapter of {names[0] or 'the model'}; call "
            "merge_and_unload(model) first, or add all adapters in one call"
        )


def require_adapters(model: nn.Module) -> dict[str, LoRA]:
    """Return the adapters of layers by name; raise `ValueError` if the model has no adapter."""
    adapters = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRA)}
    if not adapters and not find_parameter_adapters(model):
        raise ValueError("expected a model with adapters, got none; call add_lora(model) first")
    return adapters
