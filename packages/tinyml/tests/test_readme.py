"""The README's example runs as printed."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    use = (PACKAGE / "README.md").read_text().split("## Use")[1].split("\n## ")[0]
    for block in re.findall(r"```python\n(.*?)```", use, re.DOTALL):
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
