"""Pairs of prompts from a table of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from interp.patching.activation import logit_difference
from interp.prompts import Metric
from interp.text import Tokenizer, encode, tokenize_text


def pairs_of(
    table: Mapping[str, Sequence[Any]] | Any,
    tokenizer: Tokenizer,
    norm: Callable[[Tensor], Tensor] | None,
    unembed: nn.Linear | Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Metric]]:
    """Return clean prompts, corrupted prompts and one metric per pair, as for `patch_streams`.

    The other patching functions accept these values too, except `attribution_patching`.

    `table` is a DataFrame or a mapping with four columns. "clean" and "corrupted" are texts; the
    two texts of a row must have the same number of tokens. "right" and "wrong" are the answers, as
    texts of one token or as token ids. A metric is logit(right) - logit(wrong) at the last
    position. `norm` and `unembed` are the model's final norm and its unembedding, as in
    `logit_difference`.

    Raises ValueError for columns of different lengths, for answers that are not one token of the
    vocabulary, and for texts without tokens. Raises TypeError for other objects than texts.
    """
    columns = {name: list(table[name]) for name in ("clean", "corrupted", "right", "wrong")}
    rows = {name: len(column) for name, column in columns.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"expected columns with the same number of rows, got {rows}; pass lists with one entry "
            "per pair, not single strings"
        )
    metrics = [
        logit_difference(
            norm, unembed, _encode_answer(tokenizer, right), _encode_answer(tokenizer, wrong)
        )
        for right, wrong in zip(columns["right"], columns["wrong"], strict=True)
    ]
    return encode(tokenizer, columns["clean"]), encode(tokenizer, columns["corrupted"]), metrics


def _encode_answer(tokenizer: Any, answer: str | int) -> int:
    if not isinstance(answer, str):
        if not float(answer).is_integer():
            raise ValueError(f"expected a text or a token id as an answer, got {answer!r}")
        return int(answer)
    if hasattr(tokenizer, "convert_ids_to_tokens"):  # transformers, which may add special tokens
        ids = tokenizer.encode(answer, add_special_tokens=False)
    else:
        ids = tokenize_text(tokenizer, answer)
    if len(ids) != 1:
        raise ValueError(f"the answer {answer!r} is {len(ids)} tokens; pass the id of one token")
    if ids[0] == getattr(tokenizer, "unk_token_id", None) and answer != tokenizer.unk_token:
        raise ValueError(
            f"the answer {answer!r} is not in the vocabulary; pass the id of one token"
        )
    return int(ids[0])
