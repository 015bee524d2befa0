"""Published training runs (published.toml), and the prediction errors on them.

A prediction is the modeled time of a step times one factor, the geometric mean of measured over
modeled time of the runs. Its interval is measured on sources that are held out whole: the runs of
one publication are predicted with the factor of all other publications, and without the constants
that were fitted to this publication alone.
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
    """One published run: model, plan, hardware, and the measured time of a step."""

    model: Shape
    plan: Plan
    hardware: str
    batch: int
    seq: int
    seconds: float
    source: str
    precision: str = "megatron_bf16"
    flash: bool = False
    #: Overlap of communication and compute, if the publication reports more than the usual.
    overlap: Mapping[str, float] = field(default_factory=lambda: OVERLAP)
    #: Information that the publication omits, and the assumption made for it.
    assumed: str = ""
    #: True if nothing was learned from this run.
    held_out: bool = False


def _read() -> tuple[Published, ...]:
    """Return the runs of published.toml."""
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
        # The formula of the publication is part of this package's own file.
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
    """A prediction with its range, and the evidence for the width of the range."""

    low: float
    middle: float
    high: float
    #: The published runs on which the range was measured, and how many of them it contained.
    basis: str = ""

    def scaled(self, factor: float) -> "Interval":
        """Return the interval of a quantity that is proportional to this one."""
        low, middle, high = (bound * factor for bound in (self.low, self.middle, self.high))
        return replace(self, low=low, middle=middle, high=high)

    def rate(self, work: float) -> "Interval":
        """Return the interval of `work` per second, if this interval is in seconds."""
        low, middle, high = (work / of for of in (self.high, self.middle, self.low))
        return replace(self, low=low, middle=middle, high=high)

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.middle:.4g}"
        return f"{self.middle:.4g} ({self.low:.4g} to {self.high:.4g})"


#: Device, precision, and `dense` or `MoE`.
Group = tuple[str, str, str]
#: Fraction of sources that an interval should contain.
COVERAGE_GOAL = 0.8


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Logarithms of measured over modeled seconds of a run."""

    source: str
    group: Group
    usual: float
    #: Modeled without the constants that were fitted to this run's source alone.
    held_out: float
    learned_from: bool


@lru_cache
def ratios() -> tuple[Ratio, ...]:
    """Return the ratios of all runs."""
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
    """Return the properties on which errors may depend: device, precision, and dense or MoE."""
    return hardware, precision, "MoE" if model.experts else "dense"


def modeled(run: Published, *, held_out: bool = False) -> Breakdown:
    """Return the modeled step of a run, before any learning.

    `held_out` omits constants that were fitted to the source of the run: its overlap, the power
    factor of its device, and the matmul efficiency of its dtype.
    """
    work = Workload(batch=run.batch, seq=run.seq, precision=run.precision, flash=run.flash)
    device = find(run.hardware)
    if not held_out:
        return step_time(run.model, run.plan, work, hardware=device, overlap=run.overlap)
    return step_time(run.model, run.plan, work, hardware=_without_constants(device))


def _without_constants(device: Hardware) -> Hardware:
    """Return a device without fitted constants; no other source has an H100, an H800 or fp8."""
    peaks = dict(device.peaks)
    if "fp8" in peaks:
        # This replaces the known fp8 fraction by the usual bf16 fraction.
        usual = MATMUL_SHARE["bf16"] / MATMUL_SHARE["fp8"]
        peaks["fp8"] = Peak(published=round(peaks["fp8"].flops * usual))
    return replace(device, name=f"{device.name}, held out", peaks=peaks)


def mean_log_ratio(seen: Iterable[Ratio]) -> float:
    """Return the logarithm of the learned factor: the mean over the runs that are learned from."""
    logs = [ratio.usual for ratio in seen if ratio.learned_from]
    return sum(logs) / len(logs)


def errors_by_source(seen: Sequence[Ratio]) -> dict[str, float]:
    """Return the largest error per source when it is predicted from all other sources."""
    errors: dict[str, float] = {}
    for ratio in seen:
        middle = mean_log_ratio(other for other in seen if other.source != ratio.source)
        error = abs(ratio.held_out - middle)
        errors[ratio.source] = max(error, errors.get(ratio.source, 0.0))
    return errors


