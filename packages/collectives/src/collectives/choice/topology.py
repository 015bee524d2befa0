"""The ranks of a group by host, and the memory that the ranks of a host share.

Every rank creates a segment and tries to open the segments of all other ranks. Ranks that can all
open each other's segments are on one host. Neither LOCAL_RANK nor host names are trusted.
"""

import json
import mmap
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from collectives.shared_memory import engine
from collectives.shared_memory import segment as memory
from collectives.shared_memory.arena import ARENA_BYTES, Arena, is_available
from collectives.shared_memory.protocol import Shared
from collectives.shared_memory.segment import HEADER_BYTES, Address, identify_host
from collectives.store import fetch


class Topology:
    """The ranks of a group by host, this host's arena, and the tensors allocated in it."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        deadline: float,
        find_ended: Callable[[], Sequence[int]],
    ) -> None:
        self._store = store
        self._find_ended = find_ended
        self._rank = rank
        # All rounds of messages through the store share one deadline.
        self._deadline = deadline
        mappings, addresses = self._exchange_segments("arena", ARENA_BYTES, range(world_size))
        reachable = [rank for rank in range(world_size) if mappings[rank] is not None]
        text = json.dumps([reachable, engine.get_name()])
        reports = [json.loads(t) for t in self._gather_texts("reach", text, range(world_size))]
        #: The ranks of the group by host.
        self.hosts = group_by_host([reached for reached, _ in reports])
        self.local_ranks = next(host for host in self.hosts if rank in host)
        #: The memory that the ranks of this host share, or None.
        self.arena: Arena | None = None
        if mappings[rank] is not None:
            local_mappings = [mappings[r] for r in self.local_ranks]
            engines = {reports[r][1] for r in self.local_ranks}
            self.arena = Arena(
                [mapping for mapping in local_mappings if mapping is not None],
                [addresses[r].pid for r in self.local_ranks],
                self.local_ranks.index(rank),
                group_ranks=self.local_ranks,
                timeout=timeout,
                has_engine=len(engines) == 1 and "" not in engines,
            )
        #: For each rank that does not share memory with this rank, the reason.
        self.why_not_shared = {
            other: _explain_refusal(addresses[rank], addresses[other])
            for other in range(world_size)
            if other not in self.local_ranks
        }
        #: An identifier of each rank's host. A measurement is valid for these hosts only.
        self.host_identities = tuple(address.host for address in addresses)
        self.ranks_per_host = tuple(len(host) for host in self.hosts)
        #: True if all ranks share memory.
        self.is_single_host = len(self.hosts) == 1 and self.arena is not None
        if self.arena is not None:
            self.arena.is_whole_group = self.is_single_host
        self._num_allocations = 0
        # Maps the address of this rank's tensor to the number of its allocation and the other
        # ranks' tensors.
        self._shared: dict[int, tuple[int, list[Tensor]]] = {}

    def require_arena(self) -> Arena:
        """Return the arena of a group whose ranks are known to share memory."""
        assert self.arena is not None
        return self.arena

    def allocate(self, numel: int, dtype: torch.dtype, seconds: float) -> Tensor:
        """Return a flat tensor of zeros; all ranks of the host map it if they can share memory."""
        self._deadline = time.monotonic() + seconds
        self._num_allocations += 1
        key = f"allocation/{self._num_allocations}"
        size = max(1, numel) * dtype.itemsize
        mappings, _ = self._exchange_segments(key, size, self.local_ranks)
        all_mapped = json.dumps(all(mapping is not None for mapping in mappings))
        answers = self._gather_texts(f"{key}/mapped", all_mapped, self.local_ranks)
        if not all(json.loads(answer) for answer in answers):
            return torch.zeros(numel, dtype=dtype, device="cpu")
        tensors = [
            torch.frombuffer(mapping, dtype=dtype, offset=HEADER_BYTES, count=max(1, numel))
            for mapping in mappings
            if mapping is not None
        ]
        position = self.local_ranks.index(self._rank)
        tensor = tensors.pop(position)
        base = tensor.untyped_storage().data_ptr()
        self._shared[base] = (self._num_allocations, tensors)
        # The tensor's storage refers to its mapping. When the tensor is freed, so is the mapping,
        # and this rank unmaps the other ranks' tensors.
        weakref.finalize(mappings[position], self._shared.pop, base, None)
        return tensor[:numel]

    def find_shared_copies(self, flat: Tensor) -> Shared | None:
        """Return all ranks' copies of a tensor, or None if `allocate` did not return its memory."""
        storage = flat.untyped_storage().data_ptr()
        entry = self._shared.get(storage)
        if entry is None:
            return None
        allocation, peers = entry
        offset = flat.data_ptr() - storage
        addresses = [peer.data_ptr() + offset for peer in peers]
        addresses.insert(self.local_ranks.index(self._rank), flat.data_ptr())
        return Shared(addresses, allocation, offset)

    def _exchange_segments(
        self, key: str, size: int, ranks: Sequence[int]
    ) -> tuple[list[mmap.mmap | None], list[Address]]:
        """Create a segment; return the mapping, or None, and the address of each rank's segment."""
        segment = None
        # A rank without room for a segment uses messages.
        with suppress(OSError):
            segment = memory.Segment(size) if is_available() else None
        try:
            address = segment.address if segment else Address(identify_host(), 0, 0, 0, 0, 0, "")
            texts = self._gather_texts(key, json.dumps(asdict(address)), ranks)
            addresses = [Address(**json.loads(text)) for text in texts]
            mappings: list[mmap.mmap | None] = [None] * len(addresses)
            if segment is not None:
                mappings = [
                    segment.mapping if rank == self._rank else memory.open_segment(address)
                    for rank, address in zip(ranks, addresses, strict=True)
                ]
            # A file may only be closed after all ranks have opened it, or after a failure.
            self._gather_texts(f"{key}/opened", "", ranks)
        finally:
            if segment is not None:
                segment.seal()
        return mappings, addresses

    def _gather_texts(self, key: str, text: str, ranks: Sequence[int]) -> list[bytes]:
        """Publish a text in the store and return the texts of all ranks."""
        keys = {rank: f"{key}/{rank}" for rank in ranks}
        publish = {f"{key}/{self._rank}": text}
        find_ended = self._find_ended
        values = fetch(self._store, keys, self._deadline, publish, find_ended)
        return list(values.values())


def _explain_refusal(local: Address, other: Address) -> str:
    """Return the reason why this rank cannot map another rank's segment."""
    for address, subject in ((local, "this rank"), (other, "it")):
        if not address.token:
            return (
                f"{subject} could not create a segment: no room, or neither Linux on x86-64 nor "
                "Linux with a C compiler"
            )
    if local.host != other.host:
        return "it runs under another kernel or in another network namespace"
    return "its memory could not be opened through /proc (another PID namespace or user?)"


def group_by_host(reach: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the ranks by host; reach[i] are the ranks whose memory rank i has opened.

    A rank joins the first host whose ranks and this rank have all opened each other's memory.
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
