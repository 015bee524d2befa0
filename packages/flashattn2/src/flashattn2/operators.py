"""Forward and backward as torch.library operators, with fake implementations and autograd.

Notable: these are what stands in a compiled or exported graph; eager calls wrap them in
`flashattn2.function`, which differentiates further.  Dense input is ``(batch, heads, seq, dim)``;
packed sequences are the same with batch 1 and the boundaries ``cu_q`` and ``cu_k``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn2 import aten, autocast, tiled
from flashattn2.dispatch import OF_TRITON
from flashattn2.problem import Score, check_boundaries


@torch.library.custom_op("flashattn2::forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, scale: float,
    left: int, right: int, softcap: float, backend: str, precision: str, deterministic: bool,
    split_size: int, max_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, log-sum-exp and, if asked for, the largest score of each head."""
    if cu_q is not None and cu_k is not None:
        check_boundaries("cu_seqlens_q", cu_q, q.shape[2])
        check_boundaries("cu_seqlens_k", cu_k, k.shape[2])
    score = Score(scale, left, right, softcap)
    if backend == "gluon":
        from flashattn2.gluon import forward as of_gluon

        with torch.cuda.device_of(q):
            out, lse = of_gluon.forward(q, k, v, score)
        maxima = None
    elif backend == "triton":
        from flashattn2.kernels import forward

        with torch.cuda.device_of(q):
            out, lse, maxima = forward.forward(
                q, k, v, cu_q, cu_k, score, precision, split_size, max_logits
            )
    else:
        run = aten.forward_or_tiled if backend == "aten" else tiled.forward
        out, lse, *rest = by_sequence(lambda q, k, v: run(q, k, v, score), [q], [k, v], cu_q, cu_k)
        maxima = rest[0] if rest else None
    if not max_logits or maxima is None:
        return out, lse, lse.new_empty(0)
    if maxima.numel() == 0:
        return out, lse, lse.new_full(q.shape[1:2], -torch.inf)
    return out, lse, maxima.amax((0, 2))


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    cu_q, backend, max_logits = options[0], options[6], options[10]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    if backend in OF_TRITON:
        from flashattn2.kernels import launch

        out = launch.like(q, v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=_lse_dtype(q))
    if backend == "aten" and cu_q is None:
        out, lse = aten.forward_or_tiled(q, k, v, Score(*options[2:6]))
    return out, lse, lse.new_empty(q.shape[1] if max_logits else 0)


@torch.library.custom_op("flashattn2::backward", mutates_args=())
def backward_op(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, scale: float, left: int,
    right: int, softcap: float, backend: str, precision: str, deterministic: bool, split_size: int,
    max_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    score = Score(scale, left, right, softcap)
    if backend == "gluon":
        from flashattn2.gluon import backward as of_gluon

        with torch.cuda.device_of(q):
            return of_gluon.backward(q, k, v, out, lse, grad_out, grad_lse, score, deterministic)
    if backend == "triton":
        from flashattn2.kernels import backward

        with torch.cuda.device_of(q):
            return backward.backward(
                q, k, v, out, lse, grad_out, grad_lse, cu_q, cu_k, score,
                precision, deterministic, split_size,
            )  # fmt: skip
    run = aten.backward if backend == "aten" else tiled.backward
    dq, dk, dv = by_sequence(
        lambda q, out, lse, grad_out, grad_lse, k, v: run(
            q, k, v, out, lse, grad_out, grad_lse, score
        ),
        [q, out, lse, grad_out, grad_lse],
        [k, v],
        cu_q,
        cu_k,
    )
    return dq, dk, dv


@backward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    cu_q, backend = options[0], options[6]
    if backend == "aten" and cu_q is None and grad_lse is None:
        return aten.backward(q, k, v, out, lse, grad_out, None, Score(*options[2:6]))
    if backend in OF_TRITON:
        from flashattn2.kernels import launch

        return launch.like(q), launch.like(k), launch.like(v)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_q, cu_k, *ctx.options = inputs
    out, lse, max_logits = output
    ctx.mark_non_differentiable(max_logits)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None
) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    d_qkv = backward_op(q, k, v, out, lse, grad_out, grad_lse, cu_q, cu_k, *ctx.options)
    return *d_qkv, *(None,) * (2 + len(ctx.options))


forward_op.register_autograd(_backward, setup_context=_setup_context)


def by_sequence(
    function: Callable[..., tuple[Tensor, ...]],
    query_side: Sequence[Tensor | None],
    key_side: Sequence[Tensor],
    cu_q: Tensor | None,
    cu_k: Tensor | None,
) -> tuple[Tensor, ...]:
    """The function on each packed sequence by itself, its results packed again."""
    if autocast.is_on(key_side[0].device.type):
        with autocast.off(key_side[0]):
            return by_sequence(function, query_side, key_side, cu_q, cu_k)
    if cu_q is None or cu_k is None or cu_q.shape[0] == 1:  # dense, or no sequence and no row
        return function(*query_side, *key_side)
    q_bounds, k_bounds = cu_q.tolist(), cu_k.tolist()
    parts = []
    for n in range(len(q_bounds) - 1):
        rows, keys = slice(*q_bounds[n : n + 2]), slice(*k_bounds[n : n + 2])
        parts.append(
            function(
                *(None if x is None else x[:, :, rows] for x in query_side),
                *(x[:, :, keys] for x in key_side),
            )
        )
    return tuple(torch.cat(part, dim=2) for part in zip(*parts, strict=True))


def scalars(score: Score) -> tuple[float, int, int, float]:
    """A score as the operators take it."""
    return score.scale, score.left, score.right, score.softcap


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
