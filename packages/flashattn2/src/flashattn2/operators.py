"""The forward and backward pass as `torch.library` operators with fake kernels and autograd.

Compiled and exported graphs contain these operators.  Eager calls go through the functions of
`autograd_functions.py`, which support higher derivatives.  These functions call `forward` and
`backward` directly, because dispatching an operator in Python takes longer than launching a kernel.
Dense inputs are `(batch, heads, seq, dim)`.  Packed sequences are `(1, heads, total, dim)`, with
the boundaries `cu_q` and `cu_k`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn2 import autocast
from flashattn2.backends import aten, tiled
from flashattn2.dispatch import KERNEL_BACKENDS
from flashattn2.spec import DIM_LIMIT, AttentionSpec
from flashattn2.validation import check_boundaries


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    backend: str,
    precision: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp; raise ValueError for invalid boundaries or sizes.

    The scalars are the fields of an `AttentionSpec` and of a `dispatch.BackendChoice`.
    """
    # Sizes are checked inside the operator: outside of it, a comparison of symbolic sizes would
    # restrict the lengths that an exported program accepts.
    for name, x in (("q", q), ("k", k)):
        if max(x.shape) >= DIM_LIMIT:
            raise ValueError(
                f"expected every dimension of {name} to be at most {DIM_LIMIT - 1}, got shape "
                f"{tuple(x.shape)}"
            )
    if cu_q is not None and cu_k is not None:
        on_cpu = backend not in KERNEL_BACKENDS
        check_boundaries("cu_seqlens_q", cu_q, q.shape[2], on_cpu)
        if cu_k is not cu_q or k.shape[2] != q.shape[2]:
            check_boundaries("cu_seqlens_k", cu_k, k.shape[2], on_cpu)
    spec = AttentionSpec(scale, left, right, softcap)
    if backend == "gluon":
        from flashattn2.experimental import forward as gluon_forward

        with torch.cuda.device_of(q):
            return gluon_forward.forward(q, k, v, spec)
    if backend == "triton":
        from flashattn2.kernels import forward as triton_forward

        with torch.cuda.device_of(q):
            return triton_forward.forward(q, k, v, cu_q, cu_k, spec, precision)
    run = aten.forward_or_tiled if backend == "aten" else tiled.forward
    out, lse = map_sequences(lambda q, k, v: run(q, k, v, spec), [q], [k, v], cu_q, cu_k)
    return out, lse


forward_op = torch.library.custom_op("flashattn2::forward", forward, mutates_args=())


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    cu_q = options[0]
    backend = options[6]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    if backend in KERNEL_BACKENDS:
        from flashattn2.kernels import launch

        out = launch.make_empty_like(q, v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=get_lse_dtype(q))
    if backend == "aten" and cu_q is None:
        out, lse = aten.forward_or_tiled(q, k, v, AttentionSpec(*options[2:6]))
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    backend: str,
    precision: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; the options must be those of the call of `forward`."""
    spec = AttentionSpec(scale, left, right, softcap)
    if backend == "gluon":
        from flashattn2.experimental import backward as gluon_backward

        with torch.cuda.device_of(q):
            return gluon_backward.backward(
                q, k, v, out, lse, grad_out, grad_lse, spec, deterministic
            )
    if backend == "triton":
        from flashattn2.kernels import backward as triton_backward

        with torch.cuda.device_of(q):
            return triton_backward.backward(
                q, k, v, out, lse, grad_out, grad_lse, cu_q, cu_k, spec, precision
            )
    run = aten.backward if backend == "aten" else tiled.backward
    dq, dk, dv = map_sequences(
        lambda q, out, lse, grad_out, grad_lse, k, v: run(
            q, k, v, out, lse, grad_out, grad_lse, spec
        ),
        [q, out, lse, grad_out, grad_lse],
        [k, v],
        cu_q,
        cu_k,
    )
    return dq, dk, dv


backward_op = torch.library.custom_op("flashattn2::backward", backward, mutates_args=())


@backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    cu_q, backend = options[0], options[6]
    if backend == "aten" and cu_q is None and grad_lse is None:
        return aten.backward(q, k, v, out, lse, grad_out, None, AttentionSpec(*options[2:6]))
    if backend in KERNEL_BACKENDS:
        from flashattn2.kernels import launch

        dq, dk, dv = (launch.make_empty_like(x) for x in (q, k, v))
        return dq, dk, dv
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_q, cu_k, *ctx.options = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    d_qkv = backward_op(q, k, v, out, lse, grad_out, grad_lse, cu_q, cu_k, *ctx.options)
    return *d_qkv, *(None,) * (2 + len(ctx.options))


forward_op.register_autograd(_backward, setup_context=_setup_context)


def map_sequences(
    function: Callable[..., tuple[Tensor, ...]],
    query_side: Sequence[Tensor | None],
    key_side: Sequence[Tensor],
    cu_q: Tensor | None,
    cu_k: Tensor | None,
) -> tuple[Tensor, ...]:
    """Apply the function to each packed sequence and concatenate its results along dimension 2.

    The rows of the query side are split at `cu_q`, and the rows of the key side at `cu_k`.  Dense
    inputs, and packed inputs without a sequence, are passed to the function unchanged.  Autocast is
    disabled during the calls.
    """
    device = key_side[0].device.type
    if autocast.is_enabled(device):
        with torch.autocast(device, enabled=False):
            return map_sequences(function, query_side, key_side, cu_q, cu_k)
    if cu_q is None or cu_k is None or cu_q.shape[0] == 1:
        return function(*query_side, *key_side)
    q_bounds, k_bounds = cu_q.tolist(), cu_k.tolist()
    parts = []
    for n in range(len(q_bounds) - 1):
        rows = slice(q_bounds[n], q_bounds[n + 1])
        keys = slice(k_bounds[n], k_bounds[n + 1])
        query_part = [None if x is None else x[:, :, rows] for x in query_side]
        key_part = [x[:, :, keys] for x in key_side]
        parts.append(function(*query_part, *key_part))
    return tuple(torch.cat(part, dim=2) for part in zip(*parts, strict=True))


def get_lse_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of the log-sum-exp: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
