"""Published training runs (published.toml), and how far predictions of their steps are off.

A prediction is the step's seconds times one factor, the geometric mean of measured over modeled
seconds of the runs. Its interval comes from sources that are held out whole: the runs of one
publication are predicted with the factor of all others, and without the constants that were set on
this publication alone.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown
from accounting.hardware import Hardware, Peak, find
from accounting.model.records import MLA, Experts
from accounting.model.shape import Shape
from accounting.plan import Plan
from accounting.precision import Precision, recipe
from accounting.time.efficiency import MATMUL_SHARE
from accounting.time.step import OVERLAP, step_time
from accounting.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Published:
    """One run: what was trained how, and how long a step took."""

    model: Shape
    plan: Plan
    hardware: str
    batch: int
    seq: int
    seconds: float
    source: str
    precision: str = "megatron_bf16"
    flash: bool = False
    overlap: Mapping[str, float] = field(default_factory=lambda: OVERLAP)
    """What of the traffic hides, where the publication says more than the usual."""
    assumed: str = ""
    """What the publication leaves out, and what stands here for it."""
    held_out: bool = False
    """Nothing was learned from it."""


def _read() -> tuple[Published, ...]:
    """The runs of published.toml."""
    text = Path(__file__).with_name("published.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)

    def whole(entry: dict[str, Any]) -> dict[str, Any]:
        above = whole(tables["like"][entry["like"]]) if "like" in entry else {}
        both = {k: above[k] | entry[k] for k in ("model", "plan") if k in above and k in entry}
        return above | entry | both

    return tuple(_published(whole(entry)) for entry in tables["run"])


def _published(entry: dict[str, Any]) -> Published:
    known = {key: entry[key] for key in Published.__dataclass_fields__ if key in entry}
    model, plan = dict(entry["model"]), Plan(**entry["plan"])
    numbers = model | {"batch": entry["batch"], "seq": entry["seq"]}

    def value(formula: Any) -> float:
        # The publication's own count, in the file of this package.
        return float(eval(formula, {}, numbers) if isinstance(formula, str) else formula)

    if "work" in entry:
        seconds = value(entry["work"]) / (entry["teraflops"] * 1e12 * plan.devices)
    else:
        seconds = value(entry["seconds"])
    if "experts" in entry:
        layers = tuple(range(*entry["experts"]["layers"]))
        model["experts"] = Experts(**entry["experts"] | {"layers": layers})
    model["mla"] = MLA(**entry["mla"]) if "mla" in entry else None
    overlap = {**OVERLAP, **entry.get("overlap", {})}
    shape = Shape(name=entry["name"], **model)
    about = {"model": shape, "plan": plan, "seconds": seconds, "overlap": overlap}
    return Published(**known | about)


_ALL = _read()
RUNS: tuple[Published, ...] = tuple(run for run in _ALL if not run.held_out)
HELD_OUT: tuple[Published, ...] = tuple(run for run in _ALL if run.held_out)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A prediction with its range, and what is known of how often such a range holds."""

    low: float
    middle: float
    high: float
    basis: str = ""
    """The published runs that the range was measured on, and how many of them it held."""

    def scaled(self, factor: float) -> "Interval":
        """The same of something proportional."""
        low, middle, high = (bound * factor for bound in (self.low, self.middle, self.high))
        return replace(self, low=low, middle=middle, high=high)

    def rate(self, work: float) -> "Interval":
        """That much work a second, where this is of seconds."""
        low, middle, high = (work / of for of in (self.high, self.middle, self.low))
        return replace(self, low=low, middle=middle, high=high)

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.middle:.4g}"
        return f"{self.middle:.4g} ({self.low:.4g} to {self.high:.4g})"


Group = tuple[str, str, str]
"""Device, precision, and `dense` or `MoE`."""
COVERAGE_GOAL = 0.8
"""The share of sources that an interval is meant to hold."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Measured over modeled seconds of a run, as logarithms."""

    source: str
    group: Group
    usual: float
    held_out: float
    """Modeled without the constants that were set on this run's source alone."""
    learned_from: bool


@lru_cache
def ratios() -> tuple[Ratio, ...]:
    """The ratios of all runs."""
    return tuple(
        Ratio(
            source=run.source.split(",")[0],
            group=group_of(run.model, run.hardware, run.precision),
            usual=math.log(run.seconds / float(modeled(run).total)),
            held_out=math.log(run.seconds / float(modeled(run, held_out=True).total)),
            learned_from=not run.held_out,
        )
        for run in _ALL
    )


def group_of(model: Shape, hardware: str, precision: str) -> Group:
    """What a step's errors may depend on: device, precision, and whether there are experts."""
    return hardware, precision, "MoE" if model.experts else "dense"


def modeled(run: Published, *, held_out: bool = False) -> Breakdown:
    """What the model of a step says of a run, before any learning.

    `held_out` leaves out what was set on the run's source alone: what of its traffic hides, the
    share of its device's power limit, and the share of the peak that is known for its dtype.
    """
    work = Workload(batch=run.batch, seq=run.seq, precision=run.precision, flash=run.flash)
    device = find(run.hardware)
    if not held_out:
        return step_time(run.model, run.plan, work, hardware=device, overlap=run.overlap)
    return step_time(run.model, run.plan, work, hardware=_without_constants(device))


