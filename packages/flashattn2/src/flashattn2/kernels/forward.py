"""The forward kernel: one tile of queries against the keys that it sees.

The loop over keys has three regions, so that only tiles on an edge of the band or of the sequence
need a mask.  With fewer query tiles than SMs, the keys of each tile are split among several
programs, and `combine_kernel` combines their outputs by their log-sum-exps.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashattn2.kernels import launch
from flashattn2.kernels.tiles import (
    exponential,
    is_visible,
    key_ranges,
    load_tile,
    locate_program,
    locate_tile,
    select_region,
    store_tile,
    tanh,
)
from flashattn2.spec import AttentionSpec


@triton.jit
def forward_kernel(
    q, k, v, out, lse, strides, sequence_bounds, sizes, factors, meta: tl.constexpr
):  # fmt: skip
    """Compute the output of one tile of queries.

    Grid: (query tiles · batch · heads, splits of the keys).
    """
    q_strides, _, _, out_strides = strides
    tiles, heads, group, rows, seq_k = sizes
    _, _, _, left, right = factors
    tile_index, batch, head, _, batch_heads = locate_program(tiles, heads, True)
    split = tl.program_id(1)
    kv_head = head // group
    first, q_begin, k_begin, seq_q, seq_k, _ = locate_tile(
        tile_index, tiles, sequence_bounds, (rows, seq_k), meta.BLOCK_M, False, meta.PACKED
    )
    if meta.PACKED and first < 0:
        return

    q_tile = load_tile(
        q, q_strides, (batch, head, q_begin, seq_q), first,
        meta.BLOCK_M, meta.D, meta.BLOCK_D, meta.TMA,
    )  # fmt: skip  # [M, D]
    maximum = tl.full([meta.BLOCK_M], float("-inf"), tl.float32)  # [M]
    total = tl.full([meta.BLOCK_M], 0.0, tl.float32)  # [M]
    acc = tl.full([meta.BLOCK_M, meta.BLOCK_DV], 0.0, tl.float32)  # [M, DV]
    last = tl.minimum(first + meta.BLOCK_M, seq_q) - 1
    lo, all_lo, all_hi, hi = key_ranges(
        first, last, seq_q, seq_k, left, right, split,
        meta.BLOCK_N, meta.LEFT, meta.RIGHT, meta.SPLITS,
    )  # fmt: skip
    # Region 1 has the keys that all queries see.  Regions 0 and 2, before and after it, are masked.
    # Without a left bound, region 0 is empty.
    for region in tl.static_range(0 if meta.LEFT else 1, 3):
        start, stop = select_region(lo, all_lo, all_hi, hi, region)
        acc, maximum, total = _attend(
            acc, maximum, total, q_tile, k, v, strides, (batch, kv_head, k_begin, seq_k),
            start, stop,
            first + seq_k - seq_q, factors, meta, region != 1,
        )  # fmt: skip

    # A row that sees no key has a total of 0, output 0 and log-sum-exp -inf.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    part = split * (batch_heads // heads) + batch
    store_tile(out, out_strides, (part, head, q_begin, seq_q), first, acc, meta.DV)
    row_ids = first + tl.arange(0, meta.BLOCK_M)
    lse_index = (tl.cast(part, tl.int64) * heads + head) * rows + q_begin + row_ids
    # The log-sum-exp is in base e, even if the scores are exponents of 2.
    if meta.EXACT:
        row_lse = maximum + tl.log(total)
    else:
        row_lse = (maximum + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + lse_index, row_lse, mask=row_ids < seq_q)


@triton.jit
def _attend(
    acc, maximum, total, q_tile, k, v, strides, sequence, lo, hi, position, factors,
    meta: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the running output, maximum and sum of each row, updated with the keys [lo, hi)."""
    _, k_strides, v_strides, _ = strides
    _, softcap_scale, score_scale, left, right = factors
    seq_k = sequence[3]
    for start in tl.range(lo, hi, meta.BLOCK_N):
        k_tile = load_tile(
            k, k_strides, sequence, start, meta.BLOCK_N, meta.D, meta.BLOCK_D, meta.TMA, not MASKED
        )  # [N, D]
        raw = tl.dot(q_tile, tl.trans(k_tile), input_precision=meta.PRECISION)  # [M, N]
        if meta.SOFTCAP:
            raw = tanh(raw * softcap_scale)
        if MASKED:
            positions = position + tl.arange(0, meta.BLOCK_M)[:, None]
            keys = start + tl.arange(0, meta.BLOCK_N)[None, :]
            visible = is_visible(positions, keys, seq_k, left, right, meta.LEFT, meta.RIGHT)
            raw = tl.where(visible, raw, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(raw, 1) * score_scale)
        finite_maximum = new_maximum
        if MASKED:
            # The maximum is -inf while all keys are hidden, and -inf - -inf would be NaN.
            finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = exponential(raw * score_scale - finite_maximum[:, None], meta.EXACT)  # [M, N]
        # The running sums are relative to the old maximum: rescale them to the new one.
        rescale = exponential(maximum - finite_maximum, meta.EXACT)  # [M]
        total = total * rescale + tl.sum(p, 1)
        # Keys after the sequence are masked above.  Load their values as 0, because 0 · NaN is NaN.
        v_tile = load_tile(
            v, v_strides, sequence, start,
            meta.BLOCK_N, meta.DV, meta.BLOCK_DV, meta.TMA, not MASKED,
        )  # fmt: skip  # [N, DV]
        acc = acc * rescale[:, None]  # [M, DV]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=meta.PRECISION)
        maximum = new_maximum
    return acc, maximum, total


