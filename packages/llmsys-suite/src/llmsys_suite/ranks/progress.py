"""Progress of a run on stderr: the start, each tenth and the end of a stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Prints the current stage; enabled on the first rank only."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Print the name of a stage, and its duration at the end of the block."""
        start_time = time.perf_counter()
        self._print(f"{name} ...")
        yield
        self._print(f"{name} done in {time.perf_counter() - start_time:.1f} s")

    def update(self, done: int, total: int, note: str = "") -> None:
        """Print the progress after the first step and after each tenth of the stage's steps."""
        if done == 1 or 10 * done // total > 10 * (done - 1) // total:
            self._print(f"  {done}/{total} {note}")

    def _print(self, line: str) -> None:
        if self._enabled:
            print(line, file=sys.stderr, flush=True)
