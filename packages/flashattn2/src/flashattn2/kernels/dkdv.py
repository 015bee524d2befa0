"""The gradients of k and v: one tile of keys against the queries that see it.

Scores are transposed, [keys, queries], so that P and dS are left operands that remain in registers.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from flashattn2.kernels.tiles import (
    exponential,
    is_visible,
    load_row_statistics,
    load_tile,
    locate_tile,
    program,
    query_ranges,
    select_region,
    store_tile,
    tanh,
)


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
    tile_index, batch, kv_head, _, batch_heads = program(tiles, kv_heads, False)
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
