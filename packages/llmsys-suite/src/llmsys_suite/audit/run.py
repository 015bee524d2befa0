"""All checks of a run, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llmsys_suite.audit import training
from llmsys_suite.audit.check import Check, none
from llmsys_suite.audit.evidence import gather_evidence
from llmsys_suite.audit.stages import COLLECTIVE, STAGES
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages.results import Audit


def run(run: Run) -> Audit | None:
    """Write evidence.json and checks.json; a failed check makes the run fail."""
    evidence, checks = audit_run(run)
    if run.folder is None:
        return None
    run.folder.write_json("evidence.json", evidence)
    run.folder.write_json("checks.json", [check.to_json() for check in checks])
    return Audit(len(checks), [str(check) for check in checks if not check.passed])


def audit_run(run: Run) -> tuple[dict[str, Any], list[Check]]:
    """Return the evidence and the checks on rank 0; every rank takes part."""
    evidence: dict[str, Any] = {}
    checks: list[Check] = []
    ran = set(run.results)
    if {"plan", "train"} <= ran:
        evidence = gather_evidence(run)
        if run.folder is not None:
            plan, train = run.results["plan"], run.results["train"]
            samples = run.folder.samples()
            checks += training.checks(run.config, plan, train, samples, evidence)
    for stage, check in STAGES.items():
        run.wait_for_ranks()
        if stage in ran:
            stage_checks = list(_guarded(stage, check(run, run.results[stage])))
            checks += [replace(c, name=f"{stage}: {c.name}") for c in stage_checks]
    return evidence, checks if run.rank == 0 else []


def _guarded(stage: str, stage_checks: Iterator[Check]) -> Iterator[Check]:
    """Yield the checks of a stage; an exception becomes a failed check if one rank checks alone."""
    try:
        yield from stage_checks
    except Exception as error:
        if stage in COLLECTIVE:
            raise
        yield none("what the audit reads", stage, "no error", [f"{type(error).__name__}: {error}"])
