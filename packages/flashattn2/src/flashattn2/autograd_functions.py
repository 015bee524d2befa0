"""Attention as `torch.autograd.Function`s, two of which take only Q, K, V and `is_causal`.

The double backward pass runs in tiled PyTorch for every backend.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from flashattn2 import autocast, derivatives
from flashattn2.backends import aten
from flashattn2.compilation import is_mapped, is_recorded, is_untransformed, should_call_operator
from flashattn2.dispatch import BackendChoice, select_backend
from flashattn2.operators import backward, backward_op, forward, forward_op, map_sequences
from flashattn2.spec import AttentionSpec, make_spec
from flashattn2.validation import check_dense


def run_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    spec: AttentionSpec,
    choice: BackendChoice,
) -> tuple[Tensor, Tensor]:
    """Return the differentiable output and log-sum-exp.

    A call that needs no derivative skips `torch.autograd.Function`, whose Python code takes longer
    than a small attention call.
    """
    has_gradient = q.requires_grad or k.requires_grad or v.requires_grad
    is_differentiated = has_gradient and torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:
            # An operator of `torch.library` would drop the tangents without an error.
            _refuse_forward_mode()
        out, lse = forward_op(q, k, v, cu_q, cu_k, *spec.to_scalars(), *choice)
    elif is_untransformed() and not is_differentiated:
        out, lse = _run(q, k, v, cu_q, cu_k, spec, choice)
    else:
        out, lse = _Attention.apply(q, k, v, cu_q, cu_k, spec, choice)
    return out, lse


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return `out` `(batch, heads, seq, dim)` and `lse` `(batch, heads, seq)` with sinks.

    A sink s adds e^s to the sum e^L of each row of its head, and its value is zero:

        O' = O · σ(L - s)        L' = log(e^L + e^s),

    so no kernel is needed, and gradients of every order follow from the gradients of O and L.
    """
    sink = sinks.to(lse.dtype)[None, :, None]
    excess = lse - sink
    # A row that sees no key has L = -inf, and its output stays 0.  The weight is exp(log σ): for
    # a small sink, the gradient of σ rounds to 0, but the gradient of log σ does not.
    log_weight = F.logsigmoid(excess)
    # Return NaN for an infinite sink, because only eager calls on a CPU check the values of sinks.
    weight = log_weight.exp() + sink * 0
    # Avoid `torch.logaddexp`: its second derivative is NaN if exp(L - s) or exp(s - L) overflows.
    total = torch.where(excess > 0, lse - log_weight, sink - F.logsigmoid(-excess))
    return (out * weight[..., None]).to(out.dtype), total


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    spec: AttentionSpec,
    choice: BackendChoice,
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of the selected backend."""
    if _can_call_kernel_directly(choice, cu_q):
        return aten.forward(q, k, v, spec.scale, spec.has_right_bound())
    run: Callable[..., Any] = forward_op if should_call_operator(q, k, v) else forward
    out, lse = run(q, k, v, cu_q, cu_k, *spec.to_scalars(), *choice)
    return out, lse


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Save the tensors that the derivatives need."""
    q, k, v, cu_q, cu_k, ctx.spec, ctx.choice = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)


def _refuse_vmap(*arguments: Any) -> NoReturn:
    """Raise NotImplementedError for `torch.func.vmap`; the arguments are ignored."""
    raise NotImplementedError(
        "torch.func.vmap, and with it batched gradients and Jacobians by jacrev, is not supported; "
        "make the mapped dimension part of the batch, or use attention_reference"
    )


def _refuse_forward_mode(*arguments: Any) -> NoReturn:
    """Raise NotImplementedError for forward-mode AD; the arguments are ignored."""
    raise NotImplementedError(
        "forward-mode derivatives, as torch.func.jvp and torch.func.hessian need them, are not "
        "supported; use attention_reference, whose memory is quadratic in the sequence length"
    )


