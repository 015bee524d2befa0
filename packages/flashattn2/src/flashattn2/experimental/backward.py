"""The backward pass for Hopper with one loading warp and eight computing warps.

Status: experimental, as for the forward kernel: see `forward.py`.

A program keeps the tiles A and B of 128 rows resident and streams the tiles X and Y.  With resident
keys (A, B = K, V and X, Y = Q, dO) and ATOMIC, five products compute all gradients.  S and P are
then transposed, [keys, queries].  Therefore P and dS are left operands in registers of the products
for dV and dK (Shah et al. 2024, section 3.3).  Elementwise operations overlap with the product
issued before them:

    matrix unit   | S = A Xᵀ | dP = B Yᵀ |    | dB += P Y |  dQ = dSᵀ A  | dA += dS X |
    elementwise                P = exp(S - L)                              store dQ

dQ of a query is a sum over all keys, and a program has 128 keys.  With ATOMIC, dS is written to
shared memory, and both warpgroups read all of it.  TMA then adds the tile's dQ to global memory in
varying order.  For a fixed order, the first run omits dQ, and the same kernel runs a second time.
The queries are then resident (A, B = Q, dO) and the keys streamed (X, Y = K, V): dA is dQ, and dB
does not exist.

As in `forward.py`, barriers signal that X is ready, that Y is ready, and that their stage is free.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

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

from flashattn2.experimental.forward import PRODUCER_REGISTERS
from flashattn2.experimental.tma import (
    add_tile,
    load_tile,
    make_descriptor,
    make_loadable,
    make_row_descriptor,
    store_tile,
)
from flashattn2.kernels import launch, row_sums
from flashattn2.kernels.tiles import is_visible, key_ranges, locate_program, query_ranges
from flashattn2.spec import AttentionSpec


class BackwardTile(NamedTuple):
    """The launch configuration of one head dim."""

    #: Rows of the streamed tiles.
    rows: int
    #: Stages of the ring of streamed tiles.
    stages: int


#: The launch configuration of each supported head dim.
TILES = {64: BackwardTile(128, 2), 128: BackwardTile(64, 2)}
#: Resident rows of a program: 64, the rows of a wgmma, for each of two warpgroups.
RESIDENT = 128


@gluon.jit
def backward_kernel(
    a, b, x, y, lse, delta, to_dq, to_da, to_db, scale, score_scale, tiles, heads, group, seq_q,
    seq_k, left, right,
    D: gl.constexpr, RESIDENT: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BY_KEY: gl.constexpr, ATOMIC: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of 128 resident rows.  With BY_KEY they are keys, otherwise queries.

    Grid: (resident tiles · batch · heads of the resident tensor).
    """
    # With a causal mask, the tile that sees or is seen by the most rows starts first.
    tile_index, batch, head, batch_head, _ = locate_program(tiles, heads, not BY_KEY)
    first = tile_index * RESIDENT
    if BY_KEY:
        lo, all_lo, all_hi, hi = query_ranges(
            first, first + RESIDENT - 1, seq_q, seq_k, left, right, 0, ROWS, LEFT, RIGHT, 1
        )
        # The query heads of this key head are streamed one after another.
        members = group
        streamed_head = head * group
        batch_head = batch_head * group
    else:
        lo, all_lo, all_hi, hi = key_ranges(
            first, gl.minimum(first + RESIDENT, seq_q) - 1, seq_q, seq_k, left, right, 0, ROWS,
            LEFT, RIGHT, 1,
        )  # fmt: skip
        members, streamed_head = 1, head // group
    # Among `count` streamed tiles, tiles in [near, far) need no mask.  All other tiles may contain
    # an edge of the band or the end of the keys.
    count = gl.cdiv(hi - lo, ROWS)
    near = gl.cdiv(all_lo - lo, ROWS)
    far = gl.cdiv(all_hi - lo, ROWS)

    a_tile = gl.allocate_shared_memory(a.dtype, [1, 1, RESIDENT, D], a.layout)
    b_tile = gl.allocate_shared_memory(a.dtype, [1, 1, RESIDENT, D], a.layout)
    x_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, 1, 1, ROWS, D], x.layout)
    y_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, 1, 1, ROWS, D], x.layout)
    # The row statistics belong to the queries, which are streamed or resident.
    lse_shape: gl.constexpr = [STAGES, 1, ROWS] if BY_KEY else [1, 1, RESIDENT]
    lse_rows = gl.allocate_shared_memory(gl.float32, lse_shape, lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, lse_shape, lse.layout)
    # The numbers 0 to ROWS - 1, for masks.  If computed from the thread index, they would occupy
    # registers.
    numbers = gl.allocate_shared_memory(gl.int32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    numbers.store(gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [8], [0])))
    resident_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    y_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(resident_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(stage), count=1)
        mbarrier.init(y_ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    # Make the barriers, written by ordinary instructions, visible to TMA.
    fence_async_shared()

    memory = (a_tile, b_tile, x_tiles, y_tiles, lse_rows, delta_rows, numbers)
    barriers = (resident_ready, x_ready, y_ready, free)
    location = (batch, head, first, members, streamed_head)
    loop = (lo, count, near, far)
    band = (seq_q, seq_k, left, right)
    gl.warp_specialize(
        [
            (consumer, (to_dq, to_da, to_db, scale, score_scale, memory, barriers, location, loop,
                        band, D, RESIDENT, ROWS, STAGES, LEFT, RIGHT, BY_KEY, ATOMIC)),
            (producer, (a, b, x, y, lse, delta, memory, barriers, location, loop, batch_head,
                        ROWS, STAGES, BY_KEY)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def producer(
    a, b, x, y, lse, delta, memory, barriers, location, loop, batch_head,
    ROWS: gl.constexpr, STAGES: gl.constexpr, BY_KEY: gl.constexpr,
):  # fmt: skip
    """Load the resident tiles, then each streamed tile as soon as its stage is free.

    One warp executes this function.
    """
    a_tile, b_tile, x_tiles, y_tiles, lse_rows, delta_rows, _ = memory
    resident_ready, x_ready, y_ready, free = barriers
    batch, head, first, members, streamed_head = location
    start, count, _, _ = loop
    # Each tile of queries is loaded with its log-sum-exps and D.
    statistic_bytes: gl.constexpr = lse.block_type.nbytes if BY_KEY else 0
    mbarrier.expect(
        resident_ready, 2 * a.block_type.nbytes + (0 if BY_KEY else 2 * lse.block_type.nbytes)
    )
    load_tile(a, [batch, head, first, 0], resident_ready, a_tile)
    load_tile(b, [batch, head, first, 0], resident_ready, b_tile)
    if not BY_KEY:
        load_tile(lse, [batch_head, first], resident_ready, lse_rows.index(0))
        load_tile(delta, [batch_head, first], resident_ready, delta_rows.index(0))
    for j in range(members * count):
        stage, phase = j % STAGES, (j // STAGES) & 1
        member, row = j // count, start + j % count * ROWS
        coordinates = [batch, streamed_head + member, row, 0]
        # Wait for the opposite parity, so that the first tile of each stage is loaded at once.
        mbarrier.wait(free.index(stage), phase ^ 1)
        ready = x_ready.index(stage)
        mbarrier.expect(ready, x.block_type.nbytes + statistic_bytes)
        load_tile(x, coordinates, ready, x_tiles.index(stage))
        if BY_KEY:
            load_tile(lse, [batch_head + member, row], ready, lse_rows.index(stage))
        ready = y_ready.index(stage)
        mbarrier.expect(ready, x.block_type.nbytes + statistic_bytes)
        load_tile(y, coordinates, ready, y_tiles.index(stage))
        if BY_KEY:
            load_tile(delta, [batch_head + member, row], ready, delta_rows.index(stage))


@gluon.jit
def consumer(
    to_dq, to_da, to_db, scale, score_scale, memory, barriers, location, loop, band,
    D: gl.constexpr, RESIDENT: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BY_KEY: gl.constexpr, ATOMIC: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of the resident tiles over all streamed tiles.

    Eight warps execute this function.
    """
    a_tile, b_tile, _, _, _, _, _ = memory
    batch, head, first, members, streamed_head = location
    start, count, near, far = loop
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    da = gl.full([RESIDENT, D], 0.0, gl.float32, layout)  # [RESIDENT, D]
    db = gl.full([RESIDENT, D], 0.0, gl.float32, layout)  # [RESIDENT, D]
    dq_memory = (0, 0)
    if ATOMIC:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        ds_tile = gl.allocate_shared_memory(a_tile.dtype, [RESIDENT, ROWS], ds_layout)
        dq_tile = gl.allocate_shared_memory(gl.float32, [1, 1, ROWS, D], to_dq.layout)
        dq_memory = (ds_tile, dq_tile)
    mbarrier.wait(barriers[0], 0)
    for member in range(members):
        for i in range(count):
            coordinates = (batch, streamed_head + member, start + i * ROWS, first)
            da, db = step(
                member * count + i, da, db, to_dq, score_scale, memory, barriers, dq_memory,
                coordinates, band, (i < near) | (i >= far),
                D, RESIDENT, ROWS, STAGES, LEFT, RIGHT, BY_KEY, ATOMIC,
            )  # fmt: skip
    # A and B are no longer needed: the gradients are stored through their shared memory, and TMA
    # omits the rows after the end of the sequence.
    a_tile.reshape([RESIDENT, D]).store((da * scale).to(a_tile.dtype))
    if BY_KEY:
        b_tile.reshape([RESIDENT, D]).store(db.to(a_tile.dtype))
    fence_async_shared()
    store_tile(to_da, [batch, head, first, 0], a_tile)
    if BY_KEY:
        store_tile(to_db, [batch, head, first, 0], b_tile)
    tma.store_wait(0)


@gluon.jit
def step(
    j, da, db, to_dq, score_scale, memory, barriers, dq_memory, coordinates, band, masked,
    D: gl.constexpr, RESIDENT: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BY_KEY: gl.constexpr, ATOMIC: gl.constexpr,
):  # fmt: skip
    """Add the contribution of one streamed tile to dA, dB and, with ATOMIC, dQ."""
    a_tile, b_tile, x_tiles, y_tiles, lse_rows, delta_rows, numbers = memory
    _, x_ready, y_ready, free = barriers
    batch, head, row, first = coordinates
    stage, phase = j % STAGES, (j // STAGES) & 1
    # Each warpgroup has 64 of the resident rows.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    column_slice: gl.constexpr = gl.SliceLayout(0, s_layout)
    row_slice: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.full([RESIDENT, ROWS], 0.0, gl.float32, s_layout)
    a_tile = a_tile.reshape([RESIDENT, D])  # [RESIDENT, D]
    b_tile = b_tile.reshape([RESIDENT, D])  # [RESIDENT, D]
    x_tile = x_tiles.index(stage).reshape([ROWS, D])  # [ROWS, D]
    y_tile = y_tiles.index(stage).reshape([ROWS, D])  # [ROWS, D]

    mbarrier.wait(x_ready.index(stage), phase)
    s = warpgroup_mma(a_tile, x_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(y_ready.index(stage), phase)
    dp = warpgroup_mma(b_tile, y_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    # Wait for all products except for the product issued last.
    s = warpgroup_mma_wait(1, deps=(s,))  # [RESIDENT, ROWS]
    lse = load_statistic(lse_rows, stage, RESIDENT, ROWS, row_slice, column_slice, BY_KEY)
    p = gl.exp2(s * score_scale - lse)
    if masked:
        p = mask(
            p, row, first, numbers, band, RESIDENT, row_slice, column_slice, LEFT, RIGHT, BY_KEY
        )
    dp = warpgroup_mma_wait(0, deps=(dp,))  # [RESIDENT, ROWS]
    delta = load_statistic(delta_rows, stage, RESIDENT, ROWS, row_slice, column_slice, BY_KEY)
    ds = (p * (dp - delta)).to(a_tile.dtype)
    if ATOMIC:
        dq_memory[0].store(ds)
        fence_async_shared()
    # Change the layout from an accumulator's to a left operand's, in the same registers with two
    # numbers each.
    ds = gl.convert_layout(ds, gl.DotOperandLayout(0, d_layout, 2))
    if BY_KEY:
        p = gl.convert_layout(p.to(a_tile.dtype), gl.DotOperandLayout(0, d_layout, 2))
        db = warpgroup_mma(p, y_tile, db, is_async=True)
    if ATOMIC:
        # Each warpgroup computes 64 columns of dQ, or 64 rows if the tile has 128.
        q_layout: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [4, 2] if ROWS == 64 else [8, 1], [16, 64, 16]
        )
        part = gl.full([ROWS, D], 0.0, gl.float32, q_layout)  # [ROWS, D]
        ds_tile = dq_memory[0].permute((1, 0))
        part = warpgroup_mma(ds_tile, a_tile, part, use_acc=False, is_async=True)
    da = warpgroup_mma(ds, x_tile, da, is_async=True)
    if ATOMIC:
        db, part = warpgroup_mma_wait(1, deps=(db, part))
        # Wait until TMA has read the previous part.
        tma.store_wait(0)
        dq_memory[1].reshape([ROWS, D]).store(part)
        fence_async_shared()
        add_tile(to_dq, [batch, head, row, 0], dq_memory[1])
    da, db = warpgroup_mma_wait(0, deps=(da, db))
    mbarrier.arrive(free.index(stage), count=1)
    return da, db


@gluon.jit
def load_statistic(
    buffers, stage, RESIDENT: gl.constexpr, ROWS: gl.constexpr,
    row_slice: gl.constexpr, column_slice: gl.constexpr, BY_KEY: gl.constexpr,
):  # fmt: skip
    """Load L or D of the queries, in a shape that broadcasts to the tile of scores."""
    if BY_KEY:
        values = buffers.index(stage).reshape([ROWS]).load(column_slice)[None, :]  # [1, ROWS]
    else:
        values = buffers.index(0).reshape([RESIDENT]).load(row_slice)[:, None]  # [RESIDENT, 1]
    return values


@gluon.jit
def mask(
    p, row, first, numbers, band, RESIDENT: gl.constexpr,
    row_slice: gl.constexpr, column_slice: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BY_KEY: gl.constexpr,
):  # fmt: skip
    """Return P with zeros for keys that the query does not see."""
    seq_q, seq_k, left, right = band
    resident = first + gl.arange(0, RESIDENT, row_slice)[:, None]  # [RESIDENT, 1]
    streamed = row + numbers.load(column_slice)[None, :]  # [1, ROWS]
    if BY_KEY:
        visible = is_visible(streamed + seq_k - seq_q, resident, seq_k, left, right, LEFT, RIGHT)
    else:
        visible = is_visible(resident + seq_k - seq_q, streamed, seq_k, left, right, LEFT, RIGHT)
    return gl.where(visible, p, 0.0)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, spec: AttentionSpec, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    dq, dk, dv = (launch.make_empty_like(x) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, k, v, out, grad_out = make_loadable(q, k, v, out, grad_out)
    heads, seq_q, dim = q.shape[1:]
    group = heads // k.shape[1]
    tile = TILES[dim]
    lse, delta = row_sums.compute_padded_statistics(out, grad_out, grad_lse, lse.contiguous())
    score_scale = launch.compute_score_factors(spec, False)[2]

    def run(resident, streamed, to, by_key, to_dq=None):
        tiles = launch.cdiv(resident[0].shape[2], RESIDENT)
        queries = tile.rows if by_key else RESIDENT
        backward_kernel[(tiles * resident[0].shape[0] * resident[0].shape[1],)](
            *(make_descriptor(x, RESIDENT) for x in resident),
            *(make_descriptor(x, tile.rows) for x in streamed),
            make_row_descriptor(lse, queries), make_row_descriptor(delta, queries),
            None if to_dq is None else make_descriptor(to_dq, tile.rows),
            *(None if x is None else make_descriptor(x, RESIDENT) for x in to),
            spec.scale, score_scale, tiles, resident[0].shape[1], group, seq_q, k.shape[2],
            spec.left, spec.right,
            D=dim, RESIDENT=RESIDENT, ROWS=tile.rows, STAGES=tile.stages, LEFT=spec.left >= 0,
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
