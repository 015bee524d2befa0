"""A drop-in replacement for `torch.nn.functional.scaled_dot_product_attention`."""

import torch
from torch import Tensor

# Import the function by name, so that it remains torch's own function if a user replaces the
# attribute of `torch.nn.functional` by `sdpa`.
from torch.nn.functional import scaled_dot_product_attention

from flashattn2.attention import flash_attention
from flashattn2.autocast import cast_for_autocast
from flashattn2.explanation import find_torch_reason


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention of `(batch, heads, seq_q, dim)` with torch's signature and alignment.

    Causal attention is aligned at the top left, as in torch: query `i` sees keys 0 to `i`
    (`flash_attention` aligns the last query with the last key).  The `key` and `value` may have
    fewer heads only with `enable_gqa`.

    A call with an `attn_mask`, dropout, other dimensions or another argument that flashattn2 does
    not support runs torch's own function, without an error.  For a mask or dropout,
    `explain(..., attn_mask=..., dropout_p=...)` returns the reason.

    Raises ValueError if `key` and `value` have different numbers of rows.
    """
    if all(isinstance(x, Tensor) for x in (query, key, value)):
        query, key, value = cast_for_autocast(query, key, value)
        _check_lengths(key, value)
    reason = find_torch_reason(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
    # If `is_causal` is not a bool, torch's own function raises its error.
    if reason is not None or not isinstance(is_causal, (bool, torch.SymBool)):
        return scaled_dot_product_attention(
            *(query, key, value, attn_mask, dropout_p, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if not is_causal:
        return flash_attention(query, key, value, scale=scale)
    seq_q, seq_k = query.shape[2], key.shape[2]
    if seq_k > seq_q:
        # No query sees the keys after the last query.
        key, value = key[:, :, :seq_q], value[:, :, :seq_q]
        seq_k = seq_q
    if seq_k == seq_q:
        return flash_attention(query, key, value, is_causal=True, scale=scale)
    return flash_attention(query, key, value, window=(None, seq_q - seq_k), scale=scale)


def _check_lengths(key: Tensor, value: Tensor) -> None:
    """Raise ValueError for a different number of keys and values.

    torch's CPU kernel does not compare them, and would read beyond the shorter tensor.
    """
    is_dense = key.layout == value.layout == torch.strided
    if is_dense and min(key.dim(), value.dim()) >= 2 and key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"expected as many values as keys, got {key.shape[-2]} keys in shape "
            f"{tuple(key.shape)} and {value.shape[-2]} values in shape {tuple(value.shape)}"
        )
