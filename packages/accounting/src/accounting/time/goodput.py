"""The cost of failures in a long run: lost work, restarts, and the best checkpoint interval.

Failures are random with a constant rate per device-hour, so a machine of N devices has one every M
= 1 / (N rate) hours. The expected time for tau hours of work and the following checkpoint is

    M e^(R/M) (e^((tau + C)/M) - 1)

hours (Daly 2006, "A higher order estimate of the optimum checkpoint interval"), for a checkpoint of
C hours and a restart of R hours that may fail too. Young's interval is the optimal tau for C << M.
"""

import math
from dataclasses import dataclass

from accounting import checks


@checks.named
@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run on devices that fail at random."""

    #: Duration without failures and checkpoints.
    work_hours: float
    devices: int
    failures_per_device_hour: float
    #: Time for which a checkpoint stops the training.
    checkpoint_hours: float
    #: Time from a failure until training resumes from the last checkpoint.
    restart_hours: float
    usd_per_device_hour: float = 0.0

    def __post_init__(self) -> None:
        free = ("failures_per_device_hour", "restart_hours", "usd_per_device_hour")
        checks.convert_fields(self, **dict.fromkeys(free, 0))

    @property
    def hours_between_failures(self) -> float:
        """Return the mean hours between failures of all devices, or infinity without failures."""
        rate = self.devices * self.failures_per_device_hour
        return 1 / rate if rate else math.inf


#: 54 days of Llama 3 405B: 419 unexpected interruptions, over 90 % effective time (Grattafiori et
#: al. 2024, section 3.3.4). Checkpoint time, restart time and price are assumptions.
LLAMA3_405B = Run(
    work_hours=0.9 * 54 * 24,
    devices=16_384,
    failures_per_device_hour=419 / (16_384 * 54 * 24),
    checkpoint_hours=10 / 3600,
    restart_hours=5 / 60,
    usd_per_device_hour=2.0,
)

#: OPT-175B: 300B tokens with full recomputation (8ND) at 147 TFLOP/s on 992 A100s, at least 35
#: manual and about 70 automatic restarts in the 56 days of the public logbook (Zhang et al. 2022,
#: section 2.5). The restart time, mostly to find the bad host by hand, is fitted to these figures.
OPT_175B = Run(
    work_hours=8 * 175e9 * 300e9 / (992 * 147e12) / 3600,
    devices=992,
    failures_per_device_hour=105 / (992 * 56 * 24),
    checkpoint_hours=2 / 60,
    restart_hours=5.7,
    usd_per_device_hour=1.5,
)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Expected duration, failures and cost of a run."""

    #: Hours of work between two checkpoints.
    interval_hours: float
    wall_clock_hours: float
    #: Hours of useful work per wall-clock hour.
    goodput: float
    failures: float
    usd: float

    def explain(self) -> str:
        """Return the figures, one per line."""
        return (
            f"checkpoint every    {self.interval_hours:.4g} h\n"
            f"expected wall clock {self.wall_clock_hours:.6g} h\n"
            f"expected failures   {self.failures:.4g}\n"
            f"goodput             {self.goodput:.1%}\n"
            f"cost                {self.usd:,.0f} USD"
        )

    __str__ = explain


@checks.entry()
def young_daly_hours(checkpoint_hours: float, hours_between_failures: float) -> float:
    """Return Young's interval: sqrt(2 C M) hours of work between checkpoints."""
    return math.sqrt(2 * checkpoint_hours * hours_between_failures)


@checks.entry()
def best_interval_hours(checkpoint_hours: float, hours_between_failures: float) -> float:
    """Return the hours of work between checkpoints that minimize the expected duration.

    Young's interval approaches this optimum for C << M. The derivative is zero for log(1 - x) + x =
    -C/M with x = tau / M, solved by bisection below x = sqrt(2 C/M), Young's interval.
    """
    ratio = checkpoint_hours / hours_between_failures
    low, high = 0.0, min(1.0, math.sqrt(2 * ratio))
    for _ in range(50):
        x = (low + high) / 2
        low, high = (x, high) if math.log1p(-x) + x > -ratio else (low, x)
    return high * hours_between_failures


@checks.entry()
def goodput(run: Run, *, interval_hours: float | None = None) -> Goodput:
    """Return the expected duration, failures and cost with a checkpoint every `interval_hours`."""
    checks.instance("run", run, Run, "a Run")
    mean = run.hours_between_failures
    if interval_hours is None:
        interval_hours = mean
        if math.isfinite(mean):
            interval_hours = best_interval_hours(run.checkpoint_hours, mean)
    interval_hours = min(interval_hours, run.work_hours)
    segment = interval_hours + run.checkpoint_hours
    if math.isinf(mean):
        segment_hours = segment
    else:
        if (run.restart_hours + segment) / mean > 600:
            raise ValueError(
                f"failures_per_device_hour is {run.failures_per_device_hour:g} on {run.devices:,} "
                f"devices, one every {mean:.3g} hours; a segment of {segment:.3g} hours never ends"
            )
        segment_hours = mean * math.exp(run.restart_hours / mean) * math.expm1(segment / mean)
    wall_clock = segment_hours * run.work_hours / interval_hours
    return Goodput(
        interval_hours=interval_hours,
        wall_clock_hours=wall_clock,
        goodput=run.work_hours / wall_clock,
        failures=wall_clock / mean,
        usd=wall_clock * run.devices * run.usd_per_device_hour,
    )
