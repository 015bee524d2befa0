"""Attention for the models of transformers: ``attn_implementation="linear_memory"``.

A model describes twice what its queries may see: by options of the attention function and by a
mask.  Only the mask is complete, and it alone is followed: `keys_of` evaluates the mask function
tile by tile and either finds the band, the packed sequences and the padding that make the mask,
exactly, or raises an error.  Padding is removed before attention, so no time is spent on it.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashattn2.attention import flash_attention, flash_attention_varlen
from flashattn2.autocast import cast_for_autocast
from flashattn2.integrations.masks import AttentionMask, Packing, Rule

# Rows of the mask that are evaluated at a time: memory stays linear in the sequence.
ROWS = 256
# Options that change the result and that this attention does not have.
REFUSED = ("position_bias", "cache", "head_mask", "indices", "block_indices", "score_mod")
# Models whose recurrent layers carry the attention of left padding into the tokens behind it.
READS_PADDING = ("RecurrentGemmaConfig",)
# Tensors that models pass along and that no attention function needs.
IGNORED = ("num_items_in_batch", "cache_position", "seq_idx", "max_length_q", "max_length_k")


def register(name: str = "linear_memory") -> None:
    """Make ``attn_implementation=name`` known to transformers; needs version 5 or newer.

    transformers calls the package flash-attn for every name that contains "flash".
    """
    if "flash" in name:
        raise ValueError(
            f"expected a name without 'flash', got {name!r}, which transformers takes for the "
            "package flash-attn; choose another"
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, keys_of)
    _refuse_tables_of_classes(name)


def _refuse_tables_of_classes(name: str) -> None:
    """Let models that look up their attention in a table of classes raise an error with the reason.

    Falcon and GPT-J are such models: they would raise ``KeyError: 'linear_memory'``.
    """
    from transformers import PreTrainedModel

    choose: Any = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(choose)
    def checked(self: Any, requested_attention: str | None, *others: Any, **options: Any) -> Any:
        module = vars(sys.modules[type(self).__module__])
        tables = [x for key, x in module.items() if key.endswith("ATTENTION_CLASSES")]
        if requested_attention == name and any(name not in table for table in tables):
            raise ValueError(
                f"{type(self).__name__} takes its attention from a table of its own classes, not "
                f'from the attention function {name!r}; use attn_implementation="eager"'
            )
        return choose(self, requested_attention, *others, **options)

    PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None,
    s_aux: Tensor | None = None, position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend as transformers asks: ``(batch, heads, seq, dim)`` to ``(batch, seq, heads, dim)``."""
    if dropout:
        raise ValueError(
            f"expected no attention dropout, got {dropout}; set it to 0.0 in the configuration"
        )
    _check_options(others)
    # Under autocast, a norm of the queries may leave q, k and v in different dtypes.
    query, key, value = cast_for_autocast(query, key, value)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or None, "sinks": s_aux}
    mask = attention_mask
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        left = None if sliding_window is None else sliding_window - 1
        right = 0 if causal else left
        if cu_seq_lens_q is None and cu_seq_lens_k is None:
            out = flash_attention(query, key, value, window=(left, right), **options)
            return _rows_first(out), None
        batch, seq_q, seq_k = len(query), query.shape[2], key.shape[2]
        sequence = torch.ones((batch, seq_k), dtype=torch.int32, device=query.device)
        mask = AttentionMask(sequence, Rule(seq_q, seq_k - seq_q, left, right, True))
    if not isinstance(mask, AttentionMask):
        raise ValueError(
            f"a mask of shape {tuple(mask.shape)} was not made by flashattn2's own mask "
            "function, and is not read; give padding as a mask of shape (batch, seq), or use "
            'attn_implementation="sdpa"'
        )
    return _attend(query, key, value, mask, position_ids, cu_seq_lens_q, cu_seq_lens_k, options)


def _check_options(others: dict[str, Any]) -> None:
    """Raise ValueError for options of the attention function that would change its result."""
    for option, given in others.items():
        is_unknown = isinstance(given, Tensor) and option not in IGNORED
        if given is not None and (option in REFUSED or is_unknown):
            raise ValueError(f"flashattn2 takes no {option}; use another attn_implementation")
    if others.get("output_attentions"):
        raise ValueError('flashattn2 keeps no attention weights; use attn_implementation="eager"')


