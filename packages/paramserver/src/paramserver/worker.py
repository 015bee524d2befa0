"""Computes gradients with parameters that it pulls, and pushes them.

Notable: with several servers, one thread each, so that their links are used at the same time.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor, nn

from paramserver.consistency import Consistency, LocalSteps, OptimizerFactory
from paramserver.partition import Piece, partition
from paramserver.protocol.messages import Message
from paramserver.protocol.replica import add_flat, flatten
from paramserver.protocol.session import Request, Session, Steps
from paramserver.server import Server
from paramserver.transport.connection import SENDS, Connection

T = TypeVar("T")


class Worker:
    """A module whose parameters live on servers.

    `servers` is a server in this process, several of them, or connections to them, in the order of
    `partition(parameters, len(servers), whole=whole)`. As a context manager it finishes at the end,
    or tells the servers if the body raises.

        worker = Worker(module, server, rank=0)
        for inputs, targets in batches:
            worker.pull()
            loss(module(inputs), targets).backward()
            worker.push()
        worker.finish()
    """

    def __init__(
        self,
        module: nn.Module,
        servers: Server | Sequence[Server | Connection],
        *,
        rank: int = 0,
        whole: bool = False,
        local: LocalSteps | None = None,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        if local and optimizer is None:
            raise ValueError("local steps need a worker's own `optimizer`: give one")
        servers = [servers] if isinstance(servers, Server) else servers
        self.module = module
        self.rank = rank
        parameters = trainable(module)
        self._connections = [s.connect(rank) if isinstance(s, Server) else s for s in servers]
        self._shards = partition(parameters, len(servers), whole=whole)
        self._flat = {name: _flattened(name, tensor) for name, tensor in parameters.items()}
        self._parameters = parameters
        self._threads = ThreadPoolExecutor(len(servers)) if len(servers) > 1 else None
        self.bytes_pushed = self.bytes_pulled = 0
        """Bytes of gradients and of parameters that went to and came from the servers."""
        self._local = local
        self._compression = local.compression if local else None
        self._optimizer = optimizer(parameters.values()) if local and optimizer else None
        self._local_steps = 0  # since the last pull
        empty = [torch.zeros(0)] * len(servers)
        self._held = list(empty)
        """With local steps, what was pulled last: a buffer of each server."""
        self._residual = list(empty)
        """With compression, what was not sent yet of the changes, flat."""
        layouts = [shard.digest() for shard in self._shards]
        self._session = Session(rank, layouts, secrets.randbits(48))
        self._drive(self._session.join())

    @property
    def clock(self) -> int:
        """Gradients pushed so far, by which the consistency compares workers."""
        return self._session.clock

    @property
    def pushes(self) -> int:
        """Gradients of this rank that were accepted, also before it joined again: its place in its
        data."""
        return self._session.pushes

    @property
    def version(self) -> int:
        """The version that this worker last pulled."""
        return self._session.version

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.abort(f"{type(error).__name__}: {error}")

    def pull(self) -> int:
        """Copy the servers' parameters into the module, waiting as the consistency demands.

        Returns their version, which is the same at all servers.
        """
        if self._local_steps:
            return self.version  # in the middle of a round
        version = self._drive(self._session.pull())
        self._load()
        return version

    def push(self) -> None:
        """Hand the gradients to the servers and set them to None; a missing gradient is zero.

        All servers take them or none does. ValueError if one is not finite: nothing is applied
        anywhere, the gradients stay where they are and the others notice nothing.
        """
        if self._local and self._optimizer:
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._local_steps += 1
            if self._local_steps == self._local.steps:
                self._push()
            return
        self._push()
        for parameter in self._parameters.values():
            parameter.grad = None

    def finish(self) -> int:
        """Push no more, wait until all have finished and copy the final parameters into the module.

        Returns their version. However long the others take: only one that is silent ends the wait.
        """
        if self._local_steps:
            self._push()  # a round that is shorter than the others
        version = self._drive(self._session.finish())
        self._load()
        return version

    def leave(self) -> None:
        """Push no more, and wait for nobody: the others go on."""
        self._drive(self._session.leave())

    def abort(self, reason: str) -> None:
        """Tell the servers that this worker is lost, so that nobody waits for it."""
        for connection in self._connections:
            connection.abort(reason)

    def _drive(self, steps: Steps[T]) -> T:
        """Send the requests of a session to their servers, and the answers to the session."""
        map_all = self._threads.map if self._threads else map
        answers: list[Message] | None = None
        while True:
            try:
                requests = next(steps) if answers is None else steps.send(answers)
            except StopIteration as end:
                result: T = end.value
                return result
            answers = list(map_all(self._ask, requests))

    def _push(self) -> None:
        self._drive(self._session.prepare_push())
        self._drive(self._session.push())
        self._local_steps = 0

    def _ask(self, request: Request) -> Message:
        server, message = request.server, request.message
        connection = self._connections[server]
        if message.kind not in SENDS:
            answer = connection.ask(message)
            if answer.size:
                self.bytes_pulled += answer.size
                self._take(server, answer.size)
            return answer
        unsent = None
        if self._local is None:
            self._fill(server)
        else:
            size, unsent = self._fill_change(server)
            message = replace(message, size=size)
        answer = connection.ask(message)
        if unsent is not None:
            self._residual[server] = unsent
        self.bytes_pushed += message.size or len(connection.gradients)
        return answer

    def _take(self, server: int, size: int) -> None:
        """Keep what was pulled: all of it, or a change of what was pulled before."""
        if self._local is None:
            return
        shard, pulled = self._shards[server], self._connections[server].parameters
        if self._compression and size < len(pulled):
            held = flatten(shard, self._held[server])
            add_flat(shard, self._held[server], self._compression.decode(pulled[:size], len(held)))
            pulled.copy_(self._held[server])
        else:
            self._held[server] = pulled.clone()

    def _fill_change(self, server: int) -> tuple[int, Tensor | None]:
        """Write what the local steps have changed, as a gradient; its bytes and what is left."""
        shard, buffer = self._shards[server], self._connections[server].gradients
        held = shard.views(self._held[server])
        for piece, view, old in zip(shard.pieces, shard.views(buffer), held, strict=True):
            torch.sub(old.view(-1), self._slice(piece), out=view.view(-1))
        if self._compression is None:
            return 0, None
        change = flatten(shard, buffer)
        if not change.isfinite().all():
            raise ValueError(
                f"worker {self.rank}'s parameters are not finite after its local steps; nothing "
                "was sent: lower the learning rate"
            )
        if len(self._residual[server]):
            change += self._residual[server]
        data = self._compression.encode(change)
        if len(data) >= len(buffer):  # a few elements: better as they are
            add_flat(shard, buffer.zero_(), change)
            return 0, torch.zeros(0)
        buffer[: len(data)] = data
        return len(data), change - self._compression.decode(data, len(change))

    def _fill(self, server: int) -> None:
        """Copy this server's part of the gradients into the buffer that goes to it."""
        shard, buffer = self._shards[server], self._connections[server].gradients
        for piece, view in zip(shard.pieces, shard.views(buffer), strict=True):
            gradient = self._parameters[piece.name].grad
            if gradient is None:
                view.zero_()
            else:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                view.view(-1).copy_(gradient.reshape(-1)[piece.start : piece.stop])

    def _load(self) -> None:
        for connection, shard in zip(self._connections, self._shards, strict=True):
            for piece, view in zip(shard.pieces, shard.views(connection.parameters), strict=True):
                self._slice(piece).copy_(view.view(-1))

    def _slice(self, piece: Piece) -> Tensor:
        return self._flat[piece.name][piece.start : piece.stop]


def local_of(consistency: Consistency | None) -> LocalSteps | None:
    """The policy if it is one whose steps are the workers' own."""
    return consistency if isinstance(consistency, LocalSteps) else None


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that servers hold: those that require a gradient, each once, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _flattened(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"parameter {name} is not contiguous (strides {tuple(tensor.stride())}); "
            "make it so before the worker: parameter.data = parameter.data.contiguous()"
        )
    with torch.no_grad():
        return tensor.detach().view(-1)
