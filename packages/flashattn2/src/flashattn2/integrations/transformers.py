"""Attention for the models of transformers: ``attn_implementation="linear_memory"``.

Notable: a model says what its queries may see twice, as options of the attention function and as a
mask.  Only the mask is the whole truth, and it is followed: `keys_of` evaluates it tile by tile and
either finds the band, the packed sequences and the padding that make it, exactly, or raises an
error.  Padding is taken out before attention, so nothing is spent on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashattn2.attention import flash_attention, flash_attention_varlen

# Rows of the mask that are evaluated at a time: memory stays linear in the sequence.
ROWS = 256


def register(name: str = "linear_memory") -> None:
    """Make ``attn_implementation=name`` known to transformers; needs version 5 or newer.

    A name with "flash" in it is taken there for another package, whose arguments differ.
    """
    if "flash" in name:
        raise ValueError(f"transformers takes {name!r} for the package flash-attn; give another")
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, keys_of)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None,
    s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: ``(batch, heads, seq, dim)`` to ``(batch, seq, heads, dim)``."""
    if dropout:
        raise ValueError(f"attention dropout is {dropout}; flashattn2 has none: set it to 0.0")
    for option in ("position_bias", "cache", "head_mask"):
        if others.get(option) is not None:
            raise ValueError(f"flashattn2 takes no {option}; use another attn_implementation")
    if others.get("output_attentions"):
        raise ValueError('flashattn2 keeps no attention weights; use attn_implementation="eager"')
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or None, "sinks": s_aux}
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        left = None if sliding_window is None else sliding_window - 1
        window = (left, None if causal else left)
        out = flash_attention(query, key, value, is_causal=causal, window=window, **options)
        return _rows_first(out), None
    keys = getattr(attention_mask, "flashattn2", None)
    if not isinstance(keys, Keys):
        raise ValueError(
            f"a mask of shape {tuple(attention_mask.shape)} was not made by flashattn2's own mask "
            "function, and is not read; give padding as a mask of shape (batch, seq), or use "
            'attn_implementation="sdpa"'
        )
    key, value = key[:, :, : keys.count], value[:, :, : keys.count]
    options["window"] = (keys.left, keys.right)
    if keys.plain:
        out = flash_attention(query, key, value, **options)
        return _rows_first(out), None
    return _packed(query, key, value, keys.packing(query.shape[2]), options), None


@dataclass(frozen=True)
class Packing:
    """Which rows of ``(batch · seq)`` are kept, and where each sequence of them begins."""

    queries: Tensor
    keys: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


class Keys:
    """What a mask says: a band, and for each key the sequence that it belongs to, 0 for none."""

    def __init__(
        self, sequence: Tensor, left: int | None, right: int | None, plain: bool, each_query: bool
    ) -> None:
        self.sequence, self.left, self.right, self.plain = sequence, left, right, plain
        self.each_query = each_query
        self.count = sequence.shape[1]
        self._packing: dict[int, Packing] = {}

    def packing(self, seq_q: int) -> Packing:
        """The rows without padding, found once for all layers."""
        if seq_q not in self._packing:
            self._packing[seq_q] = self._pack(seq_q)
        return self._packing[seq_q]

    def _pack(self, seq_q: int) -> Packing:
        batch = len(self.sequence)
        most = int(self.sequence.amax()) + 1
        # Every sequence of every batch has a number of its own.
        number = self.sequence + most * torch.arange(batch, device=self.sequence.device)[:, None]
        number = number.masked_fill(self.sequence == 0, -1)
        # Queries stand at the last keys; where all see all, none of them is told apart.
        of_query = number[:, -seq_q:]
        if self.each_query:
            first = number.amax(1, keepdim=True)
            of_query = first.expand(batch, seq_q)
        kept_k, kept_q = (x.flatten().ge(0).nonzero().squeeze(1) for x in (number, of_query))
        sequences, counts_k = number.flatten()[kept_k].unique(return_counts=True)
        place = torch.searchsorted(sequences, of_query.flatten()[kept_q])
        counts_q = torch.bincount(place, minlength=len(sequences))
        bounds = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (counts_q, counts_k)]
        return Packing(kept_q, kept_k, *bounds)


def _packed(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: dict[str, Any]) -> Tensor:
    """Attention without the padding, ``(batch, seq, heads, dim)``; zeros where it was."""
    batch, heads, seq_q, _ = q.shape
    out = q.new_zeros((batch * seq_q, heads, v.shape[-1]))
    if len(packing.cu_seqlens_q) > 1:
        q, k, v = (
            x.transpose(1, 2).flatten(0, 1)[rows]
            for x, rows in ((q, packing.queries), (k, packing.keys), (v, packing.keys))
        )
        rows = flash_attention_varlen(
            q, k, v, packing.cu_seqlens_q, packing.cu_seqlens_k, **options
        )
        out = out.to(rows.dtype).index_copy(0, packing.queries, rows)
    return out.view(batch, seq_q, heads, v.shape[-1])


def _rows_first(out: Tensor) -> Tensor:
    return out.transpose(1, 2).contiguous()


