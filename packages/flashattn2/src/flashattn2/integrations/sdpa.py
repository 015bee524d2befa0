"""A drop-in for `torch.nn.functional.scaled_dot_product_attention`: its signature and alignment."""

import math

import torch
from torch import Tensor

from flashattn2.attention import flash_attention
from flashattn2.problem import check_tensors


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
    """Attention of ``(..., heads, seq_q, dim)``, as torch's own function of these arguments.

    Causal attention is aligned at the top left, as there: query ``i`` sees keys ``0 .. i``
    (`flash_attention` aligns the last query with the last key).  Leading dimensions broadcast, and
    ``key`` and ``value`` may have fewer heads only with ``enable_gqa``.

    Raises ValueError for an ``attn_mask`` or dropout: attention here takes neither.
    """
    check_tensors(query=query, key=key, value=value)
    if attn_mask is not None:
        raise ValueError(
            "attn_mask is not None, and no mask is read here: use is_causal, the window of "
            "flash_attention, or flash_attention_varlen for padding"
        )
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}, and there is no dropout here; give 0.0")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; give (..., heads, seq, dim)")
    if isinstance(scale, (int, float)) and scale <= 0:
        # Scores are made with a positive scale; the sign, or nought, is the queries'.
        query, scale = (-query, -scale) if scale else (query * 0.0, 1.0)
    plain = query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0]
    if not plain or (query.shape[1] != key.shape[1] and not enable_gqa):
        return _broadcast(query, key, value, is_causal, scale, enable_gqa)
    if not is_causal:
        return flash_attention(query, key, value, scale=scale)
    seq_q, seq_k = query.shape[2], key.shape[2]
    if seq_k > seq_q:
        # Nobody sees the keys beyond the last query.
        key, value, seq_k = key[:, :, :seq_q], value[:, :, :seq_q], seq_q
    if seq_k == seq_q:
        return flash_attention(query, key, value, is_causal=True, scale=scale)
    return flash_attention(query, key, value, window=(None, seq_q - seq_k), scale=scale)


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    """Any leading dimensions, as ``(batch, heads, seq, dim)`` and back."""
    tensors = (query, key, value)
    if gqa:
        if min(x.dim() for x in tensors) < 3:
            raise ValueError("enable_gqa needs (..., heads, seq, dim): at least three dimensions")
        leading = _common(*(x.shape[:-3] for x in tensors))
        shapes = [(*leading, *x.shape[-3:]) for x in tensors]
    else:
        leading = _common(*(x.shape[:-2] for x in tensors))
        shapes = [(*leading, *x.shape[-2:]) for x in tensors]
    # (batch, heads, seq, dim): heads are the last of the leading dimensions, if there are any.
    q, k, v = (
        x.expand(shape).reshape(math.prod(shape[:-3]), *((1,) * (3 - len(shape))), *shape[-3:])
        for x, shape in zip(tensors, shapes, strict=True)
    )
    out = sdpa(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
    return out.reshape(*shapes[0][:-1], value.shape[-1])


def _common(*shapes: torch.Size) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        raise ValueError(
            f"query, key and value have leading dimensions {', '.join(map(str, shapes))}; they "
            "must broadcast to each other (enable_gqa=True lets heads differ)"
        ) from error
