"""torch's own CPU flash kernel, with the log-sum-exp that it computes and SDPA drops.

Notable: `torch.nn.functional.scaled_dot_product_attention` on a CPU ends in this operator, from
C++: at 128 keys each microsecond of Python beside it shows.  In float16 it rounds sums of gradients
between its tiles, and is several times slower than in float32 where a CPU has no products of
float16: so it is given float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flashattn2 import tiled
from flashattn2.problem import UNBOUNDED, Score

# torch's own binding takes 2 us less than the operator of the same name in `torch.ops`.
kernel = torch._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# The float32 numbers of the widest vector register that torch uses on a CPU.  See Note [Lost NaN].
VECTOR = 16

# Note [Lost NaN]
# torch's kernel takes a row's maximum with vector instructions, which keep NaN, and takes the keys
# that do not fill a vector one by one, which drops NaN.  If a row's other scores are all hidden or
# do not exist, its maximum stays -inf.  The kernel takes such a row for one that sees no key, and
# returns zeros and a log-sum-exp of exactly 0 instead of NaN.  That can happen only with fewer keys
# than a vector holds, or with a mask; `forward` then looks for these rows and restores their NaN.


def why_not(
    q: Tensor, k: Tensor, score: Score, packed: bool = False, max_logits: bool = False
) -> str | None:
    """Why the kernel cannot take this, or None where it can."""
    if q.device.type != "cpu":
        return f"it is torch's CPU kernel and the tensors are on {q.device}"
    if score.softcap:
        return "it has no softcap"
    if max_logits:
        return "it does not keep the largest scores"
    # Its causal attention is aligned at the top left: query i sees keys 0 .. i.
    top_left = score.right == q.shape[2] - k.shape[2]
    if score.left != UNBOUNDED or (score.right > 0 and not top_left):
        return "it has no window"
    if score.right == 0 and not (top_left or packed):
        return (
            f"it aligns causal attention at the top left, and seq_q {q.shape[2]} "
            f"differs from seq_k {k.shape[2]}"
        )
    if q.numel() == 0 or k.numel() == 0:
        return "it takes no empty tensor"
    return None


def is_all(q: Tensor, v: Tensor) -> bool:
    """Return True if the kernel alone is enough, once the rows of q, k and v have no gaps."""
    return q.dtype != torch.float16 and q.shape[-1] == v.shape[-1] and v.shape[2] >= VECTOR


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of what the kernel can take."""
    if q.dtype == torch.float16:
        wide = None if mask is None else mask.float()
        out, lse = forward(q.float(), k.float(), v.float(), scale, causal, wide)
        return out.half(), lse
    dim = v.shape[-1]
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = _rows_contiguous(q, k, v)
    if q.shape[-1] != dim:
        q, k, v = _one_head_dim(q, k, v)
    out, lse = kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    # Fake tensors, which have no values, are of another type.
    suspect = (mask is not None or k.shape[2] < VECTOR) and type(lse) is Tensor
    if suspect and (lse == 0).any():
        out, lse = _restore_nan(q, k, out, lse, causal, mask)
    return (out if out.shape[-1] == dim else out[..., :dim]), lse


def _restore_nan(
    q: Tensor, k: Tensor, out: Tensor, lse: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the kernel's results with NaN in the rows that lost it.  See Note [Lost NaN]."""
    rows = q.unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, group, seq_q, dim]
    is_nan = (rows.double() @ k.double().mT[:, :, None]).isnan().flatten(1, 2)
    if causal:
        is_nan = is_nan.tril()
    if mask is not None:
        is_nan = is_nan & (mask != -torch.inf)
    lost = (lse == 0) & is_nan.any(-1)
    return out.masked_fill(lost[..., None], torch.nan), lse.masked_fill(lost, torch.nan)


def forward_or_tiled(q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    """The same as an operator's results; what the kernel cannot take goes through tiles."""
    if why_not(q, k, score):
        return tiled.forward(q, k, v, score)[:2]
    out, lse = forward(q, k, v, score.scale, score.right != UNBOUNDED)
    # The kernel's is a view of another layout; an operator's results stand for themselves.
    return out, lse.clone(memory_format=torch.contiguous_format)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, score: Score,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v; through tiles where the log-sum-exp has a gradient too."""
    if grad_lse is not None or why_not(q, k, score):
        return tiled.backward(q, k, v, out, lse, grad_out, grad_lse, score)
    return gradients(q, k, v, out, lse, grad_out, score)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, score: Score
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of what the kernel can take."""
    if q.dtype == torch.float16:
        q, k, v, out, grad_out = (x.float() for x in (q, k, v, out, grad_out))
        dq, dk, dv = gradients(q, k, v, out, lse, grad_out, score)
        return dq.half(), dk.half(), dv.half()
    dim, v_dim = q.shape[-1], v.shape[-1]
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == grad_out.stride(-1) == 1:
        q, k, v, grad_out = _rows_contiguous(q, k, v, grad_out)
    if dim != v_dim:
        # The values' columns may have been cut off wider ones.
        q, k, v, out, grad_out = _one_head_dim(q, k, v, out, grad_out)
    group = q.shape[1] // k.shape[1]
    causal = score.right != UNBOUNDED
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    dq, dk, dv = _backward(grad_out, q, k, v, out, lse, 0.0, causal, scale=score.scale)
    if group > 1:
        dk, dv = (x.view(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    return (dq, dk, dv) if dim == v_dim else (dq[..., :dim], dk[..., :dim], dv[..., :v_dim])


def _one_head_dim(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The kernel has but one: columns of zeros change no score, and values that are cut off."""
    most = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in tensors)


def _rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
