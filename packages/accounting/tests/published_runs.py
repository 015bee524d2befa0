"""Published training runs (published.toml), and the errors of predictions for these runs.

A prediction is the modeled time of a step times a factor: the geometric mean of measured over
modeled time in a group of runs, with equal weight per source. A source is one publication. The
interval is measured on held-out sources: the runs of each source are predicted with the factor of
all other sources, and without constants that were fitted to this source.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from accounting.breakdown import Breakdown
from accounting.hardware import Hardware, find
from accounting.model.records import RECORDS
from accounting.model.transformer import Transformer
from accounting.plan import Plan
from accounting.time import intervals
from accounting.time.efficiency import MATMUL_FRACTION
from accounting.time.intervals import Group, Interval, classify_run
from accounting.time.step import step_time
from accounting.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One published run: model, plan, hardware, and the measured time of a step."""

    model: Transformer
    plan: Plan
    hardware: str
    batch: int
    seq: int
    seconds: float
    source: str
    precision: str = "megatron_bf16"
    flash: bool = False
    #: The argument `overlap` of `step_time`, for publications that report more overlap.
    overlap: Mapping[str, float] = field(default_factory=dict)
    #: Factor on the device's `attention_fraction` for this run.
    attention: float = 1.0
    #: Information that the publication omits, and the assumption made for it.
    assumed: str = ""
    #: True if constants of the time model were fitted to this source.
    fitted: bool = False

    @cached_property
    def group(self) -> Group:
        """The properties on which the error of the prediction may depend."""
        return classify_run(self.model, self.hardware, self.precision)


#: Columns of a table that are sizes of the model.
_SIZES = ("layers", "d_model", "heads")


