import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_use_snippet_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    use = README.read_text().split("## Use")[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", use, re.S))
    exec(compile(code, "README", "exec"), {})
    assert (tmp_path / "fit.png").exists()
    assert capsys.readouterr().out


NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", README.read_text())


def test_the_readme_names_its_tests():
    assert len(NAMED) >= 15


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_every_test_that_the_readme_names_exists(file, name):
    assert f"def {name}(" in (README.parent / "tests" / file).read_text()
