"""Computes gradients with parameters that it pulls, and pushes them.

Notable: with several servers, one thread each, so that their links are used at the same time.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor, nn

from paramserver.connection import SENDS, Connection
from paramserver.messages import Message
from paramserver.partition import Piece, partition
from paramserver.server import Server
from paramserver.session import Request, Session, Steps

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
    ) -> None:
        servers = [servers] if isinstance(servers, Server) else servers
        self.module = module
        self.rank = rank
        parameters = trainable(module)
        self._connections = [s.connect(rank) if isinstance(s, Server) else s for s in servers]
        self._shards = partition(parameters, len(servers), whole=whole)
        self._flat = {name: _flattened(name, tensor) for name, tensor in parameters.items()}
        self._parameters = parameters
        self._threads = ThreadPoolExecutor(len(servers)) if len(servers) > 1 else None
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
        version = self._drive(self._session.pull())
        self._load()
        return version

    def push(self) -> None:
        """Hand the gradients to the servers and set them to None; a missing gradient is zero.

        All servers take them or none does. ValueError if one is not finite: nothing is applied
        anywhere, the gradients stay where they are and the others notice nothing.
        """
        self._drive(self._session.prepare_push())
        self._drive(self._session.push())
        for parameter in self._parameters.values():
            parameter.grad = None

    def finish(self) -> int:
        """Push no more, wait until all have finished and copy the final parameters into the module.

        Returns their version. However long the others take: only one that is silent ends the wait.
        """
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

    def _ask(self, request: Request) -> Message:
        if request.message.kind in SENDS:
            self._fill(request.server)
        return self._connections[request.server].ask(request.message)

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
