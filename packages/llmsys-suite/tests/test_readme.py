"""The README's Python runs as written, and its commands are the command line's own."""

import re
import sys
import tempfile
from pathlib import Path

import pytest
from llmsys_suite import cli
from llmsys_suite.config import STAGES

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
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
