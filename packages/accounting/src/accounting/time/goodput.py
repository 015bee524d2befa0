"""What failures cost a long run: lost work, restarts, checkpoints, and how often to write one.

Failures come at random, at a constant rate a device-hour, so the whole machine of N devices sees
one every M = 1 / (N rate) hours. To finish tau hours of work and the checkpoint after it takes on
average

    M e^(R/M) (e^((tau + C)/M) - 1)

hours (Daly 2006, "A higher order estimate of the optimum checkpoint interval"), for a checkpoint of
C hours and a restart of R hours that may fail as well. Young's interval is the tau that makes it
least for C << M.
"""

import math
from dataclasses import dataclass

from accounting import checks


@checks.named
@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run on machines that fail."""

    work_hours: float
    """What it would take if nothing ever failed and nothing were saved."""
    devices: int
    failures_per_device_hour: float
    checkpoint_hours: float
    """Time that training stands still for a checkpoint."""
    restart_hours: float
    """From a failure until training goes on from the last checkpoint."""
    usd_per_device_hour: float = 0.0

    def __post_init__(self) -> None:
        free = ("failures_per_device_hour", "restart_hours", "usd_per_device_hour")
        checks.fields(Run, vars(self), **dict.fromkeys(free, 0))

    @property
    def hours_between_failures(self) -> float:
        """M, of the whole machine; infinite if nothing fails."""
        rate = self.devices * self.failures_per_device_hour
        return 1 / rate if rate else math.inf


LLAMA3_405B = Run(
    work_hours=0.9 * 54 * 24,
    devices=16_384,
    failures_per_device_hour=419 / (16_384 * 54 * 24),
    checkpoint_hours=10 / 3600,
    restart_hours=5 / 60,
    usd_per_device_hour=2.0,
)
"""54 days of Llama 3 405B: 419 unexpected interruptions, over 90 % of the time effective
(Grattafiori et al. 2024, section 3.3.4). The seconds for a checkpoint, the minutes for a restart
and the price are assumptions."""

OPT_175B = Run(
    work_hours=8 * 175e9 * 300e9 / (992 * 147e12) / 3600,
    devices=992,
    failures_per_device_hour=105 / (992 * 56 * 24),
    checkpoint_hours=2 / 60,
    restart_hours=5.7,
    usd_per_device_hour=1.5,
)
"""OPT-175B: 300B tokens with full recomputation (8ND) at 147 TFLOP/s on 992 A100s, at least 35
manual and some 70 automatic restarts over two months, the 56 days of the public logbook (Zhang et
al. 2022, section 2.5). The hours lost to a restart, mostly to finding the bad host by hand, are
what makes these figures agree."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What to expect of a run."""

    interval_hours: float
    """Work between two checkpoints."""
    wall_clock_hours: float
    goodput: float
    """Useful hours a wall-clock hour."""
    failures: float
    usd: float

    def explain(self) -> str:
        """The figures, one line each."""
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
    """Young's interval: sqrt(2 C M) hours of work between checkpoints."""
    return math.sqrt(2 * checkpoint_hours * hours_between_failures)


@checks.entry()
def best_interval_hours(checkpoint_hours: float, hours_between_failures: float) -> float:
    """The exact minimum, which Young's interval approaches for C << M.

    Setting the derivative to zero gives (1 - x) e^x = e^(-C/M) for x = tau / M, solved by
    bisection.
    """
    target = math.exp(-checkpoint_hours / hours_between_failures)
    low, high = 0.0, 1.0
    for _ in range(100):
        x = (low + high) / 2
        low, high = (x, high) if (1 - x) * math.exp(x) > target else (low, x)
    return low * hours_between_failures


@checks.entry()
def goodput(run: Run, *, interval_hours: float | None = None) -> Goodput:
    """Expected wall clock, failures and cost of a run that saves every `interval_hours` of work."""
    checks.instance("run", run, Run, "a Run")
    mean = run.hours_between_failures
    if interval_hours is None:
        interval_hours = mean
        if math.isfinite(mean):
            interval_hours = best_interval_hours(run.checkpoint_hours, mean)
    if not math.isinf(interval_hours):
        checks.number("interval_hours", interval_hours)
    interval_hours = min(interval_hours, run.work_hours)
    segment = interval_hours + run.checkpoint_hours
    if math.isinf(mean):
        each = segment
    else:
        if (run.restart_hours + segment) / mean > 600:
            raise ValueError(
                f"failures_per_device_hour is {run.failures_per_device_hour:g} on {run.devices:,} "
                f"devices, one every {mean:.3g} hours; a segment of {segment:.3g} hours never ends"
            )
        each = mean * math.exp(run.restart_hours / mean) * math.expm1(segment / mean)
    wall_clock = each * run.work_hours / interval_hours
    return Goodput(
        interval_hours=interval_hours,
        wall_clock_hours=wall_clock,
        goodput=run.work_hours / wall_clock,
        failures=wall_clock / mean,
        usd=wall_clock * run.devices * run.usd_per_device_hour,
    )
