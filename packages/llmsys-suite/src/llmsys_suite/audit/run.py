"""The audit: `audit_run` makes all checks; `check_again` repeats checks from a folder's files."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from llmsys_suite.audit import training_checks
from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.evidence import compute_evidence, measure_evidence
from llmsys_suite.audit.stage_checks import COLLECTIVE, ON_LAST_RANK, RECORDED, STAGES
from llmsys_suite.config import UsageError
from llmsys_suite.folder import RunFolder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Audit


def run(run: Run) -> Audit | None:
    """Audit the run, and write evidence.json and checks.json; return the result on rank 0."""
    evidence, checks = audit_run(run)
    if run.folder is None:
        return None
    run.folder.write_json("evidence.json", evidence)
    run.folder.write_json("checks.json", [check.to_json() for check in checks])
    return Audit(len(checks), [str(check) for check in checks if not check.passed])


def audit_run(run: Run) -> tuple[dict[str, Any], list[Check]]:
    """Return the evidence and the checks; ranks other than 0 return no checks.

    Checks that need all ranks run first. Then each rank computes its part of the checks alone.
    """
    finished = set(run.results)
    is_trained = {"plan", "train"} <= finished
    measured = measure_evidence(run) if is_trained else {}
    collective = []
    for stage in COLLECTIVE:
        run.wait_for_ranks()
        if stage in finished:
            collective += make_stage_checks(run, stage)
    results = run.gather(run.results)[0]
    recomputed = compute_evidence(run) if is_trained else {}
    distributed_checks = _make_distributed_checks(run, results)
    evidence = dict(ChainMap(measured, *run.gather(recomputed))) if is_trained else {}
    if run.folder is None:
        return evidence, []
    return evidence, [
        *make_recorded_checks(run.folder, results, evidence),
        *collective,
        *distributed_checks,
    ]


def _make_distributed_checks(run: Run, results: dict[str, Any]) -> list[Check]:
    """Return the checks that need one rank only. The last rank makes those of `ON_LAST_RANK`."""
    shared = replace(run, results=results)
    rank_checks = {}
    for stage in STAGES.keys() & results.keys() - {*COLLECTIVE}:
        if run.rank == (run.world - 1 if stage == ON_LAST_RANK else 0):
            rank_checks[stage] = make_stage_checks(shared, stage)
    by_stage = {stage: checks for part in run.gather(rank_checks) for stage, checks in part.items()}
    return [check for stage in STAGES for check in by_stage.get(stage, [])]


def make_recorded_checks(
    folder: RunFolder, results: dict[str, Any], evidence: dict[str, Any]
) -> list[Check]:
    """Return the checks that need only a folder's files; those of `train` also need evidence."""
    recorded: list[Check] = []
    if evidence:
        plan, train = results["plan"], results["train"]
        samples = folder.samples()
        trained = training_checks.check_training(folder.config, plan, train, samples, evidence)
        recorded += catch_errors("train", trained)
    for stage in RECORDED:
        if stage in results:
            checks = catch_errors(stage, RECORDED[stage](folder, results[stage]))
            recorded += add_stage_name(stage, checks)
    return recorded


def make_stage_checks(run: Run, stage: str) -> list[Check]:
    """Return the checks of a stage that need the ranks of the run.

    An exception in a stage of `COLLECTIVE` propagates, because other ranks may wait.
    """
    checks = STAGES[stage](run, run.results[stage])
    return add_stage_name(stage, checks if stage in COLLECTIVE else catch_errors(stage, checks))


def add_stage_name(stage: str, checks: Iterable[Check]) -> list[Check]:
    """Return the checks with "STAGE: " before their names."""
    return [replace(check, name=f"{stage}: {check.name}") for check in checks]


def catch_errors(stage: str, checks: Iterator[Check]) -> Iterator[Check]:
    """Yield the checks of a stage. If computing them raises an exception, yield a failed check."""
    try:
        yield from checks
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        yield Sources(stage, "no error").check_none("what the audit reads", [message])


def check_again(folder: RunFolder) -> list[Check]:
    """Return the checks of a folder, which are recomputed from its files as far as possible.

    Checks that need the ranks of the run are read from checks.json. If results, evidence or checks
    are missing, nothing is recomputed.

    Raises:
        UsageError: the run is incomplete or was not audited.
    """
    if not folder.complete:
        raise UsageError(
            f"{folder.path} is an incomplete run; audit a run whose last stage has finished"
        )
    results = folder.results
    if "audit" not in results:
        raise UsageError(f"{folder.path} was not audited; repeat the run with the stage audit")
    stored = [
        Check(**{key: value for key, value in row.items() if key != "passed"})
        for row in folder.read_json("checks.json")
    ]
    evidence = folder.read_json("evidence.json")
    file_checks = list(_check_files(folder, evidence, len(stored)))
    if not all(check.passed for check in file_checks):
        return file_checks + stored
    recomputed = {check.name: check for check in make_recorded_checks(folder, results, evidence)}
    checks = [recomputed.pop(check.name, check) for check in stored]
    # Add the checks that the records allow but the stored list does not contain.
    return file_checks + checks + list(recomputed.values())


def _check_files(folder: RunFolder, evidence: dict[str, Any], num_stored: int) -> Iterator[Check]:
    """Check that a folder has all results, checks and evidence."""
    results = folder.results
    missing = [stage for stage in folder.config.stages if stage not in {*results, "report"}]
    if not evidence:
        missing.append("evidence.json")
    yield Sources("files of the run", "its configuration").check_none(
        "results of every stage", missing
    )
    checks = Sources("checks.json", "summary.json")
    yield checks.check_equal("number of checks", results["audit"].checks, num_stored)
