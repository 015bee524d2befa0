"""The audit finds injected faults: ten of each family here, and all of them in exhaustive runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from llmsys_suite.audit.mutate import TEN, false_alarms, mutate, table
from llmsys_suite.audit.mutations import DEFECTS
from llmsys_suite.config import UsageError


def test_the_registry_has_forty_defects_of_every_stage_and_no_two_of_one_name():
    labels = [defect.label for defect in DEFECTS]
    assert len(labels) == len(set(labels)) >= 40
    assert set(TEN) <= set(labels)
    assert {defect.stage for defect in DEFECTS} >= {
        "plan", "links", "attention", "train", "parallel", "profile", "precision", "memory",
        "scale", "inspect", "compress", "folder",
    }  # fmt: skip


def test_ten_injected_faults_are_found():
    outcomes = mutate(list(TEN))
    assert [outcome.defect for outcome in outcomes if not outcome.killed] == []
    assert len(outcomes) == 10


def test_a_defect_that_does_not_exist_is_a_usage_error():
    with pytest.raises(UsageError, match="no defect is called 'train: nothing'"):
        mutate(["train: nothing"])


@pytest.mark.exhaustive
def test_nineteen_of_twenty_injected_faults_are_found():
    outcomes = mutate()
    killed = sum(outcome.killed for outcome in outcomes)
    assert killed >= 0.95 * len(outcomes), table(outcomes)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("runs", "busy", "world"), [(90, False, 2), (10, True, 2), (5, False, 3), (3, True, 4)]
)
def test_honest_runs_raise_no_alarm_on_an_idle_and_on_a_busy_machine(runs, busy, world):
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(os.cpu_count() if busy else 0)]
    try:
        outcomes = false_alarms(runs, world=world)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert len(outcomes) == runs
    assert [str(outcome) for outcome in outcomes if outcome.killed] == []


def test_an_honest_run_raises_no_alarm():
    (outcome,) = false_alarms(1)
    assert outcome.killed_by == ()


def test_the_table_in_the_docs_is_of_these_defects_and_says_how_many_were_found():
    page = (Path(__file__).parents[3] / "docs" / "benchmarking.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z]+: .*?) \| (.*?) \|$", page, re.MULTILINE))
    assert list(rows) == [defect.label for defect in DEFECTS]
    found = sum(check != "**nothing**" for check in rows.values())
    assert f"{found} of {len(rows)} injected faults were found" in page
    assert found >= 0.95 * len(rows)
