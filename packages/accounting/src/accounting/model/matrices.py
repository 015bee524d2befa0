"""The matrices of a model, from which all counts are derived; the rows are in matrices.toml."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from accounting.model.formulas import tables, value
from accounting.model.records import Matrix
from accounting.model.transformer import Transformer

_PARTS = tables("model/matrices.toml")


@lru_cache(maxsize=4096)
def matrices(model: Transformer) -> tuple[Matrix, ...]:
    """Return the nonempty matrices of a model, one record per kind."""
    mixers = (
        replace(matrix, part=mixer.name, layers=mixer.layers)
        for mixer in model.mixers
        for matrix in mixer.matrices
    )
    ordered = [matrix for part in _PARTS for matrix in _part(model, part)]
    after = next((i for i, m in enumerate(ordered) if m.part in ("norms", "head")), len(ordered))
    ordered = [*ordered[:after], *mixers, *ordered[after:], *model.extra]
    return tuple(matrix for matrix in ordered if matrix.size)


def _part(model: Transformer, part: str) -> Iterator[Matrix]:
    experts = model.experts
    names: dict[str, Any] = {
        **{"m": model, "mla": model.mla, "experts": experts},
        **{"d": model.d_model, "h": model.heads, "g": model.kv_heads, "e": model.embedding_dim},
        **{"qk": model.qk_dim, "v": model.v_head_dim},
        "bias": model.mlp_bias if experts is None or experts.bias is None else experts.bias,
    }
    everywhere = value(_PARTS[part].get("layers"), names)
    for name, rows, columns, split, there, *more in _PARTS[part]["rows"]:
        about: dict[str, Any] = {"kind": "matrix" if rows else "vector"} | dict(*more)
        layers = value(about.pop("layers"), names) if "layers" in about else everywhere
        if layers == () or not value(there, names):
            continue
        if about.get("routed") and experts:
            about |= {"copies": experts.count, "chosen": experts.per_token}
            about["routed"] = experts.count > 1
        about["layers"] = None if layers is None else tuple(layers)
        wide, high = value(columns, names), value(rows or 1, names)
        yield Matrix(part, name, int(high), int(wide), split, **about)
