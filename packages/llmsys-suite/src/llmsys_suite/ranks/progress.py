"""Progress of a run on stderr: the start and the end of each stage, and tenths of some stages."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """A printer of the current stage and its progress, enabled on rank 0 only."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Print the name of a stage, and its duration if the `with` block ends without an error."""
        start_time = time.perf_counter()
        self._print(f"{name} ...")
        yield
        self._print(f"{name} done in {time.perf_counter() - start_time:.1f} s")

    def update(self, done: int, total: int, note: str = "") -> None:
        """Print `done` of `total` steps after the first step and after each tenth of the steps."""
        if done == 1 or 10 * done // total > 10 * (done - 1) // total:
            self._print(f"  {done}/{total} {note}")

    def _print(self, line: str) -> None:
        if self._enabled:
            print(line, file=sys.stderr, flush=True)
