"""The short measurement behind algorithm="auto": a collective, timed, fitted, shared.

It runs once for each collective on the same hosts, in the first automatic call there: later groups
of the process take it over. The algorithms take turns; the slowest rank's time counts, and the
median of the turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from collectives.algorithms import tree
from collectives.algorithms.point_to_point import PointToPoint
from collectives.choice.cost import NATIVE, CostModel, Sample, candidates

# Of each size: how many calls an algorithm has in a turn.
SIZES = {1 << 10: 4, 16 << 10: 4, 64 << 10: 4, 256 << 10: 3, 1 << 20: 2, 8 << 20: 1}
MOST_TURNS = 25
# After so long on a size, the turn that has begun is the last.
SECONDS = 0.3


@dataclass(frozen=True)
class TunedModel(CostModel):
    """A model that says, of what was measured, what the measurement said.

    Between two measured sizes it is the model's time, scaled by what that was off by at both;
    beyond them, by what it was off by at the nearest.
    """

    samples: tuple[Sample, ...] = ()

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> TunedModel:
        """The prices of `CostModel.fit`, and the samples."""
        return cls(**asdict(CostModel.fit(samples)), samples=tuple(samples))

    def correction(
        self, collective: str, algorithm: str, size_bytes: int, hosts: Sequence[int]
    ) -> float:
        """Measured time over the model's."""
        off = {
            size: seconds / self.uncorrected(collective, algorithm, size, hosts)
            for size, seconds in self._measured(collective, algorithm, hosts).items()
        }
        if not off:
            return 1.0
        sizes = sorted(off)
        logs = np.log([off[size] for size in sizes])
        return float(np.exp(np.interp(np.log(max(1, size_bytes)), np.log(sizes), logs)))

    def candidates(self, collective: str, hosts: Sequence[int]) -> tuple[str, ...]:
        """The algorithms of the package, and gloo's own where it was measured."""
        known = super().candidates(collective, hosts)
        return (*known, NATIVE) if self._measured(collective, NATIVE, hosts) else known

    def predict(
        self, collective: str, algorithm: str, size_bytes: int, hosts: Sequence[int]
    ) -> float:
        """Seconds; of gloo, what was measured: between two sizes on the line in logarithms."""
        if algorithm != NATIVE:
            return super().predict(collective, algorithm, size_bytes, hosts)
        seconds = self._measured(collective, algorithm, hosts)
        sizes = sorted(seconds)
        logs = np.log([seconds[size] for size in sizes])
        found = np.exp(np.interp(np.log(max(1, size_bytes)), np.log(sizes), logs))
        # Beyond the longest, bytes are all that counts.
        return float(found) * max(1.0, size_bytes / sizes[-1])

    def _measured(self, collective: str, algorithm: str, hosts: Sequence[int]) -> dict[int, float]:
        here = collective, algorithm, tuple(hosts)
        return {
            s.size_bytes: s.seconds
            for s in self.samples
            if (s.collective, s.algorithm, s.hosts) == here
        }

    def to_json(self) -> str:
        """The whole model as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> TunedModel:
        """What `to_json` said."""
        told = json.loads(text)
        samples = [Sample(**{**s, "hosts": tuple(s["hosts"])}) for s in told.pop("samples")]
        return cls(**told, samples=tuple(samples))


def tune(
    kind: str,
    call: Callable[[str, int], object],
    hosts: Sequence[int],
    wire: PointToPoint,
    store: Store,
    *,
    native: bool,
) -> TunedModel:
    """Time `call(algorithm, bytes)`, a collective of that kind, and fit a model to it.

    Every rank returns the same one. `native` says whether gloo's own can be called.
    """
    samples, algorithms = [], candidates(kind, hosts, shared=False)
    if native:
        algorithms = (*algorithms, NATIVE)
    for size, calls in SIZES.items():
        begun, seconds = time.perf_counter(), list[list[float]]()
        while len(seconds) < MOST_TURNS and not _any(wire, time.perf_counter() > begun + SECONDS):
            seconds.append([_turn(partial(call, name, size), calls, wire) for name in algorithms])
        slowest = torch.tensor(seconds, dtype=torch.float64)
        tree.all_reduce(wire, slowest.view(-1), "MAX")
        # The first turn pays for the connections.
        usual = slowest[min(1, len(slowest) - 1) :].median(0).values
        samples += [
            Sample(kind, algorithm, size, tuple(hosts), times)
            for algorithm, times in zip(algorithms, usual.tolist(), strict=True)
        ]
    # One rank's arithmetic decides, or ranks could choose differently.
    if wire.rank == 0:
        store.set(f"model/{kind}", TunedModel.fit(samples).to_json())
    return TunedModel.from_json(store.get(f"model/{kind}"))


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
