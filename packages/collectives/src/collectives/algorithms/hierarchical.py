"""Two levels: shared memory inside a host, a ring between the hosts' first ranks.

The link between hosts carries each tensor once per host, not once per rank: for H hosts a first
rank sends 2(H-1)/H S and all others nothing. Sums of 16-bit floats are rounded once per level.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from collectives.algorithms import ring
from collectives.algorithms.point_to_point import PointToPoint
from collectives.algorithms.reduction import average
from collectives.shared_memory import protocol
from collectives.shared_memory.arena import Arena

# What is left for ranks that come late from other hosts' messages.
LEAST_SECONDS = 0.5


def all_reduce(
    arena: Arena | None, wire: PointToPoint, hosts: Sequence[Sequence[int]], flat: Tensor,
    name: str, call: bytes,
) -> None:  # fmt: skip
    """Reduce the flat tensor over all ranks, in place."""
    partial = "SUM" if name == "AVG" else name
    speakers = heads(hosts)
    began = time.monotonic()
    if arena is not None:
        protocol.all_reduce(arena, flat, partial, call)
    if wire.rank in speakers:
        ring.all_reduce(wire.among(speakers), flat, partial)
        average(name, flat, wire.world)
    if arena is not None:
        # The others wait for their speaker here, and with it for other hosts.
        with since(began, arena):
            protocol.broadcast(arena, flat, 0, call)


@contextmanager
def since(began: float, arena: Arena) -> Iterator[None]:
    """Inside, ranks of this host wait for one another for the rest of the timeout, and a little."""
    timeout = arena.timeout
    arena.timeout = max(timeout - (time.monotonic() - began), LEAST_SECONDS)
    try:
        yield
    finally:
        arena.timeout = timeout


def broadcast(
    arena: Arena | None, wire: PointToPoint, hosts: Sequence[Sequence[int]], flat: Tensor,
    source: int, call: bytes,
) -> None:  # fmt: skip
    """Give every rank the tensor of rank `source`."""
    speakers, began = heads(hosts, source), time.monotonic()
    if wire.rank in speakers:
        ring.broadcast(wire.among(speakers), flat, speakers.index(source))
    if arena is not None:
        head = next(rank for rank in speakers if rank in arena.names)
        with since(began, arena):
            protocol.broadcast(arena, flat, arena.names.index(head), call)


def heads(hosts: Sequence[Sequence[int]], source: int | None = None) -> list[int]:
    """The rank that speaks for each host: the source for its own, else the first."""
    return [source if source is not None and source in host else host[0] for host in hosts]
