"""The README's examples print what is shown below them."""

import contextlib
import io
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def test_quick_start_prints_the_shown_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick_start = (PACKAGE / "README.md").read_text().split("## Quick start")[1].split("\n## ")[0]
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", quick_start, re.DOTALL)
    assert len(examples) == quick_start.count("```python")
    names = {"__name__": "readme"}
    for example, shown in examples:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(example, "README.md", "exec"), names)
        assert printed.getvalue() == shown
