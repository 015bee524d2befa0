"""The public functions `flash_attention` and `flash_attention_varlen`.

`specify_call` validates the arguments, specifies the scores as an `AttentionSpec` and selects a
backend.  Then the function runs the backend and formats the result.
"""

from typing import Any, Literal, TypedDict, Unpack, overload

from torch import Tensor, is_grad_enabled

from flashattn2.autocast import cast_for_autocast
from flashattn2.autograd_functions import apply_sinks, kernel_attention, run_attention
from flashattn2.backends import aten
from flashattn2.compilation import is_untransformed
from flashattn2.dispatch import BackendChoice, select_backend
from flashattn2.plan_cache import Plan, look_up_plan, store_plan
from flashattn2.spec import AttentionSpec, Window, make_spec
from flashattn2.validation import check_dense, check_sinks, check_tensors, check_varlen


class Options(TypedDict, total=False):
    """The options of both functions, without `return_lse`."""

    is_causal: bool
    scale: float | None
    window: Window
    softcap: float | None
    sinks: Tensor | None
    deterministic: bool
    backend: str


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
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
    deterministic: bool = True,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact softmax attention in memory linear in the sequence length.

    Dropout and additive masks are not supported.  The Triton kernels multiply float32 inputs in
    float32 if `torch.get_float32_matmul_precision()` is "highest", and in tf32 otherwise.

    Args:
        q: Queries `(batch, heads, seq_q, dim)` or `(batch, seq_q, dim)`.
        k: Keys `(batch, kv_heads, seq_k, dim)` or `(batch, seq_k, dim)`.  For grouped-query
            attention, `heads` is a multiple of `kv_heads`.
        v: Values `(batch, kv_heads, seq_k, dim_v)` or `(batch, seq_k, dim_v)`.
        is_causal: If True, query `i` sees keys up to `i + seq_k - seq_q` (bottom-right alignment).
        scale: Positive factor of the scores; `dim ** -0.5` by default.
        window: `(left, right)`, the numbers of keys that a query sees before and after its own
            position.  None removes a bound, and one int applies to both sides.  If `is_causal` is
            True, the right bound is 0.
        softcap: If given, scores become `softcap * tanh(score / softcap)`.
        sinks: One learned score per query head, `(heads,)`, as in gpt-oss.  A sink is the score of
            an additional key that every row sees and whose value is zero.  The log-sum-exp includes
            the sink.
        return_lse: If True, also return the log-sum-exp of each row.
        deterministic: If False, the backward pass of the backend "gluon" accumulates dQ by atomic
            additions, whose order varies.  Other backends ignore the option.
        backend: "triton", "gluon" (kernels for Hopper), "aten" (torch's CPU kernel), "torch"
            (tiled PyTorch), or "auto".

    Returns:
        The output `(batch, heads, seq_q, dim_v)`, in the dtype of the inputs or of autocast, and,
        with `return_lse`, the log-sum-exp `(batch, heads, seq_q)`.  If the inputs have no head
        dimension, neither do the results.  The log-sum-exp is differentiable and has dtype float32,
        or float64 for float64 inputs.  A row that sees no key has a zero output and contributes
        zero gradients of q, k and v, and its log-sum-exp is -inf or the sink.

    Raises:
        ValueError, TypeError: If an argument is invalid, or the named backend does not support it.
        NotImplementedError: In `torch.jit.trace`, `vmap`, and forward-mode or third derivatives.
    """
    sides = window if isinstance(window, tuple) else (window,)
    options = is_causal, scale, softcap, backend, deterministic, type(window), *sides
    signature, plan = look_up_plan(q, k, v, options)
    if plan is not None and plan.is_cpu_kernel and sinks is None:
        # Fast path: at most 15 us of Python with AVX-512, as test_speed.py measures.  See Note
        # [Plan cache].
        result = _call_cpu_kernel(q, k, v, plan, return_lse)
        if result is not None:
            return result

    # Validate, specify the scores and select a backend.
    has_heads = isinstance(q, Tensor) and q.dim() == 4
    if plan is None:
        score_options = is_causal, scale, window, softcap
        q, k, v, spec, choice, _ = specify_call(
            q, k, v, None, sinks, score_options, deterministic, backend
        )
        plan = Plan(spec, choice, is_cpu_kernel=has_heads and choice.backend == "aten")
        store_plan(signature, q, plan)
    else:
        if not has_heads:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        check_sinks(sinks, q.shape[1], q)

    # Run.
    out, lse = run_attention(q, k, v, None, None, plan.spec, plan.choice)
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)

    # Format.
    if not has_heads:
        out, lse = out.squeeze(1), lse.squeeze(1)
    # torch's CPU kernel returns the log-sum-exp as a view with another order of dimensions.
    return (out, lse.contiguous()) if return_lse else out


def _call_cpu_kernel(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Return the result of torch's CPU kernel, or None if the call needs the general path."""
    if not is_untransformed():
        return None
    if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if return_lse:
            return None
        differentiable: Tensor = kernel_attention(q, k, v, plan.spec, plan.choice)
        return differentiable
    is_causal = plan.spec.has_right_bound()
    out, lse = aten.forward(q, k, v, plan.spec.scale, is_causal)
    return (out, lse.contiguous()) if return_lse else out


@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
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
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
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
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over sequences of different lengths that are packed without padding.

    Sequence `n` consists of the rows `cu_seqlens[n]` to `cu_seqlens[n + 1] - 1`.  The Triton
    backend never waits for the GPU and does not split the keys of a sequence among programs.

    Args:
        q: Queries `(total_q, heads, dim)`.
        k: Keys `(total_k, kv_heads, dim)`.
        v: Values `(total_k, kv_heads, dim_v)`.
        cu_seqlens_q: Boundaries of the query sequences, int32 `(sequences + 1,)`, on the device
            of `q`.
        cu_seqlens_k: Boundaries of the key sequences, with the same dtype, shape and device.

    The remaining options are those of `flash_attention`.

    Returns:
        The output `(total_q, heads, dim_v)` and, if requested, the log-sum-exp `(heads, total_q)`.

    Raises:
        ValueError, TypeError: As in `flash_attention`, and unless the boundaries start at 0, never
            decrease and end at the number of rows.  On a GPU, the Triton backend checks the
            boundaries with a device-side assertion instead.
        NotImplementedError: As in `flash_attention`.
    """
    # Validate, specify the scores and select a backend.
    boundaries = cu_seqlens_q, cu_seqlens_k
    score_options = is_causal, scale, window, softcap
    q, k, v, spec, choice, _ = specify_call(
        q, k, v, boundaries, sinks, score_options, deterministic, backend
    )

    # Run.
    out, lse = run_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, spec, choice)
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)

    # Format.
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse.contiguous()) if return_lse else out


def specify_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: tuple[Any, Any] | None,
    sinks: Tensor | None,
    score_options: tuple[bool, float | None, Window, float | None],
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, AttentionSpec, BackendChoice, str]:
    """Validate the arguments of a call, specify its scores and select a backend.

    The `boundaries` are `(cu_seqlens_q, cu_seqlens_k)` for packed sequences, and the
    `score_options` are `(is_causal, scale, window, softcap)`.

    Returns:
        The tensors q, k and v as `(batch, heads, seq, dim)`, the specification, the backend choice
        and the reason for it.
    """
    check_tensors(q=q, k=k, v=v)
    q, k, v = cast_for_autocast(q, k, v)
    if boundaries is not None:
        check_varlen(q, k, v, *boundaries)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    else:
        check_dense(q, k, v)
        if q.dim() == 3:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    check_sinks(sinks, q.shape[1], q)
    spec = make_spec(q.shape[-1], *score_options)
    is_packed = boundaries is not None
    choice, reason = select_backend(
        q, k, v, spec, backend=backend, deterministic=deterministic, packed=is_packed
    )
    return q, k, v, spec, choice, reason
