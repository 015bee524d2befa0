"""The public functions: check, choose, run."""

from typing import Literal, TypedDict, Unpack, overload

from torch import Tensor

from flashattn2.autocast import lowered
from flashattn2.dispatch import choose
from flashattn2.function import attention
from flashattn2.problem import Window, check_dense, check_varlen, make_score


class _Options(TypedDict, total=False):
    """What both functions take besides ``return_lse``, which decides the type of the result."""

    is_causal: bool
    scale: float | None
    window: Window
    softcap: float | None
    deterministic: bool
    precision: str | None
    backend: str


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[_Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    precision: str | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention in linear memory.

    ``q`` is ``(batch, heads, seq_q, dim)``, ``k`` and ``v`` are ``(batch, kv_heads, seq_k, dim)``
    with ``heads % kv_heads == 0`` (grouped-query attention); or all are ``(batch, seq, dim)``.
    The result has the shape of ``q``; with ``return_lse`` also the log-sum-exp of each row, in
    float32 (float64 for float64), through which gradients flow too.

    - ``is_causal``: query ``i`` sees keys up to ``i + seq_k - seq_q`` (bottom-right aligned).  A
      row that sees no key gives zeros, a log-sum-exp of -inf and no gradient.
    - ``scale``: factor of the scores, ``dim ** -0.5`` by default.
    - ``window``: ``(left, right)``, how many keys beyond its own position a query sees on each
      side; None for no bound; an int for both sides.
    - ``softcap``: scores become ``softcap * tanh(score / softcap)``.
    - ``deterministic``: False lets the Triton backward of half precision add dQ by atomics, in one
      pass and in any order.
    - ``precision``: of float32 matrix products in Triton: "ieee", "tf32x3" or "tf32"; None follows
      `torch.get_float32_matmul_precision`, where "highest" is ieee and anything else tf32.  A
      kernel that has no tile for a head dim in that precision runs in ieee, and `explain` says so.
    - ``backend``: "triton", "aten" (torch's CPU kernel), "torch" (tiled PyTorch), or "auto".

    Raises ValueError for input that cannot be right, or that the named backend cannot take.
    """
    check_dense(q, k, v)
    q, k, v = lowered(q, k, v)
    score = make_score(q.shape[-1], is_causal, scale, window, softcap)
    heads_missing = q.dim() == 3
    if heads_missing:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    method, _ = choose(
        q, k, score, backend=backend, precision=precision, deterministic=deterministic
    )
    out, lse = attention(q, k, v, None, None, score, method)
    if heads_missing:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return (out, lse) if return_lse else out


@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    precision: str | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` over sequences of any lengths, packed without padding.

    ``q`` is ``(total_q, heads, dim)``, ``k`` and ``v`` are ``(total_k, kv_heads, dim)``; sequence n
    is the rows ``cu_seqlens[n] .. cu_seqlens[n + 1] - 1`` (int32, on the same device).  The
    log-sum-exp is ``(heads, total_q)``.  The Triton backend never waits for the GPU.
    """
    check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
    q, k, v = lowered(q, k, v)
    score = make_score(q.shape[-1], is_causal, scale, window, softcap)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    method, _ = choose(
        q, k, score, backend=backend, precision=precision, deterministic=deterministic, packed=True
    )
    out, lse = attention(q, k, v, cu_seqlens_q, cu_seqlens_k, score, method)
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out
