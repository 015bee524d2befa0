"""One server's shard: parameters, optimizer and staged gradients, changed only by the ledger's log.

Notable:
- a gradient that is not finite is refused when it is staged, before any server has applied it;
- what a read was promised is copied only if an update comes before the reader does, and readers of
  one version share that copy;
- a push is known by its name (worker, epoch, clock), so that one that arrives twice, or late, or
  from a life of the worker that is over, changes nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.compression import Compression
from paramserver.consistency import OptimizerFactory
from paramserver.partition import Shard
from paramserver.protocol.ledger import Accept, Join, Leave, Log, Push, Read, Write


class Replica:
    """The parameters of a shard at one position of the log."""

    def __init__(
        self,
        shard: Shard,
        parameters: Mapping[str, Tensor],
        optimizer: OptimizerFactory,
        compression: Compression | None = None,
        *,
        scale_by_staleness: bool = False,
    ) -> None:
        self.shard = shard
        self.position = 0
        """Entries of the log that it has followed."""
        self.base_version = 0
        """The version before the log's first entry."""
        self.version = 0
        """Updates applied so far."""
        self.staleness: Counter[int] = Counter()
        """How many gradients were applied to parameters that many versions newer than they saw."""
        self._buffer = torch.zeros(shard.buffer_bytes, dtype=torch.uint8)
        self._parameters = [nn.Parameter(view) for view in shard.views(self._buffer)]
        with torch.no_grad():
            for piece, mine in zip(shard.pieces, self._parameters, strict=True):
                flat = parameters[piece.name].detach().reshape(-1)
                mine.view(-1).copy_(flat[piece.start : piece.stop])
        self._optimizer = optimizer(self._parameters) if self._parameters else None
        self.compression, self._scale_by_staleness = compression, scale_by_staleness
        # With compression, readers hold `_buffer` plus a rounding error that is made good with the
        # next change: what they hold, and the changes that made it from one version to the next.
        self._published = self._flat() if compression else None
        self._changes: dict[int, Tensor] = {}
        self._staged: dict[Push, Tensor] = {}
        self._accepted: set[Push] = set()  # staged pushes that an update to come will name
        self._next: dict[int, tuple[int, int]] = {}  # the least epoch and clock yet to be accepted
        # The epoch and number of the read that a worker was promised, the version, and its copy,
        # once it is not the newest any more.
        self._promised: dict[int, tuple[tuple[int, int], int, Tensor | None]] = {}

    def check(self, worker: int, gradients: Tensor) -> None:
        """Raise ValueError unless `gradients` (flat bytes) are of this shard, and finite."""
        if gradients.dtype != torch.uint8 or gradients.numel() != self.shard.buffer_bytes:
            raise ValueError(
                f"worker {worker} pushed {gradients.numel()} elements of {gradients.dtype}, the "
                f"shard is {self.shard.buffer_bytes} of torch.uint8; fill a buffer of the shard"
            )
        for piece, view in zip(self.shard.pieces, self.shard.views(gradients), strict=True):
            if not _is_finite(view):
                bad = int((~view.isfinite()).sum())
                raise ValueError(
                    f"worker {worker}'s gradient of {piece.name} is not finite in {bad} of "
                    f"{view.numel()} elements; nothing was applied: skip the batch or lower the "
                    "learning rate"
                )

    def wants(self, push: Push) -> bool:
        """Whether a push of this name is the worker's next; not if it is accepted, or void.

        RuntimeError if others have to come before it: whoever pushes it brings the log first.
        """
        worker, epoch, clock = push
        expected = self._next.get(worker, (0, 0))
        if (epoch, clock) > expected:
            raise RuntimeError(
                f"worker {worker} pushes {(epoch, clock)} (epoch, clock), but this server has "
                f"followed it to {expected}; pull first"
            )
        return (epoch, clock) == expected

    def stage(self, push: Push, gradients: Tensor) -> None:
        """Hold `gradients` until the log says what becomes of them."""
        self._drop(push[0])  # a worker has one push under way
        self._staged[push] = gradients

    def follow(self, log: Log) -> None:
        """Apply what is new in `log`."""
        if log.start > self.position:
            raise RuntimeError(
                f"the log begins at entry {log.start}, this server has followed {self.position}"
            )
        for entry in log.after(self.position).entries:
            match entry:
                case Accept(push):
                    self._accepted.add(push)
                    self._next[push[0]] = push[1], push[2] + 1
                case Write(pushes, staleness):
                    self._keep_promises()
                    gradients = [self._staged.pop(push) for push in pushes]
                    if self._scale_by_staleness and staleness[0]:
                        for view in self.shard.views(gradients[0]):
                            view.div_(1 + staleness[0])
                    self._apply(gradients)
                    self._accepted.clear()
                    self.staleness.update(staleness)
                    for worker, epoch, clock in pushes:
                        later = (epoch, clock + 1)
                        self._next[worker] = max(later, self._next.get(worker, later))
                case Read(worker, epoch, number):
                    self._promised[worker] = (epoch, number), self.version, None
                case Join(worker, epoch, clock):
                    self._drop(worker)
                    self._next[worker] = epoch, clock
                case Leave(worker):
                    self._drop(worker)
                    self._promised.pop(worker, None)
                    # Nothing more from this life of the worker, however late it arrives.
                    self._next[worker] = self._next.get(worker, (0, 0))[0] + 1, 0
            self.position += 1

    def fetch(
        self, worker: int, read: tuple[int, int], have: int, out: Tensor
    ) -> tuple[int, int] | None:
        """Write the version that was promised to the `read` of `worker` into `out`.

        Returns that version, and the bytes that were written: with compression only the change, if
        the worker has the version before. None without such a promise: it was fetched before.
        """
        found, version, kept = self._promised.get(worker, (None, 0, None))
        if found != read:
            return None
        del self._promised[worker]
        if have >= 0 and have == version - 1 and version in self._changes:
            change = self._changes[version]
            out[: len(change)] = change
            return version, len(change)
        out.copy_(self._newest() if kept is None else kept)
        return version, len(out)

    def newest(self, out: Tensor) -> int:
        """Write the newest version into `out`, and return it."""
        out.copy_(self._newest())
        return self.version

    @property
    def held_tensors(self) -> int:
        """Pushes and copies of the parameters that are held, for each a shard of memory."""
        copies = {id(kept) for _, _, kept in self._promised.values() if kept is not None}
        return len(self._staged) + len(copies)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the parameters, the optimizer's state and the version."""
        optimizer = copy.deepcopy(self._optimizer.state_dict()) if self._optimizer else {}
        return {
            "layout": self.shard.digest(),
            "parameters": self._buffer.clone(),
            "optimizer": optimizer,
            "version": self.version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin a log anew from `state`, which a server of the same shard saved."""
        if state["layout"] != self.shard.digest():
            raise ValueError(
                f"the saved state is of shard {state['layout']}, this server holds shard "
                f"{self.shard.digest()}; use the same parameters and number of servers"
            )
        self._buffer.copy_(state["parameters"])
        if self._optimizer:
            self._optimizer.load_state_dict(state["optimizer"])
        self.version = self.base_version = state["version"]
        self.position = 0
        self._staged, self._accepted, self._next, self._promised = {}, set(), {}, {}
        self._published = self._flat() if self.compression else None
        self._changes = {}

    def snapshot(self) -> dict[str, Any]:
        """What `state_dict` has, and where in the log that is, with the pushes under way."""
        return self.state_dict() | {
            "position": self.position,
            "base_version": self.base_version,
            "staleness": dict(self.staleness),
            "staged": {push: gradients.clone() for push, gradients in self._staged.items()},
            "accepted": sorted(self._accepted),
            "next": dict(self._next),
            "published": None if self._published is None else self._published.clone(),
            "changes": dict(self._changes),
        }

    def load_snapshot(self, state: Mapping[str, Any]) -> None:
        """Go on in the log where `snapshot` was made. Promises are void: readers ask again."""
        self.load_state_dict(state)
        self.position, self.base_version = state["position"], state["base_version"]
        self.staleness = Counter(state["staleness"])
        self._staged, self._next = dict(state["staged"]), dict(state["next"])
        self._accepted = set(state["accepted"])
        self._published, self._changes = state["published"], dict(state["changes"])

    def _drop(self, worker: int) -> None:
        """Forget what `worker` staged and nobody accepted."""
        for push in [p for p in self._staged if p[0] == worker and p not in self._accepted]:
            del self._staged[push]

    def _keep_promises(self) -> None:
        """Copy the parameters for those who were promised them as they still are."""
        waiting = {w: read for w, (read, _, kept) in self._promised.items() if kept is None}
        if waiting:
            kept = self._newest().clone()
            self._promised |= {w: (read, self.version, kept) for w, read in waiting.items()}

    def _apply(self, pushes: list[Tensor]) -> None:
        # The sum is made in the buffers in which the gradients came: no memory of its own.
        total, *others = map(self.shard.views, pushes)
        for other in others:
            torch._foreach_add_(total, other)
        if others:
            torch._foreach_div_(total, len(pushes))
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient
        if self._optimizer:
            self._optimizer.step()
        self.version += 1
        if self.compression and self._published is not None:
            change = self.compression.encode(self._flat() - self._published)
            self._published += self.compression.decode(change, len(self._published))
            # A few elements may be better as they are.
            small = len(change) < self.shard.buffer_bytes
            self._changes = {self.version: change} if small else {}

    def expand(self, data: Tensor) -> Tensor:
        """A compressed push as a buffer of this shard."""
        assert self.compression is not None
        return _unflatten(
            self.shard, self.compression.decode(data, sum(p.numel() for p in self._parameters))
        )

    def _flat(self) -> Tensor:
        return flatten(self.shard, self._buffer)

    def _newest(self) -> Tensor:
        """What readers get: the parameters, up to the rounding of what was sent of them."""
        return self._buffer if self._published is None else _unflatten(self.shard, self._published)


def flatten(shard: Shard, buffer: Tensor) -> Tensor:
    """The elements of a shard's buffer as one float32 vector."""
    views = [view.reshape(-1).float() for view in shard.views(buffer)]
    return torch.cat(views) if views else torch.empty(0)


def _unflatten(shard: Shard, flat: Tensor) -> Tensor:
    buffer = torch.zeros(shard.buffer_bytes, dtype=torch.uint8)
    add_flat(shard, buffer, flat)
    return buffer


def add_flat(shard: Shard, buffer: Tensor, flat: Tensor) -> None:
    """Add a float32 vector to the elements of a shard's buffer."""
    start = 0
    for view in shard.views(buffer):
        view.view(-1).add_(flat[start : start + view.numel()].to(view.dtype))
        start += view.numel()


def _is_finite(gradient: Tensor) -> bool:
    # A sum is finite only if all its terms are, and costs one pass; it may overflow, so that only a
    # sum that is not finite needs the second look.
    return bool(gradient.sum().isfinite()) or bool(gradient.isfinite().all())
