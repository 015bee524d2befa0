"""Write the report for a person."""

from __future__ import annotations

from typing import Any

from llmsys_suite.report.page import write_report
from llmsys_suite.run import Run


def run(run: Run) -> dict[str, Any]:
    """Write report.md and report.html."""
    if run.folder is not None:
        write_report(run.folder)
    return {}
