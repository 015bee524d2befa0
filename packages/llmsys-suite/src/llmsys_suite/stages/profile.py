"""Times of a training step by phase, and its operators.

The protocol follows the coursework: forward, backward and optimizer in a fresh process after 0, 1,
2 and 5 warm-up steps, with mean and standard deviation over ten steps. Sizes that do not fit have a
row that says so. `llmsys step` extrapolates them and varies further options. One profiled step
follows.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from llmsys_suite.config import SIZES
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Profile, Rows
from llmsys_suite.step import kernels, sweep
from llmsys_suite.step.case import Case
from llmsys_suite.step.training import Step

#: Sizes besides that of the run; a size that would take longer than SECONDS_A_SIZE is left out.
SIZES_TIMED = tuple(size for size in SIZES if size != "mini")
SECONDS_A_SIZE = 60.0


def run(run: Run) -> Profile | None:
    """Return the tables of the protocol and of the profile, on rank 0."""
    if run.rank != 0:
        return None
    step = Step(case_of(run))
    step.timed()
    operators = kernels.by_phase(step)
    del step
    if run.device.type == "cuda":
        # The protocol runs in other processes, which cannot use memory that this one caches.
        torch.cuda.empty_cache()
    return Profile(protocol(run), operators)


def case_of(run: Run) -> Case:
    """Return the benchmark case with the rows of one rank."""
    config = run.config
    rows = config.rows // run.world
    return Case(
        size=config.size,
        context=config.context,
        rows=rows,
        dtype=config.dtype,
        vocabulary=config.vocabulary,
        device=run.device.type,
    )


def protocol(run: Run) -> Rows:
    """Return the step times of each size, one row per number of warm-up steps.

    A size that does not fit has one row with the reason.
    """
    names = dict.fromkeys((run.config.size, *SIZES_TIMED))
    cases = [replace(case_of(run), size=name) for name in names]
    return list(sweep.measure(cases, limit=SECONDS_A_SIZE, extrapolate=False))
