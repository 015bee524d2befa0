"""The cache of keys and values, for calls of a decoder with new tokens only."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor, nn


class Cache:
    """Keys and values of earlier tokens, so that a `Decoder` is called with new tokens only.

    A cache belongs to the decoder that first adds tokens to it. Keys are stored before their norm
    and rotation. A call that raises an error adds nothing.
    """

    def __init__(self) -> None:
        #: Keys and values (batch, tokens, features) by layer.
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        #: Keys and values of the current call, which `commit` moves to `layers`.
        self.pending: dict[int, tuple[Tensor, Tensor]] = {}
        #: A weak reference to the decoder that computed the keys and values.
        self.decoder: ref[nn.Module] | None = None
        #: The positions of all tokens, (batch, tokens), or None if the cache is empty.
        self.position_ids: Tensor | None = None
        #: True at padding, (batch, tokens), or None if no token is padding.
        self.padding: Tensor | None = None

    def get_seq_length(self) -> int:
        """Return the number of tokens per row in the cache."""
        return 0 if self.position_ids is None else self.position_ids.shape[1]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values to those of a layer; store the result in `pending` and return it.

        Keys and values have the shape (batch, tokens, features).
        """
        if layer in self.layers:
            k, v = (torch.cat(pair, 1) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.pending[layer] = k, v
        return k, v

    def require_rows(self, rows: int) -> None:
        """Raise ValueError if the tokens in the cache have another number of rows."""
        if self.position_ids is not None and len(self.position_ids) != rows:
            expected = len(self.position_ids)
            raise ValueError(
                f"expected {expected} rows as in the cache, got {rows}; use a new Cache()"
            )

    def require_same_padding(self, padding: Tensor) -> None:
        """Raise ValueError if `padding` (batch, tokens) differs at the tokens of the cache."""
        earlier = padding[:, : self.get_seq_length()]
        expected = torch.zeros_like(earlier) if self.padding is None else self.padding
        if not torch.equal(earlier, expected):
            raise ValueError(
                "attention_mask differs from that of the earlier calls at the tokens in the cache, "
                "whose keys and values were computed with the earlier mask; append to that mask"
            )

    def commit(self, decoder: nn.Module, position_ids: Tensor, padding: Tensor | None) -> None:
        """Move the keys and values of a completed call from `pending` to `layers`."""
        self.decoder = ref(decoder)
        self.layers, self.position_ids = self.pending, position_ids
        self.padding = padding if padding is not None and bool(padding.any()) else None
        self.pending = {}


def require_cache_of(decoder: nn.Module, cache: object) -> None:
    """Raise TypeError unless `cache` is a `Cache`, and ValueError if another decoder filled it."""
    if not isinstance(cache, Cache):
        raise TypeError(
            f"expected an interp.Cache, got a {type(cache).__name__}; create one with Cache() and "
            "call the decoder with the whole prompt"
        )
    if cache.decoder is not None and cache.decoder() is not decoder:
        raise ValueError(
            "the cache has keys and values of another decoder; create one Cache() per decoder"
        )
