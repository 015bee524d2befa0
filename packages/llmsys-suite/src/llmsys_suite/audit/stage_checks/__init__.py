"""Checks of the stages except `plan` and `train`, each with a second method.

The checks of a stage in COLLECTIVE run on all ranks, and only the checks of rank 0 are reported.
All other checks run on one rank, which has the results of rank 0.
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
from llmsys_suite.ranks.rank import Run

STAGES: dict[str, Callable[[Run, Any], Iterator[Check]]] = {
    "links": links.checks,
    "learn": learn.checks,
    "attention": attention.checks,
    "parallel": parallel.checks,
    "memory": memory.checks,
    "scale": scale.checks,
    "inspect": inspect.checks,
    "compress": compress.checks,
}
#: Stages whose checks use collectives.
COLLECTIVE = ("links", "parallel")
#: The stage that the last rank checks while rank 0 checks the other stages. The last rank also
#: repeats training steps (`recompute`), so that both ranks take about the same time.
ON_LAST_RANK = "learn"
