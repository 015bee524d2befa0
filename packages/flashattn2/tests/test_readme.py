"""The README's example runs, and the tests that its table names exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text()


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})


def test_every_test_that_the_readme_names_exists():
    names = re.findall(r"`(test_\w+\.py)::(test_\w+)`", README)
    assert len(names) > 15
    for file, test in names:
        assert f"def {test}(" in (HERE / file).read_text(), f"{file}::{test}"
