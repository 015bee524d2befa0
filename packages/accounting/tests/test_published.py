"""Tests that compare predicted times with published runs."""

import math
import statistics
from dataclasses import replace

import pytest
from accounting import Experts, Plan, Transformer, plan_for, training_memory
from accounting.cli.main import main
from accounting.time.published import (
    HELD_OUT,
    RUNS,
    Published,
    Ratio,
    coverage,
    errors_by_source,
    group_of,
    half_width,
    learned,
    left_out,
    modeled,
    predicted,
    ratios,
)


def test_each_run_left_out_is_predicted_by_the_others() -> None:
    result = left_out()
    assert len(result) == len(RUNS) == 15
    off = [abs(seconds / run.seconds - 1) for run, seconds in result]
    assert statistics.median(off) <= 0.08
    assert max(off) <= 0.20


@pytest.mark.parametrize("run", HELD_OUT, ids=lambda run: run.model.name)
def test_runs_that_nothing_was_learned_from_are_predicted(run: Published) -> None:
    interval = predicted(float(modeled(run).total))
    assert interval.middle == pytest.approx(run.seconds, rel=0.20)


def a_run(source: str, off: float, group: tuple[str, str, str] = ("A", "bf16", "dense")) -> Ratio:
    return Ratio(source=source, group=group, usual=off, held_out=off, learned_from=True)


def test_interval_is_measured_on_held_out_sources() -> None:
    # Two runs of a source say nothing about another source: within s they agree, s is off by 1.
    seen = [a_run("s", 1.0), a_run("s", 1.0), a_run("t", 0.0)]
    assert errors_by_source(seen) == pytest.approx({"s": 1.0, "t": 1.0})
    interval = learned(seen, ("A", "bf16", "dense"))
    assert math.log(interval.high / interval.middle) == pytest.approx(1.0)


def test_too_few_sources_use_widest_known_error() -> None:
    assert half_width([0.1, 0.2, 0.3]) is None
    assert half_width([0.1, 0.4, 0.2, 0.3]) == 0.4
    assert half_width([0.1 * i for i in range(1, 10)]) == pytest.approx(0.8)
    near = [a_run(f"n{i}", 0.01 * i) for i in range(5)]
    far = a_run("far", 2.0, ("B", "fp8", "MoE"))
    widest = max(errors_by_source([*near, far]).values())
    for group in (("B", "fp8", "MoE"), ("C", "bf16", "dense"), None):
        interval = learned([*near, far], group)
        assert math.log(interval.high / interval.middle) == pytest.approx(widest)
    expected = learned([*near, far], ("A", "bf16", "dense"))
    assert math.log(expected.high / expected.middle) < widest


def test_printed_coverage_is_counted_on_held_out_sources() -> None:
    actual: dict[str, list[bool]] = {}
    for run in (*RUNS, *HELD_OUT):
        name = run.source.split(",")[0]
        others = [ratio for ratio in ratios() if ratio.source != name]
        interval = learned(others, group_of(run.model, run.hardware, run.precision))
        interval = interval.scaled(float(modeled(run, held_out=True).total))
        actual.setdefault(name, []).append(interval.low <= run.seconds <= interval.high)
    runs = [inside for of_source in actual.values() for inside in of_source]
    sources = [all(of_source) for of_source in actual.values()]
    assert coverage() == (sum(sources), len(sources), sum(runs), len(runs))
    assert sum(sources) >= 0.8 * len(sources)
    assert sum(runs) >= 0.8 * len(runs)
    message = (
        f"{sum(sources)} of {len(sources)} published sources ({sum(runs)} of {len(runs)} runs)"
    )
    assert message in predicted(1.0).basis


def test_constants_of_a_source_do_not_help_to_predict_it() -> None:
    for run in (*RUNS, *HELD_OUT):
        usual, held_out = (float(modeled(run, held_out=actual).total) for actual in (False, True))
        set_on_it = run.hardware != "A100"
        assert (usual != pytest.approx(held_out, rel=1e-9)) == set_on_it, run.model.name


SMALL = Transformer(layers=4, d_model=64, heads=4, vocab_size=100)


def test_interval_reports_evidence_for_device_precision_and_kind() -> None:
    about = {"hardware": "A100", "precision": "megatron_bf16"}
    assert (
        "A100 in megatron_bf16, dense: 3 sources (15 runs)"
        in predicted(1.0, model=SMALL, **about).basis
    )
    unknown = predicted(1.0, model=SMALL, hardware="H200", precision="fsdp_bf16")
    assert "nothing is published here for H200 in fsdp_bf16, dense" in unknown.basis
    sparse = replace(SMALL, experts=Experts(count=4, per_token=2))
    assert (
        "H800 in deepseek_v3, MoE: 1 source (1 run)"
        in predicted(1.0, model=sparse, hardware="H800", precision="deepseek_v3").basis
    )
    assert "without device, precision and model" in predicted(1.0).basis
    widest = max(errors_by_source(ratios()).values())
    assert math.log(unknown.high / unknown.middle) == pytest.approx(widest)
    assert unknown.scaled(2.0).basis == unknown.rate(1.0).basis == unknown.basis


def test_answers_and_reports_print_the_measured_coverage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = plan_for(SMALL, gpus=8, batch=8, seq=64)
    assert answer.seconds.basis in answer.explain()
    assert answer.to_dict()["seconds"]["basis"] == answer.seconds.basis
    sizes = "layers=4,d_model=64,heads=4,vocab_size=100"
    assert main([sizes, "--gpus", "8", "--seq", "64"]) == 0
    assert "when held out whole" in capsys.readouterr().out


def test_every_run_has_source_and_assumptions() -> None:
    for run in RUNS:
        assert "20" in run.source
        run.plan.check(run.model, batch=run.batch, seq=run.seq)
    assert "7 % of the hours" in next(r for r in RUNS if r.model.name == "Llama 2 70B").assumed


def test_llama_3_405b_has_room_at_its_published_layout() -> None:
    # Table 4, first row: gradients sharded, nothing recomputed (section 3.3.2). How deep they
    # interleave is not published; 1F1B keeps least.
    run = next(run for run in RUNS if run.model.name == "Llama 3 405B")
    plan = Plan(
        tensor=8,
        pipeline=16,
        data=64,
        zero=2,
        microbatches=32,
        sequence_parallel=True,
    )
    need = training_memory(
        run.model, plan, batch=2048, seq=8192, precision="megatron_bf16", fused_gate=True
    )
    assert need.total <= 80e9
    assert need.total > 40e9


def test_thin_products_are_slower_than_thick_ones() -> None:
    from accounting.time.step import step_time

    model = Transformer(layers=8, d_model=4096, heads=32, vocab_size=32000)

    def fraction(microbatches: int) -> float:
        seconds = step_time(
            model, Plan(microbatches=microbatches), batch=8, seq=128, hardware="H100"
        )
        return seconds["compute"].total / seconds.total

    assert fraction(8) < fraction(2) < fraction(1)
