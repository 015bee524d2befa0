"""Attention as differentiable functions: the general one, and the paper's two.

Notable: forward mode and the double backward run in tiles whatever ran the forward pass.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from flashattn2 import aten, autocast, derivatives
from flashattn2.dispatch import Method, choose
from flashattn2.operators import backward_op, by_sequence, forward_op, scalars
from flashattn2.problem import UNBOUNDED, Score, check_dense, make_score


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, score: Score,
    method: Method,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Output and log-sum-exp, both differentiable, and each head's largest score if asked for."""
    # Python's own part of a differentiable function takes longer than a small attention.
    if torch.compiler.is_compiling():
        out, lse, largest = forward_op(q, k, v, cu_q, cu_k, *scalars(score), *method)
    elif are_values_only(q, k, v):
        out, lse, largest = _run(q, k, v, cu_q, cu_k, score, method)
    elif _are_functorch_transforms_active():
        out, lse, largest = _Transformed.apply(q, k, v, cu_q, cu_k, score, method)
    else:
        out, lse, largest = _Attention.apply(q, k, v, cu_q, cu_k, score, method)
    return out, lse, largest


def are_values_only(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing will be differentiated or transformed."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    return is_first_order()


def is_first_order() -> bool:
    """Whether neither forward mode nor a transform of `torch.func` looks on."""
    return forward_ad._current_level < 0 and not _are_functorch_transforms_active()


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of ``(batch, heads, seq, ...)`` with a sink for each head.

    A sink s takes its share of each row's sum, e^L + e^s in place of e^L, and has no value:

        O' = O · σ(L - s)        L' = log(e^L + e^s),

    so it needs no kernel of its own: gradients of every order follow from those of O and L.
    """
    sink = sinks.to(lse.dtype)[None, :, None]
    # A row that sees no key has L = -inf: the sink takes all, and its output stays 0.  The gradient
    # of σ itself, σ (1 - σ), would lose a sink of small share: the logarithm's is 1 / (1 + e^x).
    share = torch.nn.functional.logsigmoid(lse - sink).exp()
    return (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, sink)


def _run(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, score: Score,
    method: Method,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    if _is_an_operator_already(method, cu_q):
        return *aten.forward(q, k, v, score.scale, score.right != UNBOUNDED), None
    out, lse, largest = forward_op(q, k, v, cu_q, cu_k, *scalars(score), *method)
    if forward_ad._current_level >= 0:
        # A tangent has the layout of its tensor, and those of `derivatives` have no gaps.
        out, lse = out.contiguous(), lse.contiguous()
    return out, lse, largest


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, cu_q, cu_k, ctx.score, ctx.method = inputs
    out, lse, largest = output
    if largest is not None:
        ctx.mark_non_differentiable(largest)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(q, k, v, out, lse, cu_q, cu_k)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        output = _run(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        grad_out, grad_lse, _ = grads
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        # Only a derivative of this derivative needs it as a function of its own.
        run = _AttentionBackward.apply if torch.is_grad_enabled() else _gradients
        d_qkv = run(q, k, v, grad_out, grad_lse, out, lse, cu_q, cu_k, ctx.score, ctx.method)
        return *d_qkv, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor, None]:
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        t_q, t_k, t_v = (
            torch.zeros_like(x) if t is None else t
            for x, t in zip((q, k, v), tangents[:3], strict=True)
        )
        t_out, t_lse = by_sequence(
            lambda q, out, lse, t_q, k, v, t_k, t_v: derivatives.tangent(
                q, k, v, out, lse, t_q, t_k, t_v, ctx.score
            ),
            [q, out, lse, t_q],
            [k, v, t_k, t_v],
            cu_q,
            cu_k,
        )
        return t_out, t_lse, None


class _KernelAttention(torch.autograd.Function):
    """The output of torch's CPU kernel by itself, dense: what training on a CPU runs.

    Half of what `_Attention` takes, which beside a few tokens shows.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, score: Score, method: Method) -> Tensor:
        out, lse = aten.kernel(q, k, v, 0.0, score.right != UNBOUNDED, scale=score.scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.score, ctx.method = score, method
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            d_qkv = _AttentionBackward.apply(
                q, k, v, grad_out, None, out, lse, None, None, ctx.score, ctx.method
            )
        else:
            d_qkv = aten.gradients(q, k, v, out, lse, grad_out, ctx.score)
        return *d_qkv, None, None


# Of q, k, v, a score and a method.
kernel_attention = _KernelAttention.apply


class _Transformed(_Attention):
    """The same in two steps, as `torch.func` asks for it; each call binds its arguments anew."""

    forward = staticmethod(_run)  # type: ignore[assignment]
    setup_context = staticmethod(_save)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise NotImplementedError(
            "attention here takes no torch.func.vmap; make the mapped dimension part of the batch, "
            "or use attention_reference"
        )


class _AttentionBackward(torch.autograd.Function):
    """The gradients as functions of q, k, v, dO and dL: out and lse stand for what q, k, v make."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _gradients(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, grad_out, grad_lse, out, lse, cu_q, cu_k, ctx.score, _ = inputs
        ctx.save_for_backward(q, k, v, out, lse, grad_out, grad_lse, cu_q, cu_k)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
        q, k, v, _, _, grad_out, grad_lse, _, _ = ctx.saved_tensors
        with torch.no_grad():
            grads = _AttentionBackward._second(ctx, *tangents)
        if torch.is_grad_enabled():
            grads = _Undifferentiable.apply(*grads, *tangents, q, k, v, grad_out, grad_lse)
        g_q, g_k, g_v, g_out, g_lse = grads
        nones = (None,) * 6
        return g_q, g_k, g_v, g_out, None if grad_lse is None else g_lse, *nones

    @staticmethod
    def _second(ctx: Any, t_q: Tensor, t_k: Tensor, t_v: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse, grad_out, grad_lse, cu_q, cu_k = ctx.saved_tensors
        g_q, g_out, g_lse, g_k, g_v = by_sequence(
            lambda q, out, lse, grad_out, grad_lse, t_q, k, v, t_k, t_v: _rows_first(
                derivatives.double_backward(
                    q, k, v, out, lse, grad_out, grad_lse, t_q, t_k, t_v, ctx.score
                )
            ),
            [q, out, lse, grad_out, grad_lse, t_q],
            [k, v, t_k, t_v],
            cu_q,
            cu_k,
        )
        return g_q, g_k, g_v, g_out, g_lse


class _Undifferentiable(torch.autograd.Function):
    """The five second gradients, as functions of what they depend on, with no derivative.

    `once_differentiable` would leave them without a path to the inputs, and
    ``torch.autograd.grad(inputs=...)`` follows nothing else: a third derivative would come out
    without its largest part instead of as an error.
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
            "attention here has no third derivatives; attention_reference has all, in memory that "
            "grows with the square of the sequence"
        )


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor,
    lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, score: Score, method: Method,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if grad_lse is None and _is_an_operator_already(method, cu_q):
        return aten.gradients(q, k, v, out, lse, grad_out, score)
    dq, dk, dv = backward_op(
        q, k, v, out, lse, grad_out, grad_lse, cu_q, cu_k, *scalars(score), *method
    )
    return dq, dk, dv


