"""The row statistics of the backward pass: D = rowsum(dO ∘ O) - dL, and 1 / rowsum(P).

Two rounding errors, which `backends.tiled.compute_row_sums` describes, are larger than those of
EXACT float32 products (see `tiles.py`).  Therefore, for EXACT products, `sums_kernel` sums the same
P and dP that the later kernels compute: P is divided by its sum, and D = rowsum(P ∘ dP) - dL.
Other precisions have larger errors in their products and skip this kernel, which saves two of nine
products.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

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
    tanh,
)
from flashattn2.spec import AttentionSpec


def compute_delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, lse: Tensor) -> Tensor:
    """Return D = rowsum(dO ∘ O) - dL, in the shape of `lse`."""
    d = torch.empty_like(lse)
    _write_delta(out, grad_out, grad_lse, None, d, None, lse.shape[-1])
    return d


def compute_padded_statistics(
    out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return L · log2(e), as scores are exponents of 2, and D, both `(batch · heads, rows)`.

    L is +inf, so that P is 0, for rows that see no key.  The rows of each head start at a multiple
    of 16 bytes, as TMA requires.
    """
    batch, heads, rows = lse.shape
    head_stride = launch.cdiv(rows, 4) * 4
    d, scaled = lse.new_empty(2, batch * heads, head_stride)
    _write_delta(out, grad_out, grad_lse, lse, d, scaled, head_stride)
    return scaled[:, :rows], d[:, :rows]


def _write_delta(
    out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, lse: Tensor | None, d: Tensor,
    scaled: Tensor | None, head_stride: int,
) -> None:  # fmt: skip
    """Run `delta_kernel` to fill `d` and `scaled`, where heads are `head_stride` numbers apart."""
    batch, heads, rows, dim = out.shape
    tiles = launch.cdiv(rows, 32)
    delta_kernel[launch.compute_grid(tiles, batch * heads, 1)](
        out, grad_out, None if grad_lse is None else grad_lse.float().contiguous(), lse, d, scaled,
        launch.get_strides(out, grad_out), (tiles, heads, rows, head_stride),
        D=dim, BLOCK_D=launch.next_power_of_2(dim), BLOCK_M=32, enable_fp_fusion=True,
    )  # fmt: skip


