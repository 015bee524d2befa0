"""Predicted seconds with an interval, whose width was measured on published training runs.

A prediction is the modeled time of a step times a factor. Factor and interval of each group of runs
are in intervals.toml. `tests/published_runs.py` learns them: the factor is the geometric mean of
measured over modeled time, with equal weight per source. The interval is measured on held-out
sources: the runs of each source are predicted from all other sources.
"""

from dataclasses import dataclass, replace

from accounting import checks
from accounting.breakdown import format_count
from accounting.hardware import Hardware, find
from accounting.model.formulas import Table, read_tables
from accounting.model.transformer import Transformer
from accounting.precision import Precision, get_recipe

#: Chip, dtype of the matrix products, and `dense` or `MoE`.
Group = tuple[str, str, str]
#: Learned factors by group, and the `widest` interval for all groups with fewer than three sources.
_FACTORS: Table = read_tables("time/intervals.toml")


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A predicted value with its range, and the evidence for the range."""

    low: float
    middle: float
    high: float
    #: Description of the published runs on which the range was measured, and how many of them the
    #: intervals contained.
    basis: str = ""

    def scale(self, factor: float) -> "Interval":
        """Return the interval of a quantity that is proportional to this one."""
        low, middle, high = (bound * factor for bound in (self.low, self.middle, self.high))
        return replace(self, low=low, middle=middle, high=high)

    def to_rate(self, work: float) -> "Interval":
        """Return the interval of `work` per second, if this interval is in seconds."""
        low, middle, high = (work / duration for duration in (self.high, self.middle, self.low))
        return replace(self, low=low, middle=middle, high=high)

    def __str__(self) -> str:
        return f"{self.middle:.4g} ({self.low:.4g} to {self.high:.4g})"


def classify_run(model: Transformer, hardware: str | Hardware, precision: str | Precision) -> Group:
    """Return the properties on which errors may depend; see `Group`."""
    chip = find(hardware).chip
    return chip, get_recipe(precision).compute, "MoE" if model.experts else "dense"


@checks.validate()
def predict_seconds(
    seconds: float,
    *,
    model: Transformer | None = None,
    hardware: str | Hardware | None = None,
    precision: str | Precision | None = None,
) -> Interval:
    """Return predicted seconds: modeled seconds times the factor learned from published runs.

    The factor and the interval are those of runs with this chip, dtype and kind of model (dense or
    MoE). If one of the three arguments is missing, or fewer than three sources have such runs, the
    factor is that of all runs, and the interval that of the source with the widest errors. `basis`
    of the result names the runs behind the interval, and the number of held-out runs that lie in
    intervals that are computed in the same way.
    """
    where, row = "", _FACTORS["widest"]
    if model is not None and hardware is not None and precision is not None:
        group = classify_run(model, hardware, precision)
        where = f"{group[0]} in {group[1]}, {group[2]}"
        row = _FACTORS.get(", ".join(group), row)
    factor = Interval(low=row["low"], middle=row["middle"], high=row["high"])
    return replace(factor.scale(seconds), basis=_describe_basis(where, row))


def _describe_basis(where: str, row: Table) -> str:
    """Return the evidence for a row of intervals.toml; `where` is empty without a group."""
    text = (
        f"{row['covered']} of {format_count(row['runs'], 'run')} of "
        f"{format_count(row['sources'], 'published source')} lie in the interval of the other "
        "sources when their source is held out whole"
    )
    if not where:
        return f"{text}; without device, precision and model this is the widest known"
    if row is not _FACTORS["widest"]:
        return f"for {where}: {text}"
    return f"{text}; fewer than three published sources for {where}, so this is the widest known"
