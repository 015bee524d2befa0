"""The operators of a training step by phase, and their times under the profiler.

`llmsys step` times steps by size, context and number of warm-up steps without a profiler.
"""

from __future__ import annotations

from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Profile
from llmsys_suite.step import kernels
from llmsys_suite.step.case import Case
from llmsys_suite.step.training import Step


def run(run: Run) -> Profile | None:
    """Return the operators of one warmed-up step, on rank 0."""
    if run.rank != 0:
        return None
    step = Step(case_of(run))
    step.timed()
    return Profile(kernels.by_phase(step))


def case_of(run: Run) -> Case:
    """Return the benchmark case with the rows of one rank."""
    config = run.config
    return Case(
        size=config.size,
        context=config.context,
        rows=config.rows // run.world,
        dtype=config.dtype,
        vocabulary=config.vocabulary,
        device=run.device.type,
    )
