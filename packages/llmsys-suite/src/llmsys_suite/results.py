"""Results of the stages as frozen dataclasses, for other stages, the audit and the report.

The rows of a table are flat dicts. The key of a column contains its unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from llmsys_suite.measure.interleaved import Interleaved

Row = dict[str, Any]
Rows = list[Row]


@dataclass(frozen=True)
class Skipped:
    """The reason why a stage did not run."""

    skipped: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Figures that follow from the configuration, and their derivation."""

    parameters: int
    step_flops_full: int
    step_flops_causal: int
    training_peak_bytes: int
    training_bytes_by_part: dict[str, int]
    gradient_bytes: int
    ddp_wire_bytes_per_rank: int
    host_peak_bytes: int
    all_variants_bytes: int
    derivation: str


@dataclass(frozen=True, kw_only=True)
class Plan(Prediction):
    """The prediction of a step, and measurements on this machine."""

    #: True if all variants of `train` fit in memory at once.
    variants_fit_together: bool
    #: Rate of a large matrix product, in FLOPs per second.
    peak: float
    measured_peak_bytes: int


@dataclass(frozen=True)
class Links:
    """Rows of the benchmark of collectives."""

    rows: Rows


@dataclass(frozen=True)
class Attention:
    """One row per kernel, their interleaved times, and the reason for the choice of a kernel."""

    shape: list[int]
    rows: Rows
    explain: str
    interleaved: Interleaved


@dataclass(frozen=True)
class Train:
    """One row per variant, with losses and a comparison of the final weights."""

    rows: Rows
    losses: dict[str, list[float]]
    final_weights: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Learn:
    """Losses of every step, held-out losses after some steps, and generated text."""

    variant: str
    #: Number of steps of the checkpoint that the run continued; 0 without a checkpoint.
    begun_at: int
    #: Rows of the global batch. A continued training keeps the number in its checkpoint.
    rows: int
    #: Learning rate of `train`; the schedule of `learn` is proportional to it.
    learning_rate: float
    #: The step that the audit repeats in float64, or None.
    probed_step: int | None
    losses: list[float]
    #: Number of steps and held-out loss.
    heldout: list[tuple[int, float]]
    #: Number of tokens of all steps.
    tokens: int
    #: The text "prompt", and the text "written" that the trained model generates after it.
    written: dict[str, str]


@dataclass(frozen=True)
class Parallel:
    """One row per split."""

    rows: Rows


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peaks by context, a timeline of live memory, and the largest allocations."""

    rows: int
    peaks: Rows
    #: Phase and live MiB.
    training_timeline: list[tuple[str, float]]
    #: The largest allocations at the peak of training.
    largest: str


@dataclass(frozen=True)
class Scale:
    """Runs, warnings of the fit, and the fitted law, which is empty if the fit failed."""

    runs: Rows
    warnings: list[str]
    law: dict[str, float] = field(default_factory=dict)
    extrapolated: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspect:
    """Rows of the logit lens, and the best head of each kind."""

    lens: Rows
    heads: Rows


@dataclass(frozen=True)
class Compress:
    """One row per method, and the interleaved times of the methods."""

    rows: Rows
    interleaved: Interleaved


@dataclass(frozen=True)
class Audit:
    """The number of checks, and the failed checks as texts."""

    checks: int
    red: list[str]

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.red


_KINDS = (Plan, Links, Attention, Train, Learn, Parallel, Memory, Scale, Inspect, Compress, Audit)
#: Dataclass of the result of each stage.
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in _KINDS}


def from_json(stages: Mapping[str, Row]) -> dict[str, Any]:
    """Return the results of the stages that the run folder stores."""
    loaded = {}
    for stage, values in stages.items():
        kind: Any = Skipped if "skipped" in values else KINDS.get(stage)
        if kind is None:
            continue
        arguments = {field.name: values[field.name] for field in fields(kind)}
        if "interleaved" in arguments:  # the only nested dataclass
            arguments["interleaved"] = Interleaved(**arguments["interleaved"])
        loaded[stage] = kind(**arguments)
    return loaded


def format_cell(value: Any) -> str:
    """Return the text of a table cell: a float has three digits, or all before the point."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 999.5 <= abs(value) < 1e15 else f"{value:.3g}"
    return str(value)
