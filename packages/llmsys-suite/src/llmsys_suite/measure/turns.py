"""What takes turns, and how long each turn takes.

Every contender runs in every round, so that a slow second slows all of them alike and a ratio is
taken inside a round. A second clock, of another kind, spans all turns together: an audit holds the
sum of the parts against it.
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
class Turns:
    """Seconds by contender and round; what they are in all, and what the other clock says."""

    seconds: dict[str, list[float]]
    clocked_s: float

    def median_ms(self, name: str) -> float:
        """Return the median over rounds, in milliseconds."""
        return statistics.median(self.seconds[name]) * 1e3

    def ratio_to(self, peer: str, name: str) -> float:
        """Time over the peer's in the same round, the median of the pairs."""
        pairs = zip(self.seconds[name], self.seconds[peer], strict=True)
        return statistics.median(a / b for a, b in pairs)


def take_turns(
    contenders: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> Turns:
    """Time every contender in every round; one round before goes untimed."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()
    synchronize(device)
    begin_ns = time.time_ns()
    for _ in range(rounds):
        for name, contender in contenders.items():
            begin = now(device)
            contender()
            seconds[name].append(now(device) - begin)
    return Turns(seconds, (time.time_ns() - begin_ns) / 1e9)


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    synchronize(device)
    return time.perf_counter()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; nothing on a CPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
