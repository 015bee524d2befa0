"""The README's Python runs as written, and its commands are the command line's own."""

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
from llmsys_suite import cli
from llmsys_suite.config import STAGES, RunConfig
from llmsys_suite.ranks import launch, worker
from worker_pool import run_ranks

README = (Path(__file__).parents[1] / "README.md").read_text()


def run_as_rank(values):
    """Run all stages as this rank; return the exit status."""
    os.environ[launch.STORE] = os.environ["STORE_FILE"]
    return worker.run_rank(RunConfig.from_json(values))[0]


def launch_in_pool(config):
    """Launch a run in processes that have imported torch already; return its exit status."""
    return max(run_ranks(run_as_rank, config.world, config.to_json(), backend="", timeout=600))


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "launch", launch_in_pool)
    ((example, printed),) = re.findall(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    exec(example, {})
    assert capsys.readouterr().out == printed


def test_every_stage_and_every_option_it_names_exists(monkeypatch, capsys):
    named = re.findall(r"^\| `(\w+)`", README, re.MULTILINE)
    assert set(STAGES) - {"report"} <= set(named)
    monkeypatch.setattr(sys, "argv", ["llmsys", "run", "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main()
    help_text = capsys.readouterr().out
    commands = re.findall(r"(?:^|; )llmsys run.*", README, re.MULTILINE)
    options = {option for command in commands for option in re.findall(r"--[a-z]+", command)}
    assert len(options) > 10
    for option in options:
        assert re.search(rf"{option}\b", help_text)
