"""The forward pass for Hopper with one loading warp and two or three groups of computing warps.

Status: experimental.  The kernel passed the GPU tests and was measured on an H200 with torch 2.11
and Triton 3.6.  Since then, the waits in `release_skipped` were added, which never ran on a GPU.
With Triton 3.9 the kernel never ran on a GPU: it was compiled for sm_90, and its lines were
executed in Python.

One warp, the producer, issues TMA loads of key and value tiles.  Warpgroups of four warps, the
consumers, compute 64 queries each.  Products run asynchronously: a consumer issues the next
S = Q Kᵀ and then O += P V of the previous tile, and computes the softmax of that S while the second
product is still running (`wait_group 1`; Shah et al. 2024, section 3.2).  While one consumer
computes its softmax, the matrix unit is free for the others.

    matrix unit   | S0 |    | S1 |  O += P0 V0  |    | S2 |  O += P1 V1  |
    softmax             P0        P1                       P2

Barriers guard each tile of shared memory.  Each stage of the ring has two barriers:

    ready    the load has finished: consumers may read the tile
    free     every consumer has read or skipped the tile: the producer may overwrite it

A barrier counts phases, and a warp waits for the parity of a phase.  Tile j is in stage j % STAGES,
as the (j // STAGES)-th tile of that stage.  The tests run these functions line by line and explore
every order in which the warps may be scheduled.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import math
from typing import NamedTuple

import torch
import triton
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

from flashattn2.experimental.tma import load_tile, make_descriptor, make_loadable, store_tile
from flashattn2.kernels import launch
from flashattn2.kernels.tiles import is_visible, key_ranges, locate_program
from flashattn2.spec import AttentionSpec


class ForwardTile(NamedTuple):
    """The launch configuration of one head dim."""

    #: Number of warpgroups that compute.
    consumers: int
    #: Keys per tile.
    keys: int
    #: Stages of the ring of key and value tiles.
    stages: int
    #: Registers per thread of a consumer, after the producer has released most of its registers.
    #: At launch the 65,536 registers are divided evenly among all warps, three of which are idle.
    consumer_registers: int


#: The launch configuration of each supported head dim.
TILES = {64: ForwardTile(2, 128, 3, 240), 128: ForwardTile(2, 128, 2, 240)}
#: The launch configuration for head dim 64 and at least `LONG` queries without a left bound.  With
#: a third consumer, the tensor cores stall less on exponentials.  A left bound would need more
#: registers.  For fewer queries, this configuration was slower.
LONG_TILE = ForwardTile(3, 128, 3, 160)
LONG = 2048
#: With a right bound, `LONG_TILE` is used only with the version of Triton with which it was
#: measured: as compiled by Triton 3.9, its loops would spill registers (176 bytes per thread).
IS_TRITON_3_6 = triton.__version__.startswith("3.6.")
#: Queries per consumer: the rows of a wgmma.
ROWS = 64
PRODUCER_REGISTERS = 24


@gluon.jit
def forward_kernel(
    q, k, v, out, lse, score_scale, tiles, heads, group, seq_q, seq_k, left, right,
    D: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute the output of CONSUMERS · ROWS queries.  Grid: (query tiles · batch · heads).

    The tiles of the descriptors are [1, 1, ROWS or KEYS, D].
    """
    tile_index, batch, head, batch_head, _ = locate_program(tiles, heads, True)
    first = tile_index * CONSUMERS * ROWS
    last = gl.minimum(first + CONSUMERS * ROWS, seq_q) - 1
    lo, _, _, hi = key_ranges(first, last, seq_q, seq_k, left, right, 0, KEYS, LEFT, RIGHT, 1)
    # If no query sees a key, one fully masked tile is still loaded, because the consumers wait for
    # at least one tile.  Tiles are processed from the last to the first.
    count = gl.maximum(gl.cdiv(hi - lo, KEYS), 1)
    start = lo + (count - 1) * KEYS

    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, KEYS, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, KEYS, D], v.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # A phase ends after `count` arrivals: one by the producer, or one by each consumer.
    mbarrier.init(q_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=CONSUMERS)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=CONSUMERS)
    # Make the barriers, written by ordinary instructions, visible to TMA.
    fence_async_shared()

    memory = (q_tiles, k_tiles, v_tiles)
    barriers = (q_ready, k_ready, k_free, v_ready, v_free)
    location = (batch, head, batch_head, first)
    band = (seq_q, seq_k, left, right)
    loads = (q, k, v, memory, barriers, location, head // group, start, count)
    inputs = (out, lse, score_scale, memory, barriers, location, start, count, band)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (inputs, 0, D, ROWS, KEYS, STAGES, LEFT, RIGHT, PACK)),
                (consumer, (inputs, 1, D, ROWS, KEYS, STAGES, LEFT, RIGHT, PACK)),
                (producer, (loads, CONSUMERS, ROWS, KEYS, STAGES)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (inputs, 0, D, ROWS, KEYS, STAGES, LEFT, RIGHT, PACK)),
                (consumer, (inputs, 1, D, ROWS, KEYS, STAGES, LEFT, RIGHT, PACK)),
                (consumer, (inputs, 2, D, ROWS, KEYS, STAGES, LEFT, RIGHT, PACK)),
                (producer, (loads, CONSUMERS, ROWS, KEYS, STAGES)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def producer(
    loads, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr
):
    """Load Q, then K and V of each tile as soon as its stage is free.

    One warp executes this function.
    """
    q, k, v, memory, barriers, location, kv_head, start, count = loads
    q_tiles, k_tiles, v_tiles = memory
    q_ready, k_ready, k_free, v_ready, v_free = barriers
    batch, head, _, first = location
    # `expect` counts as an arrival, and keeps the phase open until that many bytes are loaded.
    mbarrier.expect(q_ready, CONSUMERS * q.block_type.nbytes)
    for index in gl.static_range(CONSUMERS):
        load_tile(q, [batch, head, first + index * ROWS, 0], q_ready, q_tiles.index(index))
    for j in range(count):
        stage, phase = j % STAGES, (j // STAGES) & 1
        # Wait for the opposite parity: a wait for the phase before the first one returns at once,
        # so the first tile of each stage is loaded without waiting.
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), k.block_type.nbytes)
        load_tile(
            k, [batch, kv_head, start - j * KEYS, 0], k_ready.index(stage), k_tiles.index(stage)
        )
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), v.block_type.nbytes)
        load_tile(
            v, [batch, kv_head, start - j * KEYS, 0], v_ready.index(stage), v_tiles.index(stage)
        )


