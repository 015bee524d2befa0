"""The README's example runs as printed, and its claims name tests that exist."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    use = (PACKAGE / "README.md").read_text().split("## Use")[1].split("\n## ")[0]
    for block in re.findall(r"```python\n(.*?)```", use, re.DOTALL):
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_every_claim_names_a_test():
    claims = re.findall(r"`(test_\w+\.py)::(\w+)`", (PACKAGE / "README.md").read_text())
    assert len(claims) > 5
    for file, name in claims:
        assert f"def {name}(" in (PACKAGE / "tests" / file).read_text(), f"{file}::{name}"
