"""Published training runs (published.toml), and how far predictions of their steps are off.

A prediction is the step's seconds times one factor, the geometric mean of measured over modeled
seconds, and its interval comes from the same ratios: each run is predicted from all others, and the
errors of those predictions are what an interval is made of.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown
from accounting.model.records import MLA, Experts
from accounting.model.shape import Shape
from accounting.plan import Plan
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
    """A prediction with the range in which 80 % of the published runs came out."""

    low: float
    middle: float
    high: float

    def scaled(self, factor: float) -> "Interval":
        """The same of something proportional."""
        return Interval(low=self.low * factor, middle=self.middle * factor, high=self.high * factor)

    def rate(self, work: float) -> "Interval":
        """That much work a second, where this is of seconds."""
        low, middle, high = (work / of for of in (self.high, self.middle, self.low))
        return Interval(low=low, middle=middle, high=high)

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.middle:.4g}"
        return f"{self.middle:.4g} ({self.low:.4g} to {self.high:.4g})"


@lru_cache
def ratios() -> tuple[float, ...]:
    """Measured over modeled seconds, run by run."""
    return tuple(run.seconds / float(modeled(run).total) for run in RUNS)


def modeled(run: Published) -> Breakdown:
    """What the model of a step says of a run, before any learning."""
    work = Workload(batch=run.batch, seq=run.seq, precision=run.precision, flash=run.flash)
    return step_time(run.model, run.plan, work, hardware=run.hardware, overlap=run.overlap)


def learned(seen: tuple[float, ...]) -> Interval:
    """The factor that the ratios of some runs give, and its interval.

    Each of them is predicted from the others; the interval is as wide as the error that 80 % of
    these predictions, and the next, stay below (a conformal quantile: ceil(.8 (n + 1)) of n).
    """
    logs = [math.log(ratio) for ratio in seen]
    errors = sorted(abs(log - (sum(logs) - log) / (len(logs) - 1)) for log in logs)
    width = errors[min(len(errors), math.ceil(0.8 * (len(errors) + 1))) - 1]
    middle = sum(logs) / len(logs)
    return Interval(
        low=math.exp(middle - width), middle=math.exp(middle), high=math.exp(middle + width)
    )


@checks.entry()
def predicted(seconds: float) -> Interval:
    """Modeled seconds as a prediction: times the factor learned from all published runs."""
    return learned(ratios()).scaled(seconds)


def left_out() -> list[tuple[Published, Interval]]:
    """Each run with what all others predict of it."""
    found = ratios()
    return [
        (run, learned(found[:i] + found[i + 1 :]).scaled(run.seconds / found[i]))
        for i, run in enumerate(RUNS)
    ]
