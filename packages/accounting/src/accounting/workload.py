"""The workload of a training step: batch, precision, and fused kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from accounting import checks
from accounting.model.transformer import Transformer
from accounting.plan import Plan
from accounting.precision import Precision, recipe


@checks.named
@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of training; functions accept these fields as keywords, or a `Workload`."""

    #: Number of sequences per step over all devices; 0 selects only the model states.
    batch: int
    seq: int
    precision: str | Precision = "fp32"
    #: True if attention saves its log-sum-exp and never writes its scores to memory.
    flash: bool = True
    dropout: bool = False
    #: True if a norm is one kernel; otherwise its normalized values are saved too.
    fused_norm: bool = True
    #: True if one kernel computes the gated product and saves gate, up and the product.
    fused_gate: bool = False
    #: True for `torch.compile`, whose partitioner saves the same tensors as all fused kernels
    #: together, and whose autocast makes one copy of the input of several matrices.
    compiled: bool = False
    #: True for the eager modules of Hugging Face transformers with sdpa, which save more tensors.
    #: An RMSNorm and the activation `gelu_new` are several operators. A layer with a window of at
    #: most `seq` keys also saves a mask and repeated keys and values. MLA copies its keys and its
    #: output.
    transformers: bool = False

    def __post_init__(self) -> None:
        checks.convert_fields(self, batch=0)
        recipe(self.precision)
        if self.compiled and self.transformers:
            raise ValueError(
                "expected transformers=False with compiled=True, got True; torch.compile fuses the "
                "operators of its modules"
            )
        for name in ("fused_norm", "fused_gate"):
            object.__setattr__(self, name, getattr(self, name) or self.compiled)

    def has_fused_norm(self, model: Transformer) -> bool:
        """Return True if a norm of the model is one operator."""
        return self.fused_norm and not (self.transformers and model.norm == "rmsnorm")

    def head(self, model: Transformer) -> dict[str, Any]:
        """Return the arguments of `head_activations` for a model."""
        return {
            "fused_norm": self.has_fused_norm(model),
            "compiled": self.compiled,
            "precision": self.kind,
        }

    @property
    def kind(self) -> Precision:
        """Return the recipe of dtypes."""
        return recipe(self.precision)

    def tokens(self, plan: Plan) -> int:
        """Return the tokens of a micro-batch on one device."""
        return self.batch // (plan.data * plan.microbatches) * (self.seq // plan.context)


#: Names of the fields that functions take as keywords.
WORKLOAD = tuple(Workload.__dataclass_fields__)


def workload(work: Workload | None, run: Mapping[str, Any], **defaults: Any) -> Workload:
    """Return a `Workload` built from keywords, or `work` with these fields replaced."""
    if work is None:
        return Workload(**defaults | dict(run))
    checks.instance("work", work, Workload, "a Workload or None")
    return replace(work, **run)
