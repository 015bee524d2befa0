import math
import random
import statistics
from typing import Any

import pytest
from accounting.time.goodput import CHECKPOINT_HOURS, compute_goodput
from hypothesis import given
from hypothesis import strategies as st


def simulate(
    work_hours: float,
    *,
    hours_between_failures: float,
    checkpoint_hours: float,
    restart_hours: float,
    interval_hours: float,
    seed: int,
) -> float:
    """Return the wall-clock hours of one run, event by event."""
    dice = random.Random(seed)

    def next_failure() -> float:
        return dice.expovariate(1 / hours_between_failures)

    clock = done = 0.0
    failure = next_failure()
    while done < work_hours:
        segment = min(interval_hours, work_hours - done) + checkpoint_hours
        if clock + segment <= failure:
            clock += segment
            done += segment - checkpoint_hours
            continue
        clock = failure
        failure = clock + next_failure()
        while failure < clock + restart_hours:
            clock = failure
            failure = clock + next_failure()
        clock += restart_hours
    return clock


@pytest.mark.parametrize("interval", [0.5, 8.0])
@pytest.mark.parametrize("restart", [0.0, 1.5])
def test_the_formula_is_the_mean_of_an_event_simulation(interval: float, restart: float) -> None:
    about: dict[str, Any] = {"checkpoint_hours": 0.25, "restart_hours": restart}
    about |= {"interval_hours": interval}
    work = 64 * interval
    times = [simulate(work, hours_between_failures=5, seed=seed, **about) for seed in range(400)]
    expected = compute_goodput(
        work, 100, failures_per_device_hour=1 / 500, **about
    ).wall_clock_hours
    error = statistics.stdev(times) / math.sqrt(len(times))
    assert abs(statistics.fmean(times) - expected) < 4 * error
    # The band is narrow enough to tell a wrong formula: a tenth more or less falls outside.
    assert 4 * error < 0.1 * expected


@given(c=st.floats(1e-4, 0.5), m=st.floats(1.0, 1e4))
def test_the_best_interval_beats_its_neighbors_and_approaches_youngs(c: float, m: float) -> None:
    about: dict[str, Any] = {"failures_per_device_hour": 1 / m, "checkpoint_hours": c}
    best = compute_goodput(1e9, 1, **about)
    for off in (0.8, 1.25):
        other = compute_goodput(1e9, 1, **about, interval_hours=best.interval_hours * off)
        assert other.wall_clock_hours > best.wall_clock_hours
    # Daly 2006, equation 37: below Young's by two thirds of a checkpoint, to first order.
    young = math.sqrt(2 * c * m)
    assert best.interval_hours == pytest.approx(
        young - 2 * c / 3, rel=0.1 * math.sqrt(c / m) + 1e-6
    )


def test_rare_failures_lose_nothing() -> None:
    rare = compute_goodput(100, 1, failures_per_device_hour=1e-18)
    assert rare.wall_clock_hours == pytest.approx(100 + CHECKPOINT_HOURS)
    with pytest.raises(ValueError, match="a segment of 10 hours never ends"):
        compute_goodput(10, 10**9, interval_hours=10)


def test_llama_3_405b_stays_above_nine_tenths() -> None:
    expected = compute_goodput(0.9 * 54 * 24, 16_384)
    assert expected.goodput > 0.9
    assert expected.failures == pytest.approx(419, rel=0.05)
    assert expected.wall_clock_hours == pytest.approx(54 * 24, rel=0.05)
