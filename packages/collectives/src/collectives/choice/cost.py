"""What a collective costs: the alpha-beta model, fitted to a measurement, and the choice it makes.

Between hosts an algorithm's time is linear in four prices (Thakur, Rabenseifner and Gropp, 2005):

    seconds = messages alpha + operations omega + wire bytes beta + reduced bytes gamma

where alpha is the latency of a message, omega what a rank spends on starting and ending a send or a
receive (the overhead of LogP: Culler and others, 1993), 1/beta the bandwidth of a link and gamma
the time to combine a byte. What an algorithm spends of each is counted here from its definition
(`terms`), so a fit is linear least squares. Without omega a ring of two, which sends and receives
at once, would cost what a tree does, which sends and then receives; on short messages it takes
longer. Memory that ranks share costs less than messages at every size, and is not priced.

Sizes are nccl-tests': the whole array, for reduce-scatter and all-gather too.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields

import numpy as np

from collectives.algorithms.halving_doubling import SHORT_BYTES
from collectives.algorithms.point_to_point import PIECE_BYTES

# gloo's own collective: it has no terms here, only times.
NATIVE = "gloo"
# In so many of the measured turns another one must take less: one median errs.
LEAST_WINS = 0.75


@dataclass(frozen=True)
class Terms:
    """What one rank spends, on the critical path."""

    messages: float = 0.0
    wire_bytes: float = 0.0
    reduced_bytes: float = 0.0
    operations: float = 0.0


@dataclass(frozen=True)
class Sample:
    """One measurement; `wins` is the part of the turns in which it took less than gloo's own."""

    collective: str
    algorithm: str
    size_bytes: int
    hosts: tuple[int, ...]
    seconds: float
    wins: float = 1.0


@dataclass(frozen=True)
class CostModel:
    """Four prices, those of a loopback by default, and what was measured, which goes before them.

    Between two measured sizes times lie on the line in logarithms; below the shortest it is
    latency that counts, beyond the longest bytes.
    """

    message_seconds: float = 1.5e-4
    wire_seconds_per_byte: float = 8e-10
    reduce_seconds_per_byte: float = 1e-10
    operation_seconds: float = 5e-5
    samples: tuple[Sample, ...] = ()

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> "CostModel":
        """The prices, none below zero, that make the relative errors smallest (least squares).

        scipy's active set is that of Lawson and Hanson, 1974, chapter 23.
        """
        # Only here: importing the package costs what torch costs.
        from scipy.optimize import nnls

        if not samples:
            raise ValueError("no samples to fit; measure at least one size for each algorithm")
        samples = [sample for sample in samples if sample.algorithm != NATIVE]
        rows = np.array([astuple(terms(s.collective, s.algorithm, s.size_bytes, s.hosts))
                         for s in samples])  # fmt: skip
        rows /= np.array([s.seconds for s in samples])[:, None]
        # To columns of one length, or prices of a nanosecond would be taken for rounding.
        scale = np.linalg.norm(rows, axis=0)
        scale[scale == 0] = 1.0
        prices, _ = nnls(rows / scale, np.ones(len(samples)))
        return cls(*(prices / scale).tolist())

    def predict(
        self, collective: str, algorithm: str, size_bytes: int, hosts: Sequence[int]
    ) -> float:
        """Seconds on hosts with so many ranks each: (4,) is one host, (1, 1) two of one rank."""
        measured = self._of(collective, algorithm, hosts)
        if not measured:
            spent = astuple(terms(collective, algorithm, size_bytes, tuple(hosts)))
            return sum(a * b for a, b in zip(spent, self.prices().values(), strict=True))
        sizes = sorted(measured)
        logs = np.log([measured[size].seconds for size in sizes])
        found = np.exp(np.interp(np.log(max(1, size_bytes)), np.log(sizes), logs))
        return float(found) * max(1.0, size_bytes / sizes[-1])

    def choose(
        self, collective: str, size_bytes: int, hosts: Sequence[int], *, native: bool = True
    ) -> str:
        """The algorithm with the lowest predicted time; gloo's own where none wins often."""
        possible = candidates(collective, hosts)
        if native and self._of(collective, NATIVE, hosts):
            often = (a for a in possible if self._wins(collective, a, size_bytes, hosts))
            possible = (*often, NATIVE)
        return min(possible, key=lambda a: self.predict(collective, a, size_bytes, hosts))

    def _wins(self, collective: str, algorithm: str, size: int, hosts: Sequence[int]) -> bool:
        """Whether it took less than gloo's own often, at both measured sizes beside this one."""
        measured = self._of(collective, algorithm, hosts)
        beside = {
            max((s for s in measured if s <= size), default=min(measured, default=0)),
            min((s for s in measured if s >= size), default=max(measured, default=0)),
        }
        return all(s in measured and measured[s].wins >= LEAST_WINS for s in beside)

    def _of(self, collective: str, algorithm: str, hosts: Sequence[int]) -> dict[int, Sample]:
        here = collective, algorithm, tuple(hosts)
        same = [s for s in self.samples if (s.collective, s.algorithm, s.hosts) == here]
        return {sample.size_bytes: sample for sample in same}

    def prices(self) -> dict[str, float]:
        """The four numbers by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "samples"}

    def to_json(self) -> str:
        """The whole model as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "CostModel":
        """What `to_json` said."""
        told = json.loads(text)
        samples = [Sample(**{**s, "hosts": tuple(s["hosts"])}) for s in told.pop("samples")]
        return cls(**told, samples=tuple(samples))


