"""Optional records of the stage `learn`: losses in TensorBoard or wandb, and traces of steps."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import profiler

from llmsys_suite.ranks.rank import Run

#: A function that records the values of a step: `log(step, {name: value})`.
Log = Callable[[int, dict[str, float]], None]
#: Number of steps of `learn` before the traced steps, and number of traced steps.
SKIPPED, TRACED = 2, 3


@contextmanager
def open_log(run: Run) -> Iterator[Log]:
    """Yield a function that records values; it does nothing without `--log` or if rank > 0."""
    if run.rank or run.config.log is None:
        yield lambda step, values: None
    elif run.config.log == "tensorboard":
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        writer = tensorboard.SummaryWriter(str(run.out / "tensorboard"))

        def add_scalars(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        try:
            yield add_scalars
        finally:
            writer.close()
    else:
        # Environment variables of wandb set the project, and whether wandb is online.
        wandb: Any = importlib.import_module("wandb")
        config = run.config.to_json()
        job = wandb.init(dir=str(run.out), name=run.out.name, config=config)
        try:
            yield lambda step, values: job.log(values, step=step)
        finally:
            job.finish()


@contextmanager
def trace_steps(run: Run) -> Iterator[profiler.profile | None]:
    """Yield a profiler, whose method `step` must be called after each step; None without `trace`.

    A Chrome trace of `TRACED` steps is written to `trace-RANK.json` in the run folder.
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
        # Without `acc_events`, torch 2.11 warns that events of earlier cycles are cleared, although
        # there is only one cycle.
        acc_events=True,
    ) as recording:
        yield recording
    if not path.exists() and run.rank == 0:
        print(f"llmsys: --trace needs more than {SKIPPED} steps of learn", file=sys.stderr)
