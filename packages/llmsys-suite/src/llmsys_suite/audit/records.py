"""Recompute the checks of a finished run from its folder."""

from __future__ import annotations

from dataclasses import fields

from llmsys_suite.audit import training
from llmsys_suite.audit.check import Check
from llmsys_suite.config import UsageError
from llmsys_suite.folder import RunFolder


def check_again(folder: RunFolder) -> list[Check]:
    """Return the checks of a folder; those of `plan` and `train` are recomputed from its records.

    Raises:
        UsageError: the run is incomplete or was not audited.
    """
    if not folder.complete:
        raise UsageError(f"{folder.path} is an incomplete run: its audit would be half of one")
    results = folder.results
    if "audit" not in results:
        raise UsageError(f"{folder.path} was not audited: its run had no stage audit")
    names = {field.name for field in fields(Check)}
    stored = [
        Check(**{key: value for key, value in row.items() if key in names})
        for row in folder.read_json("checks.json")
    ]
    recomputed: dict[str, Check] = {}
    if evidence := folder.read_json("evidence.json"):
        checks = training.checks(
            folder.config, results["plan"], results["train"], folder.samples(), evidence
        )
        recomputed = {check.name: check for check in checks}
    return [recomputed.get(check.name, check) for check in stored]
