"""Decoding: a few queries over a long cache, whose keys are split among programs.

Memory bandwidth limits decoding, so one masked loop serves all tiles.  The kernel computes one
pointer per key from the key's page, and reads each key once for all query heads that share it.

Note [Pages that do not exist]
Device-side assertions reject lengths above the capacity and pages that do not exist before these
kernels run.  However, such assertions may be compiled out.  Therefore the kernels neither read nor
write outside of the cache: the output of such a sequence is NaN, and its new rows are not written.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashattn2.kernels import launch
from flashattn2.kernels.forward import combine
from flashattn2.kernels.tiles import (
    exponential,
    is_visible,
    load_tile,
    locate_program,
    locate_tile,
    split_range,
    store_tile,
    tanh,
)
from flashattn2.spec import AttentionSpec


def decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, cu_q: Tensor | None,
    spec: AttentionSpec, new: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and log-sum-exp over the first `lengths + new` keys of each sequence.

    With `cu_q`, the queries are packed: `(1, heads, total_q, dim)`.
    """
    batch, heads, seq_q, dim = q.shape
    kv_heads, v_dim = k.shape[1], v.shape[-1]
    if q.numel() == 0 or k.numel() == 0:
        out = q.new_zeros((batch, heads, seq_q, v_dim))
        return out, q.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)
    k, v = launch.make_rows_contiguous(k, v)
    lengths = lengths.contiguous()
    table = None if table is None else table.contiguous()
    group = heads // kv_heads
    rows = seq_q * group
    # The query heads of one key head are rows of a tile, ordered by position.  A causal tile
    # therefore stops at the last key that its last query sees.
    by_row = q if seq_q == 1 else q.unflatten(1, (kv_heads, group)).transpose(2, 3)
    by_row = by_row.reshape(batch, kv_heads, rows, dim).contiguous()
    sequence_bounds = None if cu_q is None else (cu_q * group,) * 2
    rows_per_sequence = rows if cu_q is None else launch.cdiv(rows, len(lengths))
    block_m, block_n = choose_tile_rows(rows_per_sequence, max(dim, v_dim), q.element_size())
    capacity = k.shape[2] * (1 if table is None else table.shape[1])
    tiles = launch.count_tiles(by_row, cu_q, block_m)
    loop_tiles = launch.cdiv(capacity, block_n)
    processors = launch.get_device(q.device).processors
    programs = tiles * batch * kv_heads
    splits = launch.count_splits(programs, loop_tiles, processors, processors)
    out = q.new_empty((batch, kv_heads, rows, v_dim))
    lse = q.new_empty((batch, kv_heads, rows), dtype=torch.float32)
    to_out, to_lse = launch.make_split_outputs(out, splits), launch.make_split_outputs(lse, splits)
    block_d, block_dv = launch.next_power_of_2(dim), launch.next_power_of_2(v_dim)
    key_bytes = block_n * (block_d + block_dv) * k.element_size()
    exact = q.dtype == torch.float32
    meta = launch.Meta(
        dim, block_d, v_dim, block_dv, block_m, block_n,
        spec.left >= 0, spec.right >= 0, spec.softcap > 0, splits, cu_q is not None, EXACT=exact,
    )  # fmt: skip
    decode_kernel[launch.compute_grid(tiles, batch * kv_heads, splits)](
        by_row, k, v, to_out, to_lse, lengths, table, launch.get_strides(by_row, k, v, to_out),
        sequence_bounds, (0, 1) if table is None else tuple(table.shape),
        (tiles, kv_heads, rows, group, k.shape[0], k.shape[2], new),
        launch.compute_score_factors(spec, exact), meta,
        num_warps=4, num_stages=count_stages(q.device, key_bytes), enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        combine(to_out, to_lse, out, lse, splits)
    if seq_q == 1:
        return out.view(batch, heads, 1, v_dim), lse.view(batch, heads, 1)
    # [batch, kv_heads, seq_q, group, ...] to [batch, heads, seq_q, ...]
    by_query = (x.unflatten(2, (seq_q, group)).transpose(2, 3) for x in (out, lse))
    out, lse = (x.flatten(1, 2).contiguous() for x in by_query)
    return out, lse


def append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None
) -> None:
    """Write `k` and `v` into the caches after the first `lengths` rows of each sequence."""
    batch, heads, new, dim = k.shape
    if k.numel() == 0:
        return
    v_dim = v.shape[-1]
    append_kernel[(batch * new, heads)](
        k_cache, v_cache, k, v,
        lengths.contiguous(), None if table is None else table.contiguous(),
        (k_cache.stride(), v_cache.stride(), k.stride(), v.stride()),
        (0, 1) if table is None else tuple(table.shape),
        (new, k_cache.shape[0], k_cache.shape[2]),
        D=dim, BLOCK_D=launch.next_power_of_2(dim),
        DV=v_dim, BLOCK_DV=launch.next_power_of_2(v_dim),
    )  # fmt: skip


