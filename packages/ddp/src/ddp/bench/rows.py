"""From the timings of one workload to rows: ratios, the sweep, the prediction, and the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from ddp.bench.designs import Design, Timing
from ddp.overhead import fit, optimal_bucket_bytes, overhead_seconds

Row = dict[str, float | int | str]
PEERS = ("none", "torch", "torch tuned")


@dataclass(frozen=True)
class Link:
    """Bytes of an array that an all-reduce by itself sums in a second, and its seconds a call."""

    bandwidth: float
    latency: float

    def best_mb(self, model_bytes: int) -> float:
        """The bucket size that the overhead model predicts from these alone."""
        size = optimal_bucket_bytes(model_bytes, self.bandwidth, self.latency)
        return float(f"{size / 2**20:.3g}")


@dataclass(frozen=True)
class Measured:
    """One workload: `timings[turn, design]` holds the slowest rank's `Timing`."""

    workload: str
    model_bytes: int
    link: Link
    cores_per_rank: float
    designs: Sequence[Design]
    timings: np.ndarray

    def seconds(self, design: str, field: str = "step") -> np.ndarray:
        """One field of one design, a number a turn."""
        place = [d.name for d in self.designs].index(design)
        column: np.ndarray = self.timings[:, place, Timing._fields.index(field)]
        return column

    @cached_property
    def names(self) -> set[str]:
        """The designs that took part."""
        return {design.name for design in self.designs}

    @cached_property
    def rows(self) -> list[Row]:
        """All rows of this workload."""
        rows = [self._step_row(design) for design in self.designs]
        swept = [design for design in self.designs if design.name[0].isdigit()]
        if len(swept) >= 3:
            rows += self._sweep_rows(swept)
        if "none" in self.names:
            rows.append(self._bound_row())
        return [{"case": row.pop("case"), "workload": self.workload, **row} for row in rows]

    def _step_row(self, design: Design) -> Row:
        own, last = self.seconds(design.name), design.meter.last if design.meter else None
        after = self.seconds(design.name, "after_backward")
        row: Row = {
            "case": "step",
            "design": design.name,
            "step_ms": _ms(own),
            "cpu_ms": _ms(self.seconds(design.name, "cpu")),
            "after_backward_ms": _ms(after),
            "calls": last.calls if last else "-",
            "gradient_bytes": last.gradient_bytes if last else "-",
            "extra_bytes": last.extra_bytes if last else "-",
            "communication_share": "-",
            "exposed_ratio_to_flat": "-",
        }
        if "none" in self.names:
            row["communication_share"] = 1 - float(median(self.seconds("none") / own))
        if "flat" in self.names and last:
            row["exposed_ratio_to_flat"] = median(after / self.seconds("flat", "after_backward"))
        for peer in PEERS:
            ratios = own / self.seconds(peer) if peer in self.names else None
            for percent in (50, 10, 90):
                key = f"ratio_to_{peer.replace(' ', '_')}_p{percent}"
                row[key] = float(np.percentile(ratios, percent)) if ratios is not None else "-"
        tuned = self.seconds(PEERS[-1], "cpu") if PEERS[-1] in self.names else None
        row["cpu_ratio_to_torch_tuned"] = (
            float(median(self.seconds(design.name, "cpu") / tuned)) if tuned is not None else "-"
        )
        return row

    def _sweep_rows(self, swept: Sequence[Design]) -> list[Row]:
        """The overhead model beside the sweep: predicted from the link alone, and fitted to it."""
        counts = [design.meter.last.calls for design in swept if design.meter]
        exposed = [median(self.seconds(design.name, "after_backward")) for design in swept]
        try:
            fitted = fit(self.model_bytes, counts, exposed)
        except ValueError:
            fitted = None
        best = min(swept, key=lambda design: float(median(self.seconds(design.name))))
        bandwidth, latency = self.link.bandwidth, self.link.latency
        rows: list[Row] = [
            {
                "case": "sweep",
                "design": design.name,
                "num_buckets": count,
                "step_ms": _ms(self.seconds(design.name)),
                "after_backward_ms": 1e3 * measured,
                "model_ms": 1e3 * overhead_seconds(self.model_bytes, bandwidth, latency, count),
                "fitted_ms": 1e3 * fitted.seconds(count) if fitted else "-",
                "ratio_to_best_p50": median(self.seconds(design.name) / self.seconds(best.name)),
            }
            for design, count, measured in zip(swept, counts, exposed, strict=True)
        ]
        rows.append(
            {
                "case": "prediction",
                "bandwidth_gbps": bandwidth / 1e9,
                "latency_ms": 1e3 * latency,
                "predicted_mb": self.link.best_mb(self.model_bytes),
                "fitted_mb": fitted.bucket_bytes / 2**20 if fitted else "-",
                "best_design": best.name,
            }
        )
        return rows

    def _bound_row(self) -> Row:
        """Two bounds on the step of any design that sends every gradient whole.

        Overlap: gradients leave from the first instant of the backward pass on, at the rate of the
        idle link. Processor: the least processor time that any such design took, on this rank's
        share of the cores.
        """
        step, backward = median(self.seconds("none")), median(self.seconds("none", "backward"))
        wire = self.model_bytes / self.link.bandwidth
        exposed = max(0.0, wire - backward)
        whole = [d.name for d in self.designs if d.name in PEERS[1:] or self._sends_all(d)]
        busy = [median(self.seconds(name, "cpu")) / self.cores_per_rank for name in whole]
        row: Row = {
            "case": "bound",
            "forward_and_optimizer_ms": 1e3 * (step - backward),
            "backward_ms": 1e3 * backward,
            "wire_ms": 1e3 * wire,
            "overlap_bound_ms": 1e3 * (step + exposed),
            "cpu_bound_ms": 1e3 * min(busy, default=0.0),
            "bound_exposed_ratio_to_flat": "-",
        }
        bound = max(step + exposed, min(busy, default=0.0))
        if "flat" in self.names:
            flat = median(self.seconds("flat", "after_backward"))
            row["bound_exposed_ratio_to_flat"] = exposed / flat
        for peer in PEERS:
            key = f"bound_ratio_to_{peer.replace(' ', '_')}"
            row[key] = bound / median(self.seconds(peer)) if peer in self.names else "-"
        return row

    def _sends_all(self, design: Design) -> bool:
        return design.meter is not None and design.meter.last.gradient_bytes == self.model_bytes


def _ms(seconds: np.ndarray) -> float:
    return 1e3 * float(median(seconds))
