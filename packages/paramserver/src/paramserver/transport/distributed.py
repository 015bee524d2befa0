"""Channels over torch.distributed: point-to-point messages on gloo, across machines.

Notable:
- `join` works inside a process group that exists already, under torchrun or any other launcher: its
  ranks are the workers and some of them also host a server, in threads;
- messages go through a gloo group of their own, so that neither the caller's traffic nor its
  timeouts meet ours, and so that a group on NCCL will do as well;
- each direction of each pair has its own tag: a rank may be a worker and a server at once.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paramserver.consistency import Consistency, OptimizerFactory
from paramserver.protocol.messages import Kind, Message
from paramserver.running.job import Job, Site
from paramserver.running.serving import serve
from paramserver.transport.connection import GRACE, Channel, Channels, Connection, RemoteConnection
from paramserver.worker import Worker

Tags = tuple[int, int]
_LONGEST = 2**26  # bytes of a message's text
_IDLE = timedelta(days=7)  # a worker that computes for long is not gone; its death ends the wait


class DistributedChannel(Channel):
    """One end of a pair of ranks. `tags` are those for sending and for receiving."""

    def __init__(self, peer: str, rank: int, tags: Tags, nbytes: int, group: Any) -> None:
        super().__init__(nbytes)
        self.peer = peer
        self._rank, self._group = rank, group
        self._send_tag, self._receive_tag = tags

    def send(self, message: Message) -> None:
        """Send a message: its numbers, then its text or data if it has any."""
        *numbers, text = message.fields()
        raw = text.encode()
        self._send(torch.tensor([*numbers, len(raw)]))
        if raw:
            self._send(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        if message.kind is Kind.OK and message.size:
            self._send(self.parameters[: message.size])

    def receive(self, timeout: float | None = None) -> Message:
        """The next message; TimeoutError after `timeout` seconds."""
        head = torch.zeros(8, dtype=torch.int64)
        self._receive(head, timeout)
        *numbers, length = head.tolist()
        if not 0 <= length <= _LONGEST:
            raise ValueError(f"{self.peer} sends a text of {length} bytes; at most {_LONGEST}")
        text = torch.zeros(length, dtype=torch.uint8)
        if length:
            self._receive(text, timeout)
        message = Message.from_fields([*numbers, text.numpy().tobytes().decode()])
        if message.kind is Kind.OK and message.size:
            self._receive(self.parameters[: message.size], None)
        return message

    def push(self, data: Tensor, written: Iterable[int]) -> None:
        """See Channel."""
        deque(written, maxlen=0)
        self._send(data)

    def take(self, data: Tensor, see: Callable[[int], None]) -> None:
        """See Channel."""
        self._receive(data, None)

    def _send(self, data: Tensor) -> None:
        try:
            dist.send(data, group=self._group, group_dst=self._rank, tag=self._send_tag)
        except RuntimeError as error:
            raise ConnectionResetError(str(error).splitlines()[0]) from error

    def _receive(self, data: Tensor, timeout: float | None) -> None:
        start = time.monotonic()
        try:
            work = dist.irecv(data, group=self._group, group_src=self._rank, tag=self._receive_tag)
            assert work is not None
            work.wait(_IDLE if timeout is None else timedelta(seconds=timeout))
        except RuntimeError as error:
            if timeout is not None and time.monotonic() - start >= timeout:
                raise TimeoutError(f"{self.peer} did not answer for {timeout:g} s") from error
            raise ConnectionResetError(str(error).splitlines()[0]) from error


@contextmanager
def join(
    module: nn.Module, optimizer: OptimizerFactory, consistency: Consistency | None = None, *,
    servers: Sequence[int] = (0,), group: dist.ProcessGroup | None = None, timeout: float = 60.0,
    on_worker_loss: Literal["stop", "continue"] = "stop", whole: bool = False,
    drop_after: float | None = None, site: Site = None) -> Iterator[Worker]:  # fmt: skip
    """Train in an existing process group: every rank is a worker, `servers` also serve.

    Every rank of `group` calls it with the same module (names and shapes) and arguments, and uses
    the worker as `Worker` says. The servers begin with their own rank's parameters. When all ranks
    have come to the end of the body, every module holds the final ones. Raises PeerLost on every
    rank if one fails, and names it.

    With `site`, a group whose ranks are one worker (see Worker), `group` is of the first ranks of
    all sites; the others call it too.
    """
    if site is not None and dist.get_rank(site) > 0:
        job = Job(lambda: None, module, optimizer, consistency)
        with job.worker(0, [], site) as worker:
            yield worker
        return
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if not servers or len(set(servers)) < len(servers) or not set(servers) <= set(range(world)):
        text = f"give different ranks of a group of {world}"
        raise ValueError(f"servers are ranks {list(servers)}; {text}")
    job = Job(
        lambda: None, module, optimizer, consistency, (), world, len(servers), timeout,
        on_worker_loss, whole, drop_after)  # fmt: skip
    shards = job.shards()
    ranks = dist.get_process_group_ranks(group)
    private: Any = dist.new_group(ranks, _IDLE, "gloo", use_local_synchronization=True)
    threads, connections = [], list[Connection]()
    try:
        for number, (host, shard) in enumerate(zip(servers, shards, strict=True)):
            request, reply = 2 * number, 2 * number + 1
            nbytes = shard.buffer_bytes
            if host != rank:
                name = f"server {number} (rank {host})"
                channel = DistributedChannel(name, host, (request, reply), nbytes, private)
                connections.append(RemoteConnection(channel, timeout + GRACE))
                continue
            server = job.server(shard)
            connections.append(server.connect(rank))
            ends, tags = dict[int, Channel](), (reply, request)
            for r in {*range(world)} - {rank}:
                ends[r] = DistributedChannel(f"worker {r} (rank {r})", r, tags, nbytes, private)
            threads += serve(server, ends)
        with job.worker(rank, connections, site) as worker:
            yield worker
    finally:
        for thread in threads:
            thread.join(timeout + GRACE)
        # A thread that still waits for a rank that hangs needs the group until the process ends.
        if not any(thread.is_alive() for thread in threads):
            dist.destroy_process_group(private)


@dataclass(frozen=True)
class Endpoint:
    """A process that is yet to join a group through a file; servers come before workers."""

    store: str
    rank: int
    sizes: tuple[int, ...]
    workers: int

    def open(self) -> Channels:
        """Join the group, and connect to every peer."""
        servers, rank = len(self.sizes), self.rank
        world = servers + self.workers
        store = dist.FileStore(self.store, world)
        dist.init_process_group("gloo", None, _IDLE, world, rank, store)
        group = dist.group.WORLD
        assert group is not None
        if rank < servers:
            peers = [(f"worker {w}", servers + w) for w in range(self.workers)]
            return tuple(DistributedChannel(*p, (1, 0), self.sizes[rank], group) for p in peers)
        sizes = enumerate(self.sizes)
        return tuple(DistributedChannel(f"server {s}", s, (0, 1), n, group) for s, n in sizes)


def wire(sizes: list[int], workers: int, store: str) -> tuple[list[Endpoint], list[Endpoint]]:
    """Endpoints of servers whose buffers have these `sizes`, and of workers."""
    ends = [Endpoint(store, rank, tuple(sizes), workers) for rank in range(len(sizes) + workers)]
    return ends[: len(sizes)], ends[len(sizes) :]
