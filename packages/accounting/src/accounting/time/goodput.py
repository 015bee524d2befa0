"""The cost of failures in a long run: lost work, restarts, and checkpoints.

Failures are random with a constant rate per device-hour. N devices together fail every M = 1 / (N
rate) hours on average. The expected time for tau hours of work and the following checkpoint is

    M e^(R/M) (e^((tau + C)/M) - 1)

hours (Daly 2006, "A higher order estimate of the optimum checkpoint interval"). A checkpoint takes
C hours. A restart takes R hours and may fail too.
"""

import math
from dataclasses import dataclass

from accounting import checks
from accounting.breakdown import format_count

#: 54 days of Llama 3 405B on 16,384 devices: 419 unexpected interruptions (Grattafiori et al. 2024,
#: section 3.3.4). The times of a checkpoint and of a restart are assumptions.
FAILURES_PER_DEVICE_HOUR = 419 / (16_384 * 54 * 24)
CHECKPOINT_HOURS = 10 / 3600
RESTART_HOURS = 5 / 60


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Expected duration of a run, and its expected number of failures."""

    #: Hours of work between two checkpoints.
    interval_hours: float
    wall_clock_hours: float
    #: Hours of useful work per wall-clock hour.
    goodput: float
    failures: float


@checks.validate(restart_hours=0)
def compute_goodput(
    work_hours: float,
    devices: int,
    *,
    failures_per_device_hour: float = FAILURES_PER_DEVICE_HOUR,
    checkpoint_hours: float = CHECKPOINT_HOURS,
    restart_hours: float = RESTART_HOURS,
    interval_hours: float | None = None,
) -> Goodput:
    """Return the expected duration and failures of a run that takes `work_hours` without failures.

    `interval_hours` is the work between two checkpoints, at most `work_hours`; the default
    minimizes the duration. Raises `ValueError` if failures are so frequent that the run practically
    never ends.
    """
    hours_between_failures = 1 / (devices * failures_per_device_hour)
    if interval_hours is None:
        interval_hours = _compute_best_interval_hours(checkpoint_hours, hours_between_failures)
    interval_hours = min(interval_hours, work_hours)
    segment = interval_hours + checkpoint_hours
    if (restart_hours + segment) / hours_between_failures > 600:
        raise ValueError(
            f"failures_per_device_hour is {failures_per_device_hour:g} on "
            f"{format_count(devices, 'device')}, one every {hours_between_failures:.3g} hours; a "
            f"segment of {segment:.3g} hours never ends; pass fewer failures or devices, or a "
            "shorter interval_hours"
        )
    lost = math.exp(restart_hours / hours_between_failures)
    segment_hours = hours_between_failures * lost * math.expm1(segment / hours_between_failures)
    wall_clock = segment_hours * work_hours / interval_hours
    return Goodput(
        interval_hours=interval_hours,
        wall_clock_hours=wall_clock,
        goodput=work_hours / wall_clock,
        failures=wall_clock / hours_between_failures,
    )


def _compute_best_interval_hours(checkpoint_hours: float, hours_between_failures: float) -> float:
    """Return the hours of work between checkpoints that minimize the expected duration.

    With x = tau / M, the derivative is zero for log(1 - x) + x = -C/M. Bisection finds the
    solution, which is below Young's interval x = sqrt(2 C/M) and approaches it for C << M.
    """
    ratio = checkpoint_hours / hours_between_failures
    low, high = 0.0, min(1.0, math.sqrt(2 * ratio))
    for _ in range(50):
        x = (low + high) / 2
        low, high = (x, high) if math.log1p(-x) + x > -ratio else (low, x)
    return high * hours_between_failures
