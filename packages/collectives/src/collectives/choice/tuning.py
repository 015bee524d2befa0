"""The short measurement behind algorithm="auto": a collective, timed, fitted, shared.

It runs once for each collective on the same hosts, in the first automatic call there: later groups
of the process take it over. The algorithms take turns; the slowest rank's time counts, and the
median of the turns. Another algorithm than gloo's own is taken only where it won most of the turns,
so what is neither clearly ahead nor clearly behind is measured for longer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from collectives.algorithms import tree
from collectives.algorithms.point_to_point import PointToPoint
from collectives.choice.cost import LEAST_WINS, NATIVE, CostModel, Sample, candidates

# Of each size: how many calls an algorithm has in a turn.
SIZES = {1 << 10: 12, 16 << 10: 8, 64 << 10: 4, 256 << 10: 3, 1 << 20: 2, 8 << 20: 1}
MOST_TURNS = 25
# After so long on a size, the turn that has begun is the last.
SECONDS = 0.3
# Who won about as many turns as it must, as near as this, has so many times both.
CLOSE, LONGER = 0.2, 3
# A group with a short timeout measures less: for each size the timeout over this.
LEAST_OF_TIMEOUT = 40


def tune(
    kind: str, call: Callable[[str, int], object], hosts: Sequence[int], wire: PointToPoint,
    agree: Callable[[str], bytes], *, native: bool,
) -> CostModel:  # fmt: skip
    """Time `call(algorithm, bytes)`, a collective of that kind, and fit a model to it.

    Every rank returns the same one: `agree` gives all of them rank 0's text. `native` says whether
    gloo's own can be called.
    """
    samples, algorithms = [], candidates(kind, hosts, shared=False)
    if native:
        algorithms = (*algorithms, NATIVE)
    patience = min(SECONDS, wire.seconds_left / LEAST_OF_TIMEOUT)
    for size, calls in SIZES.items():
        begun, seconds = time.perf_counter(), list[list[float]]()
        over = False
        while not over:
            seconds.append([_turn(partial(call, name, size), calls, wire) for name in algorithms])
            longer = LONGER if native and _any(wire, _is_close(seconds)) else 1
            late = time.perf_counter() > begun + longer * patience
            over = _any(wire, late or len(seconds) == longer * MOST_TURNS)
            # The timeout is for ranks that do not come, not for measuring.
            wire.renew()
        slowest = torch.tensor(seconds, dtype=torch.float64)
        tree.all_reduce(wire, slowest.view(-1), "MAX")
        # The first turn pays for the connections.
        turns = slowest[min(1, len(slowest) - 1) :]
        # gloo's own is the last, where it is one.
        usual, wins = turns.median(0).values.tolist(), _wins(turns)
        samples += [
            Sample(kind, algorithm, size, tuple(hosts), times, won if native else 1.0)
            for algorithm, times, won in zip(algorithms, usual, wins, strict=True)
        ]
    model = replace(CostModel.fit(samples), samples=tuple(samples))
    return CostModel.from_json(agree(model.to_json() if wire.rank == 0 else ""))


def _wins(turns: torch.Tensor) -> list[float]:
    """The part of the turns in which each algorithm took less than the last one: turns[i, j]."""
    return [float(part) for part in (turns < turns[:, -1:]).double().mean(0)]


def _is_close(seconds: Sequence[Sequence[float]]) -> bool:
    """Whether an algorithm may win often enough, or not."""
    return any(abs(won - LEAST_WINS) < CLOSE for won in _wins(torch.tensor(seconds)))


def _turn(call: Callable[[], object], calls: int, wire: PointToPoint) -> float:
    """Seconds a call."""
    # Not timed: the algorithm before has left the caches and the threads in a state of its own.
    call()
    _any(wire, False)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _any(wire: PointToPoint, flag: bool) -> bool:
    """Whether any rank says so; no rank knows before all have said."""
    flags = torch.tensor([flag], dtype=torch.uint8)
    tree.all_reduce(wire, flags, "MAX")
    return bool(flags)
