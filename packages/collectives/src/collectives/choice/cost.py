"""The cost of a collective: the alpha-beta model, fitted to a measurement, and the choice it makes.

Between hosts the time of an algorithm is linear in four prices (Thakur, Rabenseifner and Gropp,
2005):

    seconds = messages alpha + operations omega + wire bytes beta + reduced bytes gamma

Here alpha is the latency of a message, 1/beta is the bandwidth of a link, and gamma is the time to
combine a byte. Omega is the time that a rank spends on starting and ending a send or a receive (the
overhead of LogP: Culler and others, 1993). A ring of two ranks sends and receives at the same time,
whereas a tree sends and then receives. For short messages, both would cost the same without omega,
but measurements show that the ring takes longer.

`count_terms` counts the quantities from the definition of each algorithm, so a fit is linear least
squares. Shared memory is faster than messages at every size, so its counts are not modeled: each
collective counts as one reduction of its bytes.

Sizes are defined as in nccl-tests: the whole array, also for reduce-scatter and all-gather.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields

import numpy as np

from collectives.algorithms.point_to_point import PIECE_BYTES

# gloo's own collective has no terms, only measured times.
NATIVE = "gloo"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
# An algorithm replaces gloo's own if it was faster in at least this fraction of the measured
# rounds. A comparison of two medians alone is too noisy.
MIN_WINS = 0.75


@dataclass(frozen=True)
class Terms:
    """The counts on the critical path of a call, one per price."""

    messages: float = 0.0
    wire_bytes: float = 0.0
    reduced_bytes: float = 0.0
    operations: float = 0.0


@dataclass(frozen=True)
class Sample:
    """One measurement of an algorithm."""

    collective: str
    algorithm: str
    size_bytes: int
    #: The number of ranks per host.
    ranks_per_host: tuple[int, ...]
    seconds: float
    #: The fraction of rounds in which the algorithm was faster than gloo's own collective.
    wins: float = 1.0


@dataclass(frozen=True)
class CostModel:
    """The alpha-beta model: four prices per unit, and the samples of a measurement.

    Samples take precedence over prices. The default prices are those of a loopback interface. Times
    between two measured sizes are interpolated in logarithms. Times below the smallest size are
    constant (latency), and times above the largest size are proportional to the size (bandwidth).
    """

    message_seconds: float = 1.5e-4
    wire_seconds_per_byte: float = 8e-10
    reduce_seconds_per_byte: float = 1e-10
    operation_seconds: float = 5e-5
    samples: tuple[Sample, ...] = ()

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> "CostModel":
        """Return the model whose nonnegative prices minimize the relative errors (least squares).

        Pass several sizes and algorithms: the samples of a ring alone, for example, do not
        distinguish messages from operations. The model does not store the samples, so it predicts
        from prices only. scipy uses the active-set method of Lawson and Hanson, 1974, chapter 23.
        """
        # The import is slow, and most programs never fit a model.
        from scipy.optimize import nnls

        samples = [sample for sample in samples if sample.algorithm != NATIVE]
        if not samples:
            raise ValueError("no samples to fit; measure at least one size for each algorithm")
        for sample in samples:
            if not 0 < sample.seconds < math.inf:
                raise ValueError(f"expected samples of positive, finite seconds, got {sample}")
            if sum(sample.ranks_per_host) < 2:
                raise ValueError(
                    f"expected samples of at least two ranks, got {sample}; one rank sends nothing"
                )
        counts = [
            count_terms(s.collective, s.algorithm, s.size_bytes, s.ranks_per_host) for s in samples
        ]
        rows = np.array([astuple(count) for count in counts])
        rows /= np.array([sample.seconds for sample in samples])[:, None]
        # Scale columns to equal length. Otherwise prices in nanoseconds would be rounded to zero.
        scale = np.linalg.norm(rows, axis=0)
        scale[scale == 0] = 1.0
        prices, _ = nnls(rows / scale, np.ones(len(samples)))
        return cls(*(prices / scale).tolist())

    def predict(
        self, collective: str, algorithm: str, size_bytes: int, ranks_per_host: Sequence[int]
    ) -> float:
        """Return the predicted seconds of a call of `size_bytes` bytes.

        For example, `ranks_per_host` is (4,) for one host with four ranks. Raise ValueError for a
        negative size, and for an algorithm that was not measured and cannot run such a call.
        """
        if size_bytes < 0:
            raise ValueError(f"expected size_bytes of at least 0, got {size_bytes}")
        measured = self._get_samples_by_size(collective, algorithm, ranks_per_host)
        if not measured:
            quantities = astuple(
                count_terms(collective, algorithm, size_bytes, tuple(ranks_per_host))
            )
            prices = self.get_prices().values()
            return sum(count * price for count, price in zip(quantities, prices, strict=True))
        sizes = sorted(measured)
        log_seconds = np.log([measured[size].seconds for size in sizes])
        seconds = np.exp(np.interp(np.log(max(1, size_bytes)), np.log(sizes), log_seconds))
        return float(seconds) * max(1.0, size_bytes / sizes[-1])

    def choose(
        self,
        collective: str,
        size_bytes: int,
        ranks_per_host: Sequence[int],
        *,
        native: bool = True,
    ) -> str:
        """Return the name of the algorithm with the lowest predicted time.

        If gloo's own collective was measured and can run (`native`), only algorithms that won at
        least three quarters of the rounds compete with it.
        """
        algorithms = list_candidates(collective, ranks_per_host)
        if native and self._get_samples_by_size(collective, NATIVE, ranks_per_host):
            winners = [
                a for a in algorithms if self._is_winner(collective, a, size_bytes, ranks_per_host)
            ]
            algorithms = (*winners, NATIVE)
        return min(
            algorithms, key=lambda a: self.predict(collective, a, size_bytes, ranks_per_host)
        )

    def _is_winner(
        self, collective: str, algorithm: str, size_bytes: int, ranks_per_host: Sequence[int]
    ) -> bool:
        """Return True if the algorithm won enough rounds at both adjacent measured sizes."""
        measured = self._get_samples_by_size(collective, algorithm, ranks_per_host)
        if not measured:
            return False
        smaller = [size for size in measured if size <= size_bytes]
        larger = [size for size in measured if size >= size_bytes]
        neighbors = (max(smaller, default=min(measured)), min(larger, default=max(measured)))
        return all(measured[size].wins >= MIN_WINS for size in neighbors)

    def _get_samples_by_size(
        self, collective: str, algorithm: str, ranks_per_host: Sequence[int]
    ) -> dict[int, Sample]:
        key = collective, algorithm, tuple(ranks_per_host)
        return {
            sample.size_bytes: sample
            for sample in self.samples
            if (sample.collective, sample.algorithm, sample.ranks_per_host) == key
        }

    def get_prices(self) -> dict[str, float]:
        """Return the four prices by name, in the order of `Terms`."""
        names = [field.name for field in fields(self) if field.name != "samples"]
        return {name: getattr(self, name) for name in names}

    def to_json(self) -> str:
        """Return the model and its samples as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "CostModel":
        """Return the model that `to_json` wrote."""
        values = json.loads(text)
        samples = [
            Sample(**(s | {"ranks_per_host": tuple(s["ranks_per_host"])}))
            for s in values.pop("samples")
        ]
        return cls(**values, samples=tuple(samples))


