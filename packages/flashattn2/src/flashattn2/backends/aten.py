"""The "aten" backend: torch's CPU flash kernel, including the log-sum-exp that SDPA discards.

`torch.nn.functional.scaled_dot_product_attention` on a CPU calls the same operator.  Float16 inputs
are converted to float32: in float16 the operator rounds sums of gradients between its tiles, and
without float16 arithmetic in the CPU it is several times slower.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flashattn2.backends import tiled
from flashattn2.spec import UNBOUNDED, AttentionSpec

#: torch's Python binding takes 2 us less per call than the operator in `torch.ops`.
_kernel = torch._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
#: Number of float32 values in the widest vector register that torch uses.  See Note [Lost NaN].
VECTOR = 16

# Note [Lost NaN]
# torch's kernel computes a row's maximum with vector instructions, which propagate NaN.  For the
# keys that do not fill a vector, it uses scalar instructions, which drop NaN.  If all other scores
# of the row are hidden, or none exist, the maximum stays -inf.  The kernel then treats the row as
# one that sees no key: it returns zeros and a log-sum-exp of exactly 0 instead of NaN.  This
# happens only with fewer keys than vector elements; `forward` detects these rows and restores NaN.
#
# In bfloat16 the kernel computes most exponentials by an approximation that maps NaN to a number.
# The output of a row with an infinite score is then finite, although its softmax is NaN.  Its
# log-sum-exp is still infinite, so `run_kernel` detects these rows.


def find_obstacle(q: Tensor, k: Tensor, spec: AttentionSpec, packed: bool = False) -> str | None:
    """Return the reason why the kernel does not support the input, or None if it does."""
    if q.device.type != "cpu":
        return f"expected tensors on a CPU, got {q.device}"
    if spec.softcap:
        return "it has a softcap"
    # The kernel aligns causal attention at the top left: query i sees keys 0 to i.
    is_top_left = spec.right == q.shape[2] - k.shape[2]
    if spec.left != UNBOUNDED or (spec.right > 0 and not is_top_left):
        return "it has a window"
    if spec.right == 0 and not (is_top_left or packed):
        return (
            f"it is causal with seq_q {q.shape[2]} and seq_k {k.shape[2]}, and torch's CPU kernel "
            "aligns unequal lengths at the top left"
        )
    if q.numel() == 0 or k.numel() == 0:
        return "it has empty tensors"
    return None


def is_kernel_sufficient(q: Tensor, v: Tensor) -> bool:
    """Return True if one kernel call computes the result for inputs with contiguous rows."""
    return q.dtype != torch.float16 and q.shape[-1] == v.shape[-1] and v.shape[2] >= VECTOR


def run_kernel(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the results of torch's kernel, in bfloat16 with NaN restored: Note [Lost NaN]."""
    out, lse = _kernel(q, k, v, 0.0, causal, scale=scale)
    # The comparison is also False for NaN.  The type excludes fake tensors, which have no values.
    if out.dtype == torch.bfloat16 and type(lse) is Tensor and not lse.amax() < torch.inf:
        # Change `out` in place, so that a compiled graph gets the strides of the fake result.
        out.masked_fill_((lse == torch.inf)[..., None], torch.nan)
    return out, lse


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of an input that the kernel supports.

    The log-sum-exp is a view with another order of dimensions.
    """
    if q.dtype == torch.float16:
        out, lse = forward(q.float(), k.float(), v.float(), scale, causal)
        return out.half(), lse
    dim = v.shape[-1]
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = _make_rows_contiguous(q, k, v)
    if q.shape[-1] != dim:
        q, k, v = _pad_head_dims(q, k, v)
    out, lse = run_kernel(q, k, v, causal, scale)
    # Check the type first: fake tensors have no values, and a comparison of their lengths would
    # restrict the lengths that an exported program accepts.
    may_lose_nan = type(lse) is Tensor and k.shape[2] < VECTOR
    if may_lose_nan and int(lse.count_nonzero()) < lse.numel():
        _restore_nan(q, k, out, lse, causal)
    # Copy the view, because autograd does not allow an in-place change of a result that is a view.
    return (out if out.shape[-1] == dim else out[..., :dim].clone()), lse


def _restore_nan(q: Tensor, k: Tensor, out: Tensor, lse: Tensor, causal: bool) -> None:
    """Restore NaN in the kernel's results in place.  See Note [Lost NaN]."""
    rows = q.unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, group, seq_q, dim]
    is_nan = (rows.double() @ k.double().mT[:, :, None]).isnan().flatten(1, 2)
    if causal:
        is_nan = is_nan.tril()
    lost = (lse == 0) & is_nan.any(-1)
    out.masked_fill_(lost[..., None], torch.nan)
    lse.masked_fill_(lost, torch.nan)