def _read_runs() -> tuple[PublishedRun, ...]:
    """Return the runs of published.toml."""
    text = Path(__file__).with_name("published.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)

    def merge_inherited(entry: dict[str, Any]) -> dict[str, Any]:
        inherited = merge_inherited(tables["like"][entry["like"]]) if "like" in entry else {}
        merged_fields = {
            k: inherited[k] | entry[k] for k in ("model", "plan") if k in inherited and k in entry
        }
        return inherited | entry | merged_fields

    runs = [_build_run(merge_inherited(entry), tables["size"]) for entry in tables["run"]]
    for table in tables["table"]:
        for entries in table["rows"]:
            row = dict(zip(table["columns"], entries, strict=True))
            runs.append(_build_run(merge_inherited(table) | row, tables["size"]))
    return tuple(runs)


def _build_run(entry: dict[str, Any], sizes: dict[str, Any]) -> PublishedRun:
    """Return the run of an entry, whose keys are fields of the model, the plan and the run."""
    model = entry.get("model", {}) | {key: entry[key] for key in _SIZES if key in entry}
    if "size" in entry:
        model |= sizes[entry["size"]]
        if "MPT" in entry["size"]:
            model["positions"] = entry["seq"]
    for key in RECORDS.keys() & model.keys():
        fields = dict(model[key])
        if "layers" in fields:
            fields["layers"] = tuple(range(*fields["layers"]))
        model[key] = RECORDS[key](**fields)
    plan = _build_plan(entry)
    derived = {
        "model": Transformer(name=entry.get("size") or entry["name"], **model),
        "plan": plan,
        "seconds": _compute_measured_seconds(entry, model, plan.devices),
    }
    known = {key: entry[key] for key in PublishedRun.__dataclass_fields__ if key in entry}
    return PublishedRun(**known | derived)


def _build_plan(entry: dict[str, Any]) -> Plan:
    """Return the plan of an entry.

    `virtual_stages` above 1 imply the interleaved schedule. `microbatch` implies `data`,
    `microbatches` and `sequence_parallel`.
    """
    plan = entry["plan"] | {key: entry[key] for key in Plan.__dataclass_fields__ if key in entry}
    if plan.get("virtual_stages", 1) > 1:
        plan["schedule"] = "interleaved"
    if "microbatch" in entry:
        degrees = (plan.get(axis, 1) for axis in ("tensor", "pipeline", "context"))
        plan["data"] = entry["devices"] // math.prod(degrees)
        plan["microbatches"] = entry["batch"] // plan["data"] // entry["microbatch"]
        plan["sequence_parallel"] = plan.get("tensor", 1) > 1
    return Plan(**plan)


def _compute_measured_seconds(entry: dict[str, Any], model: dict[str, Any], devices: int) -> float:
    """Return the measured time of a step from `seconds`, `rate`, or `work` and `teraflops`."""
    numbers = model | {"batch": entry["batch"], "seq": entry["seq"]}

    def evaluate(formula: Any) -> float:
        # `eval` is safe because the formula comes from a file of this package.
        return float(eval(formula, {}, numbers) if isinstance(formula, str) else formula)

    if "work" in entry:
        return evaluate(entry["work"]) / (entry["teraflops"] * 1e12 * devices)
    if "rate" in entry:
        return float(entry["batch"] * entry["seq"] / (devices * entry["rate"]))
    return evaluate(entry["seconds"])


RUNS: tuple[PublishedRun, ...] = _read_runs()


#: The half-width of an interval is this quantile of the errors of known sources.
ERROR_QUANTILE = 0.8
#: A group with fewer sources than this uses the widest known interval.
LEAST_SOURCES = 3


@dataclass(frozen=True, kw_only=True)
class LogRatio:
    """Log ratios of measured to modeled seconds of a run, with and without fitted constants."""

    source: str
    group: Group
    #: The log ratio with all constants of the time model.
    with_all_constants: float
    #: The log ratio without constants that were fitted to the source of the run.
    held_out: float


@lru_cache
def list_ratios(group: Group | None = None) -> tuple[LogRatio, ...]:
    """Return the log ratios of the runs of a group, or of all runs for None."""
    listed = (index for index, run in enumerate(RUNS) if group in (None, run.group))
    return tuple(map(_compute_ratio, listed))


@cache
def _compute_ratio(index: int) -> LogRatio:
    run = RUNS[index]
    with_all_constants = math.log(run.seconds / float(compute_modeled_seconds(run).total))
    held_out = with_all_constants
    if run.fitted:
        held_out = math.log(run.seconds / float(compute_modeled_seconds(run, held_out=True).total))
    return LogRatio(
        source=run.source.split(",")[0],
        group=run.group,
        with_all_constants=with_all_constants,
        held_out=held_out,
    )


def compute_modeled_seconds(run: PublishedRun, *, held_out: bool = False) -> Breakdown:
    """Return the modeled seconds of a step of a run, without the factor of `learn_factor`.

    With `held_out`, constants that were fitted to the source of the run are replaced by the default
    overlap, a power factor of 1, and for fp8 the matmul fraction of bf16.
    """
    work = Workload(batch=run.batch, seq=run.seq, precision=run.precision, flash=run.flash)
    device = find(run.hardware)
    device = replace(device, attention_fraction=device.attention_fraction * run.attention)
    if not held_out or not run.fitted:
        return step_time(run.model, run.plan, work, hardware=device, overlap=run.overlap)
    return step_time(run.model, run.plan, work, hardware=_remove_fitted_constants(device))


def _remove_fitted_constants(device: Hardware) -> Hardware:
    """Return a device without power factor, whose fp8 products reach the fraction of bf16."""
    peaks = dict(device.peaks)
    if "fp8" in peaks:
        # Scaling the fp8 peak by this ratio replaces the fp8 fraction with the bf16 fraction.
        ratio = MATMUL_FRACTION["bf16"] / MATMUL_FRACTION["fp8"]
        peaks["fp8"] = round(peaks["fp8"] * ratio)
    return replace(device, power_factor=1.0, peaks=peaks)


def compute_mean_log_ratio(log_ratios: Iterable[LogRatio]) -> float:
    """Return the mean log ratio with all constants, in which each source has equal weight."""
    by_source: dict[str, list[float]] = {}
    for ratio in log_ratios:
        by_source.setdefault(ratio.source, []).append(ratio.with_all_constants)
    return fmean(fmean(logs) for logs in by_source.values())


def compute_errors_by_source(log_ratios: Sequence[LogRatio]) -> dict[str, list[float]]:
    """Return, by source, the absolute log errors of its runs predicted from all other sources.

    A single source is predicted with a factor of 1.
    """
    errors: dict[str, list[float]] = {}
    for source in dict.fromkeys(ratio.source for ratio in log_ratios):
        others = [ratio for ratio in log_ratios if ratio.source != source]
        middle = compute_mean_log_ratio(others) if others else 0.0
        errors[source] = [abs(r.held_out - middle) for r in log_ratios if r.source == source]
    return errors


def compute_half_width(errors: Mapping[str, Sequence[float]]) -> float:
    """Return the quantile `ERROR_QUANTILE` of the errors of all runs, equally weighted by source.

    `errors` are logarithms of factors, by source. Raises `ValueError` if there are none.
    """
    weighted = sorted((e, 1 / len(listed)) for listed in errors.values() for e in listed)
    goal, reached = ERROR_QUANTILE * len(errors), 0.0
    for error, weight in weighted:
        reached += weight
        if reached >= goal - 1e-9:
            return error
    raise ValueError("expected errors of at least one source, got none")


def choose_interval_group(
    runs: Iterable[LogRatio | PublishedRun],
    group: Group | None,
    least_sources: int = LEAST_SOURCES,
) -> Group | None:
    """Return the group if it has enough sources for a separate interval, and None otherwise."""
    sources = {run.source.split(",")[0] for run in runs if run.group == group}
    return group if len(sources) >= least_sources else None


def learn_factor(
    log_ratios: Sequence[LogRatio], group: Group | None, least_sources: int = LEAST_SOURCES
) -> Interval:
    """Return the factor that multiplies modeled seconds, and its interval, for a group.

    Both are computed from the runs of the group if they come from at least `least_sources` sources.
    Otherwise the factor is computed from all runs, and the interval from the source with the widest
    errors.
    """
    if choose_interval_group(log_ratios, group, least_sources):
        of_group = [ratio for ratio in log_ratios if ratio.group == group]
        middle = compute_mean_log_ratio(of_group)
        half = compute_half_width(compute_errors_by_source(of_group))
    else:
        middle = compute_mean_log_ratio(log_ratios)
        half = max(
            compute_half_width({s: e}) for s, e in compute_errors_by_source(log_ratios).items()
        )
    low, high = math.exp(middle - half), math.exp(middle + half)
    return Interval(low=low, middle=math.exp(middle), high=high)


@lru_cache
def count_covered_runs(group: Group | None = None) -> tuple[int, int, int]:
    """Return the numbers of covered runs, of all runs, and of sources in a group.

    A run is covered if the interval that is learned for the group from all other sources contains
    its ratio. For None, the runs of all groups that have too few sources are compared with the
    widest interval of the other sources.
    """
    log_ratios = list_ratios(group)
    members = [ratio for ratio in log_ratios if group == choose_interval_group(RUNS, ratio.group)]
    sources = {ratio.source for ratio in members}
    covered = 0
    for source in sources:
        others = [ratio for ratio in log_ratios if ratio.source != source]
        interval = learn_factor(others, group, LEAST_SOURCES - 1)
        held_out = [math.exp(ratio.held_out) for ratio in members if ratio.source == source]
        covered += sum(interval.low <= factor <= interval.high for factor in held_out)
    return covered, len(members), len(sources)


#: The groups with a separate interval, and None for all other groups.
GROUPS: tuple[Group | None, ...] = (
    ("A100", "bf16", "dense"),
    ("H100", "bf16", "dense"),
    ("H100", "fp8", "dense"),
    ("H100", "bf16", "MoE"),
    None,
)


def measure_intervals() -> dict[str, dict[str, float]]:
    """Return the rows of time/intervals.toml: a factor and its coverage per group."""
    rows = {}
    for group in GROUPS:
        factor = learn_factor(list_ratios(), group)
        row = {name: float(f"{getattr(factor, name):.6g}") for name in ("low", "middle", "high")}
        counts = zip(("covered", "runs", "sources"), count_covered_runs(group), strict=True)
        rows[", ".join(group) if group else "widest"] = row | dict(counts)
    return rows


def write_intervals() -> None:
    """Write the measured rows into time/intervals.toml, below the comment of the file."""
    path = Path(intervals.__file__).with_suffix(".toml")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    for name, row in measure_intervals().items():
        lines += ["", f'["{name}"]', *(f"{key} = {value}" for key, value in row.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_intervals()
