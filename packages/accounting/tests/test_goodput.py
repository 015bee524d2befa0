import math
import random
import statistics

import pytest
from accounting import fermi
from accounting.time.goodput import (
    LLAMA3_405B,
    OPT_175B,
    Run,
    best_interval_hours,
    goodput,
    young_daly_hours,
)
from hypothesis import given
from hypothesis import strategies as st


def test_utilization_in_percent_is_refused() -> None:
    for utilization in (40, fermi.Range(0.3, 1.5)):
        with pytest.raises(ValueError, match="expected 0 < utilization <= 1"):
            fermi.training_usd(1e24, utilization=utilization)
    assert fermi.gpu_hours(1e24, utilization=1) == fermi.gpu_hours(1e24)


def simulate(run: Run, *, interval_hours: float, seed: int) -> float:
    """Wall-clock hours of one run, event by event."""
    dice = random.Random(seed)
    rate = run.devices * run.failures_per_device_hour

    def next_failure() -> float:
        return dice.expovariate(rate) if rate else math.inf

    clock = 0.0
    done = 0.0
    failure = next_failure()
    while done < run.work_hours:
        segment = min(interval_hours, run.work_hours - done) + run.checkpoint_hours
        if clock + segment <= failure:
            clock += segment
            done += segment - run.checkpoint_hours
            continue
        clock = failure
        failure = clock + next_failure()
        while failure < clock + run.restart_hours:
            clock = failure
            failure = clock + next_failure()
        clock += run.restart_hours
    return clock


@pytest.mark.parametrize("interval", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("restart", [0.0, 1.5])
def test_the_formula_is_the_mean_of_an_event_simulation(interval: float, restart: float) -> None:
    run = Run(
        work_hours=64 * interval,
        devices=100,
        failures_per_device_hour=1 / 500,
        checkpoint_hours=0.25,
        restart_hours=restart,
    )
    times = [simulate(run, interval_hours=interval, seed=seed) for seed in range(400)]
    expected = goodput(run, interval_hours=interval).wall_clock_hours
    error = statistics.stdev(times) / math.sqrt(len(times))
    assert abs(statistics.fmean(times) - expected) < 4 * error
    # The band is narrow enough to tell a wrong formula: a tenth more or less falls outside.
    assert 4 * error < 0.1 * expected


@given(c=st.floats(1e-4, 0.5), m=st.floats(1.0, 1e4))
def test_the_best_interval_beats_its_neighbors_and_approaches_youngs(c: float, m: float) -> None:
    run = Run(
        work_hours=1e9,
        devices=1,
        failures_per_device_hour=1 / m,
        checkpoint_hours=c,
        restart_hours=0.1,
    )
    best = best_interval_hours(c, m)
    least = goodput(run).wall_clock_hours
    for off in (0.8, 1.25):
        assert goodput(run, interval_hours=best * off).wall_clock_hours > least
    # Daly 2006, equation 37: below Young's by two thirds of a checkpoint, to first order.
    assert best == pytest.approx(
        young_daly_hours(c, m) - 2 * c / 3, rel=0.1 * math.sqrt(c / m) + 1e-6
    )


def test_rare_failures_have_the_interval_of_young() -> None:
    for ratio in (1e-20, 1e-16, 1e-12):
        best = best_interval_hours(ratio, 1.0)
        assert best == pytest.approx(young_daly_hours(ratio, 1.0), rel=1e-6)
    rare = Run(
        work_hours=100,
        devices=1,
        failures_per_device_hour=1e-18,
        checkpoint_hours=0.1,
        restart_hours=0.1,
    )
    assert goodput(rare).wall_clock_hours == pytest.approx(100.1)


def test_llama_3_405b_stays_above_nine_tenths() -> None:
    assert LLAMA3_405B.hours_between_failures == pytest.approx(3.09, abs=0.01)
    expected = goodput(LLAMA3_405B)
    assert expected.goodput > 0.9
    assert expected.failures == pytest.approx(419, rel=0.05)
    assert expected.wall_clock_hours == pytest.approx(54 * 24, rel=0.05)
    simulated = [
        simulate(LLAMA3_405B, interval_hours=expected.interval_hours, seed=s) for s in range(5)
    ]
    assert statistics.fmean(simulated) == pytest.approx(expected.wall_clock_hours, rel=0.02)


def test_opt_175b_takes_56_days_as_in_logbook() -> None:
    assert OPT_175B.work_hours / 24 == pytest.approx(33.3, abs=0.1)
    expected = goodput(OPT_175B)
    assert expected.wall_clock_hours / 24 == pytest.approx(56, rel=0.06)
    assert expected.failures == pytest.approx(105, rel=0.06)
    hours = expected.wall_clock_hours * 992
    assert expected.usd == pytest.approx(1.5 * hours)


def test_nothing_fails_nothing_is_lost() -> None:
    run = Run(
        work_hours=10, devices=4, failures_per_device_hour=0, checkpoint_hours=0.1, restart_hours=1
    )
    assert goodput(run).wall_clock_hours == pytest.approx(10.1)
    assert simulate(run, interval_hours=10, seed=0) == pytest.approx(10.1)
    assert goodput(run).failures == 0
