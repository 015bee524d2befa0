"""Payloads of pushes and pulls: gradients and parameters, or changes of local steps.

`Gradients` writes a worker's gradients into the buffers of its connections and copies pulled
parameters into the module. `Changes` does the same with the changes of local steps, fragment by
fragment, and carries compression residuals over to the next push.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.consistency import LocalSteps
from paramserver.parameters import get_local_part
from paramserver.partition import Shard
from paramserver.protocol.gradients import add_flat, flatten
from paramserver.protocol.messages import Message
from paramserver.transport.chunks import CHUNK_BYTES
from paramserver.transport.connection import Connection


class Gradients:
    """The data of pushes and pulls: a worker's gradients, and the servers' parameters."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shards: Sequence[Shard],
        connections: Sequence[Connection],
    ) -> None:
        self._parameters = parameters
        self._shards = shards
        self._connections = connections

    def write(self, server: int) -> tuple[int, Iterable[int]]:
        """Return the size of the payload for `server` in bytes, and an iterable that writes it.

        The iterable writes the payload into the connection's buffer while it is being sent, and
        yields the number of bytes written so far.
        """
        shard = self._shards[server]
        buffer = self._connections[server].gradients
        gradients = {p.name: get_local_part(self._parameters[p.name].grad) for p in shard.pieces}
        return len(buffer), self._write_pieces(shard, gradients, buffer)

    def _write_pieces(
        self, shard: Shard, gradients: Mapping[str, Tensor | None], buffer: Tensor
    ) -> Iterator[int]:
        devices = {g.device for g in gradients.values() if g is not None and g.is_cuda}
        for device in devices:
            # The caller may compute the gradients on another stream than this thread's.
            torch.cuda.synchronize(device)
        for piece, view in zip(shard.pieces, shard.views(buffer), strict=True):
            gradient = gradients[piece.name]
            if gradient is None:
                view.zero_()
                continue
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            source = gradient.reshape(-1)[piece.start : piece.stop]
            target = view.view(-1)
            step = CHUNK_BYTES // target.itemsize
            for start in range(0, len(target), step):
                part = source[start : start + step]
                target[start : start + step].copy_(part)
                yield piece.offset + (start + len(part)) * target.itemsize
        yield len(buffer)

    def mark_accepted(self) -> None:
        """Update the state after all servers have accepted the payload; gradients have no state."""

    def read_answer(self, server: int, answer: Message) -> None:
        """Process the data pulled from `server`. Here, `load` reads the data instead."""

    def load(self) -> None:
        """Copy the pulled parameters into the module."""
        flat = self.flatten_parameters()
        for connection, shard in zip(self._connections, self._shards, strict=True):
            connection.read(partial(_copy, shard, flat))
        self.store(flat)

    def flatten_parameters(self) -> dict[str, Tensor]:
        """Return each parameter, or this rank's part of a `DTensor`, flattened, by name.

        A contiguous parameter is returned as a view. Any other parameter is copied in row-major
        order.
        """
        return {n: get_local_part(p.detach()).reshape(-1) for n, p in self._parameters.items()}

    def store(self, flat: Mapping[str, Tensor]) -> None:
        """Copy `flat` into non-contiguous parameters; contiguous parameters share its memory."""
        for name, parameter in self._parameters.items():
            local = get_local_part(parameter.detach())
            if not local.is_contiguous():  # such as a weight in torch.channels_last
                local.copy_(flat[name].view(local.shape))


