"""Attention for the models of transformers: `attn_implementation="linear_memory"`.

A model describes the visible keys twice: by options of the attention function and by a mask.  Only
the mask is complete, so attention follows the mask alone: `make_mask` finds the band, the packed
sequences and the padding that equal the mask exactly, or attention raises an error.  Padding is
removed before attention.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashattn2.attention import flash_attention, flash_attention_varlen
from flashattn2.autocast import cast_for_autocast
from flashattn2.integrations.mask_functions import Grid, Pattern, find_pattern
from flashattn2.integrations.masks import AttentionMask, Packing, Rule

#: The registered name.  transformers calls the package flash-attn for a name that contains "flash".
NAME = "linear_memory"
#: Options that change the result and that this attention does not support.
REFUSED = ("position_bias", "cache", "head_mask", "indices", "block_indices", "score_mod")
#: Configurations whose recurrent layers carry the output of left padding into the tokens after it.
READS_PADDING = ("RecurrentGemmaConfig",)
#: Names of tensors that models pass to attention functions, which do not need them.
IGNORED = ("num_items_in_batch", "cache_position", "seq_idx")


def register() -> None:
    """Register `attn_implementation="linear_memory"` with transformers 5 or newer."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
    _refuse_tables_of_classes()


# Without the cache, a second call would wrap the method of transformers again.
@functools.cache
def _refuse_tables_of_classes() -> None:
    """Make models that look up their attention in a table of classes raise ValueError.

    Otherwise such models, for example Falcon and GPT-J, would raise `KeyError: 'linear_memory'`.
    """
    from transformers import PreTrainedModel

    choose: Any = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(choose)
    def checked(self: Any, requested_attention: str | None, *others: Any, **options: Any) -> Any:
        module = vars(sys.modules[type(self).__module__])
        tables = [x for key, x in module.items() if key.endswith("ATTENTION_CLASSES")]
        if requested_attention == NAME and any(NAME not in table for table in tables):
            raise ValueError(
                f"{type(self).__name__} takes its attention from a table of its own classes, not "
                f'from the attention function {NAME!r}; use attn_implementation="eager"'
            )
        return choose(self, requested_attention, *others, **options)

    PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention of `(batch, heads, seq, dim)` as `(batch, seq, heads, dim)`, and None.

    The arguments are those of the attention functions of transformers; `s_aux` are sinks.  None
    stands for the attention weights, which are not computed.

    Raises:
        ValueError: If the mask was not made by `make_mask` or is not supported, and for dropout and
            unsupported options.  The same error is raised if the mask is missing and the visible
            keys are undefined.
    """
    if dropout:
        raise ValueError(
            f"expected no attention dropout, got {dropout}; set it to 0.0 in the configuration"
        )
    _check_options(module, others)
    # Under autocast, a norm of the queries may leave q, k and v in different dtypes.
    query, key, value = cast_for_autocast(query, key, value)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or None, "sinks": s_aux}
    if attention_mask is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", None)
        _check_missing_mask(module, query, key, is_causal, sliding_window)
        out = flash_attention(query, key, value, is_causal=bool(is_causal), **options)
        return out.transpose(1, 2).contiguous(), None
    if not isinstance(attention_mask, AttentionMask):
        raise ValueError(
            f"expected {type(module).__name__} to pass a mask made by flashattn2, got a tensor of "
            f"shape {tuple(attention_mask.shape)}; pass padding as a mask of shape (batch, seq). "
            "flashattn2 supports no other mask tensors: for one that you or the model make, use "
            'attn_implementation="eager" or "sdpa"'
        )
    return _attend(query, key, value, attention_mask, position_ids, options)


def _check_missing_mask(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    is_causal: bool | None,
    sliding_window: int | None,
) -> None:
    """Raise ValueError if a call without a mask does not define which keys the queries see.

    For such a call, transformers' own attention functions disagree: "eager" shows every key, and
    the other functions may apply the window, or a causal mask with either alignment.
    """
    seq_q, seq_k = query.shape[2], key.shape[2]
    is_defined = seq_q == 1 or is_causal is False or (is_causal and seq_q == seq_k)
    if not is_defined or sliding_window is not None:
        raise ValueError(
            f"expected a mask for {seq_q} queries and {seq_k} keys of {type(module).__name__} with "
            f"is_causal {is_causal} and sliding_window {sliding_window}, got None, which does not "
            'define the visible keys; pass a mask, or use attn_implementation="eager"'
        )


def _check_options(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Raise ValueError for options of the attention function that would change its result."""
    if any(others.get(name) is not None for name in ("cu_seq_lens_q", "cu_seq_lens_k")):
        raise ValueError(
            "expected packed sequences without cu_seq_lens, got cu_seq_lens_q or cu_seq_lens_k; "
            "leave them out (return_flash_attn_kwargs=False) and pass position_ids with "
            "use_cache=False"
        )
    for option, value in others.items():
        is_unknown = isinstance(value, Tensor) and option not in IGNORED
        if value is not None and (option in REFUSED or is_unknown):
            raise ValueError(
                f"flashattn2 does not support {option} of {type(module).__name__}; use another "
                "attn_implementation"
            )
    if others.get("output_attentions"):
        raise ValueError('flashattn2 returns no attention weights; use attn_implementation="eager"')


