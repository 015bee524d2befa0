"""The attention mask of `flashattn2.integrations.transformers`: a description without storage.

Note [A mask that cannot be misread]
A model that does not call the attention function adds the mask to scores that it computes itself.
A tensor of numbers would be added and hide nothing, without an error.  Therefore `AttentionMask` is
a tensor subclass without storage.  Operations that copy, convert, slice or expand it return another
`AttentionMask`; every other operation raises ValueError and names the model.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """The rows of `(batch · seq)` that are not padding, and the boundaries of their sequences."""

    #: Indices of the query rows.
    queries: Tensor
    #: Indices of the key rows.
    keys: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


@dataclass(frozen=True)
class Rule:
    """The contents of an `AttentionMask` except for the sequence numbers of its keys.

    Query `i` is at the position of key `first + i`.  It sees the keys of its sequence from `left`
    keys before to `right` keys after that position; None removes a bound.
    """

    seq_q: int
    first: int
    left: int | None
    right: int | None
    #: True for one sequence per batch entry without padding.
    is_dense: bool
    #: True if a batch entry has several sequences.
    is_packed: bool = False
    #: The model, as error messages name it.
    owner: str = "this model"
    #: The reason why attention under this mask raises an error.  Creating the mask raises no error,
    #: because models also create masks that no layer uses.
    refusal: str = ""
    heads: int = 1
    dtype: torch.dtype = torch.bool

    @property
    def is_bounded(self) -> bool:
        """True if the band has a bound, so that a query's position matters."""
        return self.left is not None or self.right is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rule":
        # Guards of torch 2.11 copy the rule, whose symbolic sizes in a graph cannot be copied.
        return self


