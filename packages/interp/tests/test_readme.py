import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()


def test_quick_start_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"## Use\n.*?```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(snippet, names)
    assert (tmp_path / "heads.html").stat().st_size > 1000