def keys_of(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0, mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None, use_vmap: bool = False,
    device: torch.device | str = "cpu", **_: Any,
) -> Tensor:  # fmt: skip
    """The mask function for transformers: a tensor that carries `Keys`.

    Raises ValueError for a mask that is no band over packed or padded sequences.
    """
    from transformers import masking_utils

    first_query, first_key = int(q_offset), int(kv_offset)
    function = mask_function or masking_utils.causal_mask_function
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, first_key)
    # Keys behind the last query are room that a cache has left.
    ahead = first_query - first_key
    count = min(kv_length, ahead + q_length)
    sequence = torch.ones((batch_size, kv_length), dtype=torch.int32, device=device)
    left: int | None = None
    right: int | None = None
    if function is masking_utils.bidirectional_mask_function:
        count = kv_length
    elif function is masking_utils.causal_mask_function:
        right = 0
    else:

        def rows(first: int, last: int) -> Tensor:
            mask: Any = masking_utils.sdpa_mask(
                batch_size, last - first, kv_length, first_query + first, first_key, function,
                allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
            )  # fmt: skip
            seen: Tensor = mask[:, 0]
            return seen

        sequence, left, right = _read(rows, batch_size, q_length, kv_length, ahead, sequence)
        if left is None and right is None:
            count = kv_length
    each_query = left is None and right is None and int(sequence.amax()) <= 1
    if (left, right) != (None, None) and ahead + q_length > kv_length:
        raise ValueError(
            f"{q_length} queries from position {first_query} on stand behind the {kv_length} keys "
            f"from {first_key} on; flashattn2 needs the last query at one of them"
        )
    sequence = sequence[:, :count]
    plain = bool((sequence == 1).all())
    if padding is not None:
        # It is indexed by position, as the mask function is.
        kept = padding[:, first_key : first_key + count].to(sequence.device)
        if not kept.all():
            _check_holes(kept, left, right)
            sequence, plain = sequence * kept, False
    keys = Keys(sequence, left, right, plain, each_query)
    # Of four dimensions it is a mask that is ready, and comes back unchanged if it is given again.
    mask = sequence[:, None, None]
    mask.flashattn2 = keys  # type: ignore[attr-defined]
    return mask


def _read(
    rows: Callable[[int, int], Tensor],
    batch: int,
    q_length: int,
    kv_length: int,
    ahead: int,
    sequence: Tensor,
) -> tuple[Tensor, int | None, int | None]:
    """The packed sequences and the band that make this mask, and nothing else; ValueError if none.

    First what must hold is found: a sequence ends where neighbors do not see each other, and the
    band reaches as far as any query sees in its sequence.  Then every entry is compared.
    """
    starts = range(0, q_length, ROWS)
    tiles = [(first, min(first + ROWS, q_length)) for first in starts]
    keys = torch.arange(kv_length, device=sequence.device)
    if ahead == 0 and q_length == kv_length:
        before = torch.ones((batch, kv_length), dtype=torch.int32, device=sequence.device)
        for first, last in tiles:
            mask = rows(first, last)
            at = torch.arange(max(first, 1), last, device=sequence.device)
            before[:, at] *= ~mask[:, at - first, at - 1]
            at = torch.arange(first, min(last, kv_length - 1), device=sequence.device)
            before[:, at + 1] *= ~mask[:, at - first, at + 1]
        sequence = before.cumsum(1, dtype=torch.int32)
    reach = [-1, -1]
    for first, last in tiles:
        distance = torch.arange(first, last, device=keys.device)[:, None] + ahead - keys
        far = torch.where(rows(first, last), distance, 0)
        reach = [max(reach[0], int(far.amax())), max(reach[1], int((-far).amax()))]
    for first, last in tiles:
        at = torch.arange(first, last, device=keys.device)
        distance = at[:, None] + ahead - keys
        band = (distance <= reach[0]) & (-distance <= reach[1])
        if ahead == 0 and q_length == kv_length:
            band = band & (sequence[:, at, None] == sequence[:, None, :])
        if not torch.equal(rows(first, last), band.expand(batch, -1, -1)):
            raise ValueError(
                "this mask is no band (causal, sliding window) over packed sequences, and "
                'flashattn2 would not follow it; use attn_implementation="sdpa"'
            )
    # A bound that no query reaches is none.
    longest = ahead + q_length
    if ahead == 0 and q_length == kv_length:
        longest = max(int(torch.bincount(row).amax()) for row in sequence)
    left = None if reach[0] >= longest - 1 else reach[0]
    right = None if reach[1] >= kv_length - 1 - ahead else reach[1]
    return sequence, left, right


def _check_holes(kept: Tensor, left: int | None, right: int | None) -> None:
    """Without its padding a sequence is shorter: a window would reach past a hole in its middle."""
    if left is None and right in (None, 0):
        return
    edges = kept.int().diff(dim=1).abs().sum(1)
    whole = (edges <= 1) | ((edges == 2) & ~kept[:, 0] & ~kept[:, -1])
    if not whole.all():
        raise ValueError(
            "the padding mask has holes between tokens, and the attention a window, which would "
            'reach farther without them; use attn_implementation="sdpa"'
        )
