"""The README's Python runs as written, and its commands are the command line's own."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_example_runs(tmp_path):
    ((example, printed),) = re.findall(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL
    )
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_every_stage_and_every_option_it_names_exists():
    from llmsys_suite.config import STAGES

    named = re.findall(r"^\| `(\w+)`", README, re.MULTILINE)
    assert set(STAGES) - {"report"} <= set(named)
    help_text = subprocess.run(
        [sys.executable, "-m", "llmsys_suite", "run", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "200"},
    ).stdout
    commands = re.findall(r"(?:^|; )llmsys run.*", README, re.MULTILINE)
    options = {option for command in commands for option in re.findall(r"--[a-z]+", command)}
    assert len(options) > 10
    for option in options:
        assert re.search(rf"{option}\b", help_text)
