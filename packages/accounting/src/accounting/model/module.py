"""Parameters of an `nn.Module`, and the sizes that can be read from their shapes."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from accounting import checks
from accounting.breakdown import Breakdown, product, total

if TYPE_CHECKING:
    from torch import Tensor, nn

UNIT = "parameters"
_HEAD_ATTRIBUTES = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")


def count_module(module: nn.Module) -> Breakdown:
    """Count parameters by direct child; a shared parameter counts for the first child."""
    _check(module)
    seen: set[int] = set()

    def child_parameters(name: str, child: nn.Module) -> Breakdown:
        fresh = {n: p for n, p in child.named_parameters() if id(p) not in seen}
        seen.update(map(id, fresh.values()))
        shapes = Counter(tuple(p.shape) for p in fresh.values())
        leaves = (
            product(
                "x".join(map(str, shape)) or "scalar", UNIT, tensors=count, entries=_size(shape)
            )
            for shape, count in shapes.items()
        )
        return total(name, UNIT, *leaves)

    children = [child_parameters(name, child) for name, child in module.named_children()]
    direct = [
        product(name, UNIT, entries=parameter.numel())
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) not in seen
    ]
    return total(f"parameters of {type(module).__name__}", UNIT, *children, *direct)


def shape_arguments(module: nn.Module, heads: int | None) -> dict[str, Any]:
    """Return the sizes that the shapes of a module's parameters determine.

    Raises `ValueError` if they do not determine the model.
    """
    _check(module)
    from torch import nn

    stacks = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m)]
    tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
    if not stacks or not tables:
        raise ValueError(
            f"{type(module).__name__} has no nn.ModuleList of blocks or no nn.Embedding; "
            "describe it with Transformer(layers=..., d_model=..., ...)"
        )
    blocks = max(stacks, key=len)
    block = dict(blocks[0].named_parameters())
    vocabulary, d_model = max(tables, key=lambda table: table.shape[0]).shape
    heads = _heads(blocks[0]) if heads is None else checks.whole("heads", heads)
    matrices = {name: p for name, p in block.items() if p.ndim == 2}
    attention = {n: p for n, p in matrices.items() if _is_attention(n)}
    mlp = [p for n, p in matrices.items() if n not in attention]
    if not mlp or not attention:
        raise ValueError(f"expected matrices of attention and MLP, got {', '.join(matrices)}")
    d_ff = max(size for p in mlp for size in p.shape if size != d_model or p.shape[0] == p.shape[1])
    gated = sum(p.numel() for p in mlp) == 3 * d_model * d_ff
    out = next((p for n, p in attention.items() if _is_output(n)), None)
    inner = heads and (out.shape[1] if out is not None else d_model)
    into = sum(p.numel() for p in attention.values()) // d_model - inner
    key_width = (into - inner) // 2
    head_dim = inner // heads
    positions = sum(t.shape[0] for t in tables) - vocabulary
    outside = [p for n, p in module.named_parameters() if not _inside(p, blocks)]
    table = max(tables, key=lambda t: t.shape[0])
    untied = any(p.shape == table.shape and p is not table for p in outside)
    vectors = [(n, p) for n, p in block.items() if p.ndim == 1]
    normed = [(n, p) for n, p in vectors if _has_word(n, _NORMS)]
    norm = "none"
    if normed:
        has_bias = any(n.endswith("bias") for n, _ in normed)
        norm = "layernorm" if has_bias else "rmsnorm"
    sizes: dict[str, Any] = {
        "layers": len(blocks),
        "d_model": d_model,
        "heads": heads,
        "kv_heads": max(1, key_width // head_dim),
        "head_dim": head_dim,
        "d_ff": d_ff,
        "vocab_size": vocabulary,
        "positions": positions,
        "tied": not untied,
        "gated_mlp": gated,
        "activation": "silu" if gated else "gelu",
        "norm": norm,
        "norms_per_layer": sum(n.endswith("weight") for n, _ in normed),
        "name": type(module).__name__,
    }
    biases = [n for n, p in vectors if n.endswith("bias") and (n, p) not in normed]
    is_out = [n for n in biases if _is_output(n) and _is_attention(n)]
    return sizes | {
        "qkv_bias": any(_is_attention(n) and n not in is_out for n in biases),
        "out_bias": bool(is_out),
        "mlp_bias": any(not _is_attention(n) for n in biases),
    }


def _heads(block: nn.Module) -> int:
    for part in block.modules():
        for name in _HEAD_ATTRIBUTES:
            value: Any = getattr(part, name, None)
            if isinstance(value, int) and value > 0:
                return value
    raise ValueError(
        f"no submodule of {type(block).__name__} says how many heads it has "
        f"({', '.join(_HEAD_ATTRIBUTES)}); pass heads="
    )


_ATTENTION = re.compile(r"(self|cross|multihead)?(attn|attention)\d*|w?[qkvo]|qkv|query|key|value")
_NORMS = re.compile(r"(layer|rms)?norm\d*|ln\d*")
_OUTPUTS = ("out", "out_proj", "o_proj", "o", "wo", "c_proj", "proj")


def _has_word(name: str, word: re.Pattern[str]) -> bool:
    """Return True if a whole word of a parameter name matches, between dots and underscores."""
    return any(word.fullmatch(part) for part in re.split(r"[._]", name.lower()))


def _is_attention(name: str) -> bool:
    return _has_word(name, _ATTENTION) or "out_proj" in name.split(".")


def _is_output(name: str) -> bool:
    return any(part in _OUTPUTS for part in name.split("."))


def _inside(parameter: Tensor, blocks: nn.Module) -> bool:
    return any(parameter is p for p in blocks.parameters())


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dimension in shape:
        size *= dimension
    return size


def _check(module: object) -> None:
    if not hasattr(module, "named_parameters"):
        raise TypeError(
            f"expected a model, a Transformer or an nn.Module, got {type(module).__name__}; "
            "a config.json is read with Transformer.from_hf"
        )
