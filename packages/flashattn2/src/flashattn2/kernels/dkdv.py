"""The gradients of k and v: one tile of keys against the queries that see it.

Notable: scores stand transposed, [keys, queries], so that P and dS are left operands straight from
registers.  With ATOMIC the same pass adds dQ as well, by atomics.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from flashattn2.kernels.tiles import (
    load_rows,
    load_tile,
    place,
    power,
    program,
    query_ranges,
    seen,
    store_tile,
    tanh,
)


@triton.jit
def dkdv_kernel(
    q, k, v, grad_out, lse, delta, norm, dq, dk, dv,
    q_strides, k_strides, v_strides, grad_out_strides, dq_strides, dk_strides, dv_strides,
    cu_q, cu_k, scale, inner, outer, tiles, kv_heads, group, rows, seq_q, seq_k, left, right,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr,
    TMA: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    ATOMIC: tl.constexpr,
):  # fmt: skip
    """Grid: (key tiles · batch · kv_heads, splits of the queries)."""
    # The first tiles are seen by the most queries of a causal problem, and start first.
    tile, batch, kv_head, _, every = program(tiles, kv_heads, False)
    split = tl.program_id(1)
    first, q_begin, k_begin, seq_q, seq_k = place(
        tile, tiles, cu_k, seq_k, cu_q, cu_k, seq_q, seq_k, BLOCK_N, PACKED
    )
    if PACKED and first < 0:
        return

    k_tile = load_tile(
        k, k_strides, batch, kv_head, k_begin, first, seq_k, BLOCK_N, D, BLOCK_D, TMA, False
    )  # [N, D]
    v_tile = load_tile(
        v, v_strides, batch, kv_head, k_begin, first, seq_k, BLOCK_N, DV, BLOCK_DV, TMA, False
    )  # [N, DV]
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # [N, D]
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)  # [N, DV]
    lo, all_lo, all_hi, hi = query_ranges(
        first, first + BLOCK_N - 1, seq_q, seq_k, left, right, split, BLOCK_M, LEFT, RIGHT, SPLITS
    )
    for member in range(group):
        head = kv_head * group + member
        line = (tl.cast(batch, tl.int64) * kv_heads * group + head) * rows + q_begin
        # Before the queries that see all of these keys, those, and after.
        for region in tl.static_range(3 if LEFT else 2):
            dk_acc, dv_acc = _add_dkdv(
                dk_acc, dv_acc, k_tile, v_tile, q, grad_out, lse, delta, norm, dq, q_strides,
                grad_out_strides, dq_strides, batch, head, line, q_begin, first,
                lo if region == 0 else all_lo if region == 1 else all_hi,
                all_lo if region == 0 else all_hi if region == 1 else hi,
                seq_q, seq_k, scale, inner, outer, left, right,
                D, BLOCK_D, DV, BLOCK_DV, BLOCK_M, BLOCK_N, LEFT, RIGHT, SOFTCAP, TMA,
                PRECISION, EXACT, ATOMIC, region != 1,
            )  # fmt: skip
    part = split * (every // kv_heads) + batch
    dk_acc = dk_acc * scale
    store_tile(dk, dk_strides, part, kv_head, k_begin, first, seq_k, dk_acc, BLOCK_N, D, BLOCK_D)
    store_tile(dv, dv_strides, part, kv_head, k_begin, first, seq_k, dv_acc, BLOCK_N, DV, BLOCK_DV)


@triton.jit
def _add_dkdv(
    dk_acc, dv_acc, k_tile, v_tile, q, grad_out, lse, delta, norm, dq, q_strides,
    grad_out_strides, dq_strides, batch, head, line, q_begin, first, lo, hi,
    seq_q, seq_k, scale, inner, outer, left, right,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, ATOMIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add Pᵀ dO and dSᵀ q over the queries [lo, hi); scores are transposed, [keys, queries]."""
    for start in tl.range(lo, hi, BLOCK_M):
        q_tile = load_tile(
            q, q_strides, batch, head, q_begin, start, seq_q, BLOCK_M, D, BLOCK_D, TMA, False
        )  # [M, D]
        lines = start + tl.arange(0, BLOCK_M)
        row_lse, d, n = load_rows(lse, delta, norm, line, lines, seq_q, EXACT)  # [M] each
        raw = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [N, M]
        if SOFTCAP:
            raw = tanh(raw * inner)
        p = power(raw * outer - row_lse[None, :], EXACT)
        if MASKED:
            keys = first + tl.arange(0, BLOCK_N)[:, None]
            positions = (lines + seq_k - seq_q)[None, :]
            p = tl.where(seen(positions, keys, seq_k, left, right, LEFT, RIGHT), p, 0.0)
        if EXACT:
            p *= n[None, :]
        do_tile = load_tile(
            grad_out, grad_out_strides, batch, head, q_begin, start, seq_q,
            BLOCK_M, DV, BLOCK_DV, TMA, False,
        )  # fmt: skip  # [M, DV]
        dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
        dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)  # [N, M]
        ds = p * (dp - d[None, :])  # [N, M]
        if SOFTCAP:
            ds *= 1.0 - raw * raw
        ds = ds.to(q_tile.dtype)
        dk_acc = tl.dot(ds, q_tile, dk_acc, input_precision=PRECISION)
        if ATOMIC:
            part = tl.dot(tl.trans(ds), k_tile, input_precision=PRECISION) * scale  # [M, D]
            base = (
                tl.cast(batch, tl.int64) * dq_strides[0] + tl.cast(head, tl.int64) * dq_strides[1]
            )
            base += tl.cast(q_begin + start, tl.int64) * dq_strides[2]
            columns = tl.arange(0, BLOCK_D)
            offsets = tl.arange(0, BLOCK_M)[:, None] * dq_strides[2] + columns[None, :]
            inside = (lines < seq_q)[:, None] & (columns < D)[None, :]
            tl.atomic_add(dq + base + offsets, part, mask=inside, sem="relaxed")
    return dk_acc, dv_acc