def list_candidates(
    collective: str, ranks_per_host: Sequence[int], *, shared: bool | None = None
) -> tuple[str, ...]:
    """Return the names of the algorithms that can run this collective with these ranks per host.

    `shared` is True if all ranks share memory; the default is True if there is only one host. Raise
    ValueError if the collective is unknown or a host has no rank.
    """
    if collective not in COLLECTIVES:
        raise ValueError(
            f"expected a collective among {', '.join(COLLECTIVES)}, got {collective!r}"
        )
    if not ranks_per_host or min(ranks_per_host) < 1:
        raise ValueError(f"expected a positive number of ranks for each host, got {ranks_per_host}")
    if shared is None:
        shared = len(ranks_per_host) == 1
    names = ["shared_memory"] if shared else []
    has_equal_results = collective in ("all_reduce", "broadcast")
    if has_equal_results and 1 < len(ranks_per_host) < sum(ranks_per_host):
        names.append("hierarchical")
    names.append("ring")
    # If ranks receive different parts, a tree would send most parts several times.
    if has_equal_results:
        names.append("tree")
    return tuple(names)


def count_terms(
    collective: str, algorithm: str, size: int, ranks_per_host: tuple[int, ...]
) -> Terms:
    """Return the counts of messages, bytes and operations on the critical path of one call.

    `size` is the number of bytes of the call. `predict` multiplies each count by its price. Raise
    ValueError if the algorithm cannot run the collective.
    """
    supported = list_candidates(collective, ranks_per_host, shared=True)
    if algorithm not in supported:
        raise ValueError(
            f"expected one of {', '.join(supported)} for {collective} with {ranks_per_host} ranks "
            f"per host, got {algorithm!r}"
        )
    world_size = sum(ranks_per_host)
    if world_size == 1:
        return Terms()
    if algorithm == "shared_memory":
        return Terms(reduced_bytes=size)
    if algorithm == "hierarchical":
        return _count_message_terms(collective, "ring", size, len(ranks_per_host), 1)
    # The ranks of one host send to another host over the same link.
    ranks_per_link = max(ranks_per_host) if len(ranks_per_host) > 1 else 1
    return _count_message_terms(collective, algorithm, size, world_size, ranks_per_link)


def _count_message_terms(
    collective: str, algorithm: str, size: int, world_size: int, ranks_per_link: int
) -> Terms:
    others = world_size - 1
    steps = math.ceil(math.log2(world_size))
    part = others / world_size * size
    link_part = part * ranks_per_link
    pieces = max(1, math.ceil(size / PIECE_BYTES))
    chain = pieces + others - 1
    # In the middle of the chain a rank forwards one piece while it receives the next.
    chain_operations = chain + (pieces - 1 if world_size > 2 else 0)
    table = {
        # In each step of a ring, a rank sends and receives a message: two operations.
        ("all_reduce", "ring"): Terms(2 * others, 2 * part, part, 4 * others),
        ("reduce_scatter", "ring"): Terms(others, part, part, 2 * others),
        ("all_gather", "ring"): Terms(others, part, 0, 2 * others),
        ("all_to_all", "ring"): Terms(others, link_part, 0, 2 * others),
        ("broadcast", "ring"): Terms(chain, size * chain / pieces, 0, chain_operations),
        ("all_reduce", "tree"): Terms(2 * steps, 2 * steps * size, steps * size, 2 * steps),
        ("broadcast", "tree"): Terms(steps, steps * size, 0, steps),
    }
    return table[collective, algorithm]