def forward_or_tiled(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the results of the kernel or, if it does not support the input, of tiled PyTorch."""
    if find_obstacle(q, k, spec):
        return tiled.forward(q, k, v, spec)
    # With dynamic lengths in a graph, the right bound is symbolic, but the kernel needs a bool.
    out, lse = forward(q, k, v, spec.scale, spec.has_right_bound())
    # The kernel returns the log-sum-exp as a view, which an operator must not return.
    return out, lse.clone(memory_format=torch.contiguous_format)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    They are computed in tiled PyTorch if the log-sum-exp has a gradient or the kernel does not
    support the input.
    """
    if grad_lse is not None or find_obstacle(q, k, spec):
        return tiled.backward(q, k, v, out, lse, grad_out, grad_lse, spec)
    return compute_gradients(q, k, v, out, lse, grad_out, spec)


def compute_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of an input that the kernel supports."""
    grads = _compute_kernel_gradients(q, k, v, out, lse, grad_out, spec)
    if type(lse) is Tensor and not lse.amax() < torch.inf:
        # The softmax of a row with an infinite score is NaN.  See Note [Lost NaN].
        lse = lse.masked_fill(lse == torch.inf, torch.nan)
        tiled_grads = tiled.backward(q, k, v, out, lse, grad_out, None, spec)
        # The results have the strides of the kernel, as compiled graphs expect.
        for grad, tiled_grad in zip(grads, tiled_grads, strict=True):
            grad.copy_(tiled_grad)
    return grads


def _compute_kernel_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by the kernel."""
    if q.dtype == torch.float16:
        q, k, v, out, grad_out = (x.float() for x in (q, k, v, out, grad_out))
        dq, dk, dv = _compute_kernel_gradients(q, k, v, out, lse, grad_out, spec)
        return dq.half(), dk.half(), dv.half()
    dim, v_dim = q.shape[-1], v.shape[-1]
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == grad_out.stride(-1) == 1:
        q, k, v, grad_out = _make_rows_contiguous(q, k, v, grad_out)
    if dim != v_dim:
        # Pad the output as well, because the forward pass has cut it to the head dim of v.
        q, k, v, out, grad_out = _pad_head_dims(q, k, v, out, grad_out)
    group = q.shape[1] // k.shape[1]
    causal = spec.has_right_bound()
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    dq, dk, dv = _backward(grad_out, q, k, v, out, lse, 0.0, causal, scale=spec.scale)
    if group > 1:
        dk, dv = (x.view(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    if dim == v_dim:
        return dq, dk, dv
    return dq.narrow(-1, 0, dim), dk.narrow(-1, 0, dim), dv.narrow(-1, 0, v_dim)


def _pad_head_dims(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return all tensors, padded with zeros to the largest head dim; the kernel requires one size.

    Columns of zeros in q and k do not change scores.  The caller removes the output columns that
    belong to columns of zeros in v.
    """
    largest = max(x.shape[-1] for x in tensors)
    return tuple(F.pad(x, (0, largest - x.shape[-1])) for x in tensors)


def _make_rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, copied if their last dimension is not contiguous."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