class Changes(Gradients):
    """The data of local steps: the pushed change of a fragment, and its pulled update."""

    def __init__(
        self,
        policy: LocalSteps,
        parameters: Mapping[str, nn.Parameter],
        shards: Sequence[Shard],
        connections: Sequence[Connection],
    ) -> None:
        super().__init__(parameters, shards, connections)
        self._compression = policy.compression
        self._fragments = [shard.fragments(policy.fragments) for shard in shards]
        #: Copy of the parameters that were pulled last, per server.
        self._pulled = [torch.zeros_like(connection.parameters) for connection in connections]
        #: The fragment of the next push, and its change per server.
        self._fragment = 0
        self._changes: list[Tensor] = []
        #: Flat compression residual of each (server, fragment), added to its next change.
        self._residuals: dict[tuple[int, int], Tensor] = {}
        #: Residuals of the last payload, which take effect when all servers have accepted it.
        self._pending_residuals: dict[tuple[int, int], Tensor] = {}
        #: Fragment that arrived since the last `load`, by server; -1 for all parameters.
        self._arrived: dict[int, int] = {}

    def capture(self, fragment: int) -> None:
        """Compute the change of `fragment` since it was pulled last."""
        self._fragment = fragment
        self._changes = []
        flat = self.flatten_parameters()
        for pulled, fragments in zip(self._pulled, self._fragments, strict=True):
            shard = fragments[fragment].shard
            old = fragments[fragment].get_view(pulled)
            change = torch.zeros_like(old)
            views = zip(shard.pieces, shard.views(change), shard.views(old), strict=True)
            for piece, view, old_view in views:
                new = flat[piece.name][piece.start : piece.stop].to(old_view.device)
                torch.sub(old_view.view(-1), new, out=view.view(-1))
            self._changes.append(change)

    def write(self, server: int) -> tuple[int, Iterable[int]]:
        """Write the captured change into the buffer; see `Gradients.write`.

        Raises:
            ValueError: the parameters are not finite; checked here with compression only.
        """
        change = self._changes[server]
        if self._compression:
            change = self._compress(server, change)
        self._connections[server].gradients[: len(change)] = change
        return len(change), ()

    def mark_accepted(self) -> None:
        """Carry the residuals of the last payload over to the next push."""
        self._residuals |= self._pending_residuals

    def read_answer(self, server: int, answer: Message) -> None:
        """Update the copy of the parameters from pulled data: a whole shard, or one fragment."""
        self._connections[server].read(partial(self._update_pulled, server, answer))

    def _update_pulled(self, server: int, answer: Message, data: Tensor) -> None:
        pulled = self._pulled[server]
        self._arrived[server] = answer.fragment
        if answer.fragment < 0:
            pulled.copy_(data)
            return
        fragment = self._fragments[server][answer.fragment]
        old = fragment.get_view(pulled)
        data = data[: answer.size]
        if not self._compression:
            old.copy_(data)
            return
        views = fragment.shard.views(old)
        numel = sum(view.numel() for view in views)
        add_flat(views, self._compression.decode(data, numel))

    def load(self, alpha: float = 0.0) -> None:
        """Copy the arrived data into the module; a fragment's old values keep weight `alpha`."""
        flat = self.flatten_parameters()
        for server, number in self._arrived.items():
            pulled = self._pulled[server]
            if number < 0:
                _copy(self._shards[server], flat, pulled)
            else:
                fragment = self._fragments[server][number]
                _copy(fragment.shard, flat, fragment.get_view(pulled), alpha)
        self.store(flat)
        self._arrived.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters that were pulled last, by name, and the compression residuals."""
        flat = self.flatten_parameters()
        pulled = {name: torch.empty_like(part, device="cpu") for name, part in flat.items()}
        for shard, buffer in zip(self._shards, self._pulled, strict=True):
            shard.gather(buffer, pulled)
        return {"pulled": pulled, "residuals": self._residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        for shard, buffer in zip(self._shards, self._pulled, strict=True):
            shard.scatter(state["pulled"], buffer)
        self._residuals = dict(state["residuals"])

    def _compress(self, server: int, change: Tensor) -> Tensor:
        """Return an encoded change plus its residual; store the new residual until acceptance."""
        assert self._compression is not None
        shard = self._fragments[server][self._fragment].shard
        key = (server, self._fragment)
        flat = flatten(shard.views(change))
        if key in self._residuals:
            flat += self._residuals[key]
        data = self._compression.encode(flat)
        self._pending_residuals[key] = flat - self._compression.decode(data, len(flat))
        return data


def _copy(shard: Shard, flat: Mapping[str, Tensor], buffer: Tensor, alpha: float = 0.0) -> None:
    """Copy `buffer` into the flat parameters of a shard; old values keep weight `alpha`."""
    for piece, view in zip(shard.pieces, shard.views(buffer), strict=True):
        local = flat[piece.name][piece.start : piece.stop]
        pulled = view.view(-1).to(local.device)
        if alpha:
            local.lerp_(pulled, 1 - alpha)
        else:
            local.copy_(pulled)
