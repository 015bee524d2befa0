"""All checks of a run, stage by stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmsys_suite.audit import training
from llmsys_suite.audit.check import Check
from llmsys_suite.audit.evidence import gather_evidence
from llmsys_suite.audit.stages import STAGES
from llmsys_suite.run import Run


def audit_run(run: Run) -> tuple[dict[str, Any], list[Check]]:
    """The evidence and the checks, on rank 0; every rank takes part."""
    evidence: dict[str, Any] = {}
    checks: list[Check] = []
    if "train" in run.results:
        evidence = gather_evidence(run)
        if run.folder is not None:
            plan, train = run.results["plan"], run.results["train"]
            samples = run.folder.samples()
            checks += training.checks(run.config, plan, train, samples, evidence)
    for stage, check in STAGES.items():
        run.meet()
        if stage in run.results:
            found = list(check(run, run.results[stage]))
            checks += [replace(c, name=f"{stage}: {c.name}") for c in found]
    return evidence, checks if run.rank == 0 else []
