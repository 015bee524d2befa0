"""The short measurement behind algorithm="auto": a collective, timed, fitted, shared.

It runs once for each collective on the same hosts, in the first automatic call there: later groups
of the process take it over. The algorithms take turns; the slowest rank's time counts, and the
median of the turns. Another algorithm than gloo's own is taken only where it won most of the turns,
so what is neither clearly ahead nor clearly behind is measured for longer.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
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


@dataclass(frozen=True)
class TunedModel(CostModel):
    """A model that says, of what was measured, what the measurement said.

    Between two measured sizes times lie on the line in logarithms; below the shortest it is
    latency that counts, beyond the longest bytes.
    """

    samples: tuple[Sample, ...] = ()

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> "TunedModel":
        """The prices of `CostModel.fit`, and the samples."""
        return cls(**asdict(CostModel.fit(samples)), samples=tuple(samples))

    def candidates(self, collective: str, hosts: Sequence[int]) -> tuple[str, ...]:
        """The algorithms of the package, and gloo's own where it was measured."""
        known = super().candidates(collective, hosts)
        return (*known, NATIVE) if self._measured(collective, NATIVE, hosts) else known

    def predict(
        self, collective: str, algorithm: str, size_bytes: int, hosts: Sequence[int]
    ) -> float:
        """Seconds: what was measured if anything was, else what the prices say."""
        seconds = self._measured(collective, algorithm, hosts)
        if not seconds:
            return super().predict(collective, algorithm, size_bytes, hosts)
        sizes = sorted(seconds)
        logs = np.log([seconds[size] for size in sizes])
        found = np.exp(np.interp(np.log(max(1, size_bytes)), np.log(sizes), logs))
        return float(found) * max(1.0, size_bytes / sizes[-1])

    def wins(self, collective: str, algorithm: str, size_bytes: int, hosts: Sequence[int]) -> float:
        """The lesser of what was measured at the two sizes beside this one; 0 if nothing was."""
        wins = {s.size_bytes: s.wins for s in self._samples(collective, algorithm, hosts)}
        below = max((size for size in wins if size <= size_bytes), default=min(wins, default=0))
        above = min((size for size in wins if size >= size_bytes), default=max(wins, default=0))
        return min(wins.get(below, 0.0), wins.get(above, 0.0))

    def _measured(self, collective: str, algorithm: str, hosts: Sequence[int]) -> dict[int, float]:
        return {s.size_bytes: s.seconds for s in self._samples(collective, algorithm, hosts)}

    def _samples(self, collective: str, algorithm: str, hosts: Sequence[int]) -> list[Sample]:
        here = collective, algorithm, tuple(hosts)
        return [s for s in self.samples if (s.collective, s.algorithm, s.hosts) == here]

    def to_json(self) -> str:
        """The whole model as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "TunedModel":
        """What `to_json` said."""
        told = json.loads(text)
        samples = [Sample(**{**s, "hosts": tuple(s["hosts"])}) for s in told.pop("samples")]
        return cls(**told, samples=tuple(samples))


def tune(
    kind: str, call: Callable[[str, int], object], hosts: Sequence[int], wire: PointToPoint,
    agree: Callable[[str], bytes], *, native: bool,
) -> TunedModel:  # fmt: skip
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
    return TunedModel.from_json(agree(TunedModel.fit(samples).to_json() if wire.rank == 0 else ""))


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
