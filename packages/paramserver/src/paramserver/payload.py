"""What a worker writes into a push and makes of a pull: gradients, or the changes of local steps.

Notable: what local steps have changed is taken down at once; with overlap a thread encodes it.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paramserver import sparse
from paramserver.consistency import LocalSteps
from paramserver.partition import Piece, Shard, part
from paramserver.protocol.messages import Message
from paramserver.protocol.replica import add_flat, flatten
from paramserver.transport.connection import Connection
from paramserver.transport.pieces import PIECE

ByName = Mapping[str, Tensor | None]


class Gradients:
    """Gradients go to the servers, parameters come back."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shards: Sequence[Shard],
        connections: Sequence[Connection]) -> None:  # fmt: skip
        self._parameters, self._shards, self._connections = parameters, shards, connections
        self.flat = {name: _flattened(name, p) for name, p in parameters.items()}
        if any(flat.is_cuda for flat in self.flat.values()):
            some = [b for c in connections for b in (c.parameters, c.gradients, c.home)]
            pin(b for b in some if b is not None)

    def write(self, server: int) -> tuple[int, Iterable[int]]:
        """How many bytes go to a server, 0 for all of its buffer; what writes them while they go,
        and yields how many are there."""
        shard, buffer = self._shards[server], self._connections[server].gradients
        gradients = {p.name: part(self._parameters[p.name].grad) for p in shard.pieces}
        if size := sparse.pack(shard, gradients, buffer):
            return size, ()
        return 0, self._written(shard, gradients, buffer)

    def _written(self, shard: Shard, gradients: ByName, buffer: Tensor) -> Iterator[int]:
        for piece, view in zip(shard.pieces, shard.views(buffer), strict=True):
            gradient, flat = gradients[piece.name], view.view(-1)
            if gradient is None:
                view.zero_()
                continue
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            mine = gradient.reshape(-1)[piece.start : piece.stop]
            some = PIECE // flat.itemsize
            for start in range(0, len(flat), some):
                part_of_it = mine[start : start + some]
                flat[start : start + some].copy_(part_of_it, non_blocking=True)
                if not mine.is_cuda:
                    yield piece.offset + (start + len(part_of_it)) * flat.itemsize
        for device in {flat.device for flat in self.flat.values() if flat.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # until the copies are there
        yield len(buffer)

    def accepted(self) -> None:
        """All servers have taken what was written."""

    def read(self, server: int, answer: Message) -> None:
        """Parameters have come."""

    def take_down(self, number: int) -> None:
        """Nothing: gradients stay where they are."""

    def load(self, alpha: float = 0.0) -> None:
        """Copy what has come into the module."""
        for connection, shard in zip(self._connections, self._shards, strict=True):
            connection.read(partial(self._copy, shard))

    def _copy(self, shard: Shard, buffer: Tensor, alpha: float = 0.0) -> None:
        for piece, view in zip(shard.pieces, shard.views(buffer), strict=True):
            mine, theirs = self._slice(piece), view.view(-1).to(self._slice(piece).device)
            if alpha:
                mine.lerp_(theirs, 1 - alpha)
            else:
                mine.copy_(theirs)

    def _slice(self, piece: Piece) -> Tensor:
        return self.flat[piece.name][piece.start : piece.stop]


class Changes(Gradients):
    """A fragment of what local steps have changed goes to the servers, its update comes back."""

    def __init__(
        self, policy: LocalSteps, parameters: Mapping[str, nn.Parameter],
        shards: Sequence[Shard], connections: Sequence[Connection]) -> None:  # fmt: skip
        super().__init__(parameters, shards, connections)
        self._compression = policy.compression
        self._fragments = [shard.fragments(policy.fragments) for shard in shards]
        self._held = [torch.zeros_like(connection.parameters) for connection in connections]
        """What was pulled last, of each server."""
        self._number = 0
        self._changes: list[Tensor] = []
        self._residuals: dict[tuple[int, int], Tensor] = {}
        """By server and fragment, flat: what rounding took away of what was sent."""
        self._unsent: dict[tuple[int, int], Tensor] = {}
        self._came: dict[int, int] = {}

    def take_down(self, number: int) -> None:
        """What has changed of fragment `number`, as it is now."""
        self._number, self._changes = number, []
        for held, fragments in zip(self._held, self._fragments, strict=True):
            shard, old = fragments[number].shard, fragments[number].of(held)
            change = torch.zeros_like(old)
            views = shard.views(change), shard.views(old)
            for piece, view, was in zip(shard.pieces, *views, strict=True):
                torch.sub(was.view(-1), self._slice(piece).to(was.device), out=view.view(-1))
            self._changes.append(change)

    def write(self, server: int) -> tuple[int, Iterable[int]]:
        """See Gradients. ValueError if the parameters are not finite."""
        change, buffer = self._changes[server], self._connections[server].gradients
        if self._compression:
            change = self._compress(server, change)
        buffer[: len(change)] = change
        return len(change), ()

    def accepted(self) -> None:
        """What was left of these pushes is owed by the next."""
        self._residuals |= self._unsent

    def read(self, server: int, answer: Message) -> None:
        """Parameters have come: all, or a change of one fragment."""
        self._connections[server].read(partial(self._hold, server, answer))

    def _hold(self, server: int, answer: Message, pulled: Tensor) -> None:
        held = self._held[server]
        self._came[server] = answer.have
        if answer.have < 0:
            held.copy_(pulled)
            return
        fragment = self._fragments[server][answer.have]
        old, data = fragment.of(held), pulled[: answer.size]
        if len(data) == len(old):
            old.copy_(data)
        else:
            assert self._compression is not None
            views = fragment.shard.views(old)
            numel = sum(view.numel() for view in views)
            add_flat(views, self._compression.decode(data, numel))

    def load(self, alpha: float = 0.0) -> None:
        """Copy what has come into the module, which keeps a share `alpha` of its own."""
        for server, number in self._came.items():
            if number < 0:
                self._copy(self._shards[server], self._held[server])
            else:
                fragment = self._fragments[server][number]
                self._copy(fragment.shard, fragment.of(self._held[server]), alpha)
        self._came.clear()

    def _compress(self, server: int, change: Tensor) -> Tensor:
        assert self._compression is not None
        views = self._fragments[server][self._number].shard.views(change)
        flat, key = flatten(views), (server, self._number)
        if not flat.isfinite().all():
            text = "the parameters are not finite after local steps; nothing was sent"
            raise ValueError(f"{text}: lower the learning rate")
        if key in self._residuals:
            flat += self._residuals[key]
        data = self._compression.encode(flat)
        if len(data) < len(change):
            self._unsent[key] = flat - self._compression.decode(data, len(flat))
            return data
        data = torch.zeros_like(change)  # a few elements: better as they are
        views = self._fragments[server][self._number].shard.views(data)
        add_flat(views, flat)
        self._unsent[key] = flat - flatten(views)
        return data


def _flattened(name: str, parameter: nn.Parameter) -> Tensor:
    tensor = part(parameter.detach())
    if not tensor.is_contiguous():
        text = f"parameter {name} is not contiguous (strides {tuple(tensor.stride())})"
        raise ValueError(f"{text}; before the worker, parameter.data = parameter.data.contiguous()")
    return tensor.view(-1)


def pin(buffers: Iterable[Tensor]) -> None:
    """Lock memory that the GPU copies from and to by itself, whoever has made it, until it goes."""
    runtime = torch.cuda.cudart()
    # Both buffers of a connection may lie in one memory; no page may be locked twice.
    for start, buffer in {b.untyped_storage().data_ptr(): b for b in buffers}.items():
        nbytes = buffer.untyped_storage().nbytes()
        torch.cuda.check_error(int(runtime.cudaHostRegister(start, nbytes, 0)))
        # What is allocated there next has to find it unlocked.
        weakref.finalize(buffer, runtime.cudaHostUnregister, start).atexit = False
