"""Channels over torch.distributed: point-to-point messages on gloo, across machines.

Notable:
- `join` works inside a process group that exists already, under torchrun or any other launcher: its
  ranks are the workers and some of them also host a server, in threads;
- messages go through a gloo group of their own, so that neither the caller's traffic nor its
  timeouts meet ours, and so that a group on NCCL will do as well;
- each direction of each pair has its own tag: a rank may be a worker and a server at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paramserver.consistency import Consistency, OptimizerFactory
from paramserver.protocol.messages import Message
from paramserver.running.job import Job
from paramserver.running.serving import serve
from paramserver.transport.connection import GRACE, Channel, Connection, RemoteConnection
from paramserver.worker import Worker

_IDLE = timedelta(days=7)  # a worker that computes for long is not gone; its death ends the wait


class DistributedChannel:
    """One end of a pair of ranks. `tags` are those for sending and for receiving."""

    def __init__(
        self, peer: str, rank: int, tags: tuple[int, int], nbytes: int, group: dist.ProcessGroup
    ) -> None:
        self.peer = peer
        self.parameters = torch.zeros(nbytes, dtype=torch.uint8)
        self.gradients = torch.zeros_like(self.parameters)
        self._rank, self._group = rank, group
        self._send_tag, self._receive_tag = tags

    def send(self, message: Message) -> None:
        """Send a message: its numbers, then its text if it has one."""
        *numbers, text = message.fields()
        raw = text.encode()
        self.send_data(torch.tensor([*numbers, len(raw)]))
        if raw:
            self.send_data(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def receive(self, timeout: float | None = None) -> Message:
        """The next message; TimeoutError after `timeout` seconds."""
        head = torch.zeros(8, dtype=torch.int64)
        self._receive(head, timeout)
        *numbers, length = head.tolist()
        text = torch.zeros(length, dtype=torch.uint8)
        if length:
            self._receive(text, timeout)
        return Message.from_fields([*numbers, text.numpy().tobytes().decode()])

    def send_data(self, data: Tensor) -> None:
        """Send a tensor and wait until it has left."""
        try:
            dist.send(data, group=self._group, group_dst=self._rank, tag=self._send_tag)
        except RuntimeError as error:
            raise ConnectionResetError(str(error).splitlines()[0]) from error

    def receive_data(self, data: Tensor) -> None:
        """Fill a tensor."""
        self._receive(data, None)

    def close(self) -> None:
        """Nothing: the group is the caller's."""

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
    drop_after: float | None = None, site: dist.ProcessGroup | None = None,
) -> Iterator[Worker]:  # fmt: skip
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
        raise ValueError(
            f"servers are ranks {list(servers)}; give different ranks of a group of {world}"
        )
    job = Job(
        lambda: None, module, optimizer, consistency, workers=world, servers=len(servers),
        timeout=timeout, on_worker_loss=on_worker_loss, whole=whole, drop_after=drop_after,
    )  # fmt: skip
    shards = job.shards()
    private = _private_group(group)
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
            ends: dict[int, Channel] = {
                peer: DistributedChannel(
                    f"worker {peer} (rank {peer})", peer, (reply, request), nbytes, private
                )
                for peer in range(world)
                if peer != rank
            }
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

    def open(self) -> tuple[Channel, ...]:
        """Join the group, and connect to every peer."""
        servers = len(self.sizes)
        world = servers + self.workers
        store = dist.FileStore(self.store, world)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=world, timeout=_IDLE
        )
        group = dist.group.WORLD
        assert group is not None
        if self.rank < servers:
            nbytes = self.sizes[self.rank]
            return tuple(
                DistributedChannel(f"worker {w}", servers + w, (1, 0), nbytes, group)
                for w in range(self.workers)
            )
        return tuple(
            DistributedChannel(f"server {s}", s, (0, 1), nbytes, group)
            for s, nbytes in enumerate(self.sizes)
        )

    def close(self) -> None:
        """Nothing is open before `open`."""


def wire(sizes: list[int], workers: int, store: str) -> tuple[list[Endpoint], list[Endpoint]]:
    """Endpoints of servers whose buffers have these `sizes`, and of workers."""
    ends = [Endpoint(store, rank, tuple(sizes), workers) for rank in range(len(sizes) + workers)]
    return ends[: len(sizes)], ends[len(sizes) :]


def _private_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    made: Any = dist.new_group(ranks, timeout=_IDLE, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
