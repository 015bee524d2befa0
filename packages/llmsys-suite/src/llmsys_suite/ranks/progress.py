"""Progress of a run on stderr: a bar on a terminal, and lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import rich.progress
from rich.console import Console


class Progress:
    """Prints the current stage; enabled on the first rank only."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        if enabled and sys.stderr.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.SpinnerColumn(),
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Print the name of a stage, and its duration at the end of the block."""
        begin = time.perf_counter()
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=None)
        elif self._enabled:
            print(f"{name} ...", file=sys.stderr, flush=True)
        yield
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=1, completed=1)
        elif self._enabled:
            seconds = time.perf_counter() - begin
            print(f"{name} done in {seconds:.1f} s", file=sys.stderr, flush=True)

    def update(self, done: int, total: int, note: str = "") -> None:
        """Print the progress within the current stage."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif self._enabled and (done == 1 or 10 * done // total > 10 * (done - 1) // total):
            print(f"  {done}/{total} {note}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
