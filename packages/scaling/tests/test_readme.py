import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_quick_start_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    section = README.read_text().split("## Quick start")[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.S))
    exec(compile(code, "README", "exec"), {})
    assert (tmp_path / "fit.png").exists()
    (shown,) = re.findall(r"```text\n(.*?)```", section, re.S)
    assert capsys.readouterr().out == shown
