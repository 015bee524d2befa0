"""Checks of the predictions of `plan`: counts of the reference, formulas and measured rates."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.tolerances import BAND, PEAK_BYTES
from llmsys_suite.audit.training_checks.record import Record
from llmsys_suite.measure.samples import SINGLE

#: Range of a step's peak memory relative to weights, moments and the tensors that autograd saves.
#: Measured: 0.97 to 1.33.
SAVED_BYTES = (0.9, 1.5)


def counts(record: Record) -> Iterator[Check]:
    """Compare parameters and FLOPs with torch's counts of the reference."""
    plan, counts = record.plan, record.evidence["model_counts"]
    weights = Sources("plan", "the reference's weights")
    yield weights.equal("parameters", counts["parameters"], plan.parameters)
    full = Sources("plan", "torch's counter on the reference")
    yield full.equal("FLOPs per step, full attention", counts["flops_full"], plan.step_flops_full)
    causal = Sources("plan", "torch's counter, half of attention's products left out")
    yield causal.equal(
        "FLOPs per step, causal", counts["flops_causal"], plan.step_flops_causal, 1e-9
    )


def memory(record: Record) -> Iterator[Check]:
    """Compare predicted bytes with a real step and a real optimizer."""
    plan, parts = record.plan, record.plan.training_bytes_by_part
    step = Sources("plan", "live bytes of a real step")
    yield step.equal(
        "peak memory of a step",
        plan.measured_peak_bytes,
        plan.training_peak_bytes,
        PEAK_BYTES[record.config.device],
    )
    # The peak is at the end of the forward pass or in the backward pass.
    saved = 12 * record.evidence["model_counts"]["parameters"] + record.evidence["saved_bytes"]
    hooks = Sources("live bytes of a real step", "autograd's hooks, weights and moments")
    yield hooks.between(
        "measured peak memory of a step",
        saved,
        plan.measured_peak_bytes,
        SAVED_BYTES[0] * saved,
        SAVED_BYTES[1] * saved,
    )
    total = Sources("parts of the plan", "its peak")
    yield total.equal("parts of the peak", plan.training_peak_bytes, sum(parts.values()), 1e-9)
    stored = record.train.final_weights[SINGLE]["stored"][0]
    tensors = Sources("plan", "tensors of one process")
    yield tensors.equal("weight bytes", stored["parameters"], parts["weights"])
    yield tensors.equal("moment bytes", stored["moments"], parts["optimizer"])


def communication(record: Record) -> Iterator[Check]:
    """Compare the bytes of gradients and of an all-reduce with their formulas."""
    plan, world = record.plan, record.config.world
    gradients = 4 * record.evidence["model_counts"]["parameters"]
    weights = Sources("plan", "4 bytes per weight")
    yield weights.equal("gradient bytes", gradients, plan.gradient_bytes)
    wire = 2 * (world - 1) / world * gradients
    whole_byte = 1 / max(1.0, wire)
    ring = Sources("plan", "2 (n - 1) / n of the gradients")
    yield ring.equal("DDP's wire bytes per rank", wire, plan.ddp_wire_bytes_per_rank, whole_byte)


def rates(record: Record) -> Iterator[Check]:
    """Compare the rate of a matrix product and the time of a step with measurements."""
    plan = record.plan
    yield Sources("plan", "both timed in the audit").within(
        "matrix-product rate over the reference matmul's rate",
        record.evidence["product_over_reference"],
        plan.peak / plan.reference_flops_per_second,
        BAND,
    )
    yield Sources("plan", "the wall clock").within(
        "rate of a product", record.evidence["product_flops_per_second"], plan.peak, BAND
    )
    alone = [s for s in record.steps[SINGLE, 0] if not s["warmup"]]
    yield Sources("plan, from one and three layers", "samples").within(
        "time of one process's step, over one layer's",
        statistics.median(s["core_s"] / s["one_layer_s"] for s in alone),
        plan.step_matmuls / plan.layer_matmuls,
        BAND,
    )
    matmul_s = record.evidence["reference_matmul_flops"] / plan.reference_flops_per_second
    yield Sources("plan", "its reference matmuls over their rate").equal(
        "predicted time of a step", 1e3 * plan.step_matmuls * matmul_s, plan.step_ms, 1e-9
    )
