"""One HTML file with patterns, patching results, kinds of heads, the logit lens and attributions.

The file contains its styles, script and data, and loads nothing from a network. Patterns are stored
in base64 with one byte per weight, so the error of a weight is at most 1/510.
"""

from __future__ import annotations

import base64
import html
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from interp.detect import HeadScores
from interp.lens import Attribution, Lens
from interp.prompts import Prompt, as_prompt, get_mask, get_tokens, require_hidden_padding
from interp.text import Texts, Tokenizer


def view(
    path: str | Path,
    *,
    tokens: Texts | Sequence[int] | Prompt,
    patterns: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    heads: HeadScores | None = None,
    lens: Lens | None = None,
    attributions: Attribution | None = None,
    patching: Tensor | None = None,
    vocabulary: Sequence[str] | None = None,
    tokenizer: Tokenizer | None = None,
    title: str = "interp",
    example: int = 0,
) -> Path:
    """Write one self-contained HTML file and return its path.

    Args:
        path: The file to write.
        tokens: Prompts, of which row `example` is shown, or the strings or ids of one sequence.
            With `tokenizer`, a text or a list of texts, of which text `example` is shown.
        patterns: (batch, heads, seq, seq) or (heads, seq, seq) per layer.
        heads: The result of `detect_heads`.
        lens: The result of `logit_lens`.
        attributions: The result of `attribution`.
        patching: Values such as `recovered`, (layers, positions) or (layers, heads, positions).
        vocabulary: The string of each token id. By default, ids are shown as `tokenizer.decode`
            returns them, or as numbers if there is no such method.
        tokenizer: A function from a text to token ids, or a tokenizer of transformers. Results for
            several texts must be those of the model called with `encode(tokenizer, texts)`.
        title: The title of the page.
        example: The batch row to show, for results with a batch dimension.

    Raises ValueError for results whose number of positions differs from the number of tokens, and
    for patterns that attend to padding or have weights below 0 or above 1. Raises TypeError for a
    text without a tokenizer, and FileNotFoundError if the folder of `path` does not exist.
    """
    if isinstance(tokens, str) or tokenizer is not None:
        tokens = as_prompt(cast(Prompt | Texts, tokens), tokenizer)
    name_of = _make_token_namer(vocabulary, tokenizer)
    strings = _list_token_strings(tokens, name_of, example)
    data: dict[str, object] = {"tokens": strings}
    if patterns is not None:
        mask = get_mask(tokens)[[example]] if isinstance(tokens, Mapping) else None
        data["patterns"] = _encode_patterns(patterns, example, len(strings), mask)
    if heads is not None:
        data["heads"] = {
            "layers": _shorten_names(list(heads.names)),
            "scores": {kind: scores.tolist() for kind, scores in heads.scores.items()},
            "chance": dict(heads.chance),
            "p_values": {kind: p_values.tolist() for kind, p_values in heads.p_values.items()},
        }
    if patching is not None:
        data["patching"] = _build_heat_map(patching, strings)
    if lens is not None:
        data["lens"] = _build_lens_table(lens, example, len(strings), name_of)
    if attributions is not None:
        terms = attributions.terms[:, example]
        _require_length("attributions", terms.shape[-1], len(strings))
        data["attribution"] = {"names": list(attributions.names), "terms": terms.tolist()}
    page = resources.files("interp.view").joinpath("view.html").read_text(encoding="utf-8")
    replacements = {"{{title}}": html.escape(title), "{{data}}": _encode_json(data)}
    page = re.sub(r"{{(?:title|data)}}", lambda match: replacements[match[0]], page)
    path = Path(path)
    if path.exists() and not path.is_file():  # A pipe or a device, such as /dev/stdout.
        path.write_text(page, encoding="utf-8", newline="\n")
        return path
    target = path.resolve()  # A symbolic link is kept.
    if not target.parent.exists():
        raise FileNotFoundError(f"the folder {target.parent} does not exist; create it first")
    part = target.with_name(f"{target.name}.{os.getpid()}.part")  # An error leaves no partial page.
    try:
        part.write_text(page, encoding="utf-8", newline="\n")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return path


def _list_token_strings(
    tokens: Texts | Sequence[int] | Prompt, name_of: Callable[[int], str], example: int
) -> list[str]:
    """Return the string of each token of one sequence, "" at padding; `name_of` converts ids."""
    if not isinstance(tokens, Tensor | Mapping):
        return [token if isinstance(token, str) else name_of(token) for token in tokens]
    ids, mask = get_tokens(tokens), get_mask(tokens)
    if ids.ndim == 2:
        ids, mask = ids[example], mask[example]
    pairs = zip(ids.tolist(), mask.tolist(), strict=True)
    return [name_of(token) if is_token else "" for token, is_token in pairs]


