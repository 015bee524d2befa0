"""A two-level algorithm: shared memory inside each host, and a ring of one leader per host.

Only the leaders send messages. For H hosts and a message of S bytes, a leader sends 2(H-1)/H S
bytes in an all-reduce, and at most S bytes in a broadcast. Sums of bfloat16 are rounded once per
level. An all-reduce converts float16 and 8-bit floats to float32, and complex32 to complex64,
because the sum of one host could overflow. S is then the size after the conversion.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from collectives.algorithms import ring, tree
from collectives.algorithms.point_to_point import PointToPoint
from collectives.algorithms.reduction import average
from collectives.shared_memory import protocol
from collectives.shared_memory.arena import Arena

# Minimum time for the ranks of a host to synchronize after the messages between hosts.
MIN_LOCAL_SECONDS = 0.5


def all_reduce(
    arena: Arena | None,
    point_to_point: PointToPoint,
    hosts: Sequence[Sequence[int]],
    flat: Tensor,
    op: str,
    packed: bytes,
) -> None:
    """Reduce the flat tensor over all ranks, in place.

    Within a host, the ranks compare `packed`, the serialized call, before data moves.
    """
    # AVG divides once, after the sums of all hosts have been added.
    partial = "SUM" if op == "AVG" else op
    leaders = list_host_leaders(hosts)

    def reduce_block(block: Tensor) -> None:
        start_time = time.monotonic()
        if arena is not None:
            protocol.all_reduce(arena, block, partial, packed)
        if point_to_point.rank in leaders:
            ring.all_reduce(point_to_point.make_subgroup(leaders), block, partial)
            average(op, block, point_to_point.world_size)
        if arena is not None:
            # The other ranks wait for their leader, and thereby for the other hosts.
            with remaining_timeout(start_time, arena):
                protocol.broadcast(arena, block, 0, packed)

    if flat.dtype == torch.bfloat16:
        reduce_block(flat)
    else:
        tree.run_in_wide_blocks(flat, reduce_block)


def broadcast(
    arena: Arena | None,
    point_to_point: PointToPoint,
    hosts: Sequence[Sequence[int]],
    flat: Tensor,
    source: int,
    packed: bytes,
) -> None:
    """Copy the tensor of rank `source` to every rank; the ranks of a host compare `packed`."""
    leaders = list_host_leaders(hosts, source)
    start_time = time.monotonic()
    if point_to_point.rank in leaders:
        ring.broadcast(point_to_point.make_subgroup(leaders), flat, leaders.index(source))
    if arena is not None:
        leader = next(rank for rank in leaders if rank in arena.group_ranks)
        with remaining_timeout(start_time, arena):
            protocol.broadcast(arena, flat, arena.group_ranks.index(leader), packed)


@contextmanager
def remaining_timeout(start_time: float, arena: Arena) -> Iterator[None]:
    """Limit waits in shared memory to the remainder of the timeout that began at `start_time`."""
    timeout = arena.timeout
    arena.timeout = max(timeout - (time.monotonic() - start_time), MIN_LOCAL_SECONDS)
    try:
        yield
    finally:
        arena.timeout = timeout


def list_host_leaders(hosts: Sequence[Sequence[int]], source: int | None = None) -> list[int]:
    """Return the leader of each host: `source` on its host, the first rank on other hosts."""
    return [source if source is not None and source in host else host[0] for host in hosts]
