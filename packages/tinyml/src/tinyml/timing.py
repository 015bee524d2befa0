"""Which of several ways to compute the same is fastest here, believed only where it is clear.

Notable:
- a way is timed right after itself, with its weights in the cache, as a loop over one layer finds
  them, and after the cache was filled with something else, as a model of many layers finds them. A
  way can be twice as fast in one and half as fast in the other: another than the plain one is
  taken only where it wins in both;
- it wins where it is faster by a margin in most rounds, all ways taking turns, than the plain way
  at its best: a busy machine slows reading memory more than counting, and what is chosen stays when
  the machine is at rest. Rounds that disagree are repeated, and if they still do, the plain way
  stays and the answer says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MARGIN = 1.5
"""How many times faster a way has to be: one product on two copies of a weight differs by as much.

Where memory lies decides it (1.45 times on a virtual machine), anew in every process.
"""
MOST = 2 / 3
"""In which share of the rounds; below the rest of it, a way has lost."""
ROUNDS = 15
_CACHE_BYTES = 64 * 2**20
_LONG_MS = 10.0  # what takes longer than a cache takes to fill is not timed in two states
_SHORT = 5e-4  # seconds
_WARM_UP = 4  # calls until what lies in a cache is there, after another way's weights
_HOPELESS = 3.0  # times slower than the fastest


@dataclass(frozen=True)
class Timing:
    """The way that is taken, and the median milliseconds that say so."""

    way: str
    milliseconds: dict[str, float]
    out_of_cache: dict[str, float]
    """With the weights out of the cache; empty where that could change nothing."""
    disagree: bool = False
    """Whether the rounds did not agree on what is faster, so that the plain way stays."""
    at_best: dict[str, float] = field(default_factory=dict)
    """The least milliseconds of the plain way, which the others are held against."""

    def __str__(self) -> str:
        cold = f"; weights out of the cache: {listed(self.out_of_cache)}"
        best = f"; at best {listed(self.at_best)}"
        text = f"{self.way} ({listed(self.milliseconds)}{best if self.at_best else ''}"
        text += cold if self.out_of_cache else ""
        return text + ("; rounds disagree)" if self.disagree else ")")


def listed(times: Mapping[str, float]) -> str:
    """Names and milliseconds, the fastest first."""
    ordered = sorted(times.items(), key=lambda item: item[1])
    return ", ".join(f"{name} {ms:.3g} ms" for name, ms in ordered)


def measure(ways: Mapping[str, Callable[[], Tensor]], plain: str | None = None) -> Timing:
    """The fastest of `ways`, or `plain` where none is clearly faster than that.

    Without a plain way it is the one with the least median, its weights in the cache.
    """
    # The first call makes what a way keeps.
    once = {name: min(milliseconds(call) for _ in range(3)) for name, call in ways.items()}
    hopeless = _HOPELESS * min(once.values())
    left = {n: call for n, call in ways.items() if once[n] <= hopeless or n == plain}
    warm: dict[str, list[float]] = {name: [] for name in left}
    cold: dict[str, list[float]] = {name: [] for name in left}
    long = min(once.values()) > _LONG_MS
    fill_the_cache = torch.ones(0 if long or not plain else _CACHE_BYTES // 4).sum
    rivals, sure, unsure = left.keys() - {plain}, set[str](), set[str]()
    for _ in range(2 if plain and rivals else 1):
        for _ in range(ROUNDS // 2 if long else ROUNDS):
            for name, call in left.items():
                warm[name].append(milliseconds(call, None if long else call))
        for _ in range(ROUNDS if plain and not long else 0):
            for name, call in left.items():
                cold[name].append(milliseconds(call, fill_the_cache))
        if plain:
            won = {name: min(_share(t[name], t[plain]) for t in (warm, cold)) for name in rivals}
            sure = {name for name, share in won.items() if share >= MOST}
            unsure = {name for name, share in won.items() if 1 - MOST < share < MOST}
        if sure or not unsure:
            break
    median = once | {name: statistics.median(ms) for name, ms in warm.items()}
    emptied = {name: statistics.median(ms) for name, ms in cold.items() if ms}
    at_best = {plain: min(warm[plain])} if plain else {}
    if plain and not sure:
        return Timing(plain, median, emptied, disagree=bool(unsure), at_best=at_best)
    best = min(sure or left, key=lambda name: median[name] + emptied.get(name, 0.0))
    return Timing(best, median, emptied, at_best=at_best)


def _share(ours: Sequence[float], its: Sequence[float]) -> float:
    """In which share of the rounds ours is clearly faster than it at its best; all of no rounds."""
    won = [MARGIN * each <= min(its) for each in ours]
    return sum(won) / len(won) if won else 1.0


def milliseconds(call: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """The time of one call, after `before`; a short one, run right after itself, a few times.

    One thread alone is timed by the processor's time, which other programs do not add to.
    """
    on_gpu = torch.cuda.is_initialized()
    alone = torch.get_num_threads() == 1 and not on_gpu
    clock = time.thread_time if alone else time.perf_counter
    for _ in range(_WARM_UP if before is call else before is not None):
        before()  # type: ignore[misc]
    if on_gpu:
        torch.cuda.synchronize()
    start, count, seconds = clock(), 0, 0.0
    while not count or (before is call and seconds < _SHORT):
        call()
        if on_gpu:
            torch.cuda.synchronize()
        count, seconds = count + 1, clock() - start
    return seconds * 1e3 / count
