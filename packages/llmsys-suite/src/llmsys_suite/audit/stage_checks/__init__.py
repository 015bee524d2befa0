"""Checks of the stages except `plan` and `train`, each with a second method.

The checks in RECORDED need only the files of a run folder, so that `llmsys audit` repeats them.
The checks in STAGES need the ranks of the run. If their stage is in COLLECTIVE, they run on all
ranks, and only those of rank 0 are reported. Otherwise they run on one rank, which has the results
of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llmsys_suite.audit.check import Check
from llmsys_suite.audit.stage_checks import (
    attention,
    compress,
    inspect,
    learn,
    links,
    memory,
    parallel,
    scale,
)
from llmsys_suite.folder import RunFolder
from llmsys_suite.ranks.rank import Run

STAGES: dict[str, Callable[[Run, Any], Iterator[Check]]] = {
    "links": links.checks,
    "learn": learn.checks,
    "attention": attention.checks,
    "parallel": parallel.checks,
    "scale": scale.checks,
    "inspect": inspect.checks,
    "compress": compress.checks,
}
RECORDED: dict[str, Callable[[RunFolder, Any], Iterator[Check]]] = {
    "links": links.recorded,
    "learn": learn.recorded,
    "attention": attention.recorded,
    "parallel": parallel.recorded,
    "memory": memory.recorded,
    "scale": scale.recorded,
    "inspect": inspect.recorded,
    "compress": compress.recorded,
}
#: Stages whose checks use collectives.
COLLECTIVE = ("links", "parallel")
#: The stage that the last rank checks while rank 0 checks the other stages. The last rank also
#: repeats training steps (`recompute`), so that both ranks take about the same time.
ON_LAST_RANK = "learn"
