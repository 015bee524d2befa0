"""The examples of the README run as printed."""

import importlib
import re
import textwrap
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_quick_start_prints_what_the_readme_shows(tmp_path, monkeypatch, capsys):
    (printed,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    (tmp_path / "quick_start.py").write_text(BLOCKS[0])
    monkeypatch.syspath_prepend(tmp_path)  # other processes import `train` from this module
    module = importlib.import_module("quick_start")
    _, main = BLOCKS[0].split('if __name__ == "__main__":\n')
    exec(textwrap.dedent(main), vars(module))
    assert capsys.readouterr().out == printed


def test_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 3
    for block in BLOCKS[1:]:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
