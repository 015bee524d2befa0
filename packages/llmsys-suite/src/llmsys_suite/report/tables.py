"""The columns of the report's tables, and the table of predicted and measured values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmsys_suite.measure.samples import PEER
from llmsys_suite.results import Train

MIB = 2**20
Row = dict[str, Any]
Results = dict[str, Any]

#: Titles of the columns of each stage's table, by the keys of its rows.
COLUMNS: dict[str, dict[str, str]] = {
    "links": {"algorithm": "algorithm", "size_bytes": "bytes", "time_us": "time, µs",
        "busbw_gbps": "bus, GB/s", "wire_bytes": "wire bytes", "wrong": "wrong"},
    "attention": {"kernel": "kernel", "forward_backward_ms": "time, ms",
        "ratio_to_sdpa_p50": "of SDPA's", "max_error": "largest error"},
    "train": {"variant": "variant", "step_ms": "step, ms", "ratio_p50": "of DDP's",
        "ratio_p10": "p10", "ratio_p90": "p90", "exposed_ms": "waiting, ms", "mfu": "MFU",
        "final_loss": "loss"},
    "parallel": {"split": "split", "iteration_ms": "iteration, ms", "bubble": "bubble, planned",
        "waiting": "waiting", "loss": "loss", "single_loss": "one process's",
        "trained_loss": "trained"},
    "memory": {"context": "tokens",
        "inference_peak_mib": "inference, MiB",
        "training_peak_mib": "training, MiB", "checkpointed_peak_mib": "checkpointed, MiB",
        "residual_stream_mib": "residual stream, MiB"},
    "scale": {"compute_flops": "FLOPs", "width": "width", "parameters": "parameters",
        "tokens": "tokens", "steps": "steps", "loss": "held out"},
    "inspect": {"kind": "kind", "layer": "layer", "head": "head", "score": "score",
        "chance": "by chance"},
    "compress": {"method": "method", "size_bytes": "bytes", "smaller": "smaller, x",
        "heldout_loss": "held out", "speedup_p50": "speed, x"},
    "audit": {"name": "check", "source": "source", "actual": "value", "against": "against",
        "low": "minimum", "high": "maximum", "where": "largest difference"},
}  # fmt: skip


def pick(rows: Sequence[Row], columns: dict[str, str]) -> list[Row]:
    """Return the rows with only the keys of `columns`, renamed to the values of `columns`."""
    return [{new: row[old] for old, new in columns.items() if old in row} for row in rows]


def build_plan_rows(results: Results, evidence: Row) -> list[Row]:
    """Return rows of predicted and measured values and their ratio, if neither is missing or 0."""
    plan = results["plan"]
    train = results.get("train")
    rows = train.rows if isinstance(train, Train) else []
    received = [row["wire_bytes"] for row in rows if row["variant"] == PEER and "wire_bytes" in row]
    counts = evidence.get("model_counts", {})
    pairs = [
        ("parameters", plan.parameters, counts.get("parameters")),
        ("GFLOPs per step", plan.step_flops_full / 1e9,
         counts["flops_full"] / 1e9 if counts else None),
        ("peak of a step, MiB", plan.training_peak_bytes / MIB,
         plan.measured_peak_bytes / MIB),
        ("DDP's wire, MiB per rank", plan.ddp_wire_bytes_per_rank / MIB,
         received[0] / MIB if received else None),
    ]  # fmt: skip
    return [
        {"figure": name, "planned": predicted, "measured": measured, "ratio": measured / predicted}
        for name, predicted, measured in pairs
        if measured and predicted
    ]
