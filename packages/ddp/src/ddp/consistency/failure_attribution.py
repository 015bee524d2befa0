"""Attribution of failures: every rank reports which rank failed, and why."""

# Note [Failure attribution]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
# The error of a lost connection names neither the lost rank nor the cause. So each rank that fails
# writes its reason to the store of the process group. A waiting rank checks the store every
# `POLL_INTERVAL`. A rank that loses a connection waits up to `GRACE_SECONDS` for the reasons of the
# other ranks. A rank that writes no reason in this time has ended, hangs, or failed elsewhere.
#
# Ranks also rendezvous through the store when their parameters change. A rank that waits in a
# collective reads from the store whether another rank waits at a rendezvous instead.

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp.extensions import Extension

POLL_INTERVAL = timedelta(seconds=0.5)
GRACE_SECONDS = 2.0
#: Prefix of the reason of a rank that only lost its connection.
_LOST = "lost: "


class FailureAttribution(Extension):
    """The failure state of one `DDP`. See Note [Failure attribution].

    A rank that has failed stays failed: later checks raise an error with the first reason.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._store: Any = group.get_group_store()
        # Ranks construct their models in the same order, so the number identifies this model.
        model_number = self._store.add(f"ddp/{self._rank}", 1)
        self._key = f"ddp/{model_number}"
        self._num_rendezvous = 0
        self._failure = ""

    def check_not_failed(self) -> None:
        """Raise `RuntimeError` if this rank has failed before."""
        if self._failure:
            raise RuntimeError(
                f"the ranks of this model have been inconsistent since an earlier failure "
                f"({self._failure}); construct a new DDP, or restart from a checkpoint"
            )

    def report_failure(self, reason: str) -> None:
        """Report to the other ranks that this rank cannot continue; do nothing if it has failed."""
        if not self._failure:
            self._failure = f"rank {self._rank}: {reason}"
            self._write_reason(reason)

    @contextmanager
    def attribute_errors(self, description: str, work: dist.Work | None = None) -> Iterator[None]:
        """Replace an error of a collective in the block with an error that names the failed rank.

        `work` is polled until it completes, so that the failure of another rank ends the wait.
        """
        try:
            if work is not None:
                self._poll(work)
            yield
        except (RuntimeError, OSError) as error:
            raise self._make_attributed_error(description, error) from error

    def rendezvous(self, cause: str, value: Any) -> list[Any]:
        """Return the `value` of every rank. This is a collective.

        Raises `RuntimeError` if another rank has failed, waits in another collective instead, or
        does not reach the rendezvous within the store's timeout.
        """
        key = self._rendezvous_key()
        self._store.set(f"{key}/{self._rank}", pickle.dumps(value))
        self._store.set(key, f"{cause} on rank {self._rank}")
        rank_keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while not all(self._store.check([rank_key]) for rank_key in rank_keys):
            if self._store.check([f"{self._key}/failed"]) or time.monotonic() > deadline:
                raise self._make_attributed_error(
                    f"the rendezvous because {cause}", RuntimeError("not every rank reached it")
                )
            time.sleep(0.002)
        self._num_rendezvous += 1
        return [pickle.loads(self._store.get(rank_key)) for rank_key in rank_keys]

    def _poll(self, work: Any) -> None:
        seconds_at_rendezvous = 0.0
        while True:
            try:
                work.wait(POLL_INTERVAL)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()
                    return
                if self._store.check([f"{self._key}/failed"]):
                    raise
                # A rank that is ahead of this rank may have reached the next rendezvous already. If
                # it stays there, the two ranks wait for each other.
                if self._store.check([self._rendezvous_key()]):
                    seconds_at_rendezvous += POLL_INTERVAL.total_seconds()
                if seconds_at_rendezvous > GRACE_SECONDS:
                    self._refuse_rendezvous()

    def _rendezvous_key(self) -> str:
        return f"{self._key}/rendezvous/{self._num_rendezvous + 1}"

    def _refuse_rendezvous(self) -> None:
        cause = self._store.get(self._rendezvous_key()).decode()
        reason = f"{cause}, but not on rank {self._rank}; make the same change on every rank"
        self.report_failure(reason)
        raise RuntimeError(reason)

    def _make_attributed_error(self, description: str, error: Exception) -> RuntimeError:
        summary = (str(error) or type(error).__name__).splitlines()[0]
        if not self._failure:
            self._write_reason(_LOST + summary)
            self._failure = self._find_cause()
        return RuntimeError(
            f"rank {self._rank} could not finish {description}: {self._failure}. "
            f"See the log of that rank ({summary})"
        )

    def _find_cause(self) -> str:
        try:
            reasons = self._collect_reasons()
        except (RuntimeError, OSError):
            return (
                "the store is unreachable; rank 0, which hosts it unless the launcher does, ended "
                "or hangs"
            )
        causes = []
        gave_up = []
        for rank, reason in reasons.items():
            if not reason.startswith(_LOST):
                causes.append(f"rank {rank}: {reason}")
            if rank != self._rank:
                gave_up.append(f"rank {rank} gave up")
        silent = [f"rank {rank}" for rank in range(self._world_size) if rank not in reasons]
        if silent:
            causes.append(
                f"no message from {' and '.join(silent)}, which ended (for example because of "
                "fewer inputs), hangs, or raised an error that only its own output shows"
            )
        return "; ".join(causes or gave_up)

    def _write_reason(self, reason: str) -> None:
        # If the rank that hosts the store does not respond, `_find_cause` reports it.
        with suppress(RuntimeError, OSError):
            self._store.set(f"{self._key}/{self._rank}", reason)
            self._store.set(f"{self._key}/failed", "1")

    def _collect_reasons(self) -> dict[int, str]:
        reasons: dict[int, str] = {self._rank: _LOST}
        deadline = time.monotonic() + GRACE_SECONDS
        while len(reasons) < self._world_size and time.monotonic() < deadline:
            for rank in range(self._world_size):
                key = f"{self._key}/{rank}"
                if rank not in reasons and self._store.check([key]):
                    reasons[rank] = self._store.get(key).decode()
            time.sleep(0.02)
        return reasons
