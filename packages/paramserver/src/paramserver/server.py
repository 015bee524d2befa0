"""Holds parameters, applies gradients, and lets a worker read when the consistency allows it.

Notable:
- a request is a method that blocks until it can be answered, under one lock; a transport calls it
  from a thread per worker. All the waiting there is stands in `_wait`;
- the first server of several keeps the ledger for all of them; every server follows it;
- a wait ends with an error only when one that is waited for has been silent: a slow worker that
  goes on is waited for as long as it takes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from paramserver.connection import Greeting, PeerLost, check_layout
from paramserver.consistency import BulkSynchronous, Consistency
from paramserver.ledger import Ledger, Log
from paramserver.partition import Shard, partition
from paramserver.replica import OptimizerFactory, Replica

_SIGN_OF_LIFE = 2.0  # seconds between two words to a worker that is kept waiting


class Server:
    """One shard of the parameters and the optimizer that updates it.

    `optimizer` makes a `torch.optim.Optimizer` from the tensors of the shard, as
    `functools.partial(torch.optim.SGD, lr=0.1)` does. A wait ends with an error when a worker that
    it is for has neither pulled nor pushed for `timeout` seconds, and is not kept waiting itself.
    When a worker is lost or silent, "stop" raises in all the others and names it; "continue" goes
    on without it. Of several servers, each with its `shard`, the first orders what all do.
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
        self._workers = workers
        self._ledger = Ledger(workers, self.consistency)
        self._replica = Replica(self.shard, parameters, optimizer)
        self._continue = on_worker_loss == "continue"
        self._failure = ""
        self._dropped: dict[int, str] = {}
        self._heard = dict.fromkeys(range(workers), time.monotonic())
        self._kept_waiting: set[int] = set()
        self._changed = threading.Condition()

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self._replica.version

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients were applied to parameters that many versions newer than they saw."""
        return self._replica.staleness

    def connect(self, worker: int) -> LocalConnection:
        """How a worker in this process speaks to this server."""
        return LocalConnection(self, worker)

    def hello(self, worker: int, layout: str) -> Greeting:
        """Check that both ends hold the same shard, and say where this server stands."""
        check_layout(f"worker {worker}", layout, self.shard.digest())
        with self._changed:
            return Greeting(self._replica.position, self._replica.base_version)

    # A worker of one server says all in one message.

    def pull(
        self, worker: int, clock: int, out: Tensor, alive: Callable[[], None] | None = None
    ) -> int:
        """Write the parameters into `out` once `worker` may read at `clock`; return the version.

        `alive` is called every few seconds of a wait, to tell the worker that it is one.
        """
        with self._changed:
            self._read(worker, clock, alive)
            self._follow_own(self._replica.position)
            return self._replica.fetch(worker, out)

    def push(self, worker: int, clock: int, gradients: Tensor) -> int:
        """Take the gradients that `worker` found at `clock`; return the version they made or join.

        `gradients` belongs to the server until the worker's next pull returns. ValueError, and
        nothing applied, if one is not finite.
        """
        with self._changed:
            self._check(worker, clock)
            self.stage(worker, gradients)
            self.commit(worker, clock, self._replica.position)
            return self.version

    # A worker of several stages at all and commits at the first; reads at the first and fetches.

    def stage(self, worker: int, gradients: Tensor) -> None:
        """Hold `gradients` for a commit; refuse them here if they are bad."""
        with self._changed:
            self._raise_failure(worker)
            if self._ledger.awaits(worker):
                raise RuntimeError(
                    f"worker {worker} pushed twice in one bulk-synchronous step; pull in between"
                )
            self._replica.stage(worker, gradients)

    def commit(self, worker: int, clock: int, since: int) -> Log:
        """Accept what `worker` has staged at every server; return the log from `since` on."""
        with self._changed:
            self._check(worker, clock)
            self._ledger.commit(worker)
            return self._follow_own(since)

    def read(
        self, worker: int, clock: int, since: int, alive: Callable[[], None] | None = None
    ) -> Log:
        """Wait until `worker` may read at `clock`; return the log in which it was promised to."""
        with self._changed:
            self._read(worker, clock, alive)
            return self._follow_own(since)

    def fetch(self, worker: int, log: Log, out: Tensor) -> int:
        """Follow `log`, write what `worker` was promised into `out` and return its version."""
        with self._changed:
            self.follow(worker, log)
            return self._replica.fetch(worker, out)

    def follow(self, worker: int, log: Log) -> int:
        """Follow `log`, which `worker` brings; return how far this server has got."""
        with self._changed:
            self._raise_failure(worker)
            self._follow(log)
            return self._replica.position

    def sync(self, worker: int, since: int) -> tuple[bool, Log]:
        """Whether a push of `worker` waits for those of others, and the log from `since` on."""
        with self._changed:
            self._raise_failure(worker)
            return self._ledger.awaits(worker), self._follow_own(since)

    def finish(
        self, worker: int, since: int, out: Tensor, alive: Callable[[], None] | None = None
    ) -> tuple[int, Log]:
        """`worker` pushes no more; once nobody does, write the final parameters into `out`.

        Returns their version and the log from `since` on.
        """
        with self._changed:
            self._raise_failure(worker)
            self._leave(worker)
            clocks = self._ledger.clocks
            self._wait(worker, "at the end", lambda: sorted(clocks.active), alive)
            log = self._follow_own(since)
            return self._replica.fetch(worker, out), log

    def lose(self, worker: int, reason: str) -> None:
        """`worker` is gone without finishing."""
        with self._changed:
            if worker not in self._ledger.clocks.active:
                return
            message = f"worker {worker} is gone at clock {self._ledger.clocks[worker]}: {reason}"
            if self._continue:
                self._dropped[worker] = message
                self._leave(worker)
            else:
                self._fail(message)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the parameters, the optimizer's state and the version."""
        with self._changed:
            return self._replica.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, which a server of the same shard saved; before workers connect."""
        with self._changed:
            self._replica.load_state_dict(state)
            self._ledger = Ledger(self._workers, self.consistency, self._replica.version)

    def _read(self, worker: int, clock: int, alive: Callable[[], None] | None) -> None:
        self._check(worker, clock)
        behind = self._ledger.clocks.behind
        self._wait(worker, f"at clock {clock}", lambda: behind(clock), alive)
        self._ledger.read(worker)

    def _wait(
        self,
        worker: int,
        where: str,
        blockers: Callable[[], list[int]],
        alive: Callable[[], None] | None,
    ) -> None:
        start = said = time.monotonic()
        self._kept_waiting.add(worker)
        try:
            while True:
                self._raise_failure(worker)
                if not (waited_for := blockers()):
                    return
                # One that is kept waiting itself is not silent: it waits for one of the others.
                busy = [w for w in waited_for if w not in self._kept_waiting]
                now = time.monotonic()
                silent = [w for w in busy if now - max(start, self._heard[w]) >= self.timeout]
                if silent:
                    self._silent(worker, where, silent)
                    continue
                if alive and now - said >= _SIGN_OF_LIFE:
                    said = now
                    self._without_lock(alive)
                    continue
                first = min((max(start, self._heard[w]) for w in busy), default=now)
                until = min(first + self.timeout, said + _SIGN_OF_LIFE)
                self._changed.wait(max(0.0, until - now))
        finally:
            self._kept_waiting.discard(worker)
            self._heard[worker] = time.monotonic()

    def _silent(self, worker: int, where: str, silent: list[int]) -> None:
        state = ", ".join(f"worker {w} at clock {self._ledger.clocks[w]}" for w in silent)
        if not self._continue:
            raise TimeoutError(
                f"worker {worker} waited {self.timeout:g} s {where} for {state}; "
                "a step may take that long: raise `timeout` if one does"
            )
        for w in silent:
            self.lose(w, f"it neither pulled nor pushed for {self.timeout:g} s")

    def _without_lock(self, call: Callable[[], None]) -> None:
        self._changed.release()
        try:
            call()
        finally:
            self._changed.acquire()

    def _raise_failure(self, worker: int) -> None:
        if self._failure:
            raise PeerLost(self._failure)
        if worker in self._dropped:
            raise PeerLost(f"the others go on without this worker: {self._dropped[worker]}")
        if worker in self._heard:
            self._heard[worker] = time.monotonic()

    def _check(self, worker: int, clock: int) -> None:
        self._raise_failure(worker)
        if worker not in self._heard:
            raise ValueError(f"worker {worker} is unknown; there are {len(self._heard)} workers")
        if worker not in self._ledger.clocks.active:
            raise RuntimeError(f"worker {worker} has finished; it can neither pull nor push")
        if clock != self._ledger.clocks[worker]:
            raise ValueError(
                f"worker {worker} is at clock {clock}, but the server has "
                f"{self._ledger.clocks[worker]} of its gradients; one Worker per worker number"
            )

    def _leave(self, worker: int) -> None:
        if worker in self._ledger.clocks.active:
            # Followed by whoever reads next: of several servers only the first has the ledger.
            self._ledger.leave(worker)
            self._changed.notify_all()

    def _fail(self, message: str) -> None:
        self._failure = self._failure or message
        self._changed.notify_all()

    def _follow_own(self, since: int) -> Log:
        # `since` may lie before what this server has followed: another one is behind.
        log = self._ledger.since(min(since, self._replica.position))
        self._follow(log)
        return log

    def _follow(self, log: Log) -> None:
        try:
            self._replica.follow(log)
        except Exception as error:  # of the optimizer: this shard is not what the others' are
            self._fail(f"the server is lost: {type(error).__name__}: {error}")
            raise
        self._changed.notify_all()


class LocalConnection:
    """A server in this process."""

    def __init__(self, server: Server, worker: int) -> None:
        self._server, self._worker = server, worker
        self.parameters = torch.zeros(server.shard.buffer_bytes, dtype=torch.uint8)
        self.gradients = torch.zeros_like(self.parameters)

    def hello(self, layout: str) -> Greeting:
        """See Server.hello."""
        return self._server.hello(self._worker, layout)

    def pull(self, clock: int) -> int:
        """See Server.pull."""
        return self._server.pull(self._worker, clock, self.parameters)

    def push(self, clock: int) -> None:
        """See Server.push."""
        self._server.push(self._worker, clock, self.gradients)

    def stage(self) -> None:
        """See Server.stage."""
        self._server.stage(self._worker, self.gradients)

    def commit(self, clock: int, since: int) -> Log:
        """See Server.commit."""
        return self._server.commit(self._worker, clock, since)

    def read(self, clock: int, since: int) -> Log:
        """See Server.read."""
        return self._server.read(self._worker, clock, since)

    def fetch(self, log: Log) -> int:
        """See Server.fetch."""
        return self._server.fetch(self._worker, log, self.parameters)

    def follow(self, log: Log) -> int:
        """See Server.follow."""
        return self._server.follow(self._worker, log)

    def sync(self, since: int) -> tuple[bool, Log]:
        """See Server.sync."""
        return self._server.sync(self._worker, since)

    def finish(self, since: int) -> tuple[int, Log]:
        """See Server.finish."""
        return self._server.finish(self._worker, since, self.parameters)

    def end(self, log: Log) -> int:
        """See Server.fetch; the last request."""
        return self.fetch(log)

    def abort(self, reason: str) -> None:
        """See Server.lose."""
        self._server.lose(self._worker, reason)