@torch.compiler.disable(reason="a mask's values decide")  # type: ignore[untyped-decorator]
def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, position_ids: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: dict[str, Any],
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention under a mask of `keys_of`."""
    if mask.rule.refusal:
        raise ValueError(f'{mask.rule.refusal}; use attn_implementation="sdpa"')
    batch, heads, seq_q, _ = query.shape
    expected = (batch, heads, seq_q, key.shape[2])
    if len(mask) == 1:
        mask = mask.expand(batch, -1, -1, -1)  # type: ignore[assignment]
    if tuple(mask.shape) not in (expected, (batch, 1, *expected[2:])):
        raise ValueError(
            f"expected a mask of shape {expected}, or with one head, for queries "
            f"{tuple(query.shape)} and keys {tuple(key.shape)}, got {tuple(mask.shape)}"
        )
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        if (
            cu_seqlens_q is None
            or cu_seqlens_k is None
            or not torch.equal(cu_seqlens_q, cu_seqlens_k)
        ):
            raise ValueError(
                f"cu_seq_lens_q is {cu_seqlens_q} and cu_seq_lens_k {cu_seqlens_k}; expected the "
                "same boundaries twice"
            )
        mask = mask.split_at(cu_seqlens_q)
    if position_ids is not None:
        mask.check_positions(position_ids)
    count, left, right = mask.span()
    key, value = key[:, :, :count], value[:, :, :count]
    options["window"] = (left, right)
    if mask.rule.is_plain:
        return _rows_first(flash_attention(query, key, value, **options)), None
    return _packed(query, key, value, mask.packing(), options), None


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


@torch.compiler.disable(reason="a mask's values decide")  # type: ignore[untyped-decorator]
def keys_of(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0, mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None, use_vmap: bool = False,
    device: torch.device | str = "cpu", config: Any = None, **_: Any,
) -> AttentionMask:  # fmt: skip
    """Return the mask that transformers asks for, as a description of what it hides.

    Attention under a mask that is not a band over packed or padded sequences raises ValueError.
    """
    from transformers import masking_utils

    first_query, first_key = int(q_offset), int(kv_offset)
    function = mask_function or masking_utils.causal_mask_function
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, first_key)
    ahead = first_query - first_key
    ones = torch.ones((batch_size, kv_length), dtype=torch.int32, device=device)
    sequence = ones
    left: int | None = None
    right: int | None = None
    refusal = ""
    if function is masking_utils.causal_mask_function:
        right = 0
    elif function is not masking_utils.bidirectional_mask_function:

        def rows(first: int, last: int) -> Tensor:
            mask: Any = masking_utils.sdpa_mask(
                batch_size, last - first, kv_length, first_query + first, first_key, function,
                allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
            )  # fmt: skip
            seen: Tensor = mask[:, 0]
            return seen

        found = _read(rows, batch_size, q_length, kv_length, ahead, ones)
        if found is None:
            refusal = (
                "this mask is not a band (causal, sliding window) over packed sequences, and "
                "flashattn2 would not follow it"
            )
        else:
            sequence, left, right = found
    is_packed = bool((sequence > 1).any())
    is_plain = not is_packed
    kind = type(config).__name__
    if padding is not None:
        # It is indexed by position, as the mask function is.
        kept = padding[:, first_key : first_key + kv_length].to(sequence.device)
        if not kept.all():
            refusal = refusal or _why_not_padding(kept, left, right, kind)
            sequence, is_plain = sequence * kept, False
    owner = "this model" if config is None else f"the model of {kind}"
    rule = Rule(q_length, ahead, left, right, is_plain, is_packed, owner, refusal)
    return AttentionMask(sequence, rule)


def _read(
    rows: Callable[[int, int], Tensor],
    batch: int,
    q_length: int,
    kv_length: int,
    ahead: int,
    sequence: Tensor,
) -> tuple[Tensor, int | None, int | None] | None:
    """Return the packed sequences and the band that make this mask exactly, or None.

    Only one candidate is possible: a sequence ends where neighbors do not see each other, and the
    band reaches as far as any query sees.  Every entry of the mask is then compared with it.
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
            return None
    # A bound that no query reaches is none.
    longest = ahead + q_length
    if ahead == 0 and q_length == kv_length:
        longest = max(int(torch.bincount(row).amax()) for row in sequence)
    left = None if reach[0] >= longest - 1 else reach[0]
    right = None if reach[1] >= kv_length - 1 - ahead else reach[1]
    return sequence, left, right


def _why_not_padding(kept: Tensor, left: int | None, right: int | None, kind: str) -> str:
    """Return why this padding, 0 in ``kept``, cannot be removed; an empty string if it can."""
    if kind in READS_PADDING and (kept.int().diff(dim=1) > 0).any():
        return f"the layers of {kind} that are not attention read the padding before a sequence"
    if left is None and right in (None, 0):
        return ""
    # Without its padding a sequence is shorter: a window would reach past a hole in its middle.
    edges = kept.int().diff(dim=1).abs().sum(1)
    whole = (edges <= 1) | ((edges == 2) & ~kept[:, 0] & ~kept[:, -1])
    if whole.all():
        return ""
    return (
        "the padding mask has holes between tokens, and the attention a window, which would reach "
        "farther without them"
    )
