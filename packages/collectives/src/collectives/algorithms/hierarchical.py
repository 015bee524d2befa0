"""Two levels: shared memory inside a host, a ring between the hosts' first ranks.

The link between hosts carries each tensor once per host, not once per rank: for H hosts a first
rank sends 2(H-1)/H S and all others nothing. Sums of 16-bit floats are rounded once per level.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from collectives.algorithms import ring
from collectives.algorithms.point_to_point import PointToPoint
from collectives.algorithms.reduction import average
from collectives.faults import HOSTS_PART
from collectives.shared_memory import protocol
from collectives.shared_memory.arena import Arena

LEAST_PART = 0.1


def all_reduce(
    arena: Arena | None, wire: PointToPoint, hosts: Sequence[Sequence[int]], flat: Tensor,
    name: str, call: bytes,
) -> None:  # fmt: skip
    """Reduce the flat tensor over all ranks, in place."""
    partial = "SUM" if name == "AVG" else name
    speakers = heads(hosts)
    began, speaks = time.monotonic(), wire.rank in speakers
    if arena is not None:
        with patient(arena, HOSTS_PART):
            protocol.all_reduce(arena, flat, partial, call)
    if speaks:
        ring.all_reduce(wire.among(speakers), flat, partial)
        average(name, flat, wire.world)
    if arena is not None:
        # The others wait for their speaker here, and with it for other hosts; it for them alone.
        passed = (time.monotonic() - began) / arena.timeout
        with patient(arena, (HOSTS_PART if speaks else 1.0) - passed):
            protocol.broadcast(arena, flat, 0, call)


@contextmanager
def patient(arena: Arena, part: float) -> Iterator[None]:
    """Inside, ranks of this host wait for one another that part of the timeout, and a little."""
    timeout = arena.timeout
    arena.timeout *= max(part, LEAST_PART)
    try:
        yield
    finally:
        arena.timeout = timeout


def broadcast(
    arena: Arena | None, wire: PointToPoint, hosts: Sequence[Sequence[int]], flat: Tensor,
    source: int, call: bytes,
) -> None:  # fmt: skip
    """Give every rank the tensor of rank `source`."""
    speakers = heads(hosts, source)
    if wire.rank in speakers:
        ring.broadcast(wire.among(speakers), flat, speakers.index(source))
    if arena is not None:
        head = next(rank for rank in speakers if rank in arena.names)
        with patient(arena, HOSTS_PART if wire.rank == head else 1.0):
            protocol.broadcast(arena, flat, arena.names.index(head), call)


def heads(hosts: Sequence[Sequence[int]], source: int | None = None) -> list[int]:
    """The rank that speaks for each host: the source for its own, else the first."""
    return [source if source is not None and source in host else host[0] for host in hosts]
