"""The README's example runs as printed."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def test_quick_start_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick_start = (PACKAGE / "README.md").read_text().split("## Quick start")[1].split("\n## ")[0]
    for block in re.findall(r"```python\n(.*?)```", quick_start, re.DOTALL):
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
