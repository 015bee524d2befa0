"""Predictions of time, held against what was published."""

import math
import statistics

import pytest
from accounting import Plan, Transformer, training_memory
from accounting.time.published import (
    HELD_OUT,
    RUNS,
    Published,
    learned,
    left_out,
    modeled,
    predicted,
    ratios,
)


def test_each_run_left_out_is_predicted_by_the_others() -> None:
    found = left_out()
    assert len(found) == len(RUNS) == 15
    errors = [abs(interval.middle / run.seconds - 1) for run, interval in found]
    assert statistics.median(errors) <= 0.08
    assert max(errors) <= 0.20
    held = [interval.low <= run.seconds <= interval.high for run, interval in found]
    assert sum(held) >= 0.8 * len(held)


@pytest.mark.parametrize("run", HELD_OUT, ids=lambda run: run.model.name)
def test_runs_that_nothing_was_learned_from_are_predicted(run: Published) -> None:
    interval = predicted(float(modeled(run).total))
    assert interval.middle == pytest.approx(run.seconds, rel=0.20)


def test_the_factor_is_the_mean_ratio_and_the_interval_holds_most() -> None:
    interval = learned((0.9, 1.0, 1.1, 1.2, 1.0))
    assert interval.middle == pytest.approx(math.prod((0.9, 1.0, 1.1, 1.2, 1.0)) ** 0.2)
    assert interval.low < 0.95 < 1.15 < interval.high
    assert predicted(2.0).middle == pytest.approx(2 * learned(ratios()).middle)


def test_every_run_says_where_it_is_from_and_what_was_assumed() -> None:
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

    def share(microbatches: int) -> float:
        seconds = step_time(
            model, Plan(microbatches=microbatches), batch=8, seq=128, hardware="H100"
        )
        return seconds["compute"].total / seconds.total

    assert share(8) < share(2) < share(1)
