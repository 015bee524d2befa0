"""The quick start of the README runs."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_quick_start_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
