"""Holds parameters, applies gradients, and lets a worker read when the consistency allows it.

Notable:
- a request is a method that blocks until it can be answered, under one lock; a transport calls it
  from a thread per worker. All the waiting there is stands in `_wait`;
- what a worker reads is one version: no update is half in it;
- a bulk-synchronous mean is summed in the order of the workers, not of their arrival, in the
  buffers in which the gradients came: the same bits in every run, and no memory of its own.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paramserver.connection import LocalConnection, PeerLost
from paramserver.consistency import BulkSynchronous, Clocks, Consistency
from paramserver.partition import Shard, partition

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class Server:
    """One shard of the parameters and the optimizer that updates it.

    `optimizer` makes a `torch.optim.Optimizer` from the tensors of the shard, as
    `functools.partial(torch.optim.SGD, lr=0.1)` does. `timeout` (seconds) ends every wait with an
    error that names whom it was for. When a worker is lost, "stop" raises `PeerLost` in all the
    others; "continue" goes on without it.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: OptimizerFactory,
        consistency: Consistency | None = None,
        *,
        workers: int,
        shard: Shard | None = None,
        timeout: float = 60.0,
        on_worker_loss: Literal["stop", "continue"] = "stop",
    ) -> None:
        if workers < 1:
            raise ValueError(f"a server of {workers} workers has nobody to serve; give 1 or more")
        if on_worker_loss not in ("stop", "continue"):
            raise ValueError(f"on_worker_loss is {on_worker_loss!r}; 'stop' or 'continue'")
        self.shard = shard or partition(parameters, 1)[0]
        self.consistency: Consistency = consistency or BulkSynchronous()
        self.timeout = timeout
        self.version = 0
        """Updates applied so far."""
        self.staleness: Counter[int] = Counter()
        """How many gradients were applied to parameters that many versions newer than they saw."""
        self._buffer = torch.zeros(self.shard.buffer_bytes, dtype=torch.uint8)
        self._parameters = [nn.Parameter(view) for view in self.shard.views(self._buffer)]
        with torch.no_grad():
            for piece, mine in zip(self.shard.pieces, self._parameters, strict=True):
                flat = parameters[piece.name].detach().reshape(-1)
                mine.view(-1).copy_(flat[piece.start : piece.stop])
        self._optimizer = optimizer(self._parameters) if self._parameters else None
        self._clocks = Clocks(workers, self.consistency.bound)
        self._read = dict.fromkeys(range(workers), 0)  # the version each worker last read
        self._waiting: dict[int, Tensor] = {}  # gradients of a step that is not complete
        self._continue = on_worker_loss == "continue"
        self._failure = ""
        self._changed = threading.Condition()

    def connect(self, worker: int) -> LocalConnection:
        """How a worker in this process speaks to this server."""
        return LocalConnection(self, worker)

    def pull(self, worker: int, clock: int, out: Tensor) -> int:
        """Write the parameters into `out` once `worker` may read at `clock`; return the version."""
        with self._changed:
            self._check(worker, clock)
            self._wait(worker, f"at clock {clock}", lambda: self._clocks.behind(clock))
            out.copy_(self._buffer)
            self._read[worker] = self.version
            return self.version

    def push(self, worker: int, clock: int, gradients: Tensor) -> int:
        """Take the gradients that `worker` found at `clock`; return the version they made or join.

        `gradients` belongs to the server until the worker's next pull returns.
        """
        with self._changed:
            self._check(worker, clock)
            if worker in self._waiting:
                raise self._fail(
                    f"worker {worker} pushed twice in one bulk-synchronous step; pull in between"
                )
            if self.consistency.averages:
                self._waiting[worker] = gradients
                self._clocks.tick(worker)
                self._step_if_complete()
            else:
                self._apply(gradients)
                self.staleness[self.version - 1 - self._read[worker]] += 1
                self._clocks.tick(worker)
            self._changed.notify_all()
            return self.version

    def finish(self, worker: int, out: Tensor) -> int:
        """`worker` pushes no more; once nobody does, write the final parameters into `out`."""
        with self._changed:
            self._leave(worker)
            self._wait(worker, "at the end", lambda: sorted(self._clocks.active))
            out.copy_(self._buffer)
            return self.version

    def lose(self, worker: int, reason: str) -> None:
        """`worker` is gone without finishing."""
        with self._changed:
            if worker not in self._clocks.active:
                return
            if self._continue:
                self._leave(worker)
            else:
                self._fail(f"worker {worker} is gone at clock {self._clocks[worker]}: {reason}")

    def state_dict(self) -> dict[str, Any]:
        """A copy of the parameters, the optimizer's state and the version."""
        with self._changed:
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
        with self._changed:
            self._buffer.copy_(state["parameters"])
            if self._optimizer:
                self._optimizer.load_state_dict(state["optimizer"])
            self.version = state["version"]
            self._read = dict.fromkeys(self._read, self.version)

    def _wait(self, worker: int, where: str, blockers: Callable[[], list[int]]) -> None:
        self._changed.wait_for(lambda: self._failure or not blockers(), self.timeout)
        if self._failure:
            raise PeerLost(self._failure)
        if slow := blockers():
            state = ", ".join(f"worker {w} at clock {self._clocks[w]}" for w in slow)
            raise TimeoutError(
                f"worker {worker} waited {self.timeout:g} s {where} for {state}; "
                "if they are only slow, raise `timeout` or allow more staleness"
            )

    def _check(self, worker: int, clock: int) -> None:
        if self._failure:
            raise PeerLost(self._failure)
        if worker not in self._read:
            raise ValueError(f"worker {worker} is unknown; there are {len(self._read)} workers")
        if worker not in self._clocks.active:
            raise RuntimeError(f"worker {worker} has finished; it can neither pull nor push")
        if clock != self._clocks[worker]:
            raise ValueError(
                f"worker {worker} is at clock {clock}, but the server has "
                f"{self._clocks[worker]} of its gradients; one Worker per worker number"
            )

    def _leave(self, worker: int) -> None:
        self._clocks.leave(worker)
        self._step_if_complete()
        self._changed.notify_all()

    def _fail(self, message: str) -> RuntimeError:
        self._failure = self._failure or message
        self._changed.notify_all()
        return RuntimeError(message)

    def _step_if_complete(self) -> None:
        if not self._waiting or not self._clocks.active <= self._waiting.keys():
            return
        in_order = [self._waiting[worker] for worker in sorted(self._waiting)]
        self._waiting.clear()
        total, *others = map(self.shard.views, in_order)
        for other in others:
            torch._foreach_add_(total, other)
        if others:
            torch._foreach_div_(total, len(in_order))
        self._apply(in_order[0])
        self.staleness[0] += len(in_order)

    def _apply(self, gradients: Tensor) -> None:
        for parameter, gradient in zip(self._parameters, self.shard.views(gradients), strict=True):
            parameter.grad = gradient
        if self._optimizer:
            self._optimizer.step()
        self.version += 1
