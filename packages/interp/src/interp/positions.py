"""Patches at some positions of a text, also during generation.

The positions of a call follow from the length of the model's cache: without a cache, a call
contains a whole text; otherwise it contains the tokens after those in the cache.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Replacement = Tensor | Callable[[Tensor], Tensor]


@contextmanager
def report_calls(model: nn.Module, patches: Collection[AtPositions]) -> Iterator[None]:
    """Report the length of the cache and the number of tokens of each call to patches."""

    def start_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        _require_no_padding_at_the_start(mask)
        inputs = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
        lengths = [x.shape[1] for x in inputs if isinstance(x, Tensor) and x.ndim > 1]
        if not lengths:
            raise RuntimeError(
                "at_positions() needs input_ids or inputs_embeds (batch, seq, ...), got neither"
            )
        for patch in patches:
            patch.offset, patch.tokens = _cached_length(args, kwargs), lengths[0]

    if not patches:
        yield
        return
    handle = model.register_forward_pre_hook(start_call, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def _cached_length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of tokens in the cache of a call."""
    named = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
    for name, value in named.items():
        if hasattr(value, "get_seq_length"):
            return int(value.get_seq_length())
        is_cache = "cache" in name or "past" in name
        if is_cache and value is not None and not isinstance(value, bool | Tensor):
            raise RuntimeError(
                f"{name} is a {type(value).__name__} whose length is unknown, so the positions of "
                "this call are too; pass the whole text without a cache (use_cache=False)"
            )
    return 0


def _require_no_padding_at_the_start(mask: Any) -> None:
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool((mask[:, 0] != 0).all()):
        raise RuntimeError(
            "at_positions() counts from the start of the text, and this batch is padded on the "
            "left; pass prompts of equal length, or patch one prompt per call"
        )


class AtPositions:
    """A patch at some positions of a text, created by `at_positions`."""

    def __init__(self, positions: range | tuple[int, ...], new: Replacement) -> None:
        self.positions = positions
        self.new = new
        self.was_used = False
        #: The position of the current call's first token in its text.
        self.offset = 0
        #: The number of tokens of the current call, or None before the first call.
        self.tokens: int | None = None

    def replace(self, old: Tensor) -> Tensor:
        """Return `old` (batch, seq, ...) with its patched positions replaced."""
        length = old.shape[1]
        if self.tokens is None:
            raise RuntimeError(
                "an inner module was called, so the positions are unknown; call the model that was "
                "passed to patch(), or pass the inner module to it"
            )
        if length != self.tokens:
            raise RuntimeError(
                f"the activation has {length} positions, and the call {self.tokens} tokens, so the "
                "positions are unknown; patch a site with one position per token"
            )
        chosen = [i for i in range(length) if self.offset + i in self.positions]
        if not chosen:
            return old
        self.was_used = True
        changed, values = old.clone(), old[:, chosen]
        value = self.new(values) if callable(self.new) else self._new_values(chosen, old)
        changed[:, chosen] = value.expand_as(values)
        return changed

    def _new_values(self, chosen: list[int], old: Tensor) -> Tensor:
        """Return the rows of the new values that belong to the chosen positions of this call."""
        assert isinstance(self.new, Tensor)
        new = self.new.to(old)
        dim = new.ndim - old.ndim + 1  # shapes are aligned at the last dimension
        if dim < 0 or new.shape[dim] == 1:
            return new
        if new.shape[dim] != len(self.positions):
            raise ValueError(
                f"expected new values of one or {len(self.positions)} positions, got "
                f"{tuple(new.shape)} for activations {tuple(old.shape)}"
            )
        rows = [self.positions.index(self.offset + i) for i in chosen]
        return new.index_select(dim, torch.tensor(rows, device=new.device))


def at_positions(positions: slice | Sequence[int], new: Replacement) -> AtPositions:
    """Return a patch of (batch, seq, ...) at some positions of each text, also during generation.

    Positions count from the start of the text. If a call has a cache of Hugging Face or a `Cache`,
    its tokens follow those in the cache; otherwise it contains a whole text. `new` is a tensor that
    broadcasts to all patched positions, in their order, or a function of the old values. Each call
    uses the rows of its positions.

    Calls raise RuntimeError for prompts that are padded on the left and for other caches, and the
    block does at its end if none of the positions occurred. Raises ValueError for negative
    positions, which depend on the length.
    """
    ends = positions if not isinstance(positions, slice) else [positions.start, positions.stop]
    if any(end is not None and end < 0 for end in ends):
        raise ValueError(
            f"expected positions from the start of the text, got {positions}, which depends on its "
            "length; pass positions >= 0"
        )
    if isinstance(positions, slice):
        return AtPositions(range(*positions.indices(sys.maxsize)), new)
    if any(_is_boolean(position) for position in positions):
        raise ValueError(f"expected positions, got the mask {positions}; pass mask.nonzero()[:, 0]")
    return AtPositions(tuple(operator.index(position) for position in positions), new)


def _is_boolean(position: object) -> bool:
    return isinstance(position, bool) or getattr(position, "dtype", None) == torch.bool
