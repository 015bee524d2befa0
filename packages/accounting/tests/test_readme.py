import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_snippet_runs() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(snippet, {})


def test_the_bench_gives_rows_that_say_their_units() -> None:
    from accounting.bench import bench, table

    rows = bench(quick=True)
    assert {row["case"] for row in rows} == {"speed", "import", "scaling", "goodput"}
    assert "time_ms" in table(rows)
    for row in rows:
        if row["case"] == "scaling":
            assert 0 < row["efficiency"] < 1 + 1e-9
