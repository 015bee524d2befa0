"""Conversion of texts to prompts, with any tokenizer.

Functions with an argument `tokenizer` call `encode`. To call a model, pass the result of `encode`:

    model(**encode(tokenizer, texts))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

#: A function from a text to token ids, or to a mapping with `input_ids` (transformers).
Tokenizer = Callable[[str], Any]
#: One text, or several texts.
Texts = str | Sequence[str]


def encode(
    tokenizer: Tokenizer, texts: Texts, *, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Return the token ids (texts, seq) of one or several texts, padded on the left.

    The result has `input_ids`, and an `attention_mask` and `position_ids` if the texts differ in
    length. Padding has token id 0. Delete `position_ids` for models that do not accept them, such
    as Bloom. The tensors are on `device`.

    Raises ValueError without a text or for a text without tokens, and TypeError for other objects.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    rows = [tokenize_text(tokenizer, text) for text in texts]
    if not rows or not all(rows):
        raise ValueError(f"expected at least one text, each of at least one token, got {texts}")
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows], device=device)
    mask_rows = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    mask = torch.tensor(mask_rows, device=device)
    if bool(mask.all()):
        return {"input_ids": ids}
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def tokenize_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of one text, without padding.

    Raises TypeError if `text` is not a string, and ValueError if the tokenizer returns a batch.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"expected a string, got {text!r}; drop rows without a text, and pass token ids as a "
            "tensor"
        )
    encoded = tokenizer(text)
    if not isinstance(encoded, Mapping):
        encoded = {"input_ids": encoded}
    ids = torch.as_tensor(encoded["input_ids"])
    if ids.ndim != 1:
        raise ValueError(
            f"expected the token ids of one text, (seq,), got {tuple(ids.shape)}; use the "
            "tokenizer without return_tensors="
        )
    mask = torch.as_tensor(encoded.get("attention_mask", torch.ones_like(ids)))
    return [int(token) for token in ids[mask.bool()]]
