"""Which ranks share a host, and the memory that they share.

Every rank makes a segment and tries to open all the others'. Ranks that can all open each other's
are a host. Nothing is assumed: not LOCAL_RANK, not a host's name.
"""

import json
import mmap
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from collectives.faults import fetch
from collectives.shared_memory import segment as memory
from collectives.shared_memory.arena import ARENA_BYTES, Arena, available
from collectives.shared_memory.protocol import Shared
from collectives.shared_memory.segment import HEADER_BYTES, Address, host_identity

# The peers' parts of an allocation, by offset, size and dtype.
MOST_VIEWS = 4096
Views = dict[tuple[int, int, torch.dtype], list[Tensor]]


class Topology:
    """The ranks of a group by host, this host's arena, and the tensors allocated in it."""

    def __init__(self, store: Store, rank: int, world: int, timeout: float) -> None:
        self._store, self._rank = store, rank
        # One for all of it, which is several rounds of asking and telling.
        self._deadline = time.monotonic() + timeout
        mappings, addresses = self._offer("arena", ARENA_BYTES, range(world))
        reach = [rank for rank in range(world) if mappings[rank] is not None]
        reaches = self._tell("reach", json.dumps(reach), range(world))
        self.hosts = group_by_host([json.loads(told) for told in reaches])
        self.here = next(host for host in self.hosts if rank in host)
        self.arena: Arena | None = None
        if mappings[rank] is not None:
            self.arena = Arena(
                [m for r in self.here if (m := mappings[r]) is not None],
                [addresses[r].pid for r in self.here],
                self.here.index(rank),
                names=self.here,
                timeout=timeout,
            )
        # Why this rank shares no memory with another one.
        self.why_not = {
            other: _why_not(addresses[rank], addresses[other])
            for other in range(world)
            if other not in self.here
        }
        # The kernel and network namespace that each rank runs in: what a measurement belongs to.
        self.where = tuple(address.host for address in addresses)
        # How many ranks each host has.
        self.ranks_per_host = tuple(len(host) for host in self.hosts)
        # Whether all ranks share memory.
        self.one_host = len(self.hosts) == 1 and self.arena is not None
        if self.arena is not None:
            self.arena.alone = self.one_host
        self._allocations = 0
        self._shared: dict[int, tuple[int, list[Tensor], Views]] = {}

    def require(self) -> Arena:
        """The arena, where the caller knows that there is one."""
        assert self.arena is not None
        return self.arena

    def close(self) -> None:
        """Release what the kernel holds."""
        if self.arena is not None:
            self.arena.close()

    def allocate(self, numel: int, dtype: torch.dtype, seconds: float) -> Tensor:
        """`numel` zeros that all ranks of the host map; an ordinary tensor if that cannot be."""
        self._deadline = time.monotonic() + seconds
        self._allocations += 1
        size = max(1, numel) * dtype.itemsize
        mappings, _ = self._offer(f"allocation/{self._allocations}", size, self.here)
        opened = json.dumps(all(mapping is not None for mapping in mappings))
        answers = self._tell(f"allocated/{self._allocations}", opened, self.here)
        if not all(json.loads(answer) for answer in answers):
            return torch.zeros(numel, dtype=dtype)
        tensors = [
            torch.frombuffer(mapping, dtype=dtype, offset=HEADER_BYTES, count=max(1, numel))
            for mapping in mappings
            if mapping is not None
        ]
        mine = self.here.index(self._rank)
        own = tensors.pop(mine)
        base = own.untyped_storage().data_ptr()
        self._shared[base] = (self._allocations, tensors, {})
        # The peers' maps go when this rank's tensor does: its storage holds its map.
        weakref.finalize(mappings[mine], self._shared.pop, base, None)
        return own[:numel]

    def shared(self, flat: Tensor) -> Shared | None:
        """How to reach all ranks' copies of a tensor, if it lies in `allocate`d memory."""
        storage = flat.untyped_storage().data_ptr()
        found = self._shared.get(storage)
        if found is None:
            return None
        allocation, peers, views = found
        offset, size = flat.data_ptr() - storage, flat.numel() * flat.element_size()
        # The same parts (a bucket, a parameter) come again in every step.
        copies = views.get((offset, size, flat.dtype))
        if copies is None:
            copies = [t.view(torch.uint8)[offset : offset + size].view(flat.dtype) for t in peers]
            if len(views) >= MOST_VIEWS:
                views.clear()
            views[offset, size, flat.dtype] = copies
        mine = self.here.index(self._rank)
        return Shared([*copies[:mine], flat, *copies[mine:]], allocation, offset)

    def _offer(
        self, key: str, size: int, ranks: Sequence[int]
    ) -> tuple[list[mmap.mmap | None], list[Address]]:
        """Make a segment, open those of the other ranks; None stands for what could not be had."""
        segment = None
        # Where there is no room, this rank will use messages.
        with suppress(OSError):
            segment = memory.Segment(size) if available() else None
        address = segment.address if segment else Address(host_identity(), 0, 0, 0, 0, 0, "")
        told = self._tell(key, json.dumps(asdict(address)), ranks)
        addresses = [Address(**json.loads(each)) for each in told]
        mappings: list[mmap.mmap | None] = [None] * len(addresses)
        if segment is not None:
            mappings = [
                segment.mapping if rank == self._rank else memory.open_segment(address)
                for rank, address in zip(ranks, addresses, strict=True)
            ]
        # Nobody may close its file before all have opened it.
        self._tell(f"{key}/opened", "", ranks)
        if segment:
            segment.seal()
        return mappings, addresses

    def _tell(self, key: str, text: str, ranks: Sequence[int]) -> list[bytes]:
        """Put a text where the other ranks find it, and get theirs."""
        keys, tell = {r: f"{key}/{r}" for r in ranks}, {f"{key}/{self._rank}": text}
        return list(fetch(self._store, keys, self._deadline, tell).values())


def _why_not(own: Address, other: Address) -> str:
    for address, whose in ((own, "this rank"), (other, "it")):
        if not address.token:
            return f"{whose} could not make a segment: no room, or no Linux on x86-64 or a compiler"
    if own.host != other.host:
        return "it runs under another kernel or in another network namespace"
    return "its memory could not be opened through /proc (another PID namespace or user?)"


def group_by_host(reach: Sequence[Sequence[int]]) -> list[list[int]]:
    """Ranks by host, where reach[i] are the ranks whose memory rank i has opened.

    A rank joins the first host all of whose ranks it reaches and is reached by.
    """
    hosts: list[list[int]] = []
    for rank, reached in enumerate(reach):
        for host in hosts:
            if all(other in reached and rank in reach[other] for other in host):
                host.append(rank)
                break
        else:
            hosts.append([rank])
    return hosts