def compute_norm_and_delta(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None, spec: AttentionSpec, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return 1 / rowsum(P) and D for EXACT products, both with the shape of `lse`.

    P is computed from the rounded log-sum-exp, so its rows do not sum to exactly 1.  Therefore,
    D = rowsum(P ∘ dP) / rowsum(P) - dL.
    """
    plan = launch.plan_launch("dq", precision, spec, q, k, v, grad_out, packed=cu_q is not None)
    batch, heads, rows, _ = q.shape
    tile, splits = plan.tile, plan.meta.SPLITS
    tiles = launch.count_tiles(q, cu_q, tile.block_m)
    p_sums, dp_sums = lse.new_empty((2, splits, *lse.shape))
    sums_kernel[launch.compute_grid(tiles, batch * heads, splits)](
        q, k, v, grad_out, lse, p_sums, dp_sums,
        launch.get_strides(q, k, v, grad_out), launch.make_sequence_bounds(cu_q, cu_k),
        (tiles, heads, heads // k.shape[1], rows, k.shape[2]),
        launch.compute_score_factors(spec, True), plan.meta,
        **tile.compiler_options,
    )  # fmt: skip
    total = p_sums.sum(0)
    # A row that sees no key has P = 0, so any finite factor is valid.
    norm = torch.where(total == 0.0, 1.0, 1.0 / total)
    d = norm * dp_sums.sum(0)
    return norm, d if grad_lse is None else d - grad_lse


@triton.jit
def delta_kernel(
    out, grad_out, grad_lse, lse, delta, scaled, strides, sizes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute D = rowsum(dO ∘ O) - dL and, if `scaled` is not None, L · log2(e).

    The last of `sizes` is the head stride of the results.  Grid: (row tiles · batch · heads).
    """
    out_strides, grad_out_strides = strides
    tiles, heads, rows, head_stride = sizes
    tile_index, batch, head, batch_head, _ = locate_program(tiles, heads, False)
    first = tile_index * BLOCK_M
    sequence = (batch, head, 0, rows)
    o = load_tile(out, out_strides, sequence, first, BLOCK_M, D, BLOCK_D)  # [M, DV]
    do = load_tile(grad_out, grad_out_strides, sequence, first, BLOCK_M, D, BLOCK_D)  # [M, DV]
    d = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [M]
    row_ids = first + tl.arange(0, BLOCK_M)
    source = tl.cast(batch_head, tl.int64) * rows + row_ids
    target = tl.cast(batch_head, tl.int64) * head_stride + row_ids
    if grad_lse is not None:
        d -= tl.load(grad_lse + source, row_ids < rows, other=0.0)
    tl.store(delta + target, d, row_ids < rows)
    if scaled is not None:
        x = tl.load(lse + source, row_ids < rows, other=0.0)
        x = tl.where(x == float("-inf"), float("inf"), x * 1.4426950408889634)
        tl.store(scaled + target, x, row_ids < rows)


@triton.jit
def sums_kernel(
    q, k, v, grad_out, lse, p_sums, dp_sums, strides, sequence_bounds, sizes, factors,
    meta: tl.constexpr,
):  # fmt: skip
    """Compute the row sums of P and P ∘ dP.

    Grid: (query tiles · batch · heads, splits of the keys).
    """
    q_strides, k_strides, v_strides, grad_out_strides = strides
    tiles, heads, group, rows, seq_k = sizes
    _, softcap_scale, score_scale, left, right = factors
    tile_index, batch, head, batch_head, batch_heads = locate_program(tiles, heads, True)
    split = tl.program_id(1)
    kv_head = head // group
    first, q_begin, k_begin, seq_q, seq_k, _ = locate_tile(
        tile_index, tiles, sequence_bounds, (rows, seq_k), meta.BLOCK_M, False, meta.PACKED
    )
    if meta.PACKED and first < 0:
        return

    queries, keys_of = (batch, head, q_begin, seq_q), (batch, kv_head, k_begin, seq_k)
    q_tile = load_tile(q, q_strides, queries, first, meta.BLOCK_M, meta.D, meta.BLOCK_D)  # [M, D]
    do_tile = load_tile(
        grad_out, grad_out_strides, queries, first, meta.BLOCK_M, meta.DV, meta.BLOCK_DV
    )  # [M, DV]
    row_ids = first + tl.arange(0, meta.BLOCK_M)
    row_offset = tl.cast(batch_head, tl.int64) * rows + q_begin
    row_lse = tl.load(lse + row_offset + row_ids, row_ids < seq_q, other=float("inf"))  # [M]
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    total = tl.full([meta.BLOCK_M], 0.0, tl.float32)  # [M]
    product = tl.full([meta.BLOCK_M], 0.0, tl.float32)  # [M]
    last = tl.minimum(first + meta.BLOCK_M, seq_q) - 1
    lo, _, _, hi = key_ranges(
        first, last, seq_q, seq_k, left, right, split,
        meta.BLOCK_N, meta.LEFT, meta.RIGHT, meta.SPLITS,
    )  # fmt: skip
    positions = (row_ids + seq_k - seq_q)[:, None]
    # One masked loop serves all tiles: a mask takes little time compared with products that do not
    # run on matrix units.
    for start in tl.range(lo, hi, meta.BLOCK_N):
        k_tile = load_tile(
            k, k_strides, keys_of, start, meta.BLOCK_N, meta.D, meta.BLOCK_D
        )  # [N, D]
        v_tile = load_tile(
            v, v_strides, keys_of, start, meta.BLOCK_N, meta.DV, meta.BLOCK_DV
        )  # [N, DV]
        raw = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # [M, N]
        if meta.SOFTCAP:
            raw = tanh(raw * softcap_scale)
        keys = start + tl.arange(0, meta.BLOCK_N)[None, :]
        p = exponential(raw * score_scale - row_lse[:, None], True)  # [M, N]
        visible = is_visible(positions, keys, seq_k, left, right, meta.LEFT, meta.RIGHT)
        p = tl.where(visible, p, 0.0)
        total += tl.sum(p, 1)
        product += tl.sum(p * tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee"), 1)
    part = (tl.cast(split, tl.int64) * batch_heads + batch_head) * rows + q_begin
    tl.store(p_sums + part + row_ids, total, row_ids < seq_q)
    tl.store(dp_sums + part + row_ids, product, row_ids < seq_q)
