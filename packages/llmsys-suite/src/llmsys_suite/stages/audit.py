"""Hold what has a check against its second source, and say what does not agree."""

from __future__ import annotations

from typing import Any

from llmsys_suite.audit.run import audit_run
from llmsys_suite.run import Run


def run(run: Run) -> dict[str, Any]:
    """Write evidence.json and checks.json; a failed check fails the run."""
    evidence, checks = audit_run(run)
    if run.folder is None:
        return {}
    run.folder.write_json("evidence.json", evidence)
    run.folder.write_json("checks.json", [check.to_json() for check in checks])
    # Not "failed", which says of a stage that it could not be run.
    red = [str(check) for check in checks if not check.passed]
    return {"checks": len(checks), "red": red, "passed": not red}
