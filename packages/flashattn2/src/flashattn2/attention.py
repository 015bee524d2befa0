"""The public functions: check, choose, run."""

from collections.abc import Hashable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from flashattn2 import aten
from flashattn2.autocast import lowered
from flashattn2.dispatch import OF_TRITON, Method, choose
from flashattn2.function import attention, is_first_order, kernel_attention, with_sinks
from flashattn2.problem import (
    UNBOUNDED,
    Score,
    Window,
    check_dense,
    check_sinks,
    check_varlen,
    make_score,
)


class Plan(NamedTuple):
    """What input of one signature becomes, once it was checked."""

    score: Score
    method: Method
    # Whether a call is nothing but torch's CPU kernel, if rows have no gaps.
    kernel: bool


# A subclass may answer anything.
PLAIN = (Tensor, torch.nn.Parameter)
PLANS: dict[Hashable, Plan] = {}
MOST_PLANS = 1024


def recall(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]
) -> tuple[Hashable | None, Plan | None]:
    """All that the checks and the choice depend on, and the plan of input that agreed in it.

    No key where it is not worth a look, as in a compiled graph, which is checked but once.
    """
    # Behind a kernel that has filled the caches, each thing that is asked here shows.
    if is_dynamo_compiling() or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        return None, None
    if q.is_cpu and k.is_cpu and v.is_cpu:
        device, place = "cpu", None
    elif q.is_cuda:
        device = "cuda"
        place = (q.device, k.device, v.device, torch.get_float32_matmul_precision())
    else:
        return None, None
    if is_autocast_enabled(device):
        return None, None
    layouts = q.layout, k.layout, v.layout
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, layouts, place, options)
    try:
        return key, PLANS.get(key)
    except TypeError:
        # An option that is no key, such as a list.
        return None, None


def remember(key: Hashable | None, q: Tensor, plan: Plan) -> Plan:
    """The plan, which is found by its key from now on."""
    # On a CPU no key says what torch's precision is, of which only the interpreter's plans depend.
    if key is not None and (q.is_cuda or plan.method.backend not in OF_TRITON):
        if len(PLANS) >= MOST_PLANS:
            PLANS.clear()
        PLANS[key] = plan
    return plan