def _make_token_namer(
    vocabulary: Sequence[str] | None, tokenizer: Tokenizer | None
) -> Callable[[int], str]:
    """Return a function from token ids to strings: decimal ids if nothing else names tokens."""
    if vocabulary is not None:
        return vocabulary.__getitem__
    decode = getattr(tokenizer, "decode", None)
    return str if decode is None else lambda token: str(decode([token]))


def _build_heat_map(values: Tensor, tokens: list[str]) -> dict[str, Any]:
    """Return the rows, columns, values and row label of a heat map of patching results."""
    _require_length("the patches", values.shape[-1], len(tokens))
    indices = itertools.product(*map(range, values.shape[:-1]))
    rows = [".".join(map(str, index)) for index in indices]
    return {
        "rows": rows,
        "columns": [f"{i} {token}" for i, token in enumerate(tokens)],
        "row_label": "layer" if values.ndim == 2 else "layer.head",
        "values": values.reshape(len(rows), -1).tolist(),
    }


def _encode_patterns(
    patterns: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    example: int,
    length: int,
    mask: Tensor | None,
) -> list[dict[str, object]]:
    """Return the name, the number of heads and the encoded weights of each pattern."""
    named = patterns
    if not isinstance(named, Mapping):
        named = {str(i): pattern for i, pattern in enumerate(named)}
    layers = []
    for name, pattern in zip(_shorten_names(list(named)), named.values(), strict=True):
        heads = pattern[example] if pattern.ndim == 4 else pattern
        if heads.ndim != 3 or heads.shape[1:] != (length, length):
            raise ValueError(
                f"the pattern of layer {name} is {tuple(pattern.shape)}; for {length} tokens pass "
                "(batch, heads, seq, seq) or (heads, seq, seq)"
            )
        if not bool(((heads >= 0) & (heads <= 1 + 1e-3)).all()):
            raise ValueError(
                f"the pattern of layer {name} is not within 0 and 1; pass it after the softmax"
            )
        if mask is not None:
            require_hidden_padding(heads[None], mask)
        levels = (heads.detach().cpu().float() * 255).round().to(torch.uint8)
        weights = base64.b64encode(levels.numpy().tobytes()).decode()
        layers.append({"name": name, "heads": heads.shape[0], "weights": weights})
    return layers


def _shorten_names(names: list[str]) -> list[str]:
    """Return names without common parts, such as 0 and 1 for blocks.0.mlp and blocks.1.mlp."""
    split_names = [name.split(".") for name in names]
    if len(names) < 2 or len({len(parts) for parts in split_names}) > 1:
        return names
    differs = [len(set(column)) > 1 for column in zip(*split_names, strict=True)]
    return [".".join(itertools.compress(parts, differs)) for parts in split_names]


def _build_lens_table(
    lens: Lens, example: int, length: int, name_of: Callable[[int], str]
) -> dict[str, object]:
    """Return the predictions of each layer for one example."""
    tokens = lens.top_tokens[:, example]
    _require_length("lens", tokens.shape[1], length)
    strings = []
    for layer in tokens.tolist():
        strings.append([[name_of(token) for token in row] for row in layer])
    return {
        "layers": list(lens.names),
        "top": strings,
        "probabilities": lens.top_probabilities[:, example].tolist(),
        "entropy": lens.entropy[:, example].tolist(),
        "kl": lens.kl_to_last[:, example].tolist(),
    }


def _require_length(label: str, positions: int, length: int) -> None:
    if positions != length:
        raise ValueError(
            f"expected {label} for {length} tokens, got {positions} positions; pass the tokens of "
            "the recorded run"
        )


def _encode_json(data: object) -> str:
    """Return JSON that is safe inside a script element.

    Floats are rounded to 6 significant digits; nan and infinities become null. Half of a surrogate
    pair, which UTF-8 cannot represent, is written as an escape sequence.
    """
    finite = _make_finite(data)
    text = json.dumps(finite, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _make_finite(data: object) -> object:
    if isinstance(data, dict):
        return {key: _make_finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_make_finite(value) for value in data]
    if isinstance(data, float):
        return float(f"{data:.6g}") if abs(data) < float("inf") else None
    return data
