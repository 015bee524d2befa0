"""Validation of state dicts that are loaded into compressed models.

torch copies one tensor after another and reports mismatches at the end, so a float state dict would
leave its biases in a compressed model. Here all names, shapes and formats are compared before
anything is copied, and the error names the layer.
"""

from __future__ import annotations

import re
from typing import Any, cast

from torch import Tensor, nn


def check_before_loading(model: nn.Module) -> nn.Module:
    """Make `model.load_state_dict` validate the whole state dict first; return the model."""
    hooks = model._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is _check for hook in hooks):
        cast(Any, model).register_load_state_dict_pre_hook(_check)
    return model


def _check(
    model: nn.Module, state: dict[str, Any], prefix: str, _: Any, strict: bool, *__: Any
) -> None:
    current = model.state_dict(prefix=prefix)
    saved = {key: value for key, value in state.items() if key.startswith(prefix)}
    missing = current.keys() - saved.keys() if strict else set()
    for key in sorted(saved.keys() - current.keys()) + sorted(missing):
        if _layer_of(key, current) is not None:
            _refuse(key, current, f"it {'lacks' if key in current else 'has'} {key!r}")
    for key in sorted(saved.keys() & current.keys()):
        mine, value = current[key], saved[key]
        if key.endswith("_extra_state"):
            if _layer_of(key, current) is not None and mine.tolist() != value.tolist():
                _refuse(
                    key, current, f"its format is {value.tolist()}, the model's {mine.tolist()}"
                )
        elif isinstance(value, Tensor) and _form(mine) != _form(value):
            _refuse(key, current, f"{key!r} is {_form(value)}, the model's {_form(mine)}")


def _refuse(key: str, current: dict[str, Any], why: str) -> None:
    raise RuntimeError(
        f"{_layer_of(key, current) or key}: the state dict is of a model that was not "
        f"compressed as this one: {why}; compress as the saved one was, "
        "or load first and then compress"
    )


def _layer_of(key: str, current: dict[str, Any]) -> str | None:
    """Return the layer of a key if the model stores that layer's weight in compressed form."""
    layer = re.sub(r"(\.parametrizations\.weight\b.*|\.grid\..*|\.\w+)$", "", f".{key}")[1:]
    start = f"{layer}." if layer else ""
    markers = ("parametrizations.weight.original", "weight_codes", "grid.codes")
    known = key.rpartition(".")[2] not in ("bias", "lora_A", "lora_B")
    return (
        layer or "the model"
        if known and any(start + marker in current for marker in markers)
        else None
    )


def _form(tensor: Tensor) -> str:
    """Return the shape and type of a tensor; float types count as one, as torch converts them."""
    kind = "float" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {tuple(tensor.shape)}"
