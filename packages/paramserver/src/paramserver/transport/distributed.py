"""Channels over torch.distributed: point-to-point messages on gloo, across machines.

`join` works inside an existing process group, under torchrun or any other launcher. Its ranks are
the workers, and some of them also run a server in threads. Messages use a separate gloo group. They
therefore do not interfere with the caller's messages and timeouts, and the caller's group may use
NCCL. Requests and replies of each server have separate tags, because a rank may be a worker and a
server.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paramserver.consistency import Consistency
from paramserver.optimizers import OptimizerFactory
from paramserver.protocol.messages import Kind, Message
from paramserver.running.job import Job
from paramserver.running.serving import serve
from paramserver.transport.connection import (
    GRACE_SECONDS,
    MAX_WAIT_SECONDS,
    Channel,
    Connection,
    RemoteConnection,
    drain,
)
from paramserver.worker import Worker

Tags = tuple[int, int]
#: Largest size of a message's text in bytes.
_MAX_TEXT_BYTES = 2**26
#: Timeout for receiving from a worker that computes. The wait ends earlier if the worker dies.
_IDLE = timedelta(seconds=MAX_WAIT_SECONDS)


class DistributedChannel(Channel):
    """One end of a connection between two ranks, with the tags for sending and receiving."""

    def __init__(self, peer: str, rank: int, tags: Tags, nbytes: int, group: Any) -> None:
        super().__init__(nbytes)
        self.peer = peer
        self._rank = rank
        self._group = group
        self._send_tag, self._receive_tag = tags

    def send(self, message: Message) -> None:
        """Send a message: its numbers, then its text and data if it has any."""
        *numbers, text = message.to_fields()
        raw = text.encode()
        self._send(torch.tensor([*numbers, len(raw)], device="cpu"))
        if raw:
            self._send(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        if message.kind is Kind.OK and message.size:
            self._send(self.parameters[: message.size])

    def receive(self, timeout: float | None = None) -> Message:
        """Receive the next message; raise `TimeoutError` after `timeout` seconds."""
        head = torch.zeros(9, dtype=torch.int64, device="cpu")
        self._receive(head, timeout)
        *numbers, length = head.tolist()
        if not 0 <= length <= _MAX_TEXT_BYTES:
            raise ValueError(
                f"expected a text of at most {_MAX_TEXT_BYTES} bytes, {self.peer} announced "
                f"{length}"
            )
        text = torch.zeros(length, dtype=torch.uint8, device="cpu")
        if length:
            self._receive(text, timeout)
        message = Message.from_fields([*numbers, text.numpy().tobytes().decode()])
        if message.kind is Kind.OK and message.size:
            self._receive(self.parameters[: message.size], None)
        return message

    def send_gradients(self, data: Tensor, write_chunks: Iterable[int]) -> None:
        """Write the gradients, then send them; see `Channel.send_gradients`."""
        drain(write_chunks)
        self._send(data)

    def receive_gradients(self, data: Tensor, on_progress: Callable[[int], None]) -> None:
        """Receive gradients in one message; see `Channel.receive_gradients`."""
        self._receive(data, None)

    def _send(self, data: Tensor) -> None:
        try:
            self._group.send([data], self._rank, self._send_tag).wait()
        except RuntimeError as error:
            raise ConnectionResetError(str(error).splitlines()[0]) from error

    def _receive(self, data: Tensor, timeout: float | None) -> None:
        start = time.monotonic()
        try:
            work = self._group.recv([data], self._rank, self._receive_tag)
            work.wait(_IDLE if timeout is None else timedelta(seconds=timeout))
        except RuntimeError as error:
            if timeout is not None and time.monotonic() - start >= timeout:
                raise TimeoutError(f"{self.peer} did not answer for {timeout:g} s") from error
            raise ConnectionResetError(str(error).splitlines()[0]) from error


@contextmanager
def join(
    module: nn.Module,
    optimizer: OptimizerFactory,
    consistency: Consistency | None = None,
    *,
    servers: Sequence[int] = (0,),
    group: dist.ProcessGroup | None = None,
    timeout: float = 60.0,
    allow_missing: bool = False,
) -> Iterator[Worker]:
    """Train in an existing process group, in which every rank is a worker.

    The returned context manager provides this rank's `Worker`. Every rank of `group` enters it with
    the same arguments and a module with the same parameter names and shapes. A server starts with
    the parameters of the rank that runs it. When all ranks have reached the end of the block, every
    module has the final parameters.

    Args:
        module: the module to train.
        optimizer: see `Server`.
        consistency: the policy; None is `BulkSynchronous()`.
        servers: distinct ranks of `group` that also run a server.
        group: the process group; None is the default group.
        timeout: see `Server`.
        allow_missing: see `Server`.

    Raises:
        PeerLost: another rank has failed; the message names it.
        TypeError: an argument has another type; the message names the argument.
        ValueError: `servers` is empty, or not distinct ranks of `group`.
    """
    rank = dist.get_rank(group)
    world = dist.get_world_size(group)
    if not isinstance(servers, Iterable):
        raise TypeError(f"expected servers to be ranks of the group, such as (0,), got {servers!r}")
    if not servers or len(set(servers)) < len(servers) or not set(servers) <= set(range(world)):
        raise ValueError(
            f"expected distinct ranks of a group of {world} as servers, got {list(servers)}"
        )
    job = Job(
        lambda: None,
        module,
        optimizer,
        consistency,
        workers=world,
        servers=len(servers),
        timeout=timeout,
        allow_missing=allow_missing,
    )
    shards = job.shards()
    private_group = _connect_gloo(group)
    threads = []
    connections = list[Connection]()
    try:
        for number, (host, shard) in enumerate(zip(servers, shards, strict=True)):
            request_tag = 2 * number
            reply_tag = 2 * number + 1
            nbytes = shard.buffer_bytes
            if host != rank:
                name = f"server {number} (rank {host})"
                tags = (request_tag, reply_tag)
                channel = DistributedChannel(name, host, tags, nbytes, private_group)
                connections.append(RemoteConnection(channel, job.timeout + GRACE_SECONDS))
                continue
            server = job.server(shard)
            connections.append(server.connect(rank))
            channels = dict[int, Channel]()
            for r in {*range(world)} - {rank}:
                name = f"worker {r} (rank {r})"
                tags = (reply_tag, request_tag)
                channels[r] = DistributedChannel(name, r, tags, nbytes, private_group)
            threads += serve(server, channels)
        with job.worker(rank, connections) as worker:
            yield worker
    finally:
        for thread in threads:
            thread.join(min(job.timeout + GRACE_SECONDS, MAX_WAIT_SECONDS))


def _connect_gloo(group: dist.ProcessGroup | None) -> Any:
    """Return a new gloo group of the same ranks that is not registered with torch.distributed.

    `new_group` of torch 2.11 may reuse the name of a destroyed group, and therefore read its
    outdated addresses in the store. Here the prefix is the number of earlier calls per rank.
    """
    group = group or dist.group.WORLD
    assert group is not None
    store: Any = group.get_group_store()
    world = group.size()
    number = (store.add("paramserver/joined", 1) - 1) // world
    prefixed = dist.PrefixStore(f"paramserver/{number}", store)
    return dist.ProcessGroupGloo(prefixed, group.rank(), world, _IDLE)
