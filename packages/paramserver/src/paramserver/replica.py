"""One server's shard: parameters, optimizer and staged gradients, changed only by the ledger's log.

Notable:
- a gradient that is not finite is refused when it is staged, before any server has applied it;
- what a read was promised is copied only if an update comes before the reader does, and readers of
  one version share that copy.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.ledger import Leave, Log, Read, Write
from paramserver.partition import Shard

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class Replica:
    """The parameters of a shard at one position of the log."""

    def __init__(
        self, shard: Shard, parameters: Mapping[str, Tensor], optimizer: OptimizerFactory
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
        self._staged: dict[int, Tensor] = {}
        # The version that a reader was promised, and its copy, once it is not the newest any more.
        self._promised: dict[int, tuple[int, Tensor | None]] = {}

    def stage(self, worker: int, gradients: Tensor) -> None:
        """Hold `gradients` (flat bytes) until the log says what becomes of them."""
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
        self._staged[worker] = gradients

    def follow(self, log: Log) -> None:
        """Apply what is new in `log`."""
        if log.start > self.position:
            raise RuntimeError(
                f"the log begins at entry {log.start}, this server has followed {self.position}"
            )
        for entry in log.after(self.position).entries:
            if isinstance(entry, Write):
                self._keep_promises()
                self._apply([self._staged.pop(worker) for worker in entry.workers])
                self.staleness.update(entry.staleness)
            elif isinstance(entry, Read):
                self._promised[entry.worker] = self.version, None
            elif isinstance(entry, Leave):
                self._promised.pop(entry.worker, None)
                # A committed push of a step that others have yet to complete is still needed.
                # What was not committed no Write will ever name: it is overwritten or dies with us.
            self.position += 1

    def fetch(self, worker: int, out: Tensor) -> int:
        """Write the version that `worker` was promised into `out`; the newest without a promise."""
        version, kept = self._promised.pop(worker, (self.version, None))
        out.copy_(self._buffer if kept is None else kept)
        return version

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
        """Go on from `state`, which a server of the same shard saved."""
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

    def _keep_promises(self) -> None:
        """Copy the parameters for those who were promised them as they still are."""
        waiting = [worker for worker, (_, kept) in self._promised.items() if kept is None]
        if waiting:
            self._promised |= dict.fromkeys(waiting, (self.version, self._buffer.clone()))

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


def _is_finite(gradient: Tensor) -> bool:
    # A sum is finite only if all its terms are, and costs one pass; it may overflow, so that only a
    # sum that is not finite needs the second look.
    return bool(gradient.sum().isfinite()) or bool(gradient.isfinite().all())
