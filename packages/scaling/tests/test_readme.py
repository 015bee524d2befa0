import json
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


def test_times_in_sentences_are_measured():
    results = README.parents[2] / "docs" / "results"
    newest = max(results.glob("*-cpu/scaling-measured.json"))
    rows = json.loads(newest.read_text())["rows"]
    seconds = {row["what"]: row["time_s"] for row in rows if row["case"] == "answer"}
    text = " ".join(README.read_text().split())
    assert f"and takes {seconds['first optimum']:.2g} s." in text
    assert f"100,000 records is read and fitted in {seconds['read and fit']:.2g} s." in text
    assert seconds["first optimum"] < 0.3
    assert seconds["read and fit"] < 5
