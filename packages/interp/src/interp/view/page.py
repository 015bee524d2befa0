"""One HTML file that shows patterns, patches, head kinds, the logit lens and attributions.

Self-contained: styles, script and data are inside, nothing is fetched, so that it opens from a
mail or years later. Patterns are stored as one byte per weight in base64 (the error is at most
1/510) and drawn on canvases. `figure` draws one map with matplotlib, an extra, for a paper.
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
from typing import Any

import torch
from torch import Tensor

from interp.detect import HeadScores
from interp.lens import Attribution, Lens
from interp.patching import Ablations, Edges, StreamScan

Patched = StreamScan | Ablations | Edges


def view(
    path: str | Path,
    *,
    tokens: Sequence[str] | Tensor,
    patterns: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    heads: HeadScores | None = None,
    lens: Lens | None = None,
    attributions: Attribution | None = None,
    patching: Patched | Mapping[str, Patched] | None = None,
    vocabulary: Sequence[str] | None = None,
    title: str = "interp",
    example: int = 0,
) -> Path:
    """Write one self-contained HTML file and return its path.

    `tokens`: the strings (or ids) of one sequence. `patterns`: (batch, heads, seq, seq) or
    (heads, seq, seq) per layer. `patching`: scans, ablations or edges, by title if several. Of
    anything with a batch, `example` is shown. `vocabulary` names token ids in the lens.
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
            "p_values": {kind: values.tolist() for kind, values in heads.p_values.items()},
        }
    if patching is not None:
        maps = patching if isinstance(patching, Mapping) else {"Patching": patching}
        data["patching"] = [_map(title, one, list(tokens)) for title, one in maps.items()]
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


def figure(patched: Patched, *, tokens: Sequence[str] | None = None, title: str = "") -> Any:
    """The same map as a `matplotlib.figure.Figure`; pip install "interp[plot]"."""
    from matplotlib.figure import Figure

    length = patched.values.shape[-1]
    told = _map(title, patched, list(tokens) if tokens else [str(i) for i in range(length)])
    values = torch.tensor(told["values"], dtype=torch.float64)
    most = float(values.abs().max())
    drawn = Figure(
        figsize=(2 + 0.25 * values.shape[1], 1.5 + 0.2 * len(values)), layout="constrained"
    )
    axes = drawn.subplots()
    image = axes.imshow(values.numpy(), cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
    axes.set_xticks(range(values.shape[1]), told["columns"], rotation=70)
    axes.set_yticks(range(len(values)), told["rows"])
    axes.set(xlabel=told["across"], ylabel=told["down"], title=title)
    drawn.colorbar(image, label=told["note"])
    return drawn


def _map(title: str, patched: Patched, tokens: list[str]) -> dict[str, Any]:
    """Rows, columns and values of a heat map; heads and layers are rows, positions columns."""
    if isinstance(patched, Edges):
        rows, columns = [str(s) for s in patched.senders], [str(r) for r in patched.receivers]
        values, note = patched.values, "what the metric gains when the clean sender is read"
        down, across = "sender", "receiver"
    else:
        layers, down, across = _told_apart(list(patched.names)), "layer", "position"
        if isinstance(patched, Ablations):
            values, note = patched.effect, "the metric less what it is without the head"
            rows, columns, across = layers, [str(h) for h in range(values.shape[1])], "head"
        else:
            gap = patched.clean != patched.corrupted
            values = patched.recovered if gap else patched.values
            note = "the share of the gap that a patch closes" if gap else "the metric after a patch"
            _require_length("the patches", values.shape[-1], len(tokens))
            rows, columns = layers, [f"{i} {token}" for i, token in enumerate(tokens)]
            if values.ndim == 3:
                down = "layer.head"
                rows = [f"{layer}.{head}" for layer in layers for head in range(values.shape[1])]
    told = {"title": title, "note": note, "rows": rows, "columns": columns}
    cells = values.reshape(len(rows), -1).tolist()
    return {**told, "down": down, "across": across, "values": cells}


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