@triton.jit
def append_kernel(
    k_cache, v_cache, k, v, lengths, table, strides, table_shape, sizes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Write one new row of each cache.  Grid: (batch · new rows, kv_heads).

    See Note [Pages that do not exist].
    """
    k_cache_strides, v_cache_strides, k_strides, v_strides = strides
    new, pages, page_size = sizes
    batch, row = tl.program_id(0) // new, tl.program_id(0) % new
    head = tl.cast(tl.program_id(1), tl.int64)
    position = tl.load(lengths + batch) + row
    entries = table_shape[1]
    page = batch
    exists = (position >= 0) & (position < page_size * tl.cast(entries, tl.int64))
    if table is not None:
        entry = tl.cast(batch, tl.int64) * entries + position // page_size
        page = tl.load(table + entry, exists, other=-1)
        exists = exists & (page >= 0) & (page < pages)
    source = (batch, head, row)
    target = (page, head, position % page_size)
    _copy_row(k, k_strides, source, k_cache, k_cache_strides, target, exists, D, BLOCK_D)
    _copy_row(v, v_strides, source, v_cache, v_cache_strides, target, exists, DV, BLOCK_DV)


@triton.jit
def _copy_row(
    rows, strides, source, cache, cache_strides, target, exists,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy one row to the slot `(page, head, row)` of the cache, if the slot exists."""
    columns = tl.cast(tl.arange(0, BLOCK_D), tl.int64)
    first = tl.cast(source[0], tl.int64) * strides[0] + source[1] * strides[1]
    first += tl.cast(source[2], tl.int64) * strides[2]
    start = tl.cast(target[0], tl.int64) * cache_strides[0] + target[1] * cache_strides[1]
    start += tl.cast(target[2], tl.int64) * cache_strides[2]
    x = tl.load(rows + first + columns * strides[3], columns < D, other=0.0)
    if exists:
        tl.store(cache + start + columns * cache_strides[3], x, columns < D)


def choose_tile_rows(rows: int, dim: int, element_bytes: int) -> tuple[int, int]:
    """Return the rows of a query tile and of a key tile; matrix units need at least 16 rows."""
    block_m = min(max(16, launch.next_power_of_2(rows)), 64 if dim <= 128 else 32)
    if element_bytes == 4:
        return min(block_m, 16), 32 if dim <= 128 else 16
    return block_m, 64 if dim <= 128 else 32


def count_stages(device: torch.device, key_bytes: int) -> int:
    """Return the stages of the pipeline of loads: two to four, as many as fit into shared memory.

    A program multiplies only a few rows, so the latency of loads determines its time.  With four
    stages, three tiles of keys and values are being loaded while the fourth is used.
    """
    # A tile of queries has at most this size: see `choose_tile_rows`.
    query_bytes = 16 * 1024
    return max(2, min(4, (launch.get_device(device).shared_bytes - query_bytes) // key_bytes))


@triton.jit
def decode_kernel(
    q, k, v, out, lse, lengths, table, strides, sequence_bounds, table_shape, sizes, factors,
    meta: tl.constexpr,
):  # fmt: skip
    """Compute the output of one tile of rows.

    Grid: (row tiles · batch · kv_heads, splits of the keys).  A row is one head of one query; the
    `sequence_bounds` of packed queries count rows.
    """
    q_strides, k_strides, v_strides, out_strides = strides
    tiles, kv_heads, rows, group, pages, page_size, new = sizes
    _, _, _, left, right = factors
    tile_index, batch, kv_head, batch_head, batch_heads = locate_program(tiles, kv_heads, False)
    split = tl.program_id(1)
    first, begin, _, count, _, sequence = locate_tile(
        tile_index, tiles, sequence_bounds, (rows, rows), meta.BLOCK_M, False, meta.PACKED
    )
    if meta.PACKED and first < 0:
        return
    part = split * (batch_heads // kv_heads) + batch
    q_tile = load_tile(
        q, q_strides, (batch, kv_head, begin, count), first, meta.BLOCK_M, meta.D, meta.BLOCK_D
    )  # [M, D]
    if meta.PACKED:
        batch = sequence
    seq_k = tl.load(lengths + batch) + new
    # See Note [Pages that do not exist].
    capacity = page_size * tl.cast(table_shape[1], tl.int64)
    fits = (seq_k >= 0) & (seq_k <= capacity)
    invalid_sequence = tl.where(fits, 0.0, float("nan"))
    seq_k = tl.where(fits, seq_k, 0)
    row_ids = first + tl.arange(0, meta.BLOCK_M)
    shift = seq_k - count // group
    positions = (row_ids // group + shift)[:, None]
    lo, hi = 0, seq_k
    if meta.LEFT:
        lo = tl.maximum(first // group + shift - left, 0) // meta.BLOCK_N * meta.BLOCK_N
    if meta.RIGHT:
        last = tl.minimum(first + meta.BLOCK_M, count) - 1
        hi = tl.maximum(tl.minimum(seq_k, last // group + shift + right + 1), 0)
    lo, _, _, hi = split_range(lo, lo, hi, hi, split, meta.BLOCK_N, meta.SPLITS)
    k += tl.cast(kv_head, tl.int64) * k_strides[1]
    v += tl.cast(kv_head, tl.int64) * v_strides[1]
    acc, maximum, total = _attend_pages(
        q_tile, k, v, table, strides, table_shape, batch, pages, page_size, lo, hi, seq_k,
        positions, factors, meta,
    )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    total += invalid_sequence
    acc = acc / total[:, None]
    store_tile(out, out_strides, (part, kv_head, begin, count), first, acc, meta.DV)
    lse_offset = (tl.cast(split, tl.int64) * batch_heads + batch_head) * rows + begin
    if meta.EXACT:
        row_lse = maximum + tl.log(total)
    else:
        row_lse = (maximum + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + lse_offset + row_ids, row_lse, mask=row_ids < count)


@triton.jit
def _attend_pages(
    q_tile, k, v, table, strides, table_shape, batch, pages, page_size, lo, hi, seq_k,
    positions, factors, meta: tl.constexpr,
):  # fmt: skip
    """Return the output, maximum and sum of each row over the keys [lo, hi)."""
    _, k_strides, v_strides, _ = strides
    _, softcap_scale, score_scale, left, right = factors
    maximum = tl.full([meta.BLOCK_M], float("-inf"), tl.float32)  # [M]
    total = tl.full([meta.BLOCK_M], 0.0, tl.float32)  # [M]
    acc = tl.full([meta.BLOCK_M, meta.BLOCK_DV], 0.0, tl.float32)  # [M, DV]
    columns, v_columns = tl.arange(0, meta.BLOCK_D), tl.arange(0, meta.BLOCK_DV)
    for start in tl.range(lo, hi, meta.BLOCK_N):
        keys = start + tl.arange(0, meta.BLOCK_N)
        inside = keys < seq_k
        exists = keys >= 0
        if table is None:
            page, row = tl.full([meta.BLOCK_N], 0, tl.int32) + batch, keys
        else:
            entry = tl.cast(batch, tl.int64) * table_shape[1] + keys // page_size
            page = tl.load(table + entry, inside, other=0)
            row = keys % page_size
            exists = (page >= 0) & (page < pages)
            inside = inside & exists
        page, row = page.to(tl.int64), row.to(tl.int64)
        k_rows = k + page * k_strides[0] + row * k_strides[2]
        k_tile = tl.load(
            k_rows[:, None] + columns[None, :],
            inside[:, None] & (columns < meta.D)[None, :],
            other=0.0,
        )  # [N, D]
        raw = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # [M, N]
        if meta.SOFTCAP:
            raw = tanh(raw * softcap_scale)
        visible = is_visible(positions, keys[None, :], seq_k, left, right, meta.LEFT, meta.RIGHT)
        raw = tl.where(visible, tl.where(exists[None, :], raw, float("nan")), float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(raw, 1) * score_scale)
        # The maximum is -inf while all keys are hidden, and -inf - -inf would be NaN.
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = exponential(raw * score_scale - finite_maximum[:, None], meta.EXACT)
        rescale = exponential(maximum - finite_maximum, meta.EXACT)
        total = total * rescale + tl.sum(p, 1)
        v_rows = v + page * v_strides[0] + row * v_strides[2]
        v_tile = tl.load(
            v_rows[:, None] + v_columns[None, :],
            inside[:, None] & (v_columns < meta.DV)[None, :],
            other=0.0,
        )  # [N, DV]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
        maximum = new_maximum
    return acc, maximum, total
