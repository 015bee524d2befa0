"""The gradient of q: one tile of queries against the keys that it sees."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from flashattn2.kernels.tiles import (
    exponential,
    is_visible,
    key_ranges,
    load_row_statistics,
    load_tile,
    locate_tile,
    program,
    select_region,
    store_tile,
    tanh,
)


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
    tile_index, batch, head, batch_head, batch_heads = program(tiles, heads, True)
    split, kv_head = tl.program_id(1), head // group
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
