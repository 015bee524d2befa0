"""Computes gradients with parameters that it pulls, and pushes them.

Notable: with several servers, one thread each, so that their links are used at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor, nn

from paramserver.connection import Connection
from paramserver.partition import Piece, partition
from paramserver.server import Server


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
        self._each(lambda i: self._connections[i].hello(self._shards[i].digest()))

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

        Returns the oldest of the versions read.
        """
        self.versions = self._each(lambda i: self._connections[i].pull(self.clock))
        self._load()
        return min(self.versions)

    def push(self) -> None:
        """Hand the gradients to the servers and set them to None; a missing gradient is zero."""
        gradients = {name: p.grad for name, p in self._parameters.items()}
        self._each(lambda i: self._push(i, gradients))
        self.clock += 1
        for parameter in self._parameters.values():
            parameter.grad = None

    def finish(self) -> int:
        """Push no more, wait until all have finished and copy the final parameters into the module.

        Returns their version.
        """
        self.versions = self._each(lambda i: self._connections[i].finish())
        self._load()
        return min(self.versions)

    def abort(self, reason: str) -> None:
        """Tell the servers that this worker is lost, so that nobody waits for it."""
        self._each(lambda i: self._connections[i].abort(reason))

    def _each(self, call: Callable[[int], int | None]) -> list[int]:
        numbers = range(len(self._connections))
        results = self._threads.map(call, numbers) if self._threads else map(call, numbers)
        return [result or 0 for result in results]

    def _push(self, server: int, gradients: dict[str, Tensor | None]) -> int:
        connection, shard = self._connections[server], self._shards[server]
        for piece, view in zip(shard.pieces, shard.views(connection.gradients), strict=True):
            gradient = gradients[piece.name]
            if gradient is None:
                view.zero_()
            else:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                view.view(-1).copy_(gradient.reshape(-1)[piece.start : piece.stop])
        return connection.push(self.clock)

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
