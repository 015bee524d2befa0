"""The quick start of the README runs as printed."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def test_quick_start_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = (PACKAGE / "README.md").read_text().split("## Quick start")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
