"""Collectives of a training step: payload, bytes on the wire and seconds.

The payload of a collective is the size of its tensor, counted once; wire bytes are the bytes that
one device sends. A ring all-reduce over n devices sends 2(n-1)/n of the payload. Reduce-scatter,
all-gather and all-to-all send (n-1)/n. A double binary tree sends the payload in log2 n steps; an
all-reduce does this twice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from accounting.breakdown import Breakdown, multiply, simplify, sum_parts
from accounting.hardware import Link


@dataclass(frozen=True)
class Collective:
    """All calls of one collective in a step, with its group, number of calls and payload."""

    name: str
    #: `all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all` or `send`.
    operation: str
    #: Axis of the plan: `data`, `tensor`, `pipeline`, `expert` or `context`.
    axis: str
    ranks: int
    #: Calls per step on one device.
    count: int
    #: Payload bytes of one call.
    call_bytes: int | Fraction

    @property
    def payload(self) -> int | float:
        """The payload bytes of all calls."""
        return simplify(self.count * self.call_bytes)

    @property
    def wire_fraction(self) -> Fraction:
        """The bytes that one device of a ring sends per byte of payload."""
        if self.operation == "send":
            return Fraction(1)
        return Fraction(count_phases(self.operation) * (self.ranks - 1), self.ranks)

    @property
    def wire(self) -> int | float:
        """The bytes that one device of a ring sends in all calls."""
        return simplify(self.wire_fraction * self.count * self.call_bytes)

    def compute_seconds(self, link: Link) -> float:
        """Return the seconds of all calls; see the function `compute_seconds`."""
        return compute_seconds(self.operation, self.ranks, self.count, float(self.call_bytes), link)


def count_phases(operation: str) -> int:
    """Return 2 for an all-reduce, which is a reduce-scatter and an all-gather, and 1 otherwise."""
    return 2 if operation == "all_reduce" else 1


def compute_seconds(
    operation: str, ranks: int, num_calls: float, call_bytes: float, link: Link
) -> float:
    """Return the seconds of `num_calls` calls of a collective, each with a payload of `call_bytes`.

    A collective uses a ring or a double binary tree, whichever is faster. An all-to-all sends to
    each rank directly, or half of its payload in each of log2 n steps (Bruck et al. 1997),
    whichever is faster. A `send` is one message per call.
    """
    payload_seconds = num_calls * call_bytes / link.bandwidth
    if operation == "send":
        return num_calls * link.latency + payload_seconds
    ring = (ranks - 1) * (num_calls * link.latency + payload_seconds / ranks)
    steps = math.ceil(math.log2(ranks))
    sent = steps / 2 if operation == "all_to_all" else 1
    tree = steps * num_calls * link.latency + sent * payload_seconds
    return count_phases(operation) * min(ring, tree)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """All collectives of one device in a step; iterating yields each `Collective`."""

    name: str
    collectives: tuple[Collective, ...]

    def __getitem__(self, name: str) -> Collective:
        for collective in self.collectives:
            if collective.name == name:
                return collective
        known = ", ".join(c.name for c in self.collectives) or "none"
        raise KeyError(f"expected the name of a collective ({known}), got {name!r}")

    @property
    def payload(self) -> Breakdown:
        """The payload bytes by collective."""
        return sum_parts(
            f"payload of {self.name}",
            "B",
            *(multiply(c.name, "B", c.operation, calls=c.count, each=c.call_bytes) for c in self),
        )

    @property
    def wire(self) -> Breakdown:
        """The bytes that one device sends, by collective."""
        return sum_parts(
            f"bytes sent by a device for {self.name}",
            "B",
            *(
                multiply(
                    c.name,
                    "B",
                    f"ring {c.operation} over {c.ranks}",
                    fraction=c.wire_fraction,
                    calls=c.count,
                    each=c.call_bytes,
                )
                for c in self
            ),
        )

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.collectives)

    def explain(self) -> str:
        """Return the derivation of the bytes that one device sends, as text."""
        return self.wire.explain()

    __str__ = explain
