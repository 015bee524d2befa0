"""What each stage hands on to the others, to the audit and to the report: frozen, and in a folder.

A table's rows stay flat dicts whose keys carry their unit, as every bench of the packages has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from llmsys_suite.config import UsageError
from llmsys_suite.measure.turns import Turns

Row = dict[str, Any]
Rows = list[Row]


@dataclass(frozen=True)
class Skipped:
    """Why there was nothing for a stage to do."""

    skipped: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Every figure that follows from the configuration alone, and how they are derived."""

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
    """And how long a step will take here; rates are in FLOPs a second."""

    variants_fit_together: bool
    peak: float
    yardstick_flops_per_second: float
    layer_yardsticks: float
    step_yardsticks: float
    step_ms: float
    measured_peak_bytes: int


@dataclass(frozen=True)
class Links:
    """The rows of the bench of collectives."""

    rows: Rows


@dataclass(frozen=True)
class Attention:
    """A row a kernel, which took turns at this shape; and why one of them is chosen."""

    shape: list[int]
    rows: Rows
    explain: str
    turns: Turns


@dataclass(frozen=True)
class Train:
    """A row a variant; each one's losses, bytes handed over, and how far its weights ended."""

    rows: Rows
    losses: dict[str, list[float]]
    gradient_bytes: dict[str, float]
    final_weights: dict[str, Any]


@dataclass(frozen=True)
class Learn:
    """Losses of every step, held-out losses of some, and what the model wrote."""

    variant: str
    begun_at: int
    losses: list[float]
    heldout: list[tuple[int, float]]
    tokens: int
    before: dict[str, str]
    after: dict[str, str]


@dataclass(frozen=True)
class Parallel:
    """A row a split."""

    rows: Rows


@dataclass(frozen=True)
class Profile:
    """Steps by size and warm-up, operators by phase, products by shape under a roof."""

    protocol: Rows
    operators: Rows
    products: Rows


@dataclass(frozen=True)
class Precision:
    """Sums, dtypes and times; the last took turns."""

    accumulation: Rows
    autocast_dtypes: dict[str, str]
    timing: Rows
    turns: Turns


@dataclass(frozen=True)
class Memory:
    """Peaks, timelines and owners of each model; what mixed precision holds; a snapshot's file."""

    models: dict[str, Row]
    mixed: Rows
    snapshot: str = ""


@dataclass(frozen=True)
class Scale:
    """Runs, every doubt about their law, and the law through their valleys if there is one."""

    runs: Rows
    doubts: list[str]
    law: dict[str, float] = field(default_factory=dict)
    valleys: Rows = field(default_factory=list)
    extrapolated: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspect:
    """What each layer would say, what each head does, who feeds whom; and a circuit grown."""

    page: str
    patterns: dict[str, list[list[float]]]
    lens: Rows
    heads: Rows
    attribution: Rows
    ablation: Row
    induction: dict[str, float]


@dataclass(frozen=True)
class Compress:
    """A row a method, which took turns."""

    rows: Rows
    turns: Turns


@dataclass(frozen=True)
class Audit:
    """How many checks there are, and those that are red."""

    checks: int
    red: list[str]

    @property
    def passed(self) -> bool:
        """Whether none is."""
        return not self.red


KINDS: dict[str, type] = {
    kind.__name__.lower(): kind
    for kind in (Plan, Links, Attention, Train, Learn, Parallel, Profile, Precision, Memory, Scale,
                 Inspect, Compress, Audit)
}  # fmt: skip


def to_json(result: Any) -> Row:
    """Plain values, for summary.json; none of a stage that hands on nothing."""
    return {} if result is None else asdict(result)


def from_json(stages: Mapping[str, Row]) -> dict[str, Any]:
    """Return the results that `to_json` wrote; raise `UsageError` for those of other versions."""
    found = {}
    for stage, values in stages.items():
        kind: Any = Skipped if "skipped" in values else KINDS.get(stage)
        if kind is None:
            continue
        try:
            kept = {field.name: values[field.name] for field in fields(kind)}
            if "turns" in kept:  # the only dataclass inside another
                kept["turns"] = Turns(**kept["turns"])
            found[stage] = kind(**kept)
        except (KeyError, TypeError) as error:
            raise UsageError(f"stage {stage} is of another version: {error}") from None
    return found