def candidates(
    collective: str, hosts: Sequence[int], *, shared: bool | None = None
) -> tuple[str, ...]:
    """The algorithms that can run this collective on these hosts.

    `shared` says whether all ranks share memory (by default, whether there is one host).
    """
    names = ["shared_memory"] if (len(hosts) == 1 if shared is None else shared) else []
    if collective in ("all_reduce", "broadcast") and 1 < len(hosts) < sum(hosts):
        names.append("hierarchical")
    # In an all-to-all every pair has data of its own: nobody can pass on what others need too.
    names += ["ring"] if collective == "all_to_all" else ["ring", "halving_doubling"]
    # Where parts differ, a tree would move more bytes in as many messages as halving does.
    names += ["tree"] if collective in ("all_reduce", "broadcast") else []
    return tuple(names)


def terms(collective: str, algorithm: str, size: int, hosts: tuple[int, ...]) -> Terms:
    """What a rank spends on `size` bytes."""
    world = sum(hosts)
    if world == 1:
        return Terms()
    if algorithm == "shared_memory":
        return Terms(reduced_bytes=size)
    if algorithm == "hierarchical":
        return _by_messages(collective, "ring", size, len(hosts), 1)
    # Ranks of one host send to another one over the same link.
    return _by_messages(collective, algorithm, size, world, max(hosts) if len(hosts) > 1 else 1)


def _by_messages(collective: str, algorithm: str, size: int, world: int, sharing: int) -> Terms:
    others, steps = world - 1, math.ceil(math.log2(world))
    part, pieces = others / world * size, max(1, math.ceil(size / PIECE_BYTES))
    chain = pieces + others - 1
    spent = {
        # A send and a receive at once: two operations a message.
        ("all_reduce", "ring"): Terms(2 * others, 2 * part, part, 4 * others),
        ("reduce_scatter", "ring"): Terms(others, part, part, 2 * others),
        ("all_gather", "ring"): Terms(others, part, 0, 2 * others),
        ("all_to_all", "ring"): Terms(others, part * sharing, 0, 2 * others),
        ("all_reduce", "halving_doubling"): (
            Terms(steps, steps * size * sharing, steps * size, 2 * steps)
            if size <= SHORT_BYTES
            else Terms(2 * steps, 2 * part * sharing, part, 4 * steps)
        ),
        ("reduce_scatter", "halving_doubling"): Terms(steps, part * sharing, part, 2 * steps),
        ("all_gather", "halving_doubling"): Terms(steps, part * sharing, 0, 2 * steps),
        # Down a tree, where a rank sends or receives, and then both at once.
        ("broadcast", "halving_doubling"): Terms(2 * steps, part * (1 + sharing), 0, 3 * steps),
        ("all_reduce", "tree"): Terms(2 * steps, 2 * steps * size, steps * size, 2 * steps),
        ("broadcast", "tree"): Terms(steps, steps * size, 0, steps),
        # In the middle of the chain a rank passes one piece on as the next comes.
        ("broadcast", "ring"): Terms(
            chain, size * chain / pieces, 0, chain + (pieces - 1) * (world > 2)
        ),
    }
    if (collective, algorithm) not in spent:
        raise ValueError(f"there is no {collective} by {algorithm!r}")
    return spent[collective, algorithm]
