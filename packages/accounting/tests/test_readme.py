import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_snippet_runs() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(snippet, {})


def picture() -> str:
    """The first lines of the answer for Llama 3 405B."""
    from accounting import Transformer, plan_for

    model = Transformer(
        layers=126,
        d_model=16384,
        heads=128,
        kv_heads=8,
        d_ff=53248,
        vocab_size=128256,
        name="Llama 3 405B",
    )
    answer = plan_for(model, gpus=16384, hardware="H100", tokens=15.6e12, seq=8192, batch=2048)
    lines = answer.explain().splitlines()
    return "\n".join(lines[: next(i for i, x in enumerate(lines) if x.startswith("others"))])


def test_the_picture_is_what_the_package_prints() -> None:
    (shown,) = re.findall(r"<!-- picture -->\n```\n(.*?)\n```", README, flags=re.S)
    assert shown == picture()


def test_the_bench_gives_rows_that_say_their_units() -> None:
    from accounting.bench import bench, table

    rows = bench(quick=True)
    assert {row["case"] for row in rows} == {"speed", "import"}
    assert "time_ms" in table(rows)
