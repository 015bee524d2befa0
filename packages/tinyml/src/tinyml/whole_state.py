"""A state dict that a compressed model cannot hold is refused before any of it is copied.

Notable: torch copies tensor after tensor and reports at the end what did not fit, so that a float
state dict leaves its biases in a compressed model. Here the names, shapes and formats of a model
that was compressed are compared first, and the error names the layer.
"""

from __future__ import annotations

import re
from typing import Any, cast

import torch
from torch import Tensor, nn

OPTIONAL = ("zero", "divide")
"""What some compressed weights of a kind have and others lack."""


def guarded_loading(model: nn.Module) -> nn.Module:
    """Have `model.load_state_dict` check the whole state dict first, in place; return the model."""
    hooks = model._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is _check for hook in hooks):
        cast(Any, model).register_load_state_dict_pre_hook(_check)
    return model


def take_optional(module: nn.Module, state: dict[str, Any], prefix: str, codes: str) -> None:
    """Have those of the `OPTIONAL` buffers that the state dict has, where it has the codes."""
    if prefix + codes not in state:
        return
    for name in OPTIONAL:
        given = state.get(prefix + name)
        if given is None and name in module._buffers:
            module._buffers[name] = None
        elif given is not None and module._buffers.get(name) is None:
            device = cast(Tensor, module._buffers[codes]).device
            module._buffers[name] = torch.zeros_like(given, device=device)


def _check(
    model: nn.Module, state: dict[str, Any], prefix: str, _: Any, strict: bool, *__: Any
) -> None:
    own = model.state_dict(prefix=prefix)
    given = {key: value for key, value in state.items() if key.startswith(prefix)}
    missing = own.keys() - given.keys() if strict else set()
    for key in sorted(given.keys() - own.keys()) + sorted(missing):
        if _layer_of(key, own) is not None and key.rpartition(".")[2] not in OPTIONAL:
            _refuse(key, own, f"it {'lacks' if key in own else 'has'} {key!r}")
    for key in sorted(given.keys() & own.keys()):
        mine, value = own[key], given[key]
        if key.endswith("_extra_state"):
            if _layer_of(key, own) is not None and mine.tolist() != value.tolist():
                _refuse(key, own, f"its format is {value.tolist()}, the model's {mine.tolist()}")
        elif isinstance(value, Tensor) and _form(mine) != _form(value):
            _refuse(key, own, f"{key!r} is {_form(value)}, the model's {_form(mine)}")


def _refuse(key: str, own: dict[str, Any], why: str) -> None:
    raise RuntimeError(
        f"{_layer_of(key, own) or key}: the state dict is of a model that was not compressed as "
        f"this one: {why}; compress as the saved one was, or load first and then compress"
    )


def _layer_of(key: str, own: dict[str, Any]) -> str | None:
    """The layer of a key if its weight is compressed in the model."""
    layer = re.sub(r"(\.parametrizations\.weight\b.*|\.grid\..*|\.\w+)$", "", f".{key}")[1:]
    start = f"{layer}." if layer else ""
    held = ("parametrizations.weight.original", "weight_codes", "grid.codes")
    known = key.rpartition(".")[2] not in ("bias", "lora_A", "lora_B")
    return layer or "the model" if known and any(start + each in own for each in held) else None


def _form(tensor: Tensor) -> str:
    """Shape, and the type where it is not one of the floats, which torch converts."""
    kind = "float" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {tuple(tensor.shape)}"
