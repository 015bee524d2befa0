"""Reading fields out of a Hugging Face configuration, with names for those that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting.model.records import Window

Arguments = dict[str, Any]


class Config:
    """A configuration that names the field it lacks."""

    def __init__(self, content: Mapping[str, Any], family: str) -> None:
        self.content, self.family = content, family

    def __getitem__(self, field: str) -> Any:
        if self.content.get(field) is None:
            raise ValueError(f"{field} is missing from this {self.family} config.json")
        return self.content[field]

    def get(self, field: str, default: Any = None) -> Any:
        """The field where it is there and not null."""
        value = self.content.get(field)
        return default if value is None else value

    @property
    def architecture(self) -> str:
        """The class that the file was written for, or nothing."""
        named = self.content.get("architectures") or [""]
        return str(named[0])


def activation(name: str) -> str:
    """Which of the three kinds an activation is, by what it keeps for the backward."""
    for known, prefixes in _ACTIVATIONS.items():
        if str(name).startswith(prefixes):
            return known
    raise ValueError(f"hidden_act is {name!r}; known are silu, gelu and relu in their variants")


_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    # GELU in its variants, and xIELU, keep their input.
    "gelu": ("gelu", "quick_gelu", "xielu"),
    "relu": ("relu",),
}


def windows(config: Config, default: int, is_windowed: Callable[[int], bool]) -> Arguments:
    """Which layers see a window: `layer_types` where the file has it, else the family's pattern."""
    size = config.content.get("sliding_window", default)
    if not size:
        return {}
    types: Sequence[str] | None = config.get("layer_types")
    layers = range(config["num_hidden_layers"])
    if types is not None:
        if len(types) != len(layers):
            raise ValueError(f"layer_types has {len(types)} entries for {len(layers)} layers")
        chosen = tuple(i for i in layers if types[i] == "sliding_attention")
    else:
        chosen = tuple(i for i in layers if is_windowed(i))
    return {"window": Window(size=size, layers=chosen)} if chosen else {}