def combine(parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, splits: int) -> None:
    """Combine the outputs and log-sum-exps of all splits into `out` and `lse`, in place."""
    batch, heads, rows, dim = out.shape
    tiles = launch.cdiv(rows, COMBINED_ROWS)
    combine_kernel[launch.compute_grid(tiles, batch * heads, 1)](
        parts, part_lse, out, lse, out.stride()[:3],
        (tiles, heads, rows, splits, batch * heads * rows),
        D=dim, BLOCK_D=launch.next_power_of_2(dim), BLOCK_M=COMBINED_ROWS, SPLITS=COMBINED_SPLITS,
        enable_fp_fusion=True,
    )  # fmt: skip


#: Rows of each split that one program of `combine_kernel` loads.
COMBINED_ROWS = 4
#: Splits that one step of `combine_kernel` loads.
COMBINED_SPLITS = 16


@triton.jit
def combine_kernel(
    parts, part_lse, out, lse, strides, sizes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the outputs of all splits, weighted by their log-sum-exps.

    A program loads SPLITS parts at a time; one step is enough unless a decoding call has more.
    Grid: (row tiles · batch · heads).  The `strides` are those of the output, and the last of
    `sizes` is the number of rows per split in all heads.
    """
    tiles, heads, rows, splits, part_rows = sizes
    tile_index, batch, head, batch_head, _ = locate_program(tiles, heads, False)
    first = tile_index * BLOCK_M
    row_ids = first + tl.arange(0, BLOCK_M)  # [M]
    columns = tl.arange(0, BLOCK_D)
    row_index = tl.cast(batch_head, tl.int64) * rows + row_ids
    # All parts together may have 2**31 elements or more, so offsets are int64.
    part_index = tl.cast(tl.arange(0, SPLITS), tl.int64)[:, None] * part_rows
    part_index += row_index[None, :]  # [S, M]
    numbers = tl.arange(0, SPLITS)[:, None]
    is_row = (row_ids < rows)[None, :]
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [M]
    for start in tl.range(0, splits, SPLITS):
        offset = tl.cast(start, tl.int64) * part_rows
        exists = (numbers + start < splits) & is_row
        x = tl.load(part_lse + offset + part_index, exists, other=float("-inf"))
        maximum = tl.maximum(maximum, tl.max(x, 0))
    finite_maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)  # [M, D]
    total = tl.full([BLOCK_M], 0.0, tl.float32)  # [M]
    for start in tl.range(0, splits, SPLITS):
        offset = tl.cast(start, tl.int64) * part_rows
        exists = (numbers + start < splits) & is_row
        x = tl.load(part_lse + offset + part_index, exists, other=float("-inf"))
        weight = tl.exp(x - finite_maximum[None, :])  # [S, M]
        cells = parts + (offset + part_index)[:, :, None] * D + columns[None, None, :]
        inside = exists[:, :, None] & (columns < D)[None, None, :]
        part = tl.load(cells, inside, other=0.0)  # [S, M, D]
        acc += tl.sum(weight[:, :, None] * part, 0)
        total += tl.sum(weight, 0)
    nonzero_total = tl.where(total == 0.0, 1.0, total)
    store_tile(out, strides, (batch, head, 0, rows), first, acc / nonzero_total[:, None], D)
    tl.store(lse + row_index, maximum + tl.log(nonzero_total), row_ids < rows)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: AttentionSpec,
    precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and the log-sum-exp."""
    out = launch.make_empty_like(q, v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if q.numel() == 0 or k.numel() == 0:
        lse.fill_(-math.inf)
        return out.zero_(), lse
    q, k, v = launch.make_rows_contiguous(q, k, v)
    plan = launch.plan_launch("forward", precision, spec, q, k, v, packed=cu_q is not None)
    batch, heads, rows, _ = q.shape
    tile, meta = plan
    splits = meta.SPLITS
    tiles = launch.count_tiles(q, cu_q, tile.block_m)
    to_out, to_lse = launch.make_split_outputs(out, splits), launch.make_split_outputs(lse, splits)
    forward_kernel[launch.compute_grid(tiles, batch * heads, splits)](
        *plan.make_operands((q, tile.block_m), (k, tile.block_n), (v, tile.block_n)),
        to_out, to_lse, launch.get_strides(q, k, v, to_out),
        launch.make_sequence_bounds(cu_q, cu_k),
        (tiles, heads, heads // k.shape[1], rows, k.shape[2]),
        launch.compute_score_factors(spec, meta.EXACT), meta, **tile.compiler_options,
    )  # fmt: skip
    if splits > 1:
        combine(to_out, to_lse, out, lse, splits)
    return out, lse
