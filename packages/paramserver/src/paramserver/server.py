"""Holds parameters, applies gradients, and lets a worker read when the consistency allows it.

Notable:
- the protocol is `Core`'s; here are the lock, the clock and the waiting, all of it in `ask`, which
  a transport calls from a thread per worker;
- a wait ends with an error only when one that is waited for has been silent: a slow worker that
  goes on is waited for as long as it takes.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch import Tensor

from paramserver.consistency import BulkSynchronous, Consistency, OptimizerFactory
from paramserver.partition import Shard, partition
from paramserver.protocol.core import Core
from paramserver.protocol.messages import Message
from paramserver.protocol.replica import Replica
from paramserver.running.progress import Progress, progress_of
from paramserver.transport.connection import Connection

_SIGN_OF_LIFE = 2.0  # seconds between two words to a worker that is kept waiting


class Server:
    """One shard of the parameters and the optimizer that updates it.

    `optimizer` makes a `torch.optim.Optimizer` from the tensors of the shard, as
    `functools.partial(torch.optim.SGD, lr=0.1)` does. A wait ends with an error when a worker that
    it is for has neither pulled nor pushed for `timeout` seconds, and is not kept waiting itself.
    When a worker is lost or silent, "stop" raises in all the others and names it; "continue" goes
    on without it. Of several servers, each with its `shard`, the first orders what all do.

    A worker that is well but slow is waited for, unless others have waited for it for `drop_after`
    seconds: then it is lost. With `LocalSteps` the optimizer is that policy's `outer`; `optimizer`
    is the workers' own.

    `workers` take part from the start: nobody goes on without them. With `elastic`, others may join
    (any number will do for a rank) and one that was lost may come back. Parameters lie in `memory`.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], optimizer: OptimizerFactory,
        consistency: Consistency | None = None, *, workers: int, shard: Shard | None = None,
        timeout: float = 60.0, on_worker_loss: Literal["stop", "continue"] = "stop",
        elastic: bool = False, drop_after: float | None = None,
        memory: Tensor | None = None) -> None:  # fmt: skip
        if workers < (0 if elastic else 1):
            raise ValueError(f"a server of {workers} workers has nobody to serve; give 1 or more")
        if on_worker_loss not in ("stop", "continue"):
            raise ValueError(f"on_worker_loss is {on_worker_loss!r}; 'stop' or 'continue'")
        survives = elastic or on_worker_loss == "continue"
        if drop_after is not None and not survives:
            raise ValueError("drop_after goes on without a worker: give on_worker_loss='continue'")
        if drop_after is not None and not 0 < drop_after < math.inf:
            raise ValueError(f"drop_after is {drop_after!r}; give seconds, or None for never")
        self.shard = shard or partition(parameters, 1)[0]
        self.consistency: Consistency = consistency or BulkSynchronous()
        self.core = Core(
            Replica(self.shard, parameters, optimizer, self.consistency, memory), self.consistency,
            workers=workers, timeout=timeout, survives=survives, elastic=elastic,
            drop_after=drop_after)  # fmt: skip
        self._changed = threading.Condition()
        self._told: dict[int, Exception] = {}

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self.core.replica.version

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients were applied to parameters that many versions newer than they saw."""
        return self.core.replica.staleness

    @property
    def push_bytes(self) -> Counter[int]:
        """How many gradients were applied that came in so many bytes."""
        return self.core.replica.push_bytes

    def connect(self, worker: int) -> "LocalConnection":
        """How a worker in this process speaks to this server."""
        return LocalConnection(self, worker)

    def ask(
        self, worker: int, message: Message, data: Tensor | None = None,
        out: Callable[[Tensor], Callable[[], None] | None] | None = None,
        alive: Callable[[], None] | None = None, *, finite: bool = False) -> Message:  # fmt: skip
        """Answer a request, as soon as that can be done.

        Gradients are taken from `data`, which is the server's until the worker's next pull returns,
        and looked at unless known to be `finite`. `out` gets parameters; what it returns is called
        before those change. `alive` is called every few seconds of a wait, to tell the worker.
        """
        with self._changed:
            said = time.monotonic()
            try:
                while True:
                    now = time.monotonic()
                    reply = self.core.handle(worker, message, data, now, finite=finite)
                    if reply is not None:
                        if out and reply.size and (keep := out(self.core.given)):
                            self.core.replica.lent[worker] = keep
                        return reply
                    self._told.update(self.core.check(now))
                    if worker in self._told:
                        raise self._told.pop(worker)
                    self._changed.notify_all()
                    if alive and now - said >= _SIGN_OF_LIFE:
                        said = now
                        self._changed.release()
                        try:
                            alive()
                        finally:
                            self._changed.acquire()
                    until = min(self.core.next_deadline(), said + _SIGN_OF_LIFE)
                    self._changed.wait(max(0.0, until - time.monotonic()))
            finally:
                self._changed.notify_all()  # it may be that somebody can go on, or that nobody can

    def lose(self, worker: int, reason: str) -> None:
        """`worker` is gone without finishing."""
        with self._changed:
            self.core.lose(worker, reason)
            self._changed.notify_all()

    def progress(self) -> Progress:
        """How far training is, for the first of several servers."""
        with self._changed:
            return progress_of(self.core)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the parameters, the optimizer's state and the version."""
        with self._changed:
            return self.core.replica.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, which a server of the same shard saved; before workers connect."""
        with self._changed:
            self.core.restart(state)


class LocalConnection(Connection):
    """A server in this process."""

    def __init__(self, server: Server, worker: int) -> None:
        super().__init__(server.shard.buffer_bytes)
        self._server, self._worker = server, worker

    def ask(self, message: Message, written: Iterable[int] = ()) -> Message:
        """See Server.ask."""
        deque(written, maxlen=0)
        return self._server.ask(self._worker, message, self.gradients, self.deliver)

    def abort(self, reason: str) -> None:
        """See Server.lose."""
        self._server.lose(self._worker, reason)
