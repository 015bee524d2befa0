"""Checks of the bytes in shared memory and on sockets against formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.training_checks.record import Record
from llmsys_suite.config import get_size
from llmsys_suite.measure.samples import PEER, SERVER, SINGLE

SHARED_MEMORY = "ddp shared memory"
#: Broadcasts of the model's buffer per step. `ddp.DDP` broadcasts it before the forward pass and at
#: the end of the step. Torch's DDP and `zero.FSDP` broadcast it before the forward pass only.
BROADCASTS = {PEER: 1, "fsdp": 1, "ddp overlapped": 2, "ddp bucketed": 2, SHARED_MEMORY: 2}
#: Upper bound on the header bytes per tensor and sending rank.
HEADER_BYTES = 1024


def check_shared_memory(record: Record) -> Iterator[Check]:
    """Compare the bytes that `ddp` sums in shared memory with the bytes of the gradients."""
    probe = record.probes.get(SHARED_MEMORY)
    if probe is None or not record.evidence["shares_memory"]:
        return
    gradients = 4 * record.evidence["model_counts"]["parameters"]
    announced = Sources("announced in the arena", "4 bytes per weight")
    for rank, summed in enumerate(probe["shared"]):
        yield announced.check_between(
            f"{SHARED_MEMORY}: bytes summed in shared memory, rank {rank}",
            gradients,
            summed,
            gradients,
            1.001 * gradients + HEADER_BYTES,
        )


def check_sockets(record: Record) -> Iterator[Check]:
    """Compare the bytes that sockets received per step of training with the variant's formula."""
    if not record.evidence["sockets_count"]:
        return
    # A ring forwards each tensor once per other rank.
    tensors = record.evidence["model_counts"]["tensors"]
    header_bytes = HEADER_BYTES * tensors * max(1, record.config.world - 1)
    # The cosines and sines of rotary positions are the model's only buffer.
    size = get_size(record.config.size)
    buffer_bytes = 4 * record.config.context * (size.d_model // size.num_heads)
    kernel = Sources("the kernel's sockets", "the variant's formula")
    reported = []
    for row in record.train.rows:
        received = _compute_received_bytes(record, row["variant"])
        reported.append((received, row.get("wire_bytes", math.nan), row["variant"]))
        low, high = _compute_expected_bytes(record, row["variant"])
        high += BROADCASTS.get(row["variant"], 0) * buffer_bytes
        if not record.config.warmup:
            # In its first step, zero's FSDP exchanges more bytes to verify the optimizer.
            high += record.plan.gradient_bytes
        yield kernel.check_between(
            f"{row['variant']}: bytes received per step of training",
            high,
            received,
            0.99 * low - 64,
            1.01 * high + header_bytes,
        )
    summary = Sources("summary", "the samples")
    yield summary.check_all_equal("reported bytes received per step", reported, 1e-9)


def _compute_received_bytes(record: Record, variant: str) -> float:
    """Return the mean bytes per measured step of the rank that received the most."""
    by_rank = [
        [s["received"] for s in steps if not s["warmup"]]
        for (name, _), steps in record.steps.items()
        if name == variant
    ]
    return max(statistics.mean(counts) for counts in by_rank if counts)


def _compute_expected_bytes(record: Record, variant: str) -> tuple[float, float]:
    """Return the minimum and maximum bytes per step of the rank that receives the most.

    In a reduce-scatter or an all-gather over n ranks, each rank receives (n - 1) / n of the data,
    and in an all-reduce twice as much.
    """
    counts, world = record.evidence["model_counts"], record.config.world
    whole = 4.0 * counts["parameters"]
    once = (world - 1) / world * whole
    blocks = (world - 1) / world * 4 * counts["block_parameters"]
    if variant == SINGLE:
        return 0.0, 0.0
    if variant == SERVER:
        # The rank of the server receives the gradients of all other ranks.
        return (world - 1) * whole, (world - 1) * whole
    if variant == SHARED_MEMORY:
        return 0.0, 0.0 if record.evidence["shares_memory"] else 2 * whole
    if variant == "fsdp":
        # Parameters are received in the forward pass. Those of all blocks but the last are freed
        # and are also received in the backward pass. Gradients are received once.
        layers = get_size(record.config.size).num_layers
        return 2 * once + (layers - 1) / layers * blocks, 3 * once
    if variant == "torch FSDP2":
        # The blocks' parameters are also received in the backward pass. Gradients are received
        # once, or twice if gloo implements their reduce-scatter as an all-reduce.
        return 2 * once + blocks, 3 * once + blocks
    return 2 * once, 2 * once