@gluon.jit
def consumer(
    inputs, INDEX: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """Compute the output of ROWS queries over the tiles that they see.

    Four warps execute this function.  The queries are tile number INDEX of the program's queries.
    """
    out, lse, score_scale, memory, barriers, location, start, count, band = inputs
    q_ready, k_ready, k_free, v_ready, _ = barriers
    batch, head, batch_head, first = location
    seq_q, seq_k, left, right = band
    row = first + INDEX * ROWS
    position = row + seq_k - seq_q
    last = gl.minimum(row + ROWS, seq_q) - 1
    lo, all_lo, all_hi, hi = key_ranges(
        row, last, seq_q, seq_k, left, right, 0, KEYS, LEFT, RIGHT, 1
    )
    # Tiles are processed from right to left.  This consumer skips tiles before `first_tile`, whose
    # keys none of its queries see, and tiles from `stop_tile` on.  Tiles in [first_tile, near) are
    # masked, because they may contain the right edge of the band or the end of the keys.  Tiles in
    # [near, far) need no mask.  Tiles in [far, stop_tile) may contain the left edge of the band.
    stop = start + KEYS
    first_tile = gl.minimum(gl.maximum(stop - hi, 0) // KEYS, count - 1)
    stop_tile = gl.maximum(gl.minimum((stop - lo) // KEYS, count), first_tile + 1)
    near = gl.minimum(gl.maximum((stop - all_hi) // KEYS, first_tile + 1), stop_tile)
    far = gl.minimum(gl.maximum((stop - all_lo) // KEYS, near), stop_tile)
    # The register layouts of wgmma results: each row is spread over four threads, so its maximum
    # and sum need two shuffles and no shared memory.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))  # [ROWS]
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))  # [ROWS]
    acc = gl.full([ROWS, D], 0.0, gl.float32, o_layout)  # [ROWS, D]
    zero = gl.full([ROWS, KEYS], 0.0, gl.float32, s_layout)  # [ROWS, KEYS]

    release_skipped(barriers, first_tile)

    # For the first tile compute only S, because P of a previous tile does not exist.
    q_memory = memory[0].index(INDEX)
    q_tile = q_memory.reshape([ROWS, D])  # [ROWS, D]
    k_tile = memory[1].index(first_tile).reshape([KEYS, D])  # [KEYS, D]
    mbarrier.wait(q_ready, 0)
    mbarrier.wait(k_ready.index(first_tile), 0)
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))  # [ROWS, KEYS]
    mbarrier.arrive(k_free.index(first_tile), count=1)
    p, maximum, total, _ = softmax(
        s, maximum, total, position, start - first_tile * KEYS, score_scale, band,
        ROWS, KEYS, s_layout, LEFT, RIGHT, True,
    )  # fmt: skip
    p = to_operand(p, q_tile.dtype, o_layout, PACK)

    for j in range(first_tile + 1, near):
        acc, maximum, total, p = step(
            j, acc, maximum, total, p, q_tile, zero, memory, barriers, position, start,
            score_scale, band, D, ROWS, KEYS, STAGES, s_layout, o_layout, LEFT, RIGHT, PACK, True,
        )  # fmt: skip
    for j in range(near, far):
        acc, maximum, total, p = step(
            j, acc, maximum, total, p, q_tile, zero, memory, barriers, position, start,
            score_scale, band, D, ROWS, KEYS, STAGES, s_layout, o_layout, LEFT, RIGHT, PACK, False,
        )  # fmt: skip
    if LEFT:
        for j in range(far, stop_tile):
            acc, maximum, total, p = step(
                j, acc, maximum, total, p, q_tile, zero, memory, barriers, position, start,
                score_scale, band,
                D, ROWS, KEYS, STAGES, s_layout, o_layout, LEFT, RIGHT, PACK, True,
            )  # fmt: skip

    # P V of the last tile.  No later tile is loaded into its stage, so the stage is not released.
    stage, phase = (stop_tile - 1) % STAGES, ((stop_tile - 1) // STAGES) & 1
    mbarrier.wait(v_ready.index(stage), phase)
    v_tile = memory[2].index(stage).reshape([KEYS, D])  # [KEYS, D]
    acc = warpgroup_mma(p, v_tile, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    # A row that sees no key has a total of 0, output 0 and log-sum-exp -inf.
    total = gl.where(total == 0.0, 1.0, total)
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
    row_ids = row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    row_lse = (maximum + gl.log2(total)) * 0.6931471805599453
    gl.store(lse + gl.cast(batch_head, gl.int64) * seq_q + row_ids, row_lse, mask=row_ids < seq_q)
    # Q is no longer needed: O is stored through its shared memory, and TMA omits the rows after the
    # end of the sequence.
    q_tile.store(acc.to(q_tile.dtype))
    fence_async_shared()
    store_tile(out, [batch, head, row, 0], q_memory)
    tma.store_wait(0)


@gluon.jit
def release_skipped(barriers, first_tile):
    """Release the tiles before `first_tile`, which a consumer does not read.

    The first tiles of two consumers differ by fewer than STAGES tiles, so a skipped tile is the
    first tile in its stage.  The consumer waits for its load, although it does not read the tile.
    Otherwise, its wait for the next tile of the stage could start before the first phase ends.
    That wait is for the other parity, so it would return at once.
    """
    _, k_ready, k_free, v_ready, v_free = barriers
    for j in range(first_tile):
        mbarrier.wait(k_ready.index(j), 0)
        mbarrier.arrive(k_free.index(j), count=1)
        mbarrier.wait(v_ready.index(j), 0)
        mbarrier.arrive(v_free.index(j), count=1)


@gluon.jit
def step(
    j, acc, maximum, total, p, q_tile, zero, memory, barriers, position, start, score_scale, band,
    D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, PACK: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Compute S of tile j, and its softmax during O += P V of tile j - 1."""
    _, k_tiles, v_tiles = memory
    _, k_ready, k_free, v_ready, v_free = barriers
    stage, phase = j % STAGES, (j // STAGES) & 1
    before, phase_before = (j - 1) % STAGES, ((j - 1) // STAGES) & 1
    k_tile = k_tiles.index(stage).reshape([KEYS, D])  # [KEYS, D]
    v_tile = v_tiles.index(before).reshape([KEYS, D])  # [KEYS, D]

    mbarrier.wait(k_ready.index(stage), phase)
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), phase_before)
    acc = warpgroup_mma(p, v_tile, acc, is_async=True)
    # Wait for all products except for the product issued last: S is complete, O is not.
    s = warpgroup_mma_wait(1, deps=(s,))  # [ROWS, KEYS]
    mbarrier.arrive(k_free.index(stage), count=1)
    new_p, maximum, total, rescale = softmax(
        s, maximum, total, position, start - j * KEYS, score_scale, band,
        ROWS, KEYS, s_layout, LEFT, RIGHT, MASKED,
    )  # fmt: skip
    # This wait has already succeeded above.  Its loop keeps ptxas from moving the exponentials past
    # the product that they should overlap.
    mbarrier.wait(v_ready.index(before), phase_before)
    acc = warpgroup_mma_wait(0, deps=(acc,))  # [ROWS, D]
    mbarrier.arrive(v_free.index(before), count=1)
    # O and P V are relative to the old maximum: rescale them to the new maximum.
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
    return acc, maximum, total, to_operand(new_p, q_tile.dtype, o_layout, PACK)


@gluon.jit
def to_operand(p, dtype: gl.constexpr, o_layout: gl.constexpr, PACK: gl.constexpr):
    """Return P, rounded to `dtype`, as the left operand of a product.

    The change of layout keeps each number in its thread; a register holds two of them.  With PACK,
    one instruction rounds two numbers into one register.  Otherwise, loop variables are stored with
    one number per register, and the loop packs them with further instructions.
    """
    if PACK and dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.bfloat16, is_pure=True, pack=2
        )
    elif PACK:
        p = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.float16, is_pure=True, pack=2
        )
    else:
        p = p.to(dtype)
    return gl.convert_layout(p, gl.DotOperandLayout(0, o_layout, 2))


@gluon.jit
def softmax(
    s, maximum, total, position, start, score_scale, band,
    ROWS: gl.constexpr, KEYS: gl.constexpr, s_layout: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Return P of a tile, each row's new maximum and sum, and the factor that rescales O."""
    if MASKED:
        _, seq_k, left, right = band
        positions = position + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))  # [ROWS]
        keys = start + gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))  # [KEYS]
        visible = is_visible(positions[:, None], keys[None, :], seq_k, left, right, LEFT, RIGHT)
        s = gl.where(visible, s, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(s, 1) * score_scale)  # [ROWS]
    finite_maximum = new_maximum
    if MASKED:
        # The maximum is -inf while all keys are hidden, and -inf - -inf would be NaN.
        finite_maximum = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    p = gl.exp2(s * score_scale - finite_maximum[:, None])  # [ROWS, KEYS]
    rescale = gl.exp2(maximum - finite_maximum)  # [ROWS]
    return p, new_maximum, total * rescale + gl.sum(p, 1), rescale


def choose_tile(dim: int, seq_q: int, spec: AttentionSpec) -> ForwardTile:
    """Return the tile sizes of a call; see `LONG_TILE` and `IS_TRITON_3_6`."""
    is_long = dim == 64 and seq_q >= LONG and spec.left < 0
    if is_long and (spec.right < 0 or IS_TRITON_3_6):
        return LONG_TILE
    return TILES[dim]


def should_pack(tile: ForwardTile, spec: AttentionSpec) -> bool:
    """Return True if the kernel is faster with PACK (see `to_operand`).

    On an H200 with 16,384 tokens, PACK made the kernel 1.02 to 1.09 times as fast.  `LONG_TILE`
    with a right bound took 1.09 times as long, because 12 registers spilled in its loop.  With a
    left bound, PACK was not measured.
    """
    return spec.left < 0 and (tile.consumers == 2 or spec.right < 0)


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of `(batch, heads, seq, dim)`."""
    out = launch.make_empty_like(q)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_(), lse.fill_(-math.inf)
    q, k, v = make_loadable(q, k, v)
    batch, heads, seq_q, dim = q.shape
    tile = choose_tile(dim, seq_q, spec)
    tiles = launch.cdiv(seq_q, tile.consumers * ROWS)
    score_scale = launch.compute_score_factors(spec, False)[2]
    forward_kernel[(tiles * batch * heads,)](
        *(make_descriptor(x, rows) for x, rows in ((q, ROWS), (k, tile.keys), (v, tile.keys))),
        make_descriptor(out, ROWS), lse, score_scale, tiles, heads, heads // k.shape[1], seq_q,
        k.shape[2], spec.left, spec.right,
        D=dim, CONSUMERS=tile.consumers, ROWS=ROWS, KEYS=tile.keys, STAGES=tile.stages,
        LEFT=spec.left >= 0, RIGHT=spec.right >= 0, PACK=should_pack(tile, spec),
        CONSUMER_REGISTERS=tile.consumer_registers, PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse
