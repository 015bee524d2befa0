"""One HTML file that shows attention patterns, head kinds, the logit lens and attributions.

Self-contained: styles, script and data are inside, nothing is fetched, so that it opens from a
mail or years later. Patterns are stored as one byte per weight in base64 (the error is at most
1/510) and drawn on canvases.
"""

from __future__ import annotations

import base64
import html
import itertools
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from interp.detect import HeadScores
from interp.lens import Attribution, Lens


def view(
    path: str | Path,
    *,
    tokens: Sequence[str] | Tensor,
    patterns: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    heads: HeadScores | None = None,
    lens: Lens | None = None,
    attributions: Attribution | None = None,
    vocabulary: Sequence[str] | None = None,
    title: str = "interp",
    example: int = 0,
) -> Path:
    """Write one self-contained HTML file and return its path.

    `tokens`: the strings (or ids) of one sequence. `patterns`: (batch, heads, seq, seq) or
    (heads, seq, seq) per layer. Of anything with a batch, `example` is shown. `vocabulary` names
    token ids in the lens.
    """
    if isinstance(tokens, Tensor):
        ids = (tokens[example] if tokens.ndim == 2 else tokens).tolist()
        tokens = [vocabulary[i] if vocabulary else str(i) for i in ids]
    data: dict[str, object] = {"tokens": list(tokens)}
    if patterns is not None:
        data["patterns"] = _patterns(patterns, example, len(tokens))
    if heads is not None:
        data["heads"] = {
            "scores": {kind: scores.tolist() for kind, scores in heads.scores.items()},
            "chance": dict(heads.chance),
        }
    if lens is not None:
        data["lens"] = _lens(lens, example, len(tokens), vocabulary)
    if attributions is not None:
        terms = attributions.terms[:, example]
        _require_length("attributions", terms.shape[-1], len(tokens))
        data["attribution"] = {"names": list(attributions.names), "terms": terms.tolist()}
    page = resources.files("interp.view").joinpath("view.html").read_text(encoding="utf-8")
    parts = {"{{title}}": html.escape(title), "{{data}}": _json(data)}
    page = re.sub(r"{{(?:title|data)}}", lambda match: parts[match[0]], page)
    return _write(Path(path), page)


def _patterns(
    patterns: Tensor | Sequence[Tensor] | Mapping[str, Tensor], example: int, length: int
) -> list[dict[str, object]]:
    named = (
        patterns if isinstance(patterns, Mapping) else {str(i): p for i, p in enumerate(patterns)}
    )
    layers = []
    for name, pattern in zip(_told_apart(list(named)), named.values(), strict=True):
        one = pattern[example] if pattern.ndim == 4 else pattern
        if one.ndim != 3 or one.shape[1:] != (length, length):
            raise ValueError(
                f"the pattern of layer {name} is {tuple(pattern.shape)}; for {length} tokens give "
                "(batch, heads, seq, seq) or (heads, seq, seq)"
            )
        if not bool(((one >= 0) & (one <= 1 + 1e-3)).all()):
            raise ValueError(
                f"the pattern of layer {name} is not within 0 and 1; give it after softmax"
            )
        levels = (
            (one.detach().float() * 255).round().clamp(0, 255).to(torch.uint8).cpu().contiguous()
        )
        weights = base64.b64encode(levels.numpy().tobytes()).decode()
        layers.append({"name": name, "heads": one.shape[0], "weights": weights})
    return layers


def _told_apart(names: list[str]) -> list[str]:
    """Names without the parts that all share: blocks.0.pattern, blocks.1.pattern become 0, 1."""
    parts = [name.split(".") for name in names]
    if len(names) < 2 or len({len(p) for p in parts}) > 1:
        return names
    differs = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    return [".".join(itertools.compress(p, differs)) for p in parts]


def _lens(
    lens: Lens, example: int, length: int, vocabulary: Sequence[str] | None
) -> dict[str, object]:
    tokens = lens.top_tokens[:, example]
    _require_length("lens", tokens.shape[1], length)

    def name(index: int) -> str:
        return vocabulary[index] if vocabulary else str(index)

    return {
        "layers": list(lens.names),
        "top": [[[name(i) for i in row] for row in layer] for layer in tokens.tolist()],
        "probabilities": lens.top_probabilities[:, example].tolist(),
        "entropy": lens.entropy[:, example].tolist(),
        "kl": lens.kl_to_last[:, example].tolist(),
    }


def _require_length(what: str, given: int, length: int) -> None:
    if given != length:
        raise ValueError(f"{what} cover {given} positions; there are {length} tokens")


def _json(data: object) -> str:
    """JSON that cannot end the script element that it stands in; nan and infinities become null."""
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    if isinstance(data, float):
        return float(f"{data:.6g}") if abs(data) < float("inf") else None
    return data


def _write(path: Path, text: str) -> Path:
    """Write beside the target, then rename, so that nobody reads half a file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path
