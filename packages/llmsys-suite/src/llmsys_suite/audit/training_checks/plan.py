"""Check the predictions of `plan` against counts of the reference model and formulas."""

from __future__ import annotations

from collections.abc import Iterator

from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.tolerances import BAND, PEAK_BYTES
from llmsys_suite.audit.training_checks.record import Record
from llmsys_suite.measure.samples import SINGLE

#: Range of a step's peak memory relative to weights, moments and the tensors that autograd saves.
#: Measured: 0.97 to 1.33.
SAVED_BYTES = (0.9, 1.5)


def check_counts(record: Record) -> Iterator[Check]:
    """Compare the numbers of parameters and of FLOPs with counts of the reference."""
    plan, counts = record.plan, record.evidence["model_counts"]
    weights = Sources("plan", "the reference's weights")
    yield weights.check_equal("parameters", counts["parameters"], plan.parameters)
    full = Sources("plan", "torch's counter on the reference")
    yield full.check_equal(
        "FLOPs per step, full attention", counts["flops_full"], plan.step_flops_full
    )
    causal = Sources("plan", "torch's counter, masked products of attention left out")
    yield causal.check_equal(
        "FLOPs per step, causal", counts["flops_causal"], plan.step_flops_causal, 1e-9
    )


def check_memory(record: Record) -> Iterator[Check]:
    """Check the predicted and the measured peak of a step, and the bytes of weights and moments."""
    plan, parts = record.plan, record.plan.training_bytes_by_part
    step = Sources("plan", "live bytes of a real step")
    yield step.check_equal(
        "peak memory of a step",
        plan.measured_peak_bytes,
        plan.training_peak_bytes,
        PEAK_BYTES[record.config.device],
    )
    # The peak is at the end of the forward pass or in the backward pass.
    saved = 12 * record.evidence["model_counts"]["parameters"] + record.evidence["saved_bytes"]
    hooks = Sources("live bytes of a real step", "autograd's hooks, weights and moments")
    yield hooks.check_between(
        "measured peak memory of a step",
        saved,
        plan.measured_peak_bytes,
        SAVED_BYTES[0] * saved,
        SAVED_BYTES[1] * saved,
    )
    total = Sources("parts of the plan", "its peak")
    yield total.check_equal(
        "parts of the peak", plan.training_peak_bytes, sum(parts.values()), 1e-9
    )
    stored = record.train.final_weights[SINGLE]["stored"][0]
    tensors = Sources("plan", "tensors of one process")
    yield tensors.check_equal("weight bytes", stored["parameters"], parts["weights"])
    yield tensors.check_equal("moment bytes", stored["moments"], parts["optimizer"])


def check_communication(record: Record) -> Iterator[Check]:
    """Compare the bytes of gradients and of an all-reduce with their formulas."""
    plan, world = record.plan, record.config.world
    gradients = 4 * record.evidence["model_counts"]["parameters"]
    weights = Sources("plan", "4 bytes per weight")
    yield weights.check_equal("gradient bytes", gradients, plan.gradient_bytes)
    wire = 2 * (world - 1) / world * gradients
    whole_byte = 1 / max(1.0, wire)
    ring = Sources("plan", "2 (n - 1) / n of the gradients")
    yield ring.check_equal(
        "DDP's wire bytes per rank", wire, plan.ddp_wire_bytes_per_rank, whole_byte
    )


def check_rates(record: Record) -> Iterator[Check]:
    """Compare the rate of a matrix product with the rate that the audit measured."""
    rate = record.evidence["product_flops_per_second"]
    clock = Sources("plan", "the wall clock, without waiting for a core")
    yield clock.check_factor("rate of a product", rate, record.plan.peak, BAND)
