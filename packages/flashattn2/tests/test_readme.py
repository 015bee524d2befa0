"""The README's example runs."""

import re
from pathlib import Path

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text()


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
