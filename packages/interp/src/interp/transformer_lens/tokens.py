"""Conversions between texts and token ids, with TransformerLens's names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from interp.text import tokenize_text

#: Texts, or token ids (batch, pos) or (pos,).
Input = str | Sequence[str] | Tensor


class TextConversion:
    """Methods of a model with a tokenizer of transformers; see `HookedDecoder`."""

    def __init__(self, tokenizer: Any, default_prepend_bos: bool, device: torch.device) -> None:
        self.tokenizer = tokenizer
        self.default_prepend_bos = default_prepend_bos
        self._device = device

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> Tensor:
        """Return the token ids (batch, pos) of texts, padded on the tokenizer's `padding_side`.

        Raises ValueError without a tokenizer, for another `padding_side`, and if the tokenizer has
        no padding token or BOS token although one is needed.
        """
        return self.encode_with_mask(input, prepend_bos, padding_side)[0]

    def encode_with_mask(
        self, input: str | Sequence[str], prepend_bos: bool | None, padding_side: str | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the token ids of texts, and a mask (batch, pos) that is 0 at padding.

        The mask is None if no text is padded. Errors are those of `to_tokens`.
        """
        encode = partial(self._require_tokenizer(), add_special_tokens=False)
        texts = [input] if isinstance(input, str) else input
        rows = [tokenize_text(encode, text) for text in texts]
        if self.default_prepend_bos if prepend_bos is None else prepend_bos:
            bos = self.tokenizer.bos_token_id
            if bos is None:
                raise ValueError("the tokenizer has no BOS token; pass prepend_bos=False")
            rows = [[bos, *row] for row in rows]
        lengths = [len(row) for row in rows]
        if len(set(lengths)) < 2:
            return torch.tensor(rows, dtype=torch.long, device=self._device), None
        padding = self._get_padding_token()
        if padding is None:
            raise ValueError(
                f"the texts have {lengths} tokens, and the tokenizer has no padding token; set "
                "tokenizer.pad_token, or pass texts of equal lengths"
            )
        side = padding_side or getattr(self.tokenizer, "padding_side", "right")
        if side not in ("left", "right"):
            raise ValueError(f"expected padding_side 'left' or 'right', got {side!r}")

        def pad(row: list[int], filler: int) -> list[int]:
            missing = [filler] * (max(lengths) - len(row))
            return missing + row if side == "left" else row + missing

        tokens = torch.tensor([pad(row, padding) for row in rows], device=self._device)
        mask = torch.tensor([pad([1] * len(row), 0) for row in rows], device=self._device)
        return tokens, mask

    def require_no_left_padding(self, tokens: Tensor) -> None:
        """Raise ValueError if token ids (batch, pos) start with padding, as `to_tokens` may add."""
        padding = self._get_padding_token()
        # A BOS token that is also the padding token may start a text once.
        length = 2 if padding == getattr(self.tokenizer, "bos_token_id", None) else 1
        start = tokens[:, :length]
        has_start = start.shape[1] == length
        if padding is not None and has_start and bool((start == padding).all(-1).any()):
            raise ValueError(
                f"expected token ids without padding, got rows that start with the padding token "
                f"{padding}; pass attention_mask=, or the texts"
            )

    def _get_padding_token(self) -> int | None:
        padding: int | None = getattr(self.tokenizer, "pad_token_id", None)
        return getattr(self.tokenizer, "eos_token_id", None) if padding is None else padding

    def to_string(self, tokens: Sequence[int] | int | Tensor) -> str | list[str]:
        """Return the text of token ids (pos,), or the texts of token ids (batch, pos)."""
        ids = torch.as_tensor(tokens)
        decode = partial(self._require_tokenizer().decode, clean_up_tokenization_spaces=False)
        if ids.ndim == 2:
            return [decode(row) for row in ids.tolist()]
        text: str = decode(ids.reshape(-1).tolist())
        return text

    def to_str_tokens(
        self, input: Input | numpy.ndarray[Any, Any], prepend_bos: bool | None = None
    ) -> list[Any]:
        """Return the string of each token; for several texts, one list per text.

        For token ids (batch, pos), return one flat list. They may be an array of numpy.
        """
        if isinstance(input, numpy.ndarray) and input.dtype.kind in "iu":
            input = torch.as_tensor(input)
        if isinstance(input, Tensor):
            return [self.to_string(int(token)) for token in input.reshape(-1)]
        texts = [input] if isinstance(input, str) else input
        rows = [self.to_str_tokens(self.to_tokens([text], prepend_bos)) for text in texts]
        return rows[0] if isinstance(input, str) else rows

    def to_single_token(self, string: str) -> int:
        """Return the id of a text of one token; raise ValueError for other texts."""
        ids = self.to_tokens(string, prepend_bos=False)
        if ids.numel() != 1:
            raise ValueError(f"{string!r} has {ids.numel()} tokens; pass a text of one token")
        return int(ids)

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Tensor,
        mode: str = "first",
        prepend_bos: bool | None = None,
    ) -> int:
        """Return the "first" or "last" position of a token in one text, or in its token ids.

        Raises ValueError if the text does not contain the token, for several texts, and for another
        `mode`.
        """
        ids = input if isinstance(input, Tensor) else self.to_tokens(input, prepend_bos)
        if isinstance(single_token, str):
            single_token = self.to_single_token(single_token)
        positions = (ids.reshape(-1) == single_token).nonzero()[:, 0].tolist()
        if not positions or mode not in ("first", "last") or (ids.ndim == 2 and len(ids) != 1):
            raise ValueError(
                f"expected one text with the token {single_token} and mode 'first' or 'last', "
                f"got positions {positions} in {tuple(ids.shape)} and {mode!r}"
            )
        return int(positions[0 if mode == "first" else -1])

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("a text needs a tokenizer; pass HookedDecoder(decoder, tokenizer)")
        return self.tokenizer
