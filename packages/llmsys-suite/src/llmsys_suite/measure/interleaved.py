"""Interleaved timing of several functions, called contenders.

Every contender runs in every round, so that a slow second affects all contenders. Ratios are taken
within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Interleaved:
    """Seconds by contender and round, and the seconds of all rounds on a second clock."""

    seconds: dict[str, list[float]]
    clocked_s: float

    def compute_median_ms(self, name: str) -> float:
        """Return the median time of the contender `name` over rounds, in milliseconds."""
        return statistics.median(self.seconds[name]) * 1e3

    def compute_ratio(self, peer: str, name: str) -> float:
        """Return the median over rounds of the time of `name` divided by the time of `peer`."""
        pairs = zip(self.seconds[name], self.seconds[peer], strict=True)
        return statistics.median(a / b for a, b in pairs)


def time_interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> Interleaved:
    """Return the times of every contender in `rounds` rounds, after one untimed round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()
    synchronize(device)
    start_ns = time.time_ns()
    for _ in range(rounds):
        for name, contender in contenders.items():
            start_time = read_clock(device)
            contender()
            seconds[name].append(read_clock(device) - start_time)
    return Interleaved(seconds, (time.time_ns() - start_ns) / 1e9)


def read_clock(device: torch.device) -> float:
    """Wait until the device has finished its work; return the time of a monotonic clock."""
    synchronize(device)
    return time.perf_counter()


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU; do nothing on a CPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
