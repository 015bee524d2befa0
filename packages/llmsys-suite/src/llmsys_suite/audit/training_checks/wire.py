"""Checks of bytes: the plan compared with the counts of packages, shared memory and sockets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.training_checks.record import Record
from llmsys_suite.measure.samples import LINK_RATE, LOCAL, WHOLE_STEP

#: Minimum size after entropy coding, as a fraction of four bits per element.
CODED = 0.5
#: Upper bound on the header bytes per tensor and sending rank.
HEAD_BYTES = 1024


def gradients(record: Record) -> Iterator[Check]:
    """Compare the bytes that each package counted at its collectives with the plan."""
    planned = record.plan.gradient_bytes
    counts = dict(record.train.gradient_bytes)
    if LOCAL in counts:
        # DiLoCo sends a tenth of the model every fifth step, with four bits per element.
        most = _fragment(planned) * (record.num_steps // 5) / record.num_steps
        yield Sources("the worker's count", "four bits of 32").between(
            f"{LOCAL}: bytes pushed per step",
            most,
            counts.pop(LOCAL),
            CODED * most,
            1.01 * most + 64,
        )
    if counts:
        # Shards of equal length contain less than one element of padding per tensor and rank.
        padding = 4 * record.evidence["model_counts"]["tensors"] * max(1, record.config.world - 1)
        name = max(counts, key=lambda name: abs(counts[name] - planned))
        yield Sources("each package's count", "plan").between(
            "gradient bytes handed over",
            planned,
            counts[name],
            (1 - 1e-4) * planned,
            planned + padding,
            name,
        )


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
    heads = _heads(record, record.evidence["model_counts"]["tensors"])
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
        if "link_ms" in row:
            yield _received_in_training(record, row["variant"], row["wire_bytes"])


def slow_link(record: Record) -> Iterator[Check]:
    """Recompute the time over a slow link, and the fraction of it in which a rank computes."""
    wall = defaultdict[tuple[str, str], float](float)
    for s in record.samples:
        if not s["warmup"]:
            wall[s["variant"], s["phase"]] += s["seconds"]
    fractions = []
    times = []
    for row in record.train.rows:
        if "link_ms" in row:
            name, link_s = row["variant"], row["wire_bytes"] / (LINK_RATE / 8)
            communication = wall[name, "communication"] / wall[name, WHOLE_STEP]
            computing = row["step_ms"] / 1e3 * (1 - communication)
            fractions.append((computing / (computing + link_s), row["link_computing_share"], name))
            times.append((1e3 * link_s, row["link_ms"], name))
    if times:
        quotient = Sources("summary", "bytes counted, over the rate")
        yield quotient.all_equal("computing over a slow link", fractions, 1e-6)
        yield quotient.all_equal("time on a slow link", times, 1e-6)


def _received_in_training(record: Record, name: str, received: float) -> Check:
    config = record.config
    heads = _heads(record, 1 if name == LOCAL else record.evidence["model_counts"]["tensors"])
    probe = record.probes[name]
    low = high = max(probe["received"])
    if not config.warmup:
        # In its first step zero's FSDP verifies the optimizer, which exchanges more bytes.
        high = max(most for _, most in probe["planned_wire"]) + record.plan.gradient_bytes
    if name == LOCAL:
        # A pull follows every fifth step; a push to a server may arrive after the step.
        fragment = _fragment(record.plan.gradient_bytes)
        pulls = (record.num_steps - 1) // 5 - max(0, config.warmup - 1) // 5
        low = CODED * fragment * pulls / config.steps
        high = fragment * (config.steps // 5 + 1) / config.steps * max(1, config.world - 1)
        high += (not config.warmup) * record.plan.gradient_bytes
    source = "four bits of 32" if name == LOCAL else "the probe's"
    return Sources("the kernel's sockets", source).between(
        f"{name}: bytes received per step of training",
        high,
        received,
        0.98 * low - heads,
        1.02 * high + heads,
    )


def _fragment(gradient_bytes: int) -> float:
    return gradient_bytes / 10 * (1 / 8 + 1 / 1024)


def _heads(record: Record, tensors: int) -> int:
    """Return the most header bytes of a ring, which passes each tensor on once per other rank."""
    return HEAD_BYTES * tensors * max(1, record.config.world - 1)
