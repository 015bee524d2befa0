"""The audit finds injected faults, in runs of several minutes that `make test-exhaustive` makes.

The checks themselves are tested in test_audit.py, and a whole run without faults in
tests/test_end_to_end.py.
"""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from injected_faults import FAULTS
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.model import ModelConfig
from llmsys_suite.report.unaudited import UNAUDITED
from llmsys_suite.text.data import Corpus
from llmsys_suite.variants import VARIANTS
from mutate import QUICK, format_table, inject
from reported_figures import LABELED


def test_the_registry_has_faults_of_every_stage_with_distinct_names():
    labels = [fault.label for fault in FAULTS]
    assert len(labels) == len(set(labels)) >= 40
    assert set(QUICK) <= set(labels)
    stages = ("plan", "links", "attention", "train", "learn", "parallel")
    others = ("memory", "scale", "inspect", "compress", "folder")
    assert {fault.stage for fault in FAULTS} >= {*stages, *others}


@pytest.fixture(scope="module")
def outcomes():
    """Return the outcomes of one honest run and of the quick faults in the same processes."""
    return inject(list(QUICK), honest_runs=1)


@pytest.mark.exhaustive
def test_an_honest_run_raises_no_alarm(outcomes):
    assert outcomes[0].fault == "honest run 0"
    assert outcomes[0].failed_checks == ()


@pytest.mark.exhaustive
def test_quick_injected_faults_are_found(outcomes):
    assert sorted(outcome.fault for outcome in outcomes[1:]) == sorted(QUICK)
    assert [str(outcome) for outcome in outcomes[1:] if not outcome.failed_checks] == []


def test_a_fault_that_does_not_exist_is_a_usage_error():
    with pytest.raises(UsageError, match="expected the name of a fault, got 'train: nothing'"):
        inject(["train: nothing"])


@pytest.mark.exhaustive
def test_nineteen_of_twenty_injected_faults_are_found():
    outcomes = inject()
    detected = sum(bool(outcome.failed_checks) for outcome in outcomes)
    assert detected >= 0.95 * len(outcomes), format_table(outcomes)


def make_dry_run():
    """Return a run whose attributes the faults read when they are made."""
    text = torch.zeros(64, dtype=torch.uint8)
    config = RunConfig(size="mini", context=64)
    model = ModelConfig.from_size("mini", context=64)
    return SimpleNamespace(rank=1, world=2, config=config, model=model, corpus=Corpus(text, text))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.label)
def test_each_fault_patches_code_that_exists(fault):
    assert {*fault.variants} <= {*VARIANTS}
    patches = fault.make(make_dry_run())
    patches = patches if isinstance(patches, list) else [patches]
    assert patches
    with ExitStack() as stack:
        for patch in patches:
            if entries := getattr(patch, "in_dict", None):
                # Patching a dict would also add a key that no code reads.
                assert {*patch.values} <= {*entries}
            stack.enter_context(patch)


def test_the_labels_of_unaudited_figures_are_those_of_the_report():
    for stage, labels in LABELED.items():
        assert {*labels} <= {*UNAUDITED[stage]}


@pytest.mark.exhaustive
def test_each_doubled_figure_is_found_or_labeled():
    labeled = {
        f"{stage}: {name}"
        for stage, labels in LABELED.items()
        for names in labels.values()
        for name in names
    }
    outcomes = inject([], figures=True)
    assert len(outcomes) > 80
    assert [o.fault for o in outcomes if not o.failed_checks and o.fault not in labeled] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("runs", "busy", "world"), [(90, False, 2), (10, True, 2), (5, False, 3), (3, True, 4)]
)
def test_honest_runs_raise_no_alarm_on_an_idle_and_on_a_busy_machine(runs, busy, world):
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(os.cpu_count() if busy else 0)]
    try:
        outcomes = inject([], honest_runs=runs, attempts=1, world=world)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert len(outcomes) == runs
    assert [str(outcome) for outcome in outcomes if outcome.failed_checks] == []


def test_the_table_in_the_docs_is_of_these_faults_and_says_how_many_were_found():
    page = (Path(__file__).parents[3] / "docs" / "benchmarking.md").read_text()
    rows = {}
    for section in page.split("### Faults in ")[1:]:
        stage, text = section.split("\n", 1)
        table_rows = re.findall(r"^\| (.*?) \| (.*?) \|$", text, re.MULTILINE)[1:]
        rows |= {f"{stage}: {name}": check for name, check in table_rows}
    assert set(rows) == {fault.label for fault in FAULTS}
    detected = sum(check != "**nothing**" for check in rows.values())
    assert f"{detected} of {len(rows)} injected faults were found" in page
    assert detected >= 0.95 * len(rows)
