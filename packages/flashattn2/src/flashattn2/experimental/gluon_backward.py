"""The backward pass for Hopper: one warp loads, eight hold 128 rows and multiply by all they see.

Notable: a program holds tiles A and B, and tiles X and Y pass by.  Five products make the gradients
where keys are fixed, A, B = K, V, and queries pass, X, Y = Q, dO.  S and P stand transposed then,
[keys, queries], so that P and dS are left operands of dV and dK straight from registers (Shah et
al. 2024, section 3.3).  While a part of a step is done by hand, a product ordered before it runs:

    matrix unit   | S = A X^T | dP = B Y^T |    | dB += P Y |  dQ = dS^T A  | dA += dS X |
    by hand                     P = exp(S - L)                                dQ leaves

dQ of a query sums over all keys, and these are 128 of them.  So dS goes through shared memory,
where both warpgroups read all of it, and TMA adds the tile's dQ to global memory, in whatever order
programs come by (ATOMIC).  Where sums are to have one order, the same lines run a second time with
queries fixed, A, B = Q, dO, and keys passing, X, Y = K, V: dA is dQ then, and there is no dB.

Barriers are as in `forward.py`: X is ready, Y is ready, and the stage of both is free.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashattn2.experimental.gluon_forward import (
    PRODUCER_REGISTERS,
    descriptor,
    load_tile,
    store_tile,
)
from flashattn2.kernels import launch, row_sums
from flashattn2.kernels.tiles import is_visible, key_ranges, program, query_ranges
from flashattn2.spec import AttentionSpec

# Triton 3.6 has the instruction, and no name for it.
if hasattr(tma, "async_atomic_add"):
    add_tile = tma.async_atomic_add
else:

    @gl._core.builtin
    def add_tile(target, at, source, _semantic=None):
        """Add a tile to global memory by TMA."""
        at = _semantic._convert_to_ir_values(at, require_i64=False)
        add = gl._core.ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(add, target.handle, at, source.handle)


class Tile(NamedTuple):
    """Rows of the tiles that pass, and stages of the ring that they lie in."""

    rows: int
    stages: int


TILES = {64: Tile(128, 2), 128: Tile(64, 2)}
# Rows fixed by a program: 64 for each of two warpgroups, the rows of a wgmma.
FIXED = 128


@gluon.jit
def backward_kernel(
    a, b, x, y, lse, delta, to_dq, to_da, to_db, scale, outer, tiles, heads, group, seq_q, seq_k,
    left, right,
    D: gl.constexpr, FIXED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BY_KEY: gl.constexpr, ATOMIC: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: (tiles fixed · batch · their heads).  BY_KEY keys are fixed."""
    # What sees or is seen by the most rows of a causal problem starts first.
    tile, batch, head, line, _ = program(tiles, heads, not BY_KEY)
    first = tile * FIXED
    if BY_KEY:
        lo, all_lo, all_hi, hi = query_ranges(
            first, first + FIXED - 1, seq_q, seq_k, left, right, 0, ROWS, LEFT, RIGHT, 1
        )
        # The queries' heads that these keys serve pass one after the other.
        members, passing_head, line = group, head * group, line * group
    else:
        lo, all_lo, all_hi, hi = key_ranges(
            first, gl.minimum(first + FIXED, seq_q) - 1, seq_q, seq_k, left, right, 0, ROWS,
            LEFT, RIGHT, 1,
        )  # fmt: skip
        members, passing_head = 1, head // group
    # Of `count` tiles that pass, near .. far - 1 are seen whole, and an edge of the band or the end
    # of the keys cuts the others.
    count, near, far = (
        gl.cdiv(hi - lo, ROWS),
        gl.cdiv(all_lo - lo, ROWS),
        gl.cdiv(all_hi - lo, ROWS),
    )

    a_tile = gl.allocate_shared_memory(a.dtype, [1, 1, FIXED, D], a.layout)
    b_tile = gl.allocate_shared_memory(a.dtype, [1, 1, FIXED, D], a.layout)
    x_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, 1, 1, ROWS, D], x.layout)
    y_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, 1, 1, ROWS, D], x.layout)
    # Of the queries, that pass or are fixed.
    lse_shape: gl.constexpr = [STAGES, 1, ROWS] if BY_KEY else [1, 1, FIXED]
    lse_rows = gl.allocate_shared_memory(gl.float32, lse_shape, lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, lse_shape, lse.layout)
    # 0 .. ROWS - 1, for masks: made from a thread's number they would stay in registers all along.
    numbers = gl.allocate_shared_memory(gl.int32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    numbers.store(gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [8], [0])))
    fixed_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    y_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(fixed_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(stage), count=1)
        mbarrier.init(y_ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    # TMA is to see barriers that ordinary instructions have written.
    fence_async_shared()

    memory = (a_tile, b_tile, x_tiles, y_tiles, lse_rows, delta_rows, numbers)
    barriers = (fixed_ready, x_ready, y_ready, free)
    location = (batch, head, first, members, passing_head)
    loop = (lo, count, near, far)
    band = (seq_q, seq_k, left, right)
    gl.warp_specialize(
        [
            (consumer, (to_dq, to_da, to_db, scale, outer, memory, barriers, location, loop, band,
                        D, FIXED, ROWS, STAGES, LEFT, RIGHT, BY_KEY, ATOMIC)),
            (producer, (a, b, x, y, lse, delta, memory, barriers, location, loop, line,
                        ROWS, STAGES, BY_KEY)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def producer(
    a, b, x, y, lse, delta, memory, barriers, location, loop, line,
    ROWS: gl.constexpr, STAGES: gl.constexpr, BY_KEY: gl.constexpr,
):  # fmt: skip
    """One warp: what is fixed, then each tile that passes as soon as there is room for it."""
    a_tile, b_tile, x_tiles, y_tiles, lse_rows, delta_rows, _ = memory
    fixed_ready, x_ready, y_ready, free = barriers
    batch, head, first, members, passing_head = location
    start, count, _, _ = loop
    # With each tile of queries come their log-sum-exps and D.
    more: gl.constexpr = lse.block_type.nbytes if BY_KEY else 0
    mbarrier.expect(
        fixed_ready, 2 * a.block_type.nbytes + (0 if BY_KEY else 2 * lse.block_type.nbytes)
    )
    load_tile(a, [batch, head, first, 0], fixed_ready, a_tile)
    load_tile(b, [batch, head, first, 0], fixed_ready, b_tile)
    if not BY_KEY:
        load_tile(lse, [line, first], fixed_ready, lse_rows.index(0))
        load_tile(delta, [line, first], fixed_ready, delta_rows.index(0))
    for j in range(members * count):
        stage, phase = j % STAGES, (j // STAGES) & 1
        member, row = j // count, start + j % count * ROWS
        at = [batch, passing_head + member, row, 0]
        # The other parity: the first tile of each stage waits for nobody.
        mbarrier.wait(free.index(stage), phase ^ 1)
        ready = x_ready.index(stage)
        mbarrier.expect(ready, x.block_type.nbytes + more)
        load_tile(x, at, ready, x_tiles.index(stage))
        if BY_KEY:
            load_tile(lse, [line + member, row], ready, lse_rows.index(stage))
        ready = y_ready.index(stage)
        mbarrier.expect(ready, x.block_type.nbytes + more)
        load_tile(y, at, ready, y_tiles.index(stage))
        if BY_KEY:
            load_tile(delta, [line + member, row], ready, delta_rows.index(stage))


@gluon.jit
def consumer(
    to_dq, to_da, to_db, scale, outer, memory, barriers, location, loop, band,
    D: gl.constexpr, FIXED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BY_KEY: gl.constexpr, ATOMIC: gl.constexpr,
):  # fmt: skip
    """Eight warps: the tiles fixed against all that pass."""
    a_tile, b_tile, _, _, _, _, _ = memory
    batch, head, first, members, passing_head = location
    start, count, near, far = loop
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    da = gl.full([FIXED, D], 0.0, gl.float32, layout)  # [FIXED, D]
    db = gl.full([FIXED, D], 0.0, gl.float32, layout)  # [FIXED, D]
    room = (0, 0)
    if ATOMIC:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        ds_tile = gl.allocate_shared_memory(a_tile.dtype, [FIXED, ROWS], ds_layout)
        room = (ds_tile, gl.allocate_shared_memory(gl.float32, [1, 1, ROWS, D], to_dq.layout))
    mbarrier.wait(barriers[0], 0)
    for member in range(members):
        for i in range(count):
            at = (batch, passing_head + member, start + i * ROWS, first)
            da, db = step(
                member * count + i, da, db, to_dq, outer, memory, barriers, room, at, band,
                (i < near) | (i >= far),
                D, FIXED, ROWS, STAGES, LEFT, RIGHT, BY_KEY, ATOMIC,
            )  # fmt: skip
    # A and B were read for the last time: the gradients go out through their memory, and TMA leaves
    # out the rows beyond the end.
    a_tile.reshape([FIXED, D]).store((da * scale).to(a_tile.dtype))
    if BY_KEY:
        b_tile.reshape([FIXED, D]).store(db.to(a_tile.dtype))
    fence_async_shared()
    store_tile(to_da, [batch, head, first, 0], a_tile)
    if BY_KEY:
        store_tile(to_db, [batch, head, first, 0], b_tile)
    tma.store_wait(0)


@gluon.jit
def step(
    j, da, db, to_dq, outer, memory, barriers, room, at, band, masked,
    D: gl.constexpr, FIXED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BY_KEY: gl.constexpr, ATOMIC: gl.constexpr,
):  # fmt: skip
    """What one tile that passes adds to dA, dB and, if ATOMIC, dQ."""
    a_tile, b_tile, x_tiles, y_tiles, lse_rows, delta_rows, numbers = memory
    _, x_ready, y_ready, free = barriers
    batch, head, row, first = at
    stage, phase = j % STAGES, (j // STAGES) & 1
    # Each warpgroup has 64 of the rows fixed.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    lines: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.full([FIXED, ROWS], 0.0, gl.float32, s_layout)
    a_tile = a_tile.reshape([FIXED, D])  # [FIXED, D]
    b_tile = b_tile.reshape([FIXED, D])  # [FIXED, D]
    x_tile = x_tiles.index(stage).reshape([ROWS, D])  # [ROWS, D]
    y_tile = y_tiles.index(stage).reshape([ROWS, D])  # [ROWS, D]

    mbarrier.wait(x_ready.index(stage), phase)
    s = warpgroup_mma(a_tile, x_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(y_ready.index(stage), phase)
    dp = warpgroup_mma(b_tile, y_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    # All but the last one ordered are done.
    s = warpgroup_mma_wait(1, deps=(s,))  # [FIXED, ROWS]
    if BY_KEY:
        lse = lse_rows.index(stage).reshape([ROWS]).load(columns)[None, :]  # [1, ROWS]
    else:
        lse = lse_rows.index(0).reshape([FIXED]).load(lines)[:, None]  # [FIXED, 1]
    p = gl.exp2(s * outer - lse)
    if masked:
        seq_q, seq_k, left, right = band
        fixed = first + gl.arange(0, FIXED, lines)[:, None]  # [FIXED, 1]
        passing = row + numbers.load(columns)[None, :]  # [1, ROWS]
        if BY_KEY:
            visible = is_visible(passing + seq_k - seq_q, fixed, seq_k, left, right, LEFT, RIGHT)
        else:
            visible = is_visible(fixed + seq_k - seq_q, passing, seq_k, left, right, LEFT, RIGHT)
        p = gl.where(visible, p, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp,))  # [FIXED, ROWS]
    if BY_KEY:
        delta = delta_rows.index(stage).reshape([ROWS]).load(columns)[None, :]  # [1, ROWS]
    else:
        delta = delta_rows.index(0).reshape([FIXED]).load(lines)[:, None]  # [FIXED, 1]
    ds = (p * (dp - delta)).to(a_tile.dtype)
    if ATOMIC:
        room[0].store(ds)
        fence_async_shared()
    # From an accumulator's layout to a left operand's: the same registers, two numbers in each.
    ds = gl.convert_layout(ds, gl.DotOperandLayout(0, d_layout, 2))
    if BY_KEY:
        p = gl.convert_layout(p.to(a_tile.dtype), gl.DotOperandLayout(0, d_layout, 2))
        db = warpgroup_mma(p, y_tile, db, is_async=True)
    if ATOMIC:
        # Of dQ, each warpgroup makes 64 columns, or else 64 rows.
        q_layout: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [4, 2] if ROWS == 64 else [8, 1], [16, 64, 16]
        )
        part = gl.full([ROWS, D], 0.0, gl.float32, q_layout)  # [ROWS, D]
        part = warpgroup_mma(room[0].permute((1, 0)), a_tile, part, use_acc=False, is_async=True)
    da = warpgroup_mma(ds, x_tile, da, is_async=True)
    if ATOMIC:
        db, part = warpgroup_mma_wait(1, deps=(db, part))
        # TMA has read the part before.
        tma.store_wait(0)
        room[1].reshape([ROWS, D]).store(part)
        fence_async_shared()
        add_tile(to_dq, [batch, head, row, 0], room[1])
    da, db = warpgroup_mma_wait(0, deps=(da, db))
    mbarrier.arrive(free.index(stage), count=1)
    return da, db


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, spec: AttentionSpec, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    dq, dk, dv = (launch.empty_like_layout(x) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, k, v, out, grad_out = (
        x if launch.can_use_tma(x) else x.clone(memory_format=torch.contiguous_format)
        for x in (q, k, v, out, grad_out)
    )
    heads, seq_q, dim = q.shape[1:]
    group, tile = heads // k.shape[1], TILES[dim]
    lse = lse.contiguous()
    delta = per_row(row_sums.delta(out, grad_out, grad_lse, lse))
    # P of a row that sees no key is 0.
    lse = per_row(torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e)))
    outer = launch.score_factors(spec, False)[2]

    def run(fixed, passing, to, by_key, to_dq=None):
        tiles = launch.cdiv(fixed[0].shape[2], FIXED)
        queries = tile.rows if by_key else FIXED
        backward_kernel[(tiles * fixed[0].shape[0] * fixed[0].shape[1],)](
            *(descriptor(x, FIXED) for x in fixed), *(descriptor(x, tile.rows) for x in passing),
            row_statistics(lse, queries), row_statistics(delta, queries),
            None if to_dq is None else descriptor(to_dq, tile.rows),
            *(None if x is None else descriptor(x, FIXED) for x in to),
            spec.scale, outer, tiles, fixed[0].shape[1], group, seq_q, k.shape[2],
            spec.left, spec.right,
            D=dim, FIXED=FIXED, ROWS=tile.rows, STAGES=tile.stages, LEFT=spec.left >= 0,
            RIGHT=spec.right >= 0, BY_KEY=by_key, ATOMIC=to_dq is not None,
            PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip

    if deterministic:
        run((k, v), (q, grad_out), (dk, dv), True)
        run((q, grad_out), (k, v), (dq, None), False)
    else:
        total = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
        run((k, v), (q, grad_out), (dk, dv), True, total)
        dq.copy_(total.mul_(spec.scale))
    return dq, dk, dv


def per_row(x: Tensor) -> Tensor:
    """``(batch, heads, rows)`` as ``(batch · heads, rows)``, each line as long as TMA asks."""
    x = x.flatten(0, 1)
    room = x.new_empty(x.shape[0], launch.cdiv(x.shape[1], 4) * 4)[:, : x.shape[1]]
    return room.copy_(x)


def row_statistics(x: Tensor, rows: int) -> TensorDescriptor:
    """For so many of the numbers of a line."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [1, rows], layout)


def describe(dim: int, deterministic: bool) -> tuple[str, ...]:
    """The backward pass as `explain` tells it."""
    rows, stages = TILES[dim]
    tail = f"by head dim {dim}, 2 warpgroups and a loading warp, {stages} stages, TMA descriptors"
    by_key = f"{rows} queries by {FIXED} keys {tail}"
    if not deterministic:
        return (f"atomic: {by_key}",)
    return f"dkdv: {by_key}", f"dq: {FIXED} queries by {rows} keys {tail}"