def _without_constants(device: Hardware) -> Hardware:
    """The device as if no run on it had been published: no other source is on an H100 or an H800,
    or in fp8."""
    peaks = dict(device.peaks)
    if "fp8" in peaks:
        # Dividing by the known share and multiplying by the usual one gives the usual one.
        usual = MATMUL_SHARE["bf16"] / MATMUL_SHARE["fp8"]
        peaks["fp8"] = Peak(published=round(peaks["fp8"].flops * usual))
    return replace(device, name=f"{device.name}, held out", peaks=peaks)


def mean_log_ratio(seen: Iterable[Ratio]) -> float:
    """The logarithm of the factor that some runs give: the mean of those that are learned from."""
    logs = [ratio.usual for ratio in seen if ratio.learned_from]
    return sum(logs) / len(logs)


def errors_by_source(seen: Sequence[Ratio]) -> dict[str, float]:
    """The largest error of each source, predicted from all others."""
    found: dict[str, float] = {}
    for ratio in seen:
        middle = mean_log_ratio(other for other in seen if other.source != ratio.source)
        off = abs(ratio.held_out - middle)
        found[ratio.source] = max(off, found.get(ratio.source, 0.0))
    return found


def half_width(known: Iterable[float]) -> float | None:
    """Return the error that `COVERAGE_GOAL` of sources stay below, and None for too few of them.

    This is the conformal quantile, ceil(.8 (n + 1)) of n errors, which needs four sources.
    """
    listed = sorted(known)
    index = math.ceil(COVERAGE_GOAL * (len(listed) + 1))
    return listed[index - 1] if index <= len(listed) else None


def learned(seen: Sequence[Ratio], group: Group | None) -> Interval:
    """The factor of some runs with the interval for a group: its own where four sources or more
    are in it, and the widest error of all sources otherwise."""
    by_source = errors_by_source(seen)
    own = {r.source for r in seen if r.group == group}
    half = half_width(by_source[source] for source in own)
    half = max(by_source.values()) if half is None else half
    middle = mean_log_ratio(seen)
    low, high = math.exp(middle - half), math.exp(middle + half)
    return Interval(low=low, middle=math.exp(middle), high=high)


@lru_cache
def coverage() -> tuple[int, int, int, int]:
    """Sources of which all runs lie in the interval that all other sources give, and all sources;
    the same of runs."""
    seen = ratios()
    held: dict[str, list[bool]] = {}
    for ratio in seen:
        others = tuple(other for other in seen if other.source != ratio.source)
        interval = learned(others, ratio.group)
        inside = interval.low <= math.exp(ratio.held_out) <= interval.high
        held.setdefault(ratio.source, []).append(inside)
    runs = [inside for of_source in held.values() for inside in of_source]
    return sum(map(all, held.values())), len(held), sum(runs), len(runs)


@checks.entry()
def predicted(
    seconds: float,
    *,
    model: Shape | None = None,
    hardware: str | Hardware | None = None,
    precision: str | Precision | None = None,
) -> Interval:
    """Modeled seconds as a prediction: times the factor learned from published runs.

    The interval is that of the runs with this device, this precision, and experts or none; without
    these arguments, or where too few sources are known, it is the widest known. Its `basis` says
    which, and how often such intervals held sources that were left out.
    """
    group = None
    if model is not None and hardware is not None and precision is not None:
        group = group_of(model, find(hardware).name, recipe(precision).name)
    return replace(learned(ratios(), group).scaled(seconds), basis=_basis(group))


def _basis(group: Group | None) -> str:
    sources, all_sources, runs, all_runs = coverage()
    held = (
        f"{sources} of {all_sources} published sources ({runs} of {all_runs} runs) lie in the "
        "interval of the others when held out whole"
    )
    if group is None:
        return f"{held}; device, precision and model were not given, so this is the widest known"
    seen = ratios()
    by_source, own = errors_by_source(seen), [r for r in seen if r.group == group]
    where = f"{group[0]} in {group[1]}, {group[2]}"
    names = {r.source for r in own}
    if not names:
        return f"{held}; nothing is published here for {where}, so this is the widest known"
    widest = math.exp(max(by_source[name] for name in names)) - 1
    known = f"{_count(names, 'source')} ({_count(own, 'run')}) within {widest:.0%}"
    if half_width(by_source[name] for name in names) is None:
        return f"{held}; for {where}: {known}, too few, so this is the widest known"
    return f"{held}; for {where}: {known}"


def _count(found: Sized, name: str) -> str:
    return f"{len(found)} {name}" if len(found) == 1 else f"{len(found)} {name}s"


def left_out() -> list[tuple[Published, float]]:
    """Each run that was learned from, with the seconds that all others predict of it."""
    seen = [ratio for ratio in ratios() if ratio.learned_from]
    return [
        (
            run,
            run.seconds * math.exp(mean_log_ratio(r for r in seen if r is not ratio) - ratio.usual),
        )
        for run, ratio in zip(RUNS, seen, strict=True)
    ]
