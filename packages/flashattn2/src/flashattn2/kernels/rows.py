"""What the backward pass needs of each row: D = rowsum(dO ∘ O) - dL.

Notable: two roundings here show beside those of whole float32 products.  A log-sum-exp above 4 is
rounded by up to 2.4e-7, and every entry of its row of P errs by that; and dO · O does not err as
the dP does that it is taken from, of which dS may be the small rest.  So where products are EXACT a
pass over the keys makes the P and dP that the later kernels make and sums them: P is divided by its
sum, and D = rowsum(P ∘ dP) - dL.  All else errs more in its products, and spares two of nine.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashattn2.kernels import launch
from flashattn2.kernels.tiles import key_ranges, load_tile, place, power, program, seen, tanh
from flashattn2.problem import Score


def delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, lse: Tensor) -> Tensor:
    """D from the output."""
    batch, heads, rows, dim = out.shape
    d = torch.empty_like(lse)
    tiles = triton.cdiv(rows, 32)
    delta_kernel[launch.grid(tiles, batch * heads, 1)](
        out, grad_out, None if grad_lse is None else grad_lse.float().contiguous(), d,
        out.stride()[:3], grad_out.stride()[:3], tiles, heads, rows,
        D=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_M=32, HAS_GRAD_LSE=grad_lse is not None,
        enable_fp_fusion=True,
    )  # fmt: skip
    return d


def norm_and_delta(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None, score: Score, precision: str, split_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What makes each row of P sum to one, and D, both from the sums over P and dP."""
    plan = launch.plan(
        "dq",
        precision,
        score,
        q,
        k,
        v,
        grad_out,
        packed=cu_q is not None,
        split_size=split_size,
    )
    batch, heads, rows, dim = q.shape
    tile, splits = plan.tile, plan.splits
    tiles = launch.tiles_of(q, cu_q, tile.block_m)
    inner, outer = launch.score_factors(score, True)
    p_sums, dp_sums = lse.new_empty((2, splits, *lse.shape))
    sums_kernel[launch.grid(tiles, batch * heads, splits)](
        q, k, v, grad_out, lse, p_sums, dp_sums, *(x.stride()[:3] for x in (q, k, v, grad_out)),
        cu_q, cu_k, inner, outer, tiles, heads, heads // k.shape[1], rows, rows, k.shape[2],
        score.left, score.right,
        D=dim, BLOCK_D=plan.block_d, DV=v.shape[-1], BLOCK_DV=plan.block_dv,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        LEFT=score.left >= 0, RIGHT=score.right >= 0, SOFTCAP=score.softcap > 0,
        PACKED=cu_q is not None, SPLITS=plan.split_flag,
        **tile.compiler_options,
    )  # fmt: skip
    total = p_sums.sum(0)
    # A row that sees no key has P = 0, whatever it is multiplied by.
    norm = torch.where(total == 0.0, 1.0, 1.0 / total)
    d = norm * dp_sums.sum(0)
    return norm, d if grad_lse is None else d - grad_lse


@triton.jit
def delta_kernel(
    out, grad_out, grad_lse, delta, out_strides, grad_out_strides, tiles, heads, rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
):  # fmt: skip
    """D = rowsum(dO · O) - dL.  Grid: (row tiles · batch · heads)."""
    tile, batch, head, at, _ = program(tiles, heads, False)
    first = tile * BLOCK_M
    o = load_tile(out, out_strides, batch, head, 0, first, rows, BLOCK_M, D, BLOCK_D, False, False)
    do = load_tile(
        grad_out, grad_out_strides, batch, head, 0, first, rows, BLOCK_M, D, BLOCK_D, False, False
    )
    d = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    lines = first + tl.arange(0, BLOCK_M)
    line = tl.cast(at, tl.int64) * rows + lines
    if HAS_GRAD_LSE:
        d -= tl.load(grad_lse + line, lines < rows, other=0.0)
    tl.store(delta + line, d, lines < rows)


@triton.jit
def sums_kernel(
    q, k, v, grad_out, lse, p_sums, dp_sums, q_strides, k_strides, v_strides, grad_out_strides,
    cu_q, cu_k, inner, outer, tiles, heads, group, rows, seq_q, seq_k, left, right,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Rowsums of P and of P ∘ dP.  Grid: (query tiles · batch · heads, splits of the keys)."""
    tile, batch, head, at, every = program(tiles, heads, True)
    split, kv_head = tl.program_id(1), head // group
    first, q_begin, k_begin, seq_q, seq_k = place(
        tile, tiles, cu_q, seq_q, cu_q, cu_k, seq_q, seq_k, BLOCK_M, PACKED
    )
    if PACKED and first < 0:
        return

    q_tile = load_tile(
        q, q_strides, batch, head, q_begin, first, seq_q, BLOCK_M, D, BLOCK_D, False, False
    )  # [M, D]
    do_tile = load_tile(
        grad_out, grad_out_strides, batch, head, q_begin, first, seq_q,
        BLOCK_M, DV, BLOCK_DV, False, False,
    )  # fmt: skip  # [M, DV]
    lines = first + tl.arange(0, BLOCK_M)
    line = tl.cast(at, tl.int64) * rows + q_begin
    row_lse = tl.load(lse + line + lines, lines < seq_q, other=float("inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    total = tl.zeros([BLOCK_M], tl.float32)
    product = tl.zeros([BLOCK_M], tl.float32)
    last = tl.minimum(first + BLOCK_M, seq_q) - 1
    lo, _, _, hi = key_ranges(
        first, last, seq_q, seq_k, left, right, split, BLOCK_N, LEFT, RIGHT, SPLITS
    )
    positions = (lines + seq_k - seq_q)[:, None]
    # Beside products of this kind a mask costs little: one loop for all tiles.
    for start in tl.range(lo, hi, BLOCK_N):
        k_tile = load_tile(
            k, k_strides, batch, kv_head, k_begin, start, seq_k,
            BLOCK_N, D, BLOCK_D, False, False,
        )  # fmt: skip  # [N, D]
        v_tile = load_tile(
            v, v_strides, batch, kv_head, k_begin, start, seq_k,
            BLOCK_N, DV, BLOCK_DV, False, False,
        )  # fmt: skip  # [N, DV]
        raw = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # [M, N]
        if SOFTCAP:
            raw = tanh(raw * inner)
        keys = start + tl.arange(0, BLOCK_N)[None, :]
        p = power(raw * outer - row_lse[:, None], True)  # [M, N]
        p = tl.where(seen(positions, keys, seq_k, left, right, LEFT, RIGHT), p, 0.0)
        total += tl.sum(p, 1)
        product += tl.sum(p * tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee"), 1)
    part = (tl.cast(split, tl.int64) * every + at) * rows + q_begin
    tl.store(p_sums + part + lines, total, lines < seq_q)
    tl.store(dp_sums + part + lines, product, lines < seq_q)
