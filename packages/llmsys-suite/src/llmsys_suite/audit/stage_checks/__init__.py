"""Checks of the stages except `plan` and `train`, each with an independent method.

The checks in RECORDED need only the files of a run folder, so that `llmsys audit` repeats them.
The checks in STAGES need the ranks of the run. The checks of a stage in COLLECTIVE run on all
ranks, and rank 0 reports them. The checks of any other stage run on one rank.
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

_MODULES: dict[str, Any] = {
    "links": links,
    "learn": learn,
    "attention": attention,
    "parallel": parallel,
    "memory": memory,
    "scale": scale,
    "inspect": inspect,
    "compress": compress,
}
RECORDED: dict[str, Callable[[RunFolder, Any], Iterator[Check]]] = {
    stage: module.check_records for stage, module in _MODULES.items()
}
STAGES: dict[str, Callable[[Run, Any], Iterator[Check]]] = {
    stage: module.check_stage for stage, module in _MODULES.items() if module is not memory
}
#: Stages whose checks use collectives.
COLLECTIVE = ("links", "parallel")
#: The stage that the last rank checks while rank 0 checks the other stages. The last rank also
#: repeats training steps (`compute_evidence`), so that both ranks take about the same time.
ON_LAST_RANK = "learn"
