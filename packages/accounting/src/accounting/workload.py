"""What a step is asked to do: how many tokens, in which numbers, with which kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from accounting import checks
from accounting.plan import Plan
from accounting.precision import Precision, recipe


@checks.named
@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of training; what is asked of it by keyword may be asked with one of these."""

    batch: int
    """Sequences of the whole step, over all devices; 0 asks for the model's states alone."""
    seq: int
    precision: str | Precision = "fp32"
    flash: bool = True
    """Attention keeps a log-sum-exp, and never writes its scores."""
    dropout: bool = False
    fused_norm: bool = True
    """A norm that is not one kernel (torch's RMSNorm on the CPU) keeps its normalized values."""
    fused_projections: bool = False
    """Query, key and value are one matrix, gate and up another: one cast under autocast, not
    several."""
    fused_gate: bool = False
    """A kernel makes the gated product in one go, and keeps gate, up and the product."""
    compiled: bool = False
    """By `torch.compile`, whose partitioner keeps what fused kernels of all these would."""
    loss_chunks: int = 1
    """Pieces in which the head and the cross-entropy run, each once more in the backward."""

    def __post_init__(self) -> None:
        checks.fields(Workload, vars(self), batch=0)
        recipe(self.precision)
        for name in ("fused_norm", "fused_projections", "fused_gate"):
            object.__setattr__(self, name, getattr(self, name) or self.compiled)

    @property
    def head(self) -> dict[str, Any]:
        """How the end of the model runs: arguments of `head_activations`."""
        names = ("fused_norm", "compiled", "loss_chunks")
        return {name: getattr(self, name) for name in names} | {"precision": self.kind}

    @property
    def kind(self) -> Precision:
        """The recipe of dtypes."""
        return recipe(self.precision)

    def sequences(self, plan: Plan) -> int:
        """Sequences of a micro-batch on one device."""
        return self.batch // (plan.data * plan.microbatches)

    def tokens(self, plan: Plan) -> int:
        """Tokens of a micro-batch on one device."""
        return self.sequences(plan) * (self.seq // plan.context)


WORKLOAD = tuple(Workload.__dataclass_fields__)
"""What may be asked for by keyword."""


def workload(work: Workload | None, run: Mapping[str, Any], **defaults: Any) -> Workload:
    """What was asked for, as a record or field by field."""
    if work is None:
        return Workload(**defaults | dict(run))
    checks.instance("work", work, Workload, "a Workload or None")
    return replace(work, **run)
