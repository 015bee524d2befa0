"""Hold every number against a second way of getting it, and say which do not agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmsys_suite.audit import audit

if TYPE_CHECKING:
    from llmsys_suite.worker import Run


def run(run: Run) -> dict[str, Any]:
    """Write checks.json; a failed check fails the run."""
    if run.folder is None:
        return {}
    checks = audit(run.config, run.results["plan"], run.results["train"], run.folder.samples())
    run.folder.write_json("checks.json", [check.to_json() for check in checks])
    failed = [check.name for check in checks if not check.passed]
    return {"checks": len(checks), "failed": failed, "passed": not failed}
