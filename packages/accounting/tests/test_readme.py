import re
from pathlib import Path

import pytest
from accounting.model.family_tables import FAMILIES

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_quick_start_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    ((snippet, shown),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, flags=re.S)
    exec(snippet, {})
    assert capsys.readouterr().out == shown


def draw_picture() -> str:
    """Return the first lines of the answer for Llama 3 405B."""
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
    return "\n".join(lines[: next(i for i, x in enumerate(lines) if x.startswith("alternatives"))])


def test_sample_output_equals_printed_answer() -> None:
    (shown,) = re.findall(r"<!-- picture -->\n```\n(.*?)\n```", README, flags=re.S)
    assert shown == draw_picture()


def test_benchmark_rows_have_units_in_their_keys() -> None:
    from accounting.bench import bench

    rows = bench(quick=True)
    assert {row["case"] for row in rows} == {"speed"}


def test_number_of_model_families_is_counted() -> None:
    assert f"| {len(FAMILIES)} model families;" in README


def test_table_of_intervals_is_measured() -> None:
    from published_runs import RUNS, count_covered_runs, learn_factor, list_ratios

    sources = {ratio.source for ratio in list_ratios()}
    assert f"errors on {len(RUNS)} runs of {len(sources)} published sources" in README
    groups = [(chip, "bf16", "dense") for chip in ("A100", "H100")]
    groups += [("H100", "fp8", "dense"), ("H100", "bf16", "MoE")]
    for group in [*groups, None]:
        name = ", ".join(group or ("other chips and dtypes",))
        interval = learn_factor(list_ratios(), group)
        low, high = (bound / interval.middle - 1 for bound in (interval.low, interval.high))
        covered, runs, sources = count_covered_runs(group)
        row = f"| {name} | {low:.0%} to +{high:.0%}".replace("%", " %")
        assert f"{row} | {covered} of {runs} runs, {sources} sources |" in README