class Options(TypedDict, total=False):
    """What both functions take besides ``return_lse`` and ``return_max_logits``."""

    is_causal: bool
    scale: float | None
    window: Window
    softcap: float | None
    sinks: Tensor | None
    deterministic: bool
    precision: str | None
    split_size: int | None
    backend: str


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = ..., return_max_logits: bool = ...,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    deterministic: bool = True,
    precision: str | None = None,
    split_size: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Exact softmax attention in linear memory.

    ``q`` is ``(batch, heads, seq_q, dim)``, ``k`` is ``(batch, kv_heads, seq_k, dim)`` and ``v``
    ``(batch, kv_heads, seq_k, dim_v)`` with ``heads % kv_heads == 0`` (grouped-query attention); or
    all are ``(batch, seq, dim)``.  The result is ``(batch, heads, seq_q, dim_v)``; with
    ``return_lse`` also the log-sum-exp of each row, in float32 (float64 for float64), through which
    gradients flow too, and with ``return_max_logits`` last of all each head's largest score.

    - ``is_causal``: query ``i`` sees keys up to ``i + seq_k - seq_q`` (bottom-right aligned).  A
      row that sees no key gives zeros, a log-sum-exp of -inf and no gradient.
    - ``scale``: factor of the scores, ``dim ** -0.5`` by default.
    - ``window``: ``(left, right)``, how many keys beyond its own position a query sees on each
      side; None for no bound; an int for both sides.
    - ``softcap``: scores become ``softcap * tanh(score / softcap)``.
    - ``sinks``: one learned score a query head, of a key that every row sees and whose value is
      zero (gpt-oss); the log-sum-exp counts it.
    - ``deterministic``: False lets the Triton backward of half precision add dQ by atomics, in one
      pass and in any order.
    - ``precision``: of float32 matrix products in Triton: "ieee", "tf32x3" or "tf32"; None follows
      `torch.get_float32_matmul_precision`, where "highest" is ieee and anything else tf32.  A
      kernel that has no tile for a head dim in that precision runs in ieee, and `explain` says so.
    - ``split_size``: the Triton forward splits the keys of a sequence at multiples of this many
      (rounded up to whole tiles), and nothing else at all, so that a result does not depend on the
      batch it is in; None splits where the GPU would stand idle.
    - ``backend``: "triton", "aten" (torch's CPU kernel), "torch" (tiled PyTorch), or "auto"; and
      "gluon", which "auto" never takes: kernels written for Hopper's warps.

    There is no dropout and no additive mask.  Raises ValueError or TypeError for input that cannot
    be right, or that the named backend cannot take.
    """
    # True is 1 to a dictionary, and as a window an error.
    options = (
        is_causal, scale, window, type(window), softcap, backend, precision, deterministic,
        split_size, return_max_logits,
    )  # fmt: skip
    key, plan = recall(q, k, v, options)
    direct = plan is not None and plan.kernel and sinks is None and is_first_order()
    if plan is not None and direct and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        # Beside torch's kernel for a few tokens each further function here shows.
        if not (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
            out, lse = aten.kernel(
                q, k, v, 0.0, plan.score.right != UNBOUNDED, scale=plan.score.scale
            )
            return (out, lse.contiguous()) if return_lse else out
        if not return_lse:
            output: Tensor = kernel_attention(q, k, v, plan.score, plan.method)
            return output
    if plan is None:
        check_dense(q, k, v)
    heads_missing = q.dim() == 3
    if sinks is not None:
        check_sinks(sinks, 1 if heads_missing else q.shape[1], q)
    if plan is None:
        q, k, v = lowered(q, k, v)
    if heads_missing:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    if plan is None:
        score = make_score(q.shape[-1], is_causal, scale, window, softcap)
        method, _ = choose(
            q, k, v, score, backend=backend, precision=precision, deterministic=deterministic,
            split_size=split_size, max_logits=return_max_logits,
        )  # fmt: skip
        plain = not heads_missing and method.backend == "aten" and aten.is_all(q, v)
        plan = remember(key, q, Plan(score, method, plain))
    out, lse, max_logits = attention(q, k, v, None, None, plan.score, plan.method)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    if heads_missing:
        out, lse = out.squeeze(1), lse.squeeze(1)
    if not (return_lse or return_max_logits):
        return out
    # torch's kernel sums rows of all heads side by side.
    sums = (lse.contiguous(),) if return_lse else ()
    return out, *sums, *((max_logits,) if return_max_logits else ())


@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[False] = ..., **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_lse: bool = ..., return_max_logits: bool = ..., **options: Unpack[Options],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    is_causal: bool = False, scale: float | None = None, window: Window = None,
    softcap: float | None = None, sinks: Tensor | None = None, return_lse: bool = False,
    return_max_logits: bool = False, deterministic: bool = True, precision: str | None = None,
    split_size: int | None = None, backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`flash_attention` over sequences of any lengths, packed without padding.

    ``q`` is ``(total_q, heads, dim)``, ``k`` and ``v`` are ``(total_k, kv_heads, dim)``; sequence n
    is the rows ``cu_seqlens[n] .. cu_seqlens[n + 1] - 1`` (int32, on the same device).  The
    log-sum-exp is ``(heads, total_q)``.  The Triton backend never waits for the GPU, and never
    splits a sequence's keys.
    """
    check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
    check_sinks(sinks, q.shape[1], q)
    q, k, v = lowered(q, k, v)
    score = make_score(q.shape[-1], is_causal, scale, window, softcap)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    method, _ = choose(
        q, k, v, score, backend=backend, precision=precision, deterministic=deterministic,
        packed=True, split_size=split_size, max_logits=return_max_logits,
    )  # fmt: skip
    out, lse, max_logits = attention(q, k, v, cu_seqlens_q, cu_seqlens_k, score, method)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    if not (return_lse or return_max_logits):
        return out
    return out, *((lse,) if return_lse else ()), *((max_logits,) if return_max_logits else ())
