"""Who failed, and why: a rank that fails leaves a note where its peers look while they wait.

A lost connection says neither which rank was lost nor what it ran into. So every rank that fails
writes its reason to the group's store. A rank that waits longer than `POLL` looks there, and
one that loses a connection waits up to `GRACE` for the others' notes: whoever leaves none has died
or hangs.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

POLL = timedelta(seconds=0.5)
GRACE = 2.0
_LOST = "lost: "


class Blame:
    """One DDP's notes. A rank that has failed stays failed: every later call says why."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._store: Any = group.get_group_store()
        # Ranks make their models in one order, so that the count is the same name on all of them.
        count = self._store.add(f"ddp/{self._rank}", 1)
        self._key = f"ddp/{count}"
        self._meetings = 0
        self._failure = ""

    def check(self) -> None:
        """Raise RuntimeError if this rank has failed before."""
        if self._failure:
            raise RuntimeError(
                f"this model's ranks are out of step since an earlier failure ({self._failure}); "
                "make a new DDP, or start again from a checkpoint"
            )

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one will not go on, and why."""
        if not self._failure:
            self._failure = f"rank {self._rank}: {reason}"
            self._leave_note(reason)

    @contextmanager
    def naming(self, doing: str) -> Iterator[None]:
        """Turn an error of a collective in the block into one that says which rank is lost.

        If the collective names ranks itself (its error has `.ranks`), its error is raised
        unchanged, unless one of these ranks has left a note that says why it failed.
        """
        try:
            yield
        except (RuntimeError, OSError) as error:
            ranks = getattr(error, "ranks", ())
            if ranks and not self._has_note(ranks):
                self.fail(f"{type(error).__name__}: {error}")
                error.add_note(f"rank {self._rank} was waiting for {doing}")
                raise
            lost: Any = self._lost(doing, error)
            lost.ranks = ranks
            raise lost from error

    def wait(self, handle: Any, doing: str, *, poll: bool) -> None:
        """Wait for a collective; raise RuntimeError naming the rank that keeps it from ending.

        Without `poll` it is left to the collective to notice that a peer has failed.
        """
        if handle is None:
            return
        with self.naming(doing):
            if not poll:
                handle.wait()
                return
            polls_with_a_meeting = 0
            while True:
                try:
                    handle.wait(POLL)
                    return
                except RuntimeError:
                    if handle.is_completed():
                        handle.wait()
                        return
                    if self._store.check([f"{self._key}/failed"]):
                        raise
                    # A peer that is ahead may be at its next meeting already; one that stays there
                    # while we wait for it here has gone another way.
                    polls_with_a_meeting += self._store.check([self._meeting(1)])
                    if polls_with_a_meeting * POLL.total_seconds() > GRACE:
                        self._refuse_meeting(self._store.get(self._meeting(1)).decode())

    def meet(self, what: str, value: Any) -> list[Any]:
        """Everyone's `value`, by rank: a gathering that peers who stay away notice too.

        A peer that does not come but waits in a collective finds the invitation there, and both
        sides raise RuntimeError.
        """
        key = self._meeting(1)
        self._store.set(f"{key}/{self._rank}", pickle.dumps(value))
        self._store.set(key, f"{what} on rank {self._rank}")
        everyone = [f"{key}/{rank}" for rank in range(self._world)]
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while not all(self._store.check([theirs]) for theirs in everyone):
            failed = self._store.check([f"{self._key}/failed"])
            if failed or time.monotonic() > deadline:
                raise self._lost(
                    f"the meeting because {what}", RuntimeError("not every rank came to it")
                )
            time.sleep(0.002)
        self._meetings += 1
        return [pickle.loads(self._store.get(theirs)) for theirs in everyone]

    def _meeting(self, ahead: int) -> str:
        return f"{self._key}/meeting/{self._meetings + ahead}"

    def _refuse_meeting(self, why: str) -> None:
        reason = f"{why}, but not on rank {self._rank}; do the same on every rank"
        self.fail(reason)
        raise RuntimeError(reason)

    def _lost(self, doing: str, error: Exception) -> RuntimeError:
        what = str(error).splitlines()[0]
        if not self._failure:
            self._leave_note(_LOST + what)
            self._failure = self._cause()
        return RuntimeError(
            f"rank {self._rank} could not finish {doing}: {self._failure}. "
            f"Look at that rank's log ({what})"
        )

    def _cause(self) -> str:
        try:
            notes = self._notes()
        except (RuntimeError, OSError):
            return "the store is gone too; rank 0, which hosts it unless the launcher does, is dead"
        causes = [f"rank {r}: {note}" for r, note in notes.items() if not note.startswith(_LOST)]
        if silent := [f"rank {r}" for r in range(self._world) if r not in notes]:
            causes.append(f"no word from {' and '.join(silent)}: dead or hanging")
        given_up = [f"rank {rank} gave up" for rank in notes if rank != self._rank]
        return "; ".join(causes or given_up)

    def _has_note(self, ranks: Iterable[int]) -> bool:
        try:
            return any(self._store.check([f"{self._key}/{rank}"]) for rank in ranks)
        except (RuntimeError, OSError):
            return False

    def _leave_note(self, note: str) -> None:
        try:
            self._store.set(f"{self._key}/{self._rank}", note)
            self._store.set(f"{self._key}/failed", "1")
        except (RuntimeError, OSError):
            # The store went down with the rank that hosted it: `_cause` says so.
            pass

    def _notes(self) -> dict[int, str]:
        notes: dict[int, str] = {self._rank: _LOST}
        deadline = time.monotonic() + GRACE
        while len(notes) < self._world and time.monotonic() < deadline:
            for rank in range(self._world):
                key = f"{self._key}/{rank}"
                if rank not in notes and self._store.check([key]):
                    notes[rank] = self._store.get(key).decode()
            time.sleep(0.02)
        return notes
