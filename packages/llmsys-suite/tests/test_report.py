"""A report says what failed, and never fails for it."""

from types import SimpleNamespace

from llmsys_suite.config import RunConfig
from llmsys_suite.folder import RunFolder
from llmsys_suite.report.page import headline, write_report
from llmsys_suite.stages import audit

ENVIRONMENT = {
    "date": "a day", "gpus": [], "processor": "abacus", "cores": 2, "torch": "2", "python": "3",
    "load_average": 0.0,
}  # fmt: skip


def test_stages_that_failed_are_in_the_report_and_in_the_last_lines(tmp_path):
    folder = RunFolder.create(RunConfig(out=tmp_path / "run"), ENVIRONMENT)
    for stage, why in (("train", "rank 1: ValueError: no"), ("audit", "rank 0: OSError: full")):
        failed = {"failed": why, "stage_seconds": 0.0, "peak_process_mib": 0.0}
        folder.add_stage(stage, failed)
    assert "This stage failed: rank 1: ValueError: no" in write_report(folder)
    lines = headline(folder.path)
    assert "FAILED stage train: rank 1: ValueError: no" in lines
    assert "FAILED stage audit: rank 0: OSError: full" in lines


def test_an_audit_without_a_red_check_is_no_stage_that_failed(tmp_path, monkeypatch):
    folder = RunFolder.create(RunConfig(out=tmp_path / "run"), ENVIRONMENT)
    monkeypatch.setattr("llmsys_suite.stages.audit.audit_run", lambda run: ({}, []))
    folder.add_stage("audit", audit.run(SimpleNamespace(folder=folder)))
    assert headline(folder.path).splitlines()[0] == "audit: 0/0 passed"
