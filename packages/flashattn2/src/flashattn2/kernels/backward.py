"""The backward pass: Algorithm 2 as two kernels, one for dK and dV and one for dQ.

The two kernels compute seven matrix products, and in float32 without matrix units two more products
precede them (`row_sums.py`).  One kernel with five products and atomic additions to dQ was slower
in every measured case.  With fewer tiles than SMs, the loop of each tile is split among several
programs.  These programs write partial sums in float32, which are added in a fixed order.
"""

from torch import Tensor

from flashattn2.kernels import launch, row_sums
from flashattn2.kernels.dkdv import dkdv_kernel
from flashattn2.kernels.dq import dq_kernel
from flashattn2.spec import AttentionSpec


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, spec: AttentionSpec,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, in their dtypes and memory layouts."""
    dq, dk, dv = (launch.make_empty_like(x) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, k, v, out, grad_out = launch.make_rows_contiguous(q, k, v, out, grad_out)
    packed = cu_q is not None
    batch, heads, rows = q.shape[:3]
    kv_heads, seq_k = k.shape[1:3]
    by_key = launch.plan_launch("dkdv", precision, spec, q, k, v, grad_out, packed=packed)
    lse = lse.contiguous()
    is_exact = by_key.meta.EXACT
    if is_exact:
        norm, delta = row_sums.compute_norm_and_delta(
            q, k, v, grad_out, lse, grad_lse, cu_q, cu_k, spec, precision
        )
    else:
        norm, delta = None, row_sums.compute_delta(out, grad_out, grad_lse, lse)
    statistics, sizes = (lse, delta, norm), (heads // kv_heads, rows, seq_k)
    numbers = launch.compute_score_factors(spec, is_exact)

    tile, splits = by_key.tile, by_key.meta.SPLITS
    tiles = launch.count_tiles(k, cu_k, tile.block_n)
    to_dk, to_dv = launch.make_split_outputs(dk, splits), launch.make_split_outputs(dv, splits)
    dkdv_kernel[launch.compute_grid(tiles, batch * kv_heads, splits)](
        *by_key.make_operands(
            (q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (grad_out, tile.block_m)
        ),
        statistics, to_dk, to_dv, launch.get_strides(q, k, v, grad_out, to_dk, to_dv),
        launch.make_sequence_bounds(cu_q, cu_k), (tiles, kv_heads, *sizes), numbers, by_key.meta,
        **tile.compiler_options,
    )  # fmt: skip
    if splits > 1:
        dk.copy_(to_dk.unflatten(0, (splits, batch)).sum(0))
        dv.copy_(to_dv.unflatten(0, (splits, batch)).sum(0))

    by_query = launch.plan_launch("dq", precision, spec, q, k, v, grad_out, packed=packed)
    tile, splits = by_query.tile, by_query.meta.SPLITS
    tiles = launch.count_tiles(q, cu_q, tile.block_m)
    to_dq = launch.make_split_outputs(dq, splits)
    dq_kernel[launch.compute_grid(tiles, batch * heads, splits)](
        *by_query.make_operands(
            (q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (grad_out, tile.block_m)
        ),
        statistics, to_dq, launch.get_strides(q, k, v, grad_out, to_dq),
        launch.make_sequence_bounds(cu_q, cu_k), (tiles, heads, *sizes), numbers, by_query.meta,
        **tile.compiler_options,
    )  # fmt: skip
    if splits > 1:
        dq.copy_(to_dq.unflatten(0, (splits, batch)).sum(0))
    return dq, dk, dv
