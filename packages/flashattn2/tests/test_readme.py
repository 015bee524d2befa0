"""The quick start of the README runs and prints the quoted output."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_quick_start_runs_and_prints_the_quoted_line(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    quoted = re.findall(r"^# (.*\n)", example, re.MULTILINE)
    assert capsys.readouterr().out == "".join(quoted)
