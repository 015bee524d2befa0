"""Checks of bytes: the plan compared with those in shared memory and on sockets."""

from __future__ import annotations

from collections.abc import Iterator

from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.training_checks.record import Record

#: Upper bound on the header bytes per tensor and sending rank.
HEAD_BYTES = 1024


def shared_memory(record: Record) -> Iterator[Check]:
    """Compare the bytes that were summed in shared memory with the plan."""
    announced = Sources("announced in the arena", "plan")
    for name, probe in record.probes.items():
        pairs = zip(probe["planned_shared"], probe["shared"], strict=True)
        for rank, (planned, summed) in enumerate(pairs):
            if planned:
                yield announced.between(
                    f"{name}: bytes summed in shared memory, rank {rank}",
                    planned,
                    summed,
                    planned,
                    1.001 * planned + HEAD_BYTES,
                )


def sockets(record: Record) -> Iterator[Check]:
    """Compare the bytes that sockets received in the probed step and in training with the plan."""
    if not record.evidence["sockets_count"]:
        return
    heads = _heads(record)
    kernel = Sources("the kernel's sockets", "plan")
    for name, probe in record.probes.items():
        for rank, received in enumerate(probe["received"]):
            low, high = probe["planned_wire"][rank]
            yield kernel.between(
                f"{name}: bytes received, rank {rank}",
                low,
                received,
                0.99 * low - 64,
                1.01 * high + heads,
            )
    for row in record.train.rows:
        yield _received_in_training(record, row["variant"], row["wire_bytes"])


def _received_in_training(record: Record, name: str, received: float) -> Check:
    config = record.config
    heads = _heads(record)
    probe = record.probes[name]
    low = high = max(probe["received"])
    if not config.warmup:
        # In its first step zero's FSDP verifies the optimizer, which exchanges more bytes.
        high = max(most for _, most in probe["planned_wire"]) + record.plan.gradient_bytes
    return Sources("the kernel's sockets", "the probe's").between(
        f"{name}: bytes received per step of training",
        high,
        received,
        0.98 * low - heads,
        1.02 * high + heads,
    )


def _heads(record: Record) -> int:
    """Return the most header bytes of a ring, which passes each tensor on once per other rank."""
    tensors: int = record.evidence["model_counts"]["tensors"]
    return HEAD_BYTES * tensors * max(1, record.config.world - 1)
