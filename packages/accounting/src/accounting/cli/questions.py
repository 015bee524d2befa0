"""Comparison of two models, and parsing of the arguments of commands."""

import os
from collections.abc import Callable, Iterator
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, format_bytes, format_number
from accounting.flops import flops
from accounting.kv_cache import kv_cache
from accounting.model.records import RECORDS
from accounting.model.registry import read_content
from accounting.model.transformer import Transformer
from accounting.parameters import parameters


@checks.validate()
def iter_differences(
    first: Transformer, second: Transformer, *, seq: int = 4096
) -> Iterator[tuple[str, float, float, Callable[[float], str]]]:
    """Yield the name of each cost, its value in both models, and the format of its numbers.

    A cost is followed by the costs of its parts.
    """
    costs: tuple[tuple[str, Callable[[Transformer], Breakdown], Callable[[float], str]], ...] = (
        ("parameters", parameters, format_number),
        ("active", lambda model: parameters(model, active=True), format_number),
        ("FLOPs per token", lambda model: flops(model, seq=seq), lambda x: f"{x:.4g}"),
        ("cache", lambda model: kv_cache(model, seq=seq), format_bytes),
    )
    for name, cost, show in costs:
        both = cost(first), cost(second)
        divisor = seq if name == "FLOPs per token" else 1
        left, right = (float(whole.total) / divisor for whole in both)
        yield name, left, right, show
        for part in dict.fromkeys(part.name for whole in both for part in whole):
            left, right = (float(w[part].total) / divisor if part in w else 0.0 for w in both)
            yield f"  {part}", left, right, show


@checks.validate()
def parse_amount(text: str) -> float:
    """Return the number that a text such as `300B` states; K, M, B and T are powers of 1000."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 0.0)
    return float(text[:-1]) * scale if scale else float(text)


@checks.validate()
def read_model(text: str) -> Transformer:
    """Return the model of a config.json or its folder, or of comma-separated `name=value` sizes.

    Raises `ValueError` for a repeated name, and `TypeError` for an unknown or a missing name.
    """
    # Unlike `Path.exists`, this accepts text of any length.
    if "=" not in text or os.path.exists(text):
        return Transformer.from_hf(text)
    sizes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        fields, field = sizes, name
        record, _, inner = name.partition(".")
        if inner and record in RECORDS:
            # For example experts.count=8, a field of a record.
            fields, field = nested.setdefault(record, {}), inner
        if field in fields:
            raise ValueError(f"expected {name} once, got it twice")
        fields[field] = _parse_value(value)
        if name.endswith((".layers", "_layers")) and type(fields[field]) is int:
            fields[field] = (fields[field],)
    records = {name: RECORDS[name](**values) for name, values in nested.items()}
    return Transformer(**sizes | records)


@checks.validate()
def read_stored_dtype(text: str) -> str:
    """Return "fp8" if `text` is the path of a config.json with fp8 weights, and "bf16" otherwise.

    Raises `ValueError` for another quantization, or for experts in another dtype. The tables and
    norms of a file with fp8 weights usually have more bits, which the result ignores.
    """
    if not os.path.exists(text):
        return "bf16"
    content = read_content(text)
    # A multimodal file may state the quantization of its language model inside that model's part.
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    stated = [part[name] for part in parts for name in _QUANTIZATION if part.get(name) is not None]
    for quantization in stated:
        method = quantization
        if isinstance(quantization, dict):
            method = quantization.get("quant_method")
        if method != "fp8":
            raise ValueError(
                f"expected quantization_config with quant_method 'fp8', got {method!r}; pass the "
                "dtype of the weights with --weights"
            )
        experts = content.get("expert_dtype")
        if isinstance(quantization, dict):
            experts = quantization.get("expert_dtype", experts)
        if experts not in (None, "fp8"):
            raise ValueError(
                f"expected expert_dtype 'fp8' as for the other weights, got {experts!r}; pass one "
                "dtype for all weights with --weights"
            )
    return "fp8" if stated else "bf16"


#: Fields of a config.json that state the quantization of the weights; older files have the second.
_QUANTIZATION = ("quantization_config", "compression_config")


def _parse_value(value: str) -> object:
    """Return the bool, integer, tuple of layers (from `1+3+5`) or name that a text states."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return tuple(map(int, value.split("+"))) if "+" in value else int(value)
    except ValueError:
        return value
