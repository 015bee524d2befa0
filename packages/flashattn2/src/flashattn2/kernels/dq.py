"""The gradient of q: one tile of queries against the keys that it sees."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from flashattn2.kernels.tiles import (
    key_ranges,
    load_rows,
    load_tile,
    place,
    power,
    program,
    seen,
    store_tile,
    tanh,
)


@triton.jit
def dq_kernel(
    q, k, v, grad_out, lse, delta, norm, dq,
    q_strides, k_strides, v_strides, grad_out_strides, dq_strides, cu_q, cu_k,
    scale, inner, outer, tiles, heads, group, rows, seq_q, seq_k, left, right,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr,
    TMA: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid: (query tiles · batch · heads, splits of the keys)."""
    tile, batch, head, at, every = program(tiles, heads, True)
    split, kv_head = tl.program_id(1), head // group
    first, q_begin, k_begin, seq_q, seq_k = place(
        tile, tiles, cu_q, seq_q, cu_q, cu_k, seq_q, seq_k, BLOCK_M, PACKED
    )
    if PACKED and first < 0:
        return

    q_tile = load_tile(
        q, q_strides, batch, head, q_begin, first, seq_q, BLOCK_M, D, BLOCK_D, TMA, False
    )  # [M, D]
    do_tile = load_tile(
        grad_out, grad_out_strides, batch, head, q_begin, first, seq_q,
        BLOCK_M, DV, BLOCK_DV, TMA, False,
    )  # fmt: skip  # [M, DV]
    row_lse, d, n = load_rows(
        lse, delta, norm, tl.cast(at, tl.int64) * rows + q_begin, first + tl.arange(0, BLOCK_M),
        seq_q, EXACT,
    )  # fmt: skip  # [M] each
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [M, D]
    last = tl.minimum(first + BLOCK_M, seq_q) - 1
    lo, all_lo, all_hi, hi = key_ranges(
        first, last, seq_q, seq_k, left, right, split, BLOCK_N, LEFT, RIGHT, SPLITS
    )
    for region in tl.static_range(0 if LEFT else 1, 3):
        acc = _add_dq(
            acc, q_tile, do_tile, row_lse, d, n, k, v, k_strides, v_strides, batch, kv_head,
            k_begin, lo if region == 0 else all_lo if region == 1 else all_hi,
            all_lo if region == 0 else all_hi if region == 1 else hi,
            first + seq_k - seq_q, seq_k, inner, outer, left, right,
            D, BLOCK_D, DV, BLOCK_DV, BLOCK_M, BLOCK_N,
            LEFT, RIGHT, SOFTCAP, TMA, PRECISION, EXACT, region != 1,
        )  # fmt: skip
    part = split * (every // heads) + batch
    acc = acc * scale
    store_tile(dq, dq_strides, part, head, q_begin, first, seq_q, acc, BLOCK_M, D, BLOCK_D)


@triton.jit
def _add_dq(
    acc, q_tile, do_tile, row_lse, d, n, k, v, k_strides, v_strides, batch, kv_head,
    k_begin, lo, hi, position, seq_k, inner, outer, left, right,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dS k over the keys [lo, hi)."""
    for start in tl.range(lo, hi, BLOCK_N):
        k_tile = load_tile(
            k, k_strides, batch, kv_head, k_begin, start, seq_k,
            BLOCK_N, D, BLOCK_D, TMA, not MASKED,
        )  # fmt: skip  # [N, D]
        v_tile = load_tile(
            v, v_strides, batch, kv_head, k_begin, start, seq_k,
            BLOCK_N, DV, BLOCK_DV, TMA, not MASKED,
        )  # fmt: skip  # [N, DV]
        raw = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
        if SOFTCAP:
            raw = tanh(raw * inner)
        p = power(raw * outer - row_lse[:, None], EXACT)
        if MASKED:
            positions = position + tl.arange(0, BLOCK_M)[:, None]
            keys = start + tl.arange(0, BLOCK_N)[None, :]
            p = tl.where(seen(positions, keys, seq_k, left, right, LEFT, RIGHT), p, 0.0)
        if EXACT:
            p *= n[:, None]
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)  # [M, N]
        ds = p * (dp - d[:, None])  # [M, N]
        if SOFTCAP:
            ds *= 1.0 - raw * raw
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    return acc
