import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_use_snippet_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    use = README.read_text().split("## Use")[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", use, re.S))
    exec(compile(code, "README", "exec"), {})
    assert (tmp_path / "fit.png").exists()
    assert capsys.readouterr().out
