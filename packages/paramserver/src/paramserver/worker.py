"""Computes gradients with parameters that it pulls, and pushes them.

Notable:
- with several servers, one thread each, so that their links are used at the same time;
- with several servers a push has two phases (Gray, "Notes on Data Base Operating Systems", 1978,
  section 5.8.3.3): all hold the gradients, then the first accepts them, in one message. So has a
  pull: the first promises a version, then all send that one. With one server, one message does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor, nn

from paramserver.connection import Connection
from paramserver.ledger import Log
from paramserver.partition import Piece, partition
from paramserver.server import Server

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
        self.clock = 0
        """Gradients pushed so far."""
        self.versions = [0] * len(servers)
        """The version of each server's parameters that this worker last pulled."""
        parameters = trainable(module)
        self._connections = [s.connect(rank) if isinstance(s, Server) else s for s in servers]
        self._shards = partition(parameters, len(servers), whole=whole)
        self._flat = {name: _flattened(name, tensor) for name, tensor in parameters.items()}
        self._parameters = parameters
        self._threads = ThreadPoolExecutor(len(servers)) if len(servers) > 1 else None
        self._first, *self._others = self._connections
        self._pushed = False  # since the last pull
        greetings = self._each(lambda i: self._connections[i].hello(self._shards[i].digest()))
        if len({greeting.base_version for greeting in greetings}) > 1:
            raise ValueError(
                f"the servers begin with versions {[g.base_version for g in greetings]}; "
                "load states that were saved at one version"
            )
        self._positions = [greeting.position for greeting in greetings]
        """How far each server has followed the first one's log, as far as is known here."""

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
        if self._others:
            log = self._first.read(self.clock, min(self._positions))
            self.versions = self._each(lambda i: self._connections[i].fetch(self._new(i, log)))
            self._positions = [log.stop] * len(self._connections)
        else:
            self.versions = [self._first.pull(self.clock)]
        self._load()
        self._pushed = False
        return self._one_version()

    def push(self) -> None:
        """Hand the gradients to the servers and set them to None; a missing gradient is zero.

        All servers take them or none does. ValueError if one is not finite: nothing is applied
        anywhere, the gradients stay where they are and the others notice nothing.
        """
        if self._pushed:
            self._catch_up()
        gradients = {name: p.grad for name, p in self._parameters.items()}
        self._each(lambda i: self._push(i, gradients))
        if self._others:
            self._first.commit(self.clock, min(self._positions))
        self.clock += 1
        self._pushed = True
        for parameter in self._parameters.values():
            parameter.grad = None

    def finish(self) -> int:
        """Push no more, wait until all have finished and copy the final parameters into the module.

        Returns their version. However long the others take: one that is silent ends the wait.
        """
        version, log = self._first.finish(min(self._positions))
        rest = range(1, len(self._connections))
        ends = self._map(lambda i: self._connections[i].end(self._new(i, log)), rest)
        self.versions = [version, *ends]
        self._load()
        return self._one_version()

    def abort(self, reason: str) -> None:
        """Tell the servers that this worker is lost, so that nobody waits for it."""
        self._each(lambda i: self._connections[i].abort(reason))

    def _catch_up(self) -> None:
        """Before the buffers of the last push are filled again, all servers must have used them."""
        waits, log = self._first.sync(min(self._positions))
        if waits:
            raise RuntimeError(
                f"worker {self.rank} pushes twice in one bulk-synchronous step; pull in between"
            )
        rest = range(1, len(self._connections))
        self._map(lambda i: self._connections[i].follow(self._new(i, log)), rest)
        self._positions = [log.stop] * len(self._connections)

    def _new(self, server: int, log: Log) -> Log:
        return log.after(self._positions[server])

    def _one_version(self) -> int:
        if len(set(self.versions)) > 1:
            raise RuntimeError(f"the servers answered with versions {self.versions}: a bug")
        return self.versions[0]

    def _each(self, call: Callable[[int], T]) -> list[T]:
        return self._map(call, range(len(self._connections)))

    def _map(self, call: Callable[[int], T], servers: range) -> list[T]:
        return list(self._threads.map(call, servers) if self._threads else map(call, servers))

    def _push(self, server: int, gradients: dict[str, Tensor | None]) -> None:
        connection, shard = self._connections[server], self._shards[server]
        for piece, view in zip(shard.pieces, shard.views(connection.gradients), strict=True):
            gradient = gradients[piece.name]
            if gradient is None:
                view.zero_()
            else:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                view.view(-1).copy_(gradient.reshape(-1)[piece.start : piece.stop])
        if self._others:
            connection.stage()
        else:
            connection.push(self.clock)

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
