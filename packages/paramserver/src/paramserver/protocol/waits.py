"""Workers that wait for other workers, and the deadlines of their waits."""

from collections.abc import Iterable

from paramserver.protocol.ledger import Ledger
from paramserver.protocol.messages import Kind, Message


class Waits:
    """The waits of all workers for a server's answers, and the time of each worker's last request.

    Args:
        workers: number of workers that take part from the start.
        timeout: a wait times out when a worker that blocks it has sent no request for this many
            seconds since the wait started, and is not itself waiting.
    """

    def __init__(self, workers: int, timeout: float) -> None:
        self.timeout = timeout
        #: Time of the last request, by worker.
        self.last_seen = dict.fromkeys(range(workers), 0.0)
        #: Start time and request of each wait, by worker.
        self.waiting: dict[int, tuple[float, Message]] = {}

    def end(self, worker: int) -> tuple[float, Message] | None:
        """End the wait of `worker`; return its start time and request if there was one."""
        return self.waiting.pop(worker, None)

    def start(
        self, worker: int, message: Message, now: float, earlier: tuple[float, Message] | None
    ) -> None:
        """Start a wait, or continue the `earlier` one if it belongs to the same request."""
        since = earlier[0] if earlier and earlier[1] == message else now
        self.waiting[worker] = since, message

    def reset_silence(self, workers: Iterable[int], now: float) -> None:
        """Measure the silence and waits of all workers from `now`, after a server was suspended."""
        self.last_seen = dict.fromkeys({*self.last_seen, *workers}, now)
        self.waiting = {w: (now, message) for w, (_, message) in self.waiting.items()}

    def list_blockers(self, message: Message, ledger: Ledger) -> list[int]:
        """Return the workers that block a request and are not waiting for an answer themselves."""
        is_finish = message.kind is Kind.FINISH
        blockers = ledger.awaited if is_finish else ledger.list_workers_behind(message.clock)
        return [worker for worker in blockers if worker not in self.waiting]

    def find_silent_blockers(self, worker: int, ledger: Ledger, now: float) -> list[int]:
        """Return the workers whose silence has let the wait of `worker` time out."""
        since, message = self.waiting[worker]
        blockers = self.list_blockers(message, ledger)
        return [w for w in blockers if self._compute_deadline(w, since) <= now]

    def find_next_deadline(self, ledger: Ledger) -> float:
        """Return the time at which the next wait times out, or infinity if no wait can time out."""
        ends = (
            self._compute_deadline(w, since)
            for since, message in self.waiting.values()
            for w in self.list_blockers(message, ledger)
        )
        return min(ends, default=float("inf"))

    def _compute_deadline(self, worker: int, since: float) -> float:
        return max(since, self.last_seen.get(worker, 0.0)) + self.timeout