class AttentionMask(Tensor):
    """A mask `(batch, heads, seq_q, seq_k)` that only flashattn2's attention function can read.

    The attribute `sequence` is int32 `(batch, seq_k)`: the number of each key's sequence, or 0 for
    padding.  See Note [A mask that cannot be misread].
    """

    sequence: Tensor
    rule: Rule
    # `__torch_dispatch__` sees every operator, including operators that C++ code calls.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, sequence: Tensor, rule: Rule) -> "AttentionMask":
        """Return a tensor of the mask's shape that has no storage."""
        shape = (len(sequence), rule.heads, rule.seq_q, sequence.shape[1])
        mask: AttentionMask = Tensor._make_wrapper_subclass(
            cls, shape, dtype=rule.dtype, device=sequence.device
        )
        return mask

    def __init__(self, sequence: Tensor, rule: Rule) -> None:
        self.sequence = sequence
        self.rule = rule
        self._cache: dict[str, Any] = {}

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AttentionMask(shape={tuple(self.shape)}, {self.rule})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return AttentionMask, (self.sequence, self.rule)

    def __deepcopy__(self, memo: dict[int, Any]) -> "AttentionMask":
        return AttentionMask(self.sequence.clone(), self.rule)

    def __tensor_flatten__(self) -> tuple[list[str], Rule]:
        return ["sequence"], self.rule

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], rule: Rule, outer_size: Any, outer_stride: Any
    ) -> "AttentionMask":
        return AttentionMask(inner["sequence"], rule)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the result of an operation in `HANDLERS`; raise ValueError for any other."""
        handler = HANDLERS.get(func)
        mask = args[0] if args else None
        if handler is not None and isinstance(mask, AttentionMask):
            result = handler(mask, *args[1:], **(kwargs or {}))
            if result is not None:
                return result
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        owner = next(x.rule.owner for x in flat if isinstance(x, AttentionMask))
        raise ValueError(
            f"{owner} reads the attention mask itself (operator {func}) instead of passing it to "
            "the attention function, so flashattn2 would not be its attention; use "
            'attn_implementation="eager" or "sdpa"'
        )

    def compute_span(self) -> tuple[int, int | None, int | None]:
        """Return `(count, left, right)`: the number of keys to pass, and the window over them.

        `flash_attention` aligns the last query with the last key that is passed, so the bounds of
        the rule are shifted.  Raise ValueError if no such window equals the mask.
        """
        rule = self.rule
        seq_k = self.shape[3]
        if not rule.is_bounded:
            return seq_k, None, None
        end = rule.first + rule.seq_q
        count = seq_k
        if rule.right is not None:
            # Keys after all queries are unused capacity of a cache.
            count = max(0, min(seq_k, end + rule.right))
        shift = end - count
        left = None if rule.left is None else rule.left - shift
        right = None if rule.right is None else rule.right + shift
        if (left or 0) < 0 or (right or 0) < 0 or (shift and not rule.is_dense):
            raise self._make_alignment_error()
        return count, left, right

    def _make_alignment_error(self) -> ValueError:
        """Return the error for queries that do not end at the last key."""
        rule = self.rule
        return ValueError(
            f"{rule.seq_q} queries from position {rule.first} on do not end at the last of the "
            f"{self.shape[3]} keys, as flashattn2 requires for padded sequences and windows; "
            'use attn_implementation="sdpa"'
        )

    def get_packing(self) -> Packing:
        """Return the rows without padding, computed once for all layers."""
        if "packing" not in self._cache:
            self._cache["packing"] = self._pack()
        packing: Packing = self._cache["packing"]
        return packing

    def _pack(self) -> Packing:
        """Find the rows that are not padding and number their sequences."""
        rule = self.rule
        batch = len(self.sequence)
        sequence = self.sequence[:, : self.compute_span()[0]]
        numbers_per_entry = int(sequence.amax()) + 1 if sequence.numel() else 1
        # Assign distinct numbers to the sequences of all batch entries.
        number = sequence + numbers_per_entry * torch.arange(batch, device=sequence.device)[:, None]
        number = number.masked_fill(sequence == 0, -1)
        if rule.is_bounded or rule.is_packed:
            query_number = number[:, max(rule.first, 0) : rule.first + rule.seq_q]
            if query_number.shape[1] != rule.seq_q:
                raise self._make_alignment_error()
        else:
            # All queries of a batch entry see all keys of its only sequence: use that number.
            query_number = number.amax(1, keepdim=True).expand(batch, rule.seq_q)
        keys = number.flatten().ge(0).nonzero().squeeze(1)
        queries = query_number.flatten().ge(0).nonzero().squeeze(1)
        sequences, counts_k = number.flatten()[keys].unique(return_counts=True)
        index = torch.searchsorted(sequences, query_number.flatten()[queries])
        counts_q = torch.bincount(index, minlength=len(sequences))
        bounds = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (counts_q, counts_k)]
        return Packing(queries, keys, *bounds)

    def check_positions(self, position_ids: Tensor) -> None:
        """Raise ValueError if the positions restart within a sequence of the mask.

        Positions of another shape than `(1, seq_q)` or `(batch, seq_q)` are not checked.
        """
        batch, _, seq_q, _ = self.shape
        shape = tuple(position_ids.shape)
        if seq_q < 2 or shape not in ((1, seq_q), (batch, seq_q)):
            return
        if self._cache.get("position_ids") is position_ids:
            return
        number = self.sequence[:, max(self.rule.first, 0) : self.rule.first + seq_q]
        if number.shape[1] == seq_q:
            restarts = (position_ids.diff(dim=1) <= 0).to(number.device)
            within = (number[:, 1:] == number[:, :-1]) & (number[:, 1:] > 0)
            if (restarts & within).any():
                raise ValueError(
                    "position_ids restart within a sequence, as for packed sequences, but "
                    f"{self.rule.owner} made a mask of one sequence; to pack, pass position_ids "
                    "without attention_mask and with use_cache=False, or pad the sequences if the "
                    "model does not support packing"
                )
        self._cache["position_ids"] = position_ids


def _copy(mask: AttentionMask, *_: Any, **__: Any) -> AttentionMask:
    """Return a mask that shares the cached packing."""
    copy = AttentionMask(mask.sequence, mask.rule)
    copy._cache = mask._cache
    return copy


def _to(mask: AttentionMask, *_: Any, **options: Any) -> AttentionMask:
    """Return the mask with another dtype or on another device."""
    dtype = options.get("dtype") or mask.rule.dtype
    device = options.get("device") or mask.device
    return AttentionMask(mask.sequence.to(device), replace(mask.rule, dtype=dtype))


def _slice(
    mask: AttentionMask,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> AttentionMask | None:
    """Return the mask cut along one dimension, or None unless the step is 1."""
    dim %= 4
    start, end, step = slice(start, end, step).indices(mask.shape[dim])
    end = max(start, end)
    if step != 1:
        return None
    if dim == 0:
        return AttentionMask(mask.sequence[start:end], mask.rule)
    if dim == 1:
        return AttentionMask(mask.sequence, replace(mask.rule, heads=end - start))
    first = mask.rule.first
    if dim == 2:
        rule = replace(mask.rule, first=first + start, seq_q=end - start)
        return AttentionMask(mask.sequence, rule)
    return AttentionMask(mask.sequence[:, start:end], replace(mask.rule, first=first - start))


def _expand(mask: AttentionMask, size: Any, **_: Any) -> AttentionMask | None:
    """Return the mask with expanded batch and heads, or None if another dimension would change."""
    if len(size) != 4:
        return None
    sizes = [old if new == -1 else new for new, old in zip(size, mask.shape, strict=True)]
    is_broadcast = all(n in (1, m) for n, m in zip(mask.shape[:2], sizes[:2], strict=True))
    if not is_broadcast or tuple(sizes[2:]) != tuple(mask.shape[2:]):
        return None
    rule = replace(mask.rule, heads=sizes[1])
    return AttentionMask(mask.sequence.expand(sizes[0], -1), rule)


def _view(mask: AttentionMask, size: Any) -> AttentionMask | None:
    """Return a copy for the mask's own shape, otherwise None."""
    return _copy(mask) if tuple(size) == tuple(mask.shape) else None


_aten = torch.ops.aten
#: Operations that return another mask.  A handler returns None for unsupported arguments.
HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _copy,
    _aten.alias.default: _copy,
    _aten.clone.default: _copy,
    _aten.lift_fresh.default: _copy,
    _aten._to_copy.default: _to,
    _aten.slice.Tensor: _slice,
    _aten.expand.default: _expand,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
}