def _refuse_batched(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError if a tensor is a batch of cotangents.

    With `is_grads_batched=True` or `vectorize=True`, torch.autograd passes such batches as tensors
    whose memory the kernels cannot read.
    """
    if any(x is not None and is_legacy_batchedtensor(x) for x in tensors):
        _refuse_vmap()


def _compute_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    spec: AttentionSpec,
    choice: BackendChoice,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the selected backend."""
    if grad_lse is None and _can_call_kernel_directly(choice, cu_q):
        return aten.compute_gradients(q, k, v, out, lse, grad_out, spec)
    run: Callable[..., Any] = backward_op
    if not should_call_operator(q, k, v, grad_out):
        _refuse_batched(grad_out, grad_lse)
        run = backward
    dq, dk, dv = run(q, k, v, out, lse, grad_out, grad_lse, cu_q, cu_k, *spec.to_scalars(), *choice)
    return dq, dk, dv


def _can_call_kernel_directly(choice: BackendChoice, cu_q: Tensor | None) -> bool:
    """Return True if torch's CPU kernel may run outside of `forward_op` and `backward_op`.

    The overhead of a `torch.library` operator exceeds the time of a small attention call.
    Autocast must be disabled first: see `map_sequences`.
    """
    is_dense_aten = choice.backend == "aten" and cu_q is None
    return is_dense_aten and not (is_recorded() or autocast.is_enabled("cpu"))


class _Attention(torch.autograd.Function):
    """Attention that returns a log-sum-exp, for dense or packed inputs, with second derivatives."""

    forward = staticmethod(_run)
    setup_context = staticmethod(_save)
    vmap = staticmethod(_refuse_vmap)
    jvp = staticmethod(_refuse_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        grad_out, grad_lse = grads
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        d_qkv = _run_backward(
            q, k, v, grad_out, grad_lse, out, lse, cu_q, cu_k, ctx.spec, ctx.choice
        )
        return *d_qkv, None, None, None, None


def _run_backward(*inputs: Any) -> tuple[Tensor, ...]:
    """Return `_compute_gradients`, as an autograd function if it may itself be differentiated.

    Under forward-mode AD this function raises an error; operators would drop the tangents.
    """
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return _AttentionBackward.apply(*inputs)
    return _compute_gradients(*inputs)


class _KernelAttention(torch.autograd.Function):
    """Dense attention by torch's CPU kernel, which returns only the output.

    Repeated calls that need gradients but no log-sum-exp run this function.  Its Python code takes
    half as long as that of `_Attention`, which is measurable with few tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, choice: BackendChoice
    ) -> Tensor:
        out, lse = aten.forward(q, k, v, spec.scale, spec.has_right_bound())
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spec, ctx.choice = spec, choice
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_qkv = _run_backward(q, k, v, grad_out, None, out, lse, None, None, ctx.spec, ctx.choice)
        return *d_qkv, None, None


#: Apply `_KernelAttention` to q, k, v, an `AttentionSpec` and a `BackendChoice`.
kernel_attention = _KernelAttention.apply


class _AttentionBackward(torch.autograd.Function):
    """The gradients of q, k and v as functions of q, k, v, dO and dL.

    The inputs `out` and `lse` have no gradient, because they are functions of q, k and v.
    """

    forward = staticmethod(_compute_gradients)
    vmap = staticmethod(_refuse_vmap)
    jvp = staticmethod(_refuse_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, grad_out, grad_lse, _, _, cu_q, cu_k, ctx.spec, _ = inputs
        ctx.save_for_backward(q, k, v, grad_out, grad_lse, cu_q, cu_k)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
        q, k, v, grad_out, grad_lse, cu_q, cu_k = ctx.saved_tensors
        if any(is_mapped(x) for x in tangents):
            # The second derivatives are written in place, which vmap does not support.
            _refuse_vmap()
        t_q, t_k, t_v = tangents
        with torch.no_grad():
            g_q, g_out, g_lse, g_k, g_v = map_sequences(
                functools.partial(derivatives.compute_double_backward, spec=ctx.spec),
                [q, grad_out, grad_lse, t_q],
                [k, v, t_k, t_v],
                cu_q,
                cu_k,
            )
        grads: tuple[Tensor, ...] = (g_q, g_k, g_v, g_out, g_lse)
        if torch.is_grad_enabled():
            grads = _Undifferentiable.apply(*grads, *tangents, q, k, v, grad_out, grad_lse)
        return *grads[:4], None if grad_lse is None else grads[4], *(None,) * 6


class _Undifferentiable(torch.autograd.Function):
    """The five results of the double backward pass, whose derivative raises an error.

    `once_differentiable` would leave these results without a path to the inputs.  Then
    `torch.autograd.grad(inputs=...)` would omit their terms from a third derivative instead of
    raising an error.
    """

    @staticmethod
    def forward(*tensors: Any) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:5])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        raise NotImplementedError(
            "third derivatives are not supported; use attention_reference, whose memory is "
            "quadratic in the sequence length"
        )


class _PaperFunction(torch.autograd.Function):
    """Base class of the two functions that take only Q, K, V and `is_causal`, as in the paper."""

    @classmethod
    def apply(cls, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
        """Return attention of `Q (batch, seq_q, dim)` over `K` and `V (batch, seq_k, dim)`."""
        # `Function.apply` has no keyword arguments.  Dynamo traces `forward` instead of `apply`.
        out: Tensor = super().apply(Q, K, V, is_causal)
        return out

    @staticmethod
    def run(
        ctx: Any, backend: str, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False
    ) -> Tensor:
        """Check the arguments, save tensors for the backward pass, and return the output."""
        check_dense(Q, K, V)
        if Q.dim() != 3:
            raise ValueError(f"expected Q to be (batch, seq, dim), got shape {tuple(Q.shape)}")
        spec = make_spec(Q.shape[-1], is_causal, None, None, None)
        q, k, v = (x.unsqueeze(1) for x in (Q, K, V))
        choice, _ = select_backend(q, k, v, spec, backend=backend)
        out, lse = forward_op(q, k, v, None, None, *spec.to_scalars(), *choice)
        ctx.spec, ctx.choice = spec, choice
        output: Tensor = out.squeeze(1)
        ctx.save_for_backward(Q, K, V, output, lse.squeeze(1))
        return output

    @staticmethod
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = (x.unsqueeze(1) for x in ctx.saved_tensors)
        d_qkv = _run_backward(
            q, k, v, dO.unsqueeze(1), None, out, lse, None, None, ctx.spec, ctx.choice
        )
        return *(d.squeeze(1) for d in d_qkv), None


class FlashAttentionTorch(_PaperFunction):
    """Algorithms 1 and 2 of FlashAttention-2 in tiled PyTorch, on `(batch, seq, dim)`.

    Call `FlashAttentionTorch.apply(Q, K, V, is_causal=False)`.  The function saves Q, K, V, the
    output and one `(batch, seq_q)` tensor, the log-sum-exp, for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Return attention in tiled PyTorch."""
        return _PaperFunction.run(ctx, "torch", *arguments)


class FlashAttentionTriton(_PaperFunction):
    """Algorithms 1 and 2 of FlashAttention-2 in Triton kernels, on `(batch, seq, dim)`.

    Call it like `FlashAttentionTorch`; it saves the same tensors.  On a CPU the kernels need
    Triton's interpreter (`TRITON_INTERPRET=1`).
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Return attention by the Triton kernels."""
        return _PaperFunction.run(ctx, "triton", *arguments)