def _is_an_operator_already(method: Method, cu_q: Tensor | None) -> bool:
    """torch's kernel is one: another around it takes longer than a small attention.

    Forward mode wants tensors of their own, where the kernel's log-sum-exp is a view.
    """
    plain = method.backend == "aten" and cu_q is None and forward_ad._current_level < 0
    return plain and not autocast.is_on("cpu")


def _rows_first(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    g_q, g_k, g_v, g_out, g_lse = grads
    return g_q, g_out, g_lse, g_k, g_v


class _PaperFunction(torch.autograd.Function):
    backend: ClassVar[str]

    @classmethod
    def apply(cls, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
        """Attention of ``Q (batch, seq_q, dim)`` over ``K`` and ``V (batch, seq_k, dim)``."""
        check_dense(Q, K, V)
        if Q.dim() != 3:
            raise ValueError(f"Q has shape {tuple(Q.shape)}; give (batch, seq, dim)")
        score = make_score(Q.shape[-1], is_causal, None, None, None)
        method, _ = choose(
            Q.unsqueeze(1), K.unsqueeze(1), V.unsqueeze(1), score, backend=cls.backend
        )
        out: Tensor = super().apply(Q, K, V, score, method)
        return out

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, score: Score, method: Method) -> Tensor:
        q, k, v = (x.unsqueeze(1) for x in (Q, K, V))
        out, lse, _ = forward_op(q, k, v, None, None, *scalars(score), *method)
        ctx.score, ctx.method = score, method
        output: Tensor = out.squeeze(1)
        ctx.save_for_backward(Q, K, V, output, lse.squeeze(1))
        return output

    @staticmethod
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = (x.unsqueeze(1) for x in ctx.saved_tensors)
        d_qkv = _AttentionBackward.apply(
            q, k, v, dO.unsqueeze(1), None, out, lse, None, None, ctx.score, ctx.method
        )
        return *(d.squeeze(1) for d in d_qkv), None, None


class FlashAttentionTorch(_PaperFunction):
    """Algorithms 1 and 2 of FlashAttention-2 in tiled PyTorch, on ``(batch, seq, dim)``.

    ``FlashAttentionTorch.apply(Q, K, V, is_causal=False)``.  For the backward pass it saves Q, K,
    V, the output and one ``(batch, seq_q)`` tensor, the log-sum-exp.
    """

    backend = "torch"


class FlashAttentionTriton(_PaperFunction):
    """The same in Triton kernels; on a CPU they need Triton's interpreter (TRITON_INTERPRET=1)."""

    backend = "triton"
