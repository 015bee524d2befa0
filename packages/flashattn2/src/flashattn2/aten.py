"""torch's own CPU flash kernel, with the log-sum-exp that it computes and SDPA drops.

Notable: `torch.nn.functional.scaled_dot_product_attention` on a CPU ends in this operator.
"""

import torch
from torch import Tensor

from flashattn2 import tiled
from flashattn2.problem import UNBOUNDED, Score

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def why_not(q: Tensor, k: Tensor, score: Score, packed: bool = False) -> str | None:
    """Why the kernel cannot take this, or None where it can."""
    if q.device.type != "cpu":
        return f"it is torch's CPU kernel and the tensors are on {q.device}"
    if score.softcap:
        return "it has no softcap"
    if score.left != UNBOUNDED or score.right > 0:
        return "it has no window"
    if score.right == 0 and q.shape[2] != k.shape[2] and not packed:
        return (
            f"it aligns causal attention at the top left, and seq_q {q.shape[2]} "
            f"differs from seq_k {k.shape[2]}"
        )
    if q.numel() == 0 or k.numel() == 0:
        return "it takes no empty tensor"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; a packed sequence that the kernel cannot take goes through tiles."""
    if why_not(q, k, score):
        return tiled.forward(q, k, v, score)
    q, k, v = _rows_contiguous(q, k, v)
    out, lse = _forward(q, k, v, 0.0, score.right == 0, scale=score.scale)
    # The kernel's is a view of another layout; an operator's results stand for themselves.
    return out, lse.clone(memory_format=torch.contiguous_format)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; through tiles where the log-sum-exp has a gradient too."""
    if grad_lse is not None or why_not(q, k, score):
        return tiled.backward(q, k, v, out, lse, grad_out, grad_lse, score)
    q, k, v, grad_out = _rows_contiguous(q, k, v, grad_out)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    dq, dk, dv = _backward(grad_out, q, k, v, out, lse, 0.0, score.right == 0, scale=score.scale)
    if group > 1:
        dk, dv = (x.view(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
