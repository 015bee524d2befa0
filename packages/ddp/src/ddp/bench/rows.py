"""Rows of results from the timings of one workload: steps, sweep, prediction and bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from statistics import median

import numpy as np

from ddp.bench.designs import Design, Timing
from ddp.metering.overhead import optimal_bucket_bytes, overhead_seconds

Row = dict[str, float | int | str]

#: Reference designs. Ratios are step times divided by the step time of a reference design.
REFERENCES = ("none", "torch", "torch tuned")


@dataclass(frozen=True)
class Link:
    """Bandwidth and latency of an all-reduce that runs alone."""

    #: Bytes of the reduced array per second.
    bandwidth: float
    #: Seconds per call.
    latency: float

    def predict_best_mb(self, model_bytes: int) -> float:
        """Return the best bucket size that the overhead model predicts, in units of 2**20 bytes."""
        size = optimal_bucket_bytes(model_bytes, self.bandwidth, self.latency)
        return float(f"{size / 2**20:.3g}")


@dataclass(frozen=True)
class WorkloadTimings:
    """The timings of one workload."""

    workload: str
    model_bytes: int
    link: Link
    designs: Sequence[Design]
    #: `timings[round, design]` is the `Timing` of the slowest rank.
    timings: np.ndarray
    #: Seconds of the slowest rank in the steps before the measured ones, by round and design.
    first_steps: np.ndarray

    def get_seconds(self, design: str, field: str = "step") -> np.ndarray:
        """Return a field of `Timing` for one design, one number per round."""
        index = [d.name for d in self.designs].index(design)
        column: np.ndarray = self.timings[:, index, Timing._fields.index(field)]
        return column

    @cached_property
    def names(self) -> set[str]:
        """The names of the designs."""
        return {design.name for design in self.designs}

    @cached_property
    def rows(self) -> list[Row]:
        """All rows of this workload."""
        rows = [self._build_step_row(design) for design in self.designs]
        swept = [design for design in self.designs if design.name[0].isdigit()]
        if len(swept) >= 3:
            rows += self._build_sweep_rows(swept)
        if "none" in self.names:
            rows.append(self._build_bound_row())
        return [{"case": row.pop("case"), "workload": self.workload, **row} for row in rows]

    def _build_step_row(self, design: Design) -> Row:
        step = self.get_seconds(design.name)
        cpu = self.get_seconds(design.name, "cpu")
        after = self.get_seconds(design.name, "after_backward")
        last = design.meter.last if design.meter else None
        slowest_first = float(self.first_steps[:, self.designs.index(design)].max())
        row: Row = {
            "case": "step",
            "design": design.name,
            "step_ms": _compute_median_ms(step),
            "cpu_ms": _compute_median_ms(cpu),
            # The slowest first step exceeds the median later step by this time.
            "first_steps_excess_ms": 1e3 * slowest_first - _compute_median_ms(step),
            "after_backward_ms": _compute_median_ms(after),
            "calls": last.calls if last else "-",
            "gradient_bytes": last.gradient_bytes if last else "-",
            "extra_bytes": last.extra_bytes if last else "-",
            "communication_share": "-",
        }
        if "none" in self.names:
            row["communication_share"] = 1 - float(median(self.get_seconds("none") / step))
        row |= self._compute_ratios(step)
        row["cpu_ratio_to_torch_tuned"] = "-"
        if "torch tuned" in self.names:
            ratio = median(cpu / self.get_seconds("torch tuned", "cpu"))
            row["cpu_ratio_to_torch_tuned"] = float(ratio)
        return row

    def _compute_ratios(self, step: np.ndarray) -> Row:
        """Return percentiles of the ratio of step times to each reference design."""
        row: Row = {}
        for reference in REFERENCES:
            ratios = step / self.get_seconds(reference) if reference in self.names else None
            for percent in (50, 10, 90):
                key = f"ratio_to_{reference.replace(' ', '_')}_p{percent}"
                row[key] = float(np.percentile(ratios, percent)) if ratios is not None else "-"
        return row

    def _build_sweep_rows(self, swept: Sequence[Design]) -> list[Row]:
        """Return rows that compare bucket sizes with the prediction of the overhead model."""
        bucket_counts = [design.meter.last.calls for design in swept if design.meter]
        exposed = [median(self.get_seconds(design.name, "after_backward")) for design in swept]
        best = min(swept, key=lambda design: float(median(self.get_seconds(design.name))))
        bandwidth = self.link.bandwidth
        latency = self.link.latency
        rows: list[Row] = []
        for design, num_buckets, measured in zip(swept, bucket_counts, exposed, strict=True):
            predicted = overhead_seconds(self.model_bytes, bandwidth, latency, num_buckets)
            step = self.get_seconds(design.name)
            rows.append(
                {
                    "case": "sweep",
                    "design": design.name,
                    "num_buckets": num_buckets,
                    "step_ms": _compute_median_ms(step),
                    "after_backward_ms": 1e3 * measured,
                    "model_ms": 1e3 * predicted,
                    "ratio_to_best_p50": median(step / self.get_seconds(best.name)),
                }
            )
        rows.append(
            {
                "case": "prediction",
                "bandwidth_gbps": bandwidth / 1e9,
                "latency_ms": 1e3 * latency,
                "predicted_mb": self.link.predict_best_mb(self.model_bytes),
                "best_design": best.name,
            }
        )
        return rows

    def _build_bound_row(self) -> Row:
        """Return a lower bound on the step time of designs that send every gradient uncompressed.

        Gradients are sent from the start of the backward pass at the bandwidth of an idle link.
        """
        step = median(self.get_seconds("none"))
        backward = median(self.get_seconds("none", "backward"))
        wire = self.model_bytes / self.link.bandwidth
        bound = step + max(0.0, wire - backward)
        row: Row = {
            "case": "bound",
            "forward_and_optimizer_ms": 1e3 * (step - backward),
            "backward_ms": 1e3 * backward,
            "wire_ms": 1e3 * wire,
            "overlap_bound_ms": 1e3 * bound,
        }
        for reference in REFERENCES:
            key = f"bound_ratio_to_{reference.replace(' ', '_')}"
            is_measured = reference in self.names
            row[key] = bound / median(self.get_seconds(reference)) if is_measured else "-"
        return row


def compute_median_rows(runs: Sequence[list[Row]]) -> list[Row]:
    """Return the rows of several runs as one list, in which each number is the median.

    Rows of steps also contain the lowest and the highest ratio of a run to torch's tuned DDP.
    Raises `ValueError` if the runs have different rows.
    """
    if len(runs) == 1:
        return runs[0]
    result: list[Row] = []
    for rows in zip_longest(*runs, fillvalue={}):
        keys = [tuple(row.get(key) for key in ("case", "workload", "design")) for row in rows]
        if len(set(keys)) > 1:
            raise ValueError(
                f"expected the same designs in every run, got {keys}; name them with designs="
            )
        row: Row = {}
        for column in rows[0]:
            cells = [run_row[column] for run_row in rows]
            numbers = [cell for cell in cells if not isinstance(cell, str)]
            row[column] = median(numbers) if len(numbers) == len(cells) else cells[0]
        if row["case"] == "step":
            ratios = [run_row["ratio_to_torch_tuned_p50"] for run_row in rows]
            row["ratio_to_torch_tuned_lowest_run"] = min(ratios)
            row["ratio_to_torch_tuned_highest_run"] = max(ratios)
        result.append(row)
    return result


def _compute_median_ms(seconds: np.ndarray) -> float:
    return 1e3 * float(median(seconds))
