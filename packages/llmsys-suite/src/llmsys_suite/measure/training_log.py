"""Optional records of the stage `learn`: losses in TensorBoard or wandb, and traces of steps."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import profiler

from llmsys_suite.ranks.rank import Run

#: Steps of `learn` before the recorded ones, and the number of recorded steps.
SKIPPED, TRACED = 2, 3


class TrainingLog(Protocol):
    """Where the scalars of each step go."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record the values of a step by their names."""

    def close(self) -> None:
        """Write all remaining values."""


class NoLog:
    """A log that discards all values."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Discard the values."""

    def close(self) -> None:
        """Return, because nothing is open."""


class TensorBoardLog:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record the values of a step by their names."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write all remaining values."""
        self._writer.close()


class WandbLog:
    """A run of wandb, whose project and mode its environment variables decide."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(dir=str(folder), name=folder.name, config=config)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record the values of a step by their names."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Write all remaining values."""
        self._run.finish()


def open_log(run: Run) -> TrainingLog:
    """Return the log that the configuration names, on rank 0; the other ranks log nothing."""
    if run.rank or run.config.log is None:
        return NoLog()
    if run.config.log == "tensorboard":
        return TensorBoardLog(run.out)
    return WandbLog(run.out, run.config.to_json())


@contextmanager
def traced_steps(run: Run) -> Iterator[profiler.profile | None]:
    """Yield a profiler whose `step` ends a step, or None if the run has no traces.

    Chrome's trace of the recorded steps is written to `trace-RANK.json` of the run folder.
    """
    if not run.config.trace:
        yield None
        return
    activities = [profiler.ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(profiler.ProfilerActivity.CUDA)
    path = run.out / f"trace-{run.rank}.json"
    with profiler.profile(
        activities=activities,
        schedule=profiler.schedule(wait=SKIPPED - 1, warmup=1, active=TRACED, repeat=1),
        on_trace_ready=lambda finished: finished.export_chrome_trace(str(path)),
    ) as recording:
        yield recording
