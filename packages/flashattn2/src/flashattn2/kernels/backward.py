"""The backward pass: Algorithm 2 as two kernels, one for dK and dV and one for dQ.

The two kernels compute seven matrix products, and in float32 without matrix units two more products
precede them (`row_sums.py`).  One kernel with five products and atomic additions to dQ was slower
in every measured case.  With fewer tiles than SMs, the loop of each tile is split among several
programs.  These programs write partial sums in float32, which are added in a fixed order.

The kernel for dK and dV has transposed scores, [keys, queries], so that P and dS are left operands
that remain in registers.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from flashattn2.kernels import launch, row_sums
from flashattn2.kernels.tiles import (
    exponential,
    is_visible,
    key_ranges,
    load_row_statistics,
    load_tile,
    locate_program,
    locate_tile,
    query_ranges,
    select_region,
    store_tile,
    tanh,
)
from flashattn2.spec import AttentionSpec


@triton.jit
def dkdv_kernel(
    q, k, v, grad_out, statistics, dk, dv, strides, sequence_bounds, sizes, factors,
    meta: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of one tile of keys.

    Grid: (key tiles · batch · kv_heads, splits of the queries).
    """
    _, k_strides, v_strides, _, dk_strides, dv_strides = strides
    tiles, kv_heads, group, rows, seq_k = sizes
    scale, _, _, left, right = factors
    # With a causal mask the first tiles are seen by the most queries; they start first.
    tile_index, batch, kv_head, _, batch_heads = locate_program(tiles, kv_heads, False)
    split = tl.program_id(1)
    first, q_begin, k_begin, seq_q, seq_k, _ = locate_tile(
        tile_index, tiles, sequence_bounds, (rows, seq_k), meta.BLOCK_N, True, meta.PACKED
    )
    if meta.PACKED and first < 0:
        return

    keys = (batch, kv_head, k_begin, seq_k)
    k_tile = load_tile(
        k, k_strides, keys, first, meta.BLOCK_N, meta.D, meta.BLOCK_D, meta.TMA
    )  # [N, D]
    v_tile = load_tile(
        v, v_strides, keys, first, meta.BLOCK_N, meta.DV, meta.BLOCK_DV, meta.TMA
    )  # [N, DV]
    dk_acc = tl.full([meta.BLOCK_N, meta.BLOCK_D], 0.0, tl.float32)  # [N, D]
    dv_acc = tl.full([meta.BLOCK_N, meta.BLOCK_DV], 0.0, tl.float32)  # [N, DV]
    lo, all_lo, all_hi, hi = query_ranges(
        first, first + meta.BLOCK_N - 1, seq_q, seq_k, left, right, split,
        meta.BLOCK_M, meta.LEFT, meta.RIGHT, meta.SPLITS,
    )  # fmt: skip
    for member in range(group):
        head = kv_head * group + member
        row_offset = (tl.cast(batch, tl.int64) * kv_heads * group + head) * rows + q_begin
        # The regions before and after the queries that see all keys of the tile are masked.
        for region in tl.static_range(3 if meta.LEFT else 2):
            start, stop = select_region(lo, all_lo, all_hi, hi, region)
            dk_acc, dv_acc = _add_dkdv(
                dk_acc, dv_acc, k_tile, v_tile, q, grad_out, statistics, strides,
                (batch, head, q_begin, seq_q), row_offset, first,
                start, stop,
                seq_k, factors, meta, region != 1,
            )  # fmt: skip
    part = split * (batch_heads // kv_heads) + batch
    keys = (part, kv_head, k_begin, seq_k)
    store_tile(dk, dk_strides, keys, first, dk_acc * scale, meta.D)
    store_tile(dv, dv_strides, keys, first, dv_acc, meta.DV)


@triton.jit
def _add_dkdv(
    dk_acc, dv_acc, k_tile, v_tile, q, grad_out, statistics, strides, sequence, row_offset, first,
    lo, hi, seq_k, factors, meta: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add Pᵀ dO to dV and dSᵀ Q to dK over the queries [lo, hi)."""
    q_strides, _, _, grad_out_strides, _, _ = strides
    seq_q = sequence[3]
    _, softcap_scale, score_scale, left, right = factors
    for start in tl.range(lo, hi, meta.BLOCK_M):
        q_tile = load_tile(
            q, q_strides, sequence, start, meta.BLOCK_M, meta.D, meta.BLOCK_D, meta.TMA
        )  # [M, D]
        row_ids = start + tl.arange(0, meta.BLOCK_M)
        # [M] each
        row_lse, d, n = load_row_statistics(statistics, row_offset, row_ids, seq_q, meta.EXACT)
        raw = tl.dot(k_tile, tl.trans(q_tile), input_precision=meta.PRECISION)  # [N, M]
        if meta.SOFTCAP:
            raw = tanh(raw * softcap_scale)
        p = exponential(raw * score_scale - row_lse[None, :], meta.EXACT)  # [N, M]
        if MASKED:
            keys = first + tl.arange(0, meta.BLOCK_N)[:, None]
            positions = (row_ids + seq_k - seq_q)[None, :]
            visible = is_visible(positions, keys, seq_k, left, right, meta.LEFT, meta.RIGHT)
            p = tl.where(visible, p, 0.0)
        if meta.EXACT:
            p *= n[None, :]
        do_tile = load_tile(
            grad_out, grad_out_strides, sequence, start,
            meta.BLOCK_M, meta.DV, meta.BLOCK_DV, meta.TMA,
        )  # fmt: skip  # [M, DV]
        dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc, input_precision=meta.PRECISION)
        dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=meta.PRECISION)  # [N, M]
        ds = p * (dp - d[None, :])  # [N, M]
        if meta.SOFTCAP:
            ds *= 1.0 - raw * raw
        ds = ds.to(q_tile.dtype)
        dk_acc = tl.dot(ds, q_tile, dk_acc, input_precision=meta.PRECISION)
    return dk_acc, dv_acc


@triton.jit
def dq_kernel(
    q, k, v, grad_out, statistics, dq, strides, sequence_bounds, sizes, factors, meta: tl.constexpr
):  # fmt: skip
    """Compute dQ of one tile of queries.

    Grid: (query tiles · batch · heads, splits of the keys).
    """
    q_strides, _, _, grad_out_strides, dq_strides = strides
    tiles, heads, group, rows, seq_k = sizes
    scale, _, _, left, right = factors
    tile_index, batch, head, batch_head, batch_heads = locate_program(tiles, heads, True)
    split = tl.program_id(1)
    kv_head = head // group
    first, q_begin, k_begin, seq_q, seq_k, _ = locate_tile(
        tile_index, tiles, sequence_bounds, (rows, seq_k), meta.BLOCK_M, False, meta.PACKED
    )
    if meta.PACKED and first < 0:
        return

    queries = (batch, head, q_begin, seq_q)
    q_tile = load_tile(
        q, q_strides, queries, first, meta.BLOCK_M, meta.D, meta.BLOCK_D, meta.TMA
    )  # [M, D]
    do_tile = load_tile(
        grad_out, grad_out_strides, queries, first, meta.BLOCK_M, meta.DV, meta.BLOCK_DV, meta.TMA
    )  # [M, DV]
    row_offset = tl.cast(batch_head, tl.int64) * rows + q_begin
    row_statistics = load_row_statistics(
        statistics, row_offset, first + tl.arange(0, meta.BLOCK_M), seq_q, meta.EXACT
    )  # [M] each
    acc = tl.full([meta.BLOCK_M, meta.BLOCK_D], 0.0, tl.float32)  # [M, D]
    last = tl.minimum(first + meta.BLOCK_M, seq_q) - 1
    lo, all_lo, all_hi, hi = key_ranges(
        first, last, seq_q, seq_k, left, right, split,
        meta.BLOCK_N, meta.LEFT, meta.RIGHT, meta.SPLITS,
    )  # fmt: skip
    for region in tl.static_range(0 if meta.LEFT else 1, 3):
        start, stop = select_region(lo, all_lo, all_hi, hi, region)
        acc = _add_dq(
            acc, q_tile, do_tile, row_statistics, k, v, strides, (batch, kv_head, k_begin, seq_k),
            start, stop,
            first + seq_k - seq_q, factors, meta, region != 1,
        )  # fmt: skip
    part = split * (batch_heads // heads) + batch
    store_tile(dq, dq_strides, (part, head, q_begin, seq_q), first, acc * scale, meta.D)


@triton.jit
def _add_dq(
    acc, q_tile, do_tile, row_statistics, k, v, strides, sequence, lo, hi, position, factors,
    meta: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dS K to dQ over the keys [lo, hi)."""
    _, k_strides, v_strides, _, _ = strides
    _, softcap_scale, score_scale, left, right = factors
    seq_k = sequence[3]
    row_lse, d, n = row_statistics  # [M] each
    for start in tl.range(lo, hi, meta.BLOCK_N):
        k_tile = load_tile(
            k, k_strides, sequence, start,
            meta.BLOCK_N, meta.D, meta.BLOCK_D, meta.TMA, not MASKED,
        )  # fmt: skip  # [N, D]
        v_tile = load_tile(
            v, v_strides, sequence, start,
            meta.BLOCK_N, meta.DV, meta.BLOCK_DV, meta.TMA, not MASKED,
        )  # fmt: skip  # [N, DV]
        raw = tl.dot(q_tile, tl.trans(k_tile), input_precision=meta.PRECISION)  # [M, N]
        if meta.SOFTCAP:
            raw = tanh(raw * softcap_scale)
        p = exponential(raw * score_scale - row_lse[:, None], meta.EXACT)  # [M, N]
        if MASKED:
            positions = position + tl.arange(0, meta.BLOCK_M)[:, None]
            keys = start + tl.arange(0, meta.BLOCK_N)[None, :]
            visible = is_visible(positions, keys, seq_k, left, right, meta.LEFT, meta.RIGHT)
            p = tl.where(visible, p, 0.0)
        if meta.EXACT:
            p *= n[:, None]
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=meta.PRECISION)  # [M, N]
        ds = p * (dp - d[:, None])  # [M, N]
        if meta.SOFTCAP:
            ds *= 1.0 - raw * raw
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=meta.PRECISION)
    return acc


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
    statistics = (lse, delta, norm)
    sizes = (heads // kv_heads, rows, seq_k)
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
