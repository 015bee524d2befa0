"""Patches at some positions of one text, also during generation.

A patch determines the positions of a call from the length of the model's cache: the first call
contains the prompt, and each later call contains the new tokens.
"""

from __future__ import annotations

import itertools
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Replacement = Tensor | Callable[[Tensor], Tensor]


@contextmanager
def report_calls(model: nn.Module, positioned: Mapping[str, AtPositions]) -> Iterator[None]:
    """Report the position at which each call starts, the length of the cache, to patches."""
    patches = {id(at): at for at in positioned.values()}
    outer_modules: set[str] = set()
    for site in positioned:
        if site.endswith(".pattern"):
            raise ValueError(
                f"{site!r} has heads before positions, which at_positions() would patch; pass a "
                "function of the pattern, such as knock_out_attention()"
            )
        name = site.partition(":")[0]
        outer_modules |= {"", name, *(name[: dot.start()] for dot in re.finditer(r"\.", name))}
    depth = 0

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:  # Inner modules see a cache to which earlier blocks have appended.
            values = (*args, *kwargs.values())
            caches = [value for value in values if hasattr(value, "get_seq_length")]
            mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
            _require_no_padding_at_the_start(mask)
            inputs = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
            lengths = [x.shape[1] for x in inputs if isinstance(x, Tensor) and x.ndim > 1]
            for at in patches.values():
                cached = int(caches[0].get_seq_length()) if caches else 0
                at.start_call(cached, lengths[0] if lengths else None)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1

    handles = []
    try:
        for name in sorted(outer_modules) if positioned else []:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            # always_call: after an exception, another call may follow in the same block.
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _require_no_padding_at_the_start(mask: Any) -> None:
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool((mask[:, 0] != 0).all()):
        raise RuntimeError(
            "at_positions() counts from the start of the text, and this batch is padded on the "
            "left; pass prompts of equal length, or patch one prompt per call"
        )


class AtPositions:
    """A patch at some positions of one text, created by `at_positions`."""

    def __init__(
        self, positions: range | tuple[int, ...], new: Replacement, *, cached: bool
    ) -> None:
        self.positions = positions
        self.new = new
        self.cached = cached
        self.has_started = False
        self.was_used = False
        #: The position of the current call's first token in the text.
        self.offset = 0
        #: The length of the text so far.
        self.length = 0
        #: The number of tokens of the current call, if it is known.
        self.tokens: int | None = None

    def start_call(self, cached: int, tokens: int | None) -> None:
        """Start a call of `tokens` tokens after `cached` tokens of the same text.

        Raises RuntimeError if the call belongs to another text.
        """
        if not self.cached and cached:
            raise RuntimeError(
                f"at_positions(cached=False) needs the whole text in each call, got one with "
                f"{cached} tokens in its cache; pass cached=True"
            )
        if self.cached and self.has_started and (not cached or cached != self.length):
            raise RuntimeError(
                f"this at_positions() patch has seen {self.length} tokens of its text, and the "
                f"model was called with {cached} in its cache: create another patch for another "
                "text, or pass cached=False if each call contains the whole text"
            )
        self.has_started = True
        self.offset = cached
        self.tokens = tokens
        self.length = cached + (tokens or 0)

    def replace(self, old: Tensor) -> Tensor:
        """Return `old` (batch, seq, ...) with its patched positions replaced."""
        length = old.shape[1]
        if self.tokens is not None and length != self.tokens:
            raise RuntimeError(
                f"the activation has {length} positions, and the call {self.tokens} tokens, so the "
                "positions are unknown; patch a site with one position per token"
            )
        self.length = self.offset + length
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
        if dim < 0 or new.shape[dim] == 1 or len(self.positions) == len(chosen):
            return new
        if new.shape[dim] != len(self.positions):
            raise ValueError(
                f"expected new values of one or {len(self.positions)} positions, got "
                f"{tuple(new.shape)} for activations {tuple(old.shape)}"
            )
        rows = [self.positions.index(self.offset + i) for i in chosen]
        return new.index_select(dim, torch.tensor(rows, device=new.device))


def at_positions(
    positions: slice | Sequence[int], new: Replacement, *, cached: bool = True
) -> AtPositions:
    """Return a patch of (batch, seq, ...) at some positions of a text, also during generation.

    Positions count from the start of the text. With a cache of Hugging Face, the first call
    contains the prompt and each later call the new tokens, whose positions follow from the length
    of the cache. With `cached=False`, each call contains the whole text. `new` is a tensor that
    broadcasts to all patched positions, or a function of the old values. Each call uses the rows of
    its positions.

    A patch belongs to one text. Raises RuntimeError if it is used for another text or for prompts
    that are padded on the left, and if none of the positions occurred. Raises ValueError for
    negative positions, which depend on the length, and for positions that do not ascend, because
    the rows of `new` follow the order of the text.
    """
    ends = positions if not isinstance(positions, slice) else [positions.start, positions.stop]
    if any(end is not None and end < 0 for end in ends):
        raise ValueError(
            f"expected positions from the start of the text, got {positions}, which depends on its "
            "length; pass positions >= 0"
        )
    if isinstance(positions, slice):
        chosen: range | tuple[int, ...] = range(*positions.indices(sys.maxsize))
        is_ascending = positions.step is None or positions.step > 0
    else:
        if any(_is_boolean(position) for position in positions):
            raise ValueError(
                f"expected positions, got the mask {positions}; pass mask.nonzero()[:, 0]"
            )
        chosen = tuple(operator.index(position) for position in positions)
        is_ascending = all(before < after for before, after in itertools.pairwise(chosen))
    if not is_ascending:
        raise ValueError(
            f"expected ascending positions, got {positions}; sort them together with the rows of "
            "the new values"
        )
    return AtPositions(chosen, new, cached=cached)


def _is_boolean(position: object) -> bool:
    return isinstance(position, bool) or getattr(position, "dtype", None) == torch.bool
