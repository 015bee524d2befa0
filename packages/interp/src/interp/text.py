"""Conversion of text to prompts, with any tokenizer.

prompt = encode(tokenizer, ["The capital of France is", "The capital of Italy is"])
with record_patterns(model) as patterns:
    model(**prompt)
view("heads.html", tokens=prompt, heads=detect_heads(patterns, prompt), patterns=patterns)
patch_streams(decoder, *pairs_of(frame, tokenizer, decoder.norm, decoder.unembed))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interp.patching import Metric, logit_difference

#: A function from a text to token ids, or to a mapping with `input_ids` (transformers).
Tokenizer = Callable[[str], Any]


class TextPrompt(dict[str, Tensor]):
    """Keyword arguments of a model, with the string of each token in `strings`."""

    def __init__(self, arguments: Mapping[str, Tensor], strings: list[list[str]]) -> None:
        super().__init__(arguments)
        self.strings = strings


def encode(tokenizer: Tokenizer, texts: str | Sequence[str]) -> TextPrompt:
    """Return the token ids (texts, seq) of one or several texts, padded on the left.

    If the texts differ in length, the result also has an `attention_mask` and `position_ids`.
    Padding has token id 0. Delete `position_ids` for models that do not accept them, such as Bloom.

    Raises ValueError if there is no text, or if a text has no tokens.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    rows = [_ids_of(tokenizer, text) for text in texts]
    if not rows or not all(rows):
        raise ValueError(f"expected at least one text, each of at least one token, got {texts}")
    length = max(map(len, rows))
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    decode = getattr(tokenizer, "decode", lambda ids: ids[0])
    strings = [[""] * (length - len(row)) + [str(decode([token])) for token in row] for row in rows]
    arguments = {"input_ids": ids}
    if not bool(mask.all()):
        arguments["attention_mask"] = mask
        arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    return TextPrompt(arguments, strings)


def pairs_of(
    table: Mapping[str, Sequence[Any]] | Any,
    tokenizer: Tokenizer,
    norm: Callable[[Tensor], Tensor] | None,
    unembed: nn.Linear | Tensor,
) -> tuple[TextPrompt, TextPrompt, list[Metric]]:
    """Return clean prompts, corrupted prompts and one metric per pair, for all patching functions.

    `table` is a DataFrame or a mapping with four columns. "clean" and "corrupted" are texts; the
    two texts of a row have the same number of tokens. "right" and "wrong" are the answers, as texts
    of one token or as token ids. A metric is logit(right) - logit(wrong) at the last position.
    `norm` and `unembed` are the model's final norm and its unembedding, as in `logit_difference`.

    Raises ValueError for columns or pairs of different lengths, and for answers that are not one
    token of the vocabulary.
    """
    columns = {name: list(table[name]) for name in ("clean", "corrupted", "right", "wrong")}
    rows = {name: len(column) for name, column in columns.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"expected columns with the same number of rows, got {rows}; pass lists with one entry "
            "per pair, not single strings"
        )
    clean, corrupted = (encode(tokenizer, columns[name]) for name in ("clean", "corrupted"))
    for row, texts in enumerate(zip(columns["clean"], columns["corrupted"], strict=True)):
        lengths = [len(_ids_of(tokenizer, text)) for text in texts]
        if lengths[0] != lengths[1]:
            raise ValueError(
                f"the clean prompt of row {row} has {lengths[0]} tokens, the corrupted one "
                f"{lengths[1]}; positions of a pair must correspond, so pass equal lengths"
            )
    metrics = [
        logit_difference(norm, unembed, _token_of(tokenizer, right), _token_of(tokenizer, wrong))
        for right, wrong in zip(columns["right"], columns["wrong"], strict=True)
    ]
    return clean, corrupted, metrics


def _ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    if not isinstance(text, str):
        raise TypeError(f"expected a text, got {text!r}; leave out rows without a text")
    encoded = tokenizer(text)
    ids = torch.as_tensor(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)
    if ids.ndim != 1:
        raise ValueError(
            f"expected the token ids of one text, (seq,), got {tuple(ids.shape)}; use the "
            "tokenizer without return_tensors="
        )
    return [int(token) for token in ids]


def _token_of(tokenizer: Any, answer: str | int) -> int:
    if not isinstance(answer, str):
        if not float(answer).is_integer():
            raise ValueError(f"expected a text or a token id as an answer, got {answer!r}")
        return int(answer)
    if hasattr(tokenizer, "convert_ids_to_tokens"):  # transformers, which may add special tokens
        ids = tokenizer.encode(answer, add_special_tokens=False)
    else:
        ids = _ids_of(tokenizer, answer)
    if len(ids) != 1:
        raise ValueError(f"the answer {answer!r} is {len(ids)} tokens; pass the id of one token")
    if ids[0] == getattr(tokenizer, "unk_token_id", None) and answer != tokenizer.unk_token:
        raise ValueError(
            f"the answer {answer!r} is not in the vocabulary; pass the id of one token"
        )
    return int(ids[0])