@torch.compiler.disable(reason="the code branches on values of the mask")  # type: ignore[untyped-decorator]
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    position_ids: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """Return the attention under a mask of `make_mask`; raise ValueError if it is not supported."""
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
    if position_ids is not None:
        mask.check_positions(position_ids)
    count, left, right = mask.compute_span()
    key, value = key[:, :, :count], value[:, :, :count]
    options["window"] = (left, right)
    if mask.rule.is_dense:
        out = flash_attention(query, key, value, **options)
        return out.transpose(1, 2).contiguous(), None
    return _attend_packed(query, key, value, mask.get_packing(), options), None


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: dict[str, Any]
) -> Tensor:
    """Return the attention of all rows, `(batch, seq, heads, dim)`, with zeros for padding."""
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


@torch.compiler.disable(reason="the code branches on values of the mask")  # type: ignore[untyped-decorator]
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> AttentionMask:
    """Return the mask that transformers requests, as a description of the visible keys.

    If the mask is not a band over packed or padded sequences, the result contains the reason, and
    attention under it raises ValueError.
    """
    from transformers import masking_utils

    grid = Grid(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), device)
    function = mask_function or masking_utils.causal_mask_function
    pattern = Pattern(right=0)
    refusal = ""
    if function is not masking_utils.causal_mask_function:
        found_pattern = find_pattern(function, grid)
        if found_pattern is None:
            refusal = (
                f"the mask function {getattr(function, '__qualname__', function)} is not a causal, "
                "bidirectional, sliding, chunked or packed mask of transformers, or combines them "
                "in a way that flashattn2 does not support, such as packed sequences with chunks"
            )
        pattern = found_pattern or Pattern()
    sequence = pattern.sequence
    if sequence is None:
        sequence = torch.ones((batch_size, kv_length), dtype=torch.int32, device=device)
    is_packed = bool((sequence > 1).any())
    has_padding = False
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, grid.first_key)
    if padding is not None:
        # The padding mask is indexed by position.
        is_token = padding[:, grid.first_key : grid.first_key + kv_length].to(sequence.device)
        has_padding = not is_token.all()
        if has_padding:
            refusal = refusal or _find_padding_obstacle(is_token, pattern, type(config).__name__)
            sequence = sequence * is_token
    rule = Rule(
        seq_q=q_length,
        first=grid.shift,
        left=pattern.left,
        right=pattern.right,
        is_dense=not is_packed and not has_padding,
        is_packed=is_packed,
        owner="this model" if config is None else f"the model of {type(config).__name__}",
        refusal=refusal,
    )
    return AttentionMask(sequence, rule)


def _find_padding_obstacle(is_token: Tensor, pattern: Pattern, config: str) -> str:
    """Return the reason why this padding cannot be removed, or an empty string if it can."""
    steps = is_token.int().diff(dim=1)
    if config in READS_PADDING and (steps > 0).any():
        return f"the layers of {config} that are not attention read the padding before a sequence"
    if pattern.left is None and pattern.right in (None, 0):
        return ""
    # Removing padding in the middle of a sequence would let a window extend over the hole.
    edges = steps.abs().sum(1)
    is_padded_outside = (edges == 2) & ~is_token[:, 0].bool() & ~is_token[:, -1].bool()
    if ((edges <= 1) | is_padded_outside).all():
        return ""
    return (
        "the padding mask has holes between tokens, and the attention has a window that would "
        "reach farther without the holes"
    )
