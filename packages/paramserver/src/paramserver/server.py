"""A server, which stores parameters, applies gradients, and answers reads when the policy allows.

`Core` implements the protocol. `Server.request` adds locking, timeouts and blocking waits. A
transport calls it from one thread per worker. A wait times out only if an awaited worker has been
silent. Waiting for a slow worker has no time limit.
"""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from paramserver.arguments import require_integer, require_timeout
from paramserver.consistency import Consistency, require_policy
from paramserver.optimizers import OptimizerFactory
from paramserver.parameters import require_names
from paramserver.partition import Shard, partition
from paramserver.protocol.core import Core
from paramserver.protocol.messages import Message
from paramserver.protocol.replica import Replica
from paramserver.transport.connection import MAX_WAIT_SECONDS, Connection, drain

#: Seconds between two messages to a waiting worker, which report that the server is alive.
_KEEP_ALIVE_SECONDS = 2.0

#: A function that receives the parameters of an answer. If it does not copy them, it returns a
#: function that copies them, which must be called before the parameters change.
Deliver = Callable[[Tensor], Callable[[], None] | None]


class Server:
    """A shard of the parameters and the optimizer that updates it.

    Args:
        parameters: all parameters of the model, by name.
        optimizer: function that creates the optimizer from the shard's tensors, such as
            `functools.partial(torch.optim.SGD, lr=0.1)`, or an `OptimizerSpec`. With `LocalSteps`
            the server uses the policy's `outer` instead, and workers use `optimizer` locally.
        consistency: the policy; None is `BulkSynchronous()`.
        workers: initial number of workers, at least 1, or at least 0 if `elastic` is True. A policy
            that waits for the slowest worker also waits for initial workers that have not joined
            yet; they are at clock 0.
        shard: the part of the parameters that this server stores; None stores all parameters. With
            several servers, the server of the first shard orders the updates of all servers.
        timeout: seconds, possibly infinite, after which a wait ends if the awaited worker has sent
            no request in that time and is not itself waiting. Then the wait raises an error, or
            training continues without the awaited worker. Heartbeats of the ZeroMQ transport count
            as requests.
        allow_missing: True to continue training without a lost worker. If False, all other workers
            receive an error that names the lost worker, unless `elastic` is True.
        elastic: True to let further workers join, with any rank, and lost workers rejoin. A policy
            that averages then waits for a lost worker up to `timeout`, unless `allow_missing` is
            True. Other policies always continue without the lost worker.
        memory: buffer of `shard.buffer_bytes` bytes for the parameters; None allocates one.

    Raises:
        ValueError: an argument is out of range, or the optimizer cannot update this shard.
        TypeError: an argument has another type; the message names the argument.
    """

    @torch.inference_mode(False)  # other threads update the server's tensors
    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: OptimizerFactory,
        consistency: Consistency | None = None,
        *,
        workers: int,
        shard: Shard | None = None,
        timeout: float = 60.0,
        allow_missing: bool = False,
        elastic: bool = False,
        memory: Tensor | None = None,
    ) -> None:
        workers = require_integer("workers", workers, 0 if elastic else 1)
        timeout = require_timeout(timeout)
        self.consistency = require_policy(consistency)
        require_names(parameters)
        self.shard = shard or partition(parameters, 1)[0]
        self.core = Core(
            Replica(self.shard, parameters, optimizer, self.consistency, memory),
            self.consistency,
            workers=workers,
            timeout=timeout,
            allow_missing=allow_missing,
            elastic=elastic,
        )
        #: The lock of `core`. It is notified when a waiting request may be answerable.
        self._core_changed = threading.Condition()
        self._errors: dict[int, Exception] = {}
        #: The module of each worker in this process.
        self._modules = weakref.WeakValueDictionary[int, nn.Module]()

    @property
    def version(self) -> int:
        """Number of updates applied so far."""
        return self.core.replica.version

    @property
    def staleness(self) -> Counter[int]:
        """Number of applied gradients by staleness, the number of versions from pull to update."""
        return self.core.replica.staleness

    def connect(self, worker: int, module: nn.Module | None = None) -> "LocalConnection":
        """Return a connection for worker number `worker` in this process, which trains `module`.

        Raises:
            ValueError: another worker that still trains has the same module.
        """
        with self._core_changed:
            for other, used in self._modules.items():
                if used is module and other != worker and other in self.core.ledger.active:
                    raise ValueError(
                        f"expected a separate module per worker, got the module of worker {other} "
                        f"for worker {worker}, so their gradients would be added; pass "
                        "copy.deepcopy(module)"
                    )
            if module is not None:
                self._modules[worker] = module
        return LocalConnection(self, worker)

    def request(
        self,
        worker: int,
        message: Message,
        data: Tensor | None = None,
        deliver: Deliver | None = None,
        keep_alive: Callable[[], None] | None = None,
        *,
        is_known_finite: bool = False,
    ) -> Message:
        """Return the answer to a request; wait for other workers as long as the policy requires.

        Args:
            worker: number of the worker that sent the request.
            message: the request.
            data: gradients of the request. The server may use the buffer until the worker's next
                pull returns.
            deliver: called with the parameters of the answer; see `Deliver`.
            keep_alive: called every few seconds during a wait, to report that the server is alive.
            is_known_finite: True if all gradients are known to be finite.

        Raises:
            Exception: the request is invalid, has timed out, or cannot be answered.
        """
        with self._core_changed:
            last_message = time.monotonic()
            is_first_try = True
            try:
                while True:
                    now = time.monotonic()
                    answer = self.core.handle(
                        worker, message, data, now, is_known_finite=is_known_finite
                    )
                    if answer is not None:
                        # Another thread's check may have timed out this request just before.
                        self._errors.pop(worker, None)
                        if deliver and answer.size:
                            self._deliver(worker, deliver)
                        return answer
                    log_stop = self.core.ledger.stop
                    errors = dict(self.core.check(now))
                    self._errors.update(errors)
                    if worker in self._errors:
                        raise self._errors.pop(worker)
                    # Notify only after a change. Otherwise waiting requests would wake each other
                    # forever.
                    has_removed_worker = self.core.ledger.stop != log_stop
                    if is_first_try or errors or has_removed_worker:
                        self._core_changed.notify_all()
                    is_first_try = False
                    if has_removed_worker:
                        continue  # the removal may end this wait, whose deadline has changed
                    if keep_alive and now - last_message >= _KEEP_ALIVE_SECONDS:
                        last_message = now
                        self._core_changed.release()
                        try:
                            keep_alive()
                        finally:
                            self._core_changed.acquire()
                        continue  # notifications were missed while the lock was released
                    until = self.core.waits.find_next_deadline(self.core.ledger)
                    if keep_alive:
                        until = min(until, last_message + _KEEP_ALIVE_SECONDS)
                    seconds = max(0.0, until - time.monotonic())
                    self._core_changed.wait(min(seconds, MAX_WAIT_SECONDS))
            finally:
                # This request, or its failure, may end the waits of other workers.
                self._core_changed.notify_all()

    def _deliver(self, worker: int, deliver: Deliver) -> None:
        copy_out = deliver(self.core.answer_data)
        if copy_out is not None:
            self.core.replica.copy_outs[worker] = copy_out

    def mark_lost(self, worker: int, reason: str) -> None:
        """Handle the loss of `worker`, unless it has finished or left; see `Core.mark_lost`."""
        with self._core_changed:
            self.core.mark_lost(worker, reason)
            self._core_changed.notify_all()


class LocalConnection(Connection):
    """A connection to a server in the same process."""

    def __init__(self, server: Server, worker: int) -> None:
        super().__init__(server.shard.buffer_bytes)
        self._server = server
        self._worker = worker

    def request(self, message: Message, write_chunks: Iterable[int] = ()) -> Message:
        """Call the server's `request` with this connection's buffers."""
        drain(write_chunks)
        return self._server.request(self._worker, message, self.gradients, self.deliver)

    def abort(self, reason: str) -> None:
        """Report to the server that the worker has failed."""
        self._server.mark_lost(self._worker, reason)
