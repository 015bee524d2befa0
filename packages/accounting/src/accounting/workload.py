"""The work of a training step: its batch, its precision, and its kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from accounting import checks
from accounting.plan import Plan
from accounting.precision import Precision, get_recipe


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one training step.

    Functions accept a `Workload`, or its fields as keyword arguments.
    """

    #: Number of sequences per step over all devices; 0 selects only the model states.
    batch: int
    #: Tokens per sequence; required if `batch` is not 0.
    seq: int = 0
    #: A recipe, or its name in `PRECISIONS`.
    precision: str | Precision = "fp32"
    #: True if attention is one kernel, which saves its log-sum-exp instead of its scores.
    flash: bool = True
    dropout: bool = False
    #: True if each norm is one kernel; otherwise its normalized values are saved too.
    fused_norm: bool = True
    #: True if one kernel computes the gated product and saves gate, up and the product.
    fused_gate: bool = False
    #: True for `torch.compile`, which saves the same tensors as fused norms and gates do. Under
    #: autocast, compiled matrices with the same input share one cast copy of the input.
    compiled: bool = False
    #: True for the eager modules of Hugging Face transformers with sdpa, which save more tensors.
    #: For example, an RMSNorm and activations such as `gelu_new` are several operators. A layer
    #: with a window of at most `seq` keys also saves a mask, and keys and values repeated for each
    #: query head. MLA saves copies of its keys and its output.
    transformers: bool = False

    def __post_init__(self) -> None:
        checks.convert_fields(self, batch=0, seq=0)
        if self.batch and not self.seq:
            raise ValueError(
                f"expected seq >= 1 with batch={self.batch}, got 0; "
                "pass the number of tokens per sequence"
            )
        get_recipe(self.precision)
        if self.compiled and self.transformers:
            raise ValueError(
                "expected transformers=False with compiled=True, got True; torch.compile fuses "
                "these operators, so pass compiled=True alone"
            )

    @property
    def kind(self) -> Precision:
        """The recipe that `precision` names."""
        return get_recipe(self.precision)

    def tokens(self, plan: Plan) -> int:
        """Return the number of tokens of a micro-batch on one device."""
        return self.batch // (plan.data * plan.microbatches) * (self.seq // plan.context)


def build_workload(work: Workload | None, run: Mapping[str, Any], **defaults: Any) -> Workload:
    """Return `work` with the fields in `run` replaced, or a new `Workload` if `work` is None.

    `defaults` apply only to a new `Workload`.
    """
    if work is None:
        return Workload(**defaults | dict(run))
    checks.require_instance("work", work, Workload, "a Workload or None")
    return replace(work, **run)
