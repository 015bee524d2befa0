"""A drop-in replacement for `torch.nn.functional.scaled_dot_product_attention`."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

# Import the function by name, so that it remains torch's own function if a user replaces
# `torch.nn.functional.scaled_dot_product_attention` with `sdpa`.
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flashattn2.attention import flash_attention
from flashattn2.autocast import cast_for_autocast
from flashattn2.compilation import is_recorded
from flashattn2.spec import FLOAT32_RANGE
from flashattn2.validation import DTYPES, is_jit_tracing

BOOLS = (bool, torch.SymBool)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention of `(batch, heads, seq_q, dim)` with torch's signature and alignment.

    Causal attention is aligned at the top left, as in torch: query `i` sees keys 0 to `i`
    (`flash_attention` aligns the last query with the last key).  The `key` and `value` may have
    fewer heads only with `enable_gqa`.

    A call with an `attn_mask`, dropout, other dimensions, tensor subclasses such as `DTensor`, or
    another argument that flashattn2 does not support returns the result of torch's own function.
    Calls within torch's `context_parallel` run its function, which gathers the keys of all ranks.
    Calls under forward-mode AD and under transforms of `torch.func`, such as `grad`, also run
    torch's function.
    For a mask or dropout, `explain(..., attn_mask=..., dropout_p=...)` returns the reason.

    Raise ValueError if `key` and `value` have different numbers of rows.
    """
    if all(isinstance(x, Tensor) for x in (query, key, value)):
        query, key, value = cast_for_autocast(query, key, value)
        _check_lengths(key, value)
    torch_sdpa = _get_torch_sdpa(query, key, value)
    is_context_parallel = torch_sdpa is not scaled_dot_product_attention
    has_mask_or_dropout = attn_mask is not None or dropout_p != 0.0
    # If `is_causal` or `enable_gqa` is not a bool, torch's own function raises its error.
    is_bool = isinstance(is_causal, BOOLS) and isinstance(enable_gqa, BOOLS)
    needs_torch = is_context_parallel or has_mask_or_dropout or not is_bool
    if needs_torch or not _is_supported(query, key, value, scale, enable_gqa):
        return torch_sdpa(
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


def _get_torch_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Callable[..., Tensor]:
    """Return torch's function, or the function by which `context_parallel` replaces it.

    That function passes `DTensor` inputs to the function that it replaced, which may be `sdpa`.
    """
    current = torch.nn.functional.scaled_dot_product_attention
    if current is scaled_dot_product_attention:
        return current
    is_of_torch = str(getattr(current, "__module__", "")).startswith("torch.distributed.")
    is_inside = any(map(is_traceable_wrapper_subclass, (query, key, value)))
    return current if is_of_torch and not is_inside else scaled_dot_product_attention


def _is_supported(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, enable_gqa: bool
) -> bool:
    """Return True if `flash_attention` supports the tensors and the scale of a call.

    A trace would be valid only for the lengths of its example, so traced calls run torch's own
    function.  Calls under forward-mode AD and under transforms of `torch.func` run it too, because
    it supports more of them.
    """
    if is_jit_tracing() or is_recorded() or not _is_supported_scale(scale):
        return False
    if forward_ad._current_level >= 0 or _are_functorch_transforms_active():
        return False
    for x in (query, key, value):
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.dim() != 4:
            return False
        if is_traceable_wrapper_subclass(x):
            # A subclass such as `DTensor` may have no rule for the operators of flashattn2.
            return False
        if 0 in x.shape or x.dtype not in DTYPES:
            return False
        if x.dtype != query.dtype or x.device != query.device:
            return False
    heads, kv_heads = query.shape[1], key.shape[1]
    are_heads_valid = heads % kv_heads == 0 if enable_gqa else heads == kv_heads
    return are_heads_valid and query.shape[0] == key.shape[0] and key.shape[:-1] == value.shape[:-1]


def _is_supported_scale(scale: float | None) -> bool:
    """Return True if `flash_attention` supports the scale."""
    if scale is None:
        return True
    is_number = isinstance(scale, (int, float, torch.SymInt, torch.SymFloat))
    if not is_number or isinstance(scale, bool):
        return False
    low, high = FLOAT32_RANGE
    return bool(low <= scale <= high)


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
