"""Tolerances of a run whose products are not computed in float32.

The audit compares the gradients of variants and splits in float32 in any run, because averaging and
sharding do not depend on the dtype of products. The figures that the run itself has measured are
compared with float64 within the tolerances below.
"""

from __future__ import annotations

from llmsys_suite.config import RunConfig

#: Largest deviation of a fault-free run of the mini model on a CPU in bf16, times five: gradients
#: 2e-3, losses 1e-4, losses of later steps 2e-5 sqrt(n), weight changes 1.4e-3 sqrt(n), outputs and
#: gradients of attention 4e-3.
BF16 = {
    "gradient": 1e-2,
    "replayed loss": 5e-4,
    "loss": 1e-4,
    "weight change": 7e-3,
    "attention": 2e-2,
}
#: TF32 has two more bits of precision than bf16.
FACTOR = {"bf16": 1.0, "tf32": 0.25}


def allowed(config: RunConfig, kind: str, in_float32: float) -> float:
    """Return the tolerance of a run's figures, given the one of a run in float32."""
    if config.dtype == "fp32":
        return in_float32
    return max(in_float32, FACTOR[config.dtype] * BF16[kind])