def half_width(known: Iterable[float]) -> float | None:
    """Return the error that `COVERAGE_GOAL` of the sources stay below, or None for too few sources.

    This is the conformal quantile, ceil(.8 (n + 1)) of n errors, which needs four sources.
    """
    listed = sorted(known)
    index = math.ceil(COVERAGE_GOAL * (len(listed) + 1))
    return listed[index - 1] if index <= len(listed) else None


def learned(seen: Sequence[Ratio], group: Group | None) -> Interval:
    """Return the factor learned from runs, with the interval for a group.

    The width is that of the group if it has at least four sources, and otherwise the largest error
    of all sources.
    """
    by_source = errors_by_source(seen)
    sources = {r.source for r in seen if r.group == group}
    half = half_width(by_source[source] for source in sources)
    half = max(by_source.values()) if half is None else half
    middle = mean_log_ratio(seen)
    low, high = math.exp(middle - half), math.exp(middle + half)
    return Interval(low=low, middle=math.exp(middle), high=high)


@lru_cache
def coverage() -> tuple[int, int, int, int]:
    """Return how many sources and runs are covered when their source is held out.

    The four numbers are covered sources, all sources, covered runs and all runs. A source is
    covered if the interval learned from the other sources contains all of its runs.
    """
    seen = ratios()
    covered: dict[str, list[bool]] = {}
    for ratio in seen:
        others = tuple(other for other in seen if other.source != ratio.source)
        interval = learned(others, ratio.group)
        inside = interval.low <= math.exp(ratio.held_out) <= interval.high
        covered.setdefault(ratio.source, []).append(inside)
    runs = [inside for of_source in covered.values() for inside in of_source]
    return sum(map(all, covered.values())), len(covered), sum(runs), len(runs)


@checks.entry()
def predicted(
    seconds: float,
    *,
    model: Shape | None = None,
    hardware: str | Hardware | None = None,
    precision: str | Precision | None = None,
) -> Interval:
    """Return the predicted seconds: modeled seconds times the factor learned from published runs.

    The interval is that of runs with this device, this precision, and dense or MoE. Without these
    arguments, or with too few sources, it is the widest known interval. `basis` says which interval
    was used and how many held-out sources such intervals contained.
    """
    group = None
    if model is not None and hardware is not None and precision is not None:
        group = group_of(model, find(hardware).name, recipe(precision).name)
    return replace(learned(ratios(), group).scaled(seconds), basis=_basis(group))


def _basis(group: Group | None) -> str:
    sources, all_sources, runs, all_runs = coverage()
    coverage_text = (
        f"{sources} of {all_sources} published sources ({runs} of {all_runs} runs) lie in the "
        "interval of the others when held out whole"
    )
    if group is None:
        return f"{coverage_text}; without device, precision and model this is the widest known"
    seen = ratios()
    by_source, group_ratios = errors_by_source(seen), [r for r in seen if r.group == group]
    where = f"{group[0]} in {group[1]}, {group[2]}"
    names = {r.source for r in group_ratios}
    if not names:
        return (
            f"{coverage_text}; nothing is published here for {where}, so this is the widest known"
        )
    widest = math.exp(max(by_source[name] for name in names)) - 1
    known = f"{_count(names, 'source')} ({_count(group_ratios, 'run')}) within {widest:.0%}"
    if half_width(by_source[name] for name in names) is None:
        return f"{coverage_text}; for {where}: {known}, too few, so this is the widest known"
    return f"{coverage_text}; for {where}: {known}"


def _count(items: Sized, name: str) -> str:
    return f"{len(items)} {name}" if len(items) == 1 else f"{len(items)} {name}s"


def left_out() -> list[tuple[Published, float]]:
    """Return each run that was learned from, with the seconds predicted from all other runs."""
    seen = [ratio for ratio in ratios() if ratio.learned_from]
    return [
        (
            run,
            run.seconds * math.exp(mean_log_ratio(r for r in seen if r is not ratio) - ratio.usual),
        )
        for run, ratio in zip(RUNS, seen, strict=True)
    ]
