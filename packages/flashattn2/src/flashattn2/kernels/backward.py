"""The backward pass: Algorithm 2 as two kernels, or as one with atomics.

Notable: the deterministic backward runs `dkdv_kernel` and `dq_kernel`, seven matrix products in
all.  The atomic one, for half precision, adds dQ from inside the first: five products, and sums in
any order.  Where there are fewer tiles than processors, the loop of each is split among several
programs that write float32 parts, summed in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashattn2.kernels import launch
from flashattn2.kernels.configs import has_atomic
from flashattn2.kernels.dkdv import dkdv_kernel
from flashattn2.kernels.dq import dq_kernel
from flashattn2.kernels.tiles import load_tile
from flashattn2.problem import Score


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, score: Score,
    precision: str, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    dq, dk, dv = (launch.like(x) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, k, v, out, grad_out = launch.rows_contiguous(q, k, v, out, grad_out)
    packed = cu_q is not None
    atomic = not deterministic and has_atomic(q.element_size())
    batch, heads, rows, dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
    by_key = launch.plan(
        "atomic" if atomic else "dkdv", precision, score, q, k, v, grad_out, packed=packed
    )
    lse = lse.contiguous()
    delta_kernel[triton.cdiv(rows, 32), batch * heads](
        out, grad_out, None if grad_lse is None else grad_lse.float().contiguous(), delta,
        out.stride()[:3], grad_out.stride()[:3], heads, rows,
        D=dim, BLOCK_D=by_key.block_d, BLOCK_M=32, HAS_GRAD_LSE=grad_lse is not None,
        enable_fp_fusion=True,
    )  # fmt: skip
    exact = launch.is_exact(q)
    inner, outer = launch.score_factors(score, exact)
    flags = {
        "D": dim, "BLOCK_D": by_key.block_d, "LEFT": score.left >= 0, "RIGHT": score.right >= 0,
        "SOFTCAP": score.softcap > 0, "PACKED": packed, "EXACT": exact,
    }  # fmt: skip
    sizes = (group, rows, rows, k.shape[2], score.left, score.right)

    dq_sum = torch.zeros_like(dq, dtype=torch.float32) if atomic else dq
    tile, splits = by_key.tile, by_key.splits
    tiles, places = launch.query_tiles(k, cu_k, tile.block_n)
    to_dk, to_dv = launch.parts(dk, splits), launch.parts(dv, splits)
    dkdv_kernel[tiles, batch * kv_heads, splits](
        *by_key.operands(
            (q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (grad_out, tile.block_m)
        ),
        lse, delta, dq_sum, to_dk, to_dv,
        *(x.stride()[:3] for x in (q, k, v, grad_out, dq_sum, to_dk, to_dv)),
        places, cu_q, cu_k, score.scale, inner, outer, kv_heads, *sizes, **flags,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, TMA=by_key.tma, SPLITS=splits,
        PRECISION=by_key.precision,
        ATOMIC=atomic, num_warps=tile.num_warps, num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        dk.copy_(to_dk.unflatten(0, (splits, batch)).sum(0))
        dv.copy_(to_dv.unflatten(0, (splits, batch)).sum(0))
    if atomic:
        return dq.copy_(dq_sum), dk, dv

    by_query = launch.plan("dq", precision, score, q, k, v, grad_out, packed=packed)
    tile, splits = by_query.tile, by_query.splits
    tiles, places = launch.query_tiles(q, cu_q, tile.block_m)
    to_dq = launch.parts(dq, splits)
    dq_kernel[tiles, batch * heads, splits](
        *by_query.operands(
            (q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (grad_out, tile.block_m)
        ),
        lse, delta, to_dq, *(x.stride()[:3] for x in (q, k, v, grad_out, to_dq)),
        places, cu_q, cu_k, score.scale, inner, outer, heads, *sizes, **flags,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, TMA=by_query.tma, SPLITS=splits,
        PRECISION=by_query.precision, num_warps=tile.num_warps, num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        dq.copy_(to_dq.unflatten(0, (splits, batch)).sum(0))
    return dq, dk, dv


@triton.jit
def delta_kernel(
    out, grad_out, grad_lse, delta, out_strides, grad_out_strides, heads, rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
):  # fmt: skip
    """D = rowsum(dO · O) - dL.  Grid: (row tiles, batch · heads)."""
    first = tl.program_id(0) * BLOCK_M
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    o = load_tile(out, out_strides, batch, head, 0, first, rows, BLOCK_M, D, BLOCK_D, False, False)
    do = load_tile(
        grad_out, grad_out_strides, batch, head, 0, first, rows, BLOCK_M, D, BLOCK_D, False, False
    )
    d = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    lines = first + tl.arange(0, BLOCK_M)
    line = tl.cast(tl.program_id(1), tl.int64) * rows + lines
    if HAS_GRAD_LSE:
        d -= tl.load(grad_lse + line, lines < rows, other=0.0)
    tl.store(delta + line, d, lines < rows)
