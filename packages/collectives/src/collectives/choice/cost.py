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

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

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
    """Four prices. The defaults are a loopback's; `fit` finds those of a machine."""

    message_seconds: float = 1.5e-4
    wire_seconds_per_byte: float = 8e-10
    reduce_seconds_per_byte: float = 1e-10
    operation_seconds: float = 5e-5

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
        return cls(*(float(price) for price in prices / scale))

    def predict(
        self, collective: str, algorithm: str, size_bytes: int, hosts: Sequence[int]
    ) -> float:
        """Seconds on hosts with so many ranks each: (4,) is one host, (1, 1) two of one rank."""
        spent = astuple(terms(collective, algorithm, size_bytes, tuple(hosts)))
        return sum(a * b for a, b in zip(spent, self.prices(), strict=True))

    def candidates(self, collective: str, hosts: Sequence[int]) -> tuple[str, ...]:
        """The algorithms whose time is known."""
        return candidates(collective, hosts)

    def choose(
        self, collective: str, size_bytes: int, hosts: Sequence[int], *, native: bool = True
    ) -> str:
        """The algorithm with the lowest predicted time; gloo's own where none wins often."""
        possible = self.candidates(collective, hosts)
        if native and NATIVE in possible:
            possible = tuple(
                a for a in possible
                if a == NATIVE or self.wins(collective, a, size_bytes, hosts) >= LEAST_WINS
            )  # fmt: skip
        else:
            possible = tuple(a for a in possible if a != NATIVE)
        return min(possible, key=lambda a: self.predict(collective, a, size_bytes, hosts))

    def wins(self, collective: str, algorithm: str, size_bytes: int, hosts: Sequence[int]) -> float:
        """The part of the measured turns in which it took less than gloo's own."""
        return 1.0

    def prices(self) -> tuple[float, ...]:
        """The four numbers in order."""
        return tuple(getattr(self, field.name) for field in fields(CostModel))


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
    part, steps = (world - 1) / world * size, math.ceil(math.log2(world))
    pieces = max(1, math.ceil(size / PIECE_BYTES))
    chain = pieces + world - 2

    def exchanges(count: int, wire_bytes: float, reduced_bytes: float = 0.0) -> Terms:
        # A send and a receive at once.
        return Terms(count, wire_bytes, reduced_bytes, operations=2 * count)

    def messages(
        count: int, wire_bytes: float, reduced_bytes: float = 0.0, *, more: int = 0
    ) -> Terms:
        # Either a send or a receive; `more` operations beside them.
        return Terms(count, wire_bytes, reduced_bytes, operations=count + more)

    spent = {
        ("all_reduce", "ring"): exchanges(2 * (world - 1), 2 * part, part),
        ("reduce_scatter", "ring"): exchanges(world - 1, part, part),
        ("all_gather", "ring"): exchanges(world - 1, part),
        ("broadcast", "ring"): messages(
            chain, size * chain / pieces, more=(pieces - 1) * (world > 2)
        ),
        ("all_to_all", "ring"): exchanges(world - 1, part * sharing),
        ("all_reduce", "halving_doubling"): (
            exchanges(steps, steps * size * sharing, steps * size)
            if size <= SHORT_BYTES
            else exchanges(2 * steps, 2 * part * sharing, part)
        ),
        ("reduce_scatter", "halving_doubling"): exchanges(steps, part * sharing, part),
        ("all_gather", "halving_doubling"): exchanges(steps, part * sharing),
        ("broadcast", "halving_doubling"): messages(2 * steps, part * (1 + sharing), more=steps),
        ("all_reduce", "tree"): messages(2 * steps, 2 * steps * size, steps * size),
        ("broadcast", "tree"): messages(steps, steps * size),
    }
    if (collective, algorithm) not in spent:
        raise ValueError(f"there is no {collective} by {algorithm!r}")
    return spent[collective, algorithm]
