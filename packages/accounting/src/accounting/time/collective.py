"""One kind of message, and all that a device takes part in: payload, wire bytes, steps, seconds.

The payload of a collective is the tensor it is about, counted once; the wire bytes are what one
device sends. A ring all-reduce over n devices sends 2(n-1)/n of the payload, its two halves
(reduce-scatter, all-gather) and an all-to-all (n-1)/n each; a double binary tree sends at most
twice the payload, in log n steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from accounting.breakdown import Breakdown, plain, product, total


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of message: which devices, how often, how large."""

    name: str
    operation: str
    """`all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all` or `send`."""
    axis: str
    """The degree of the plan it runs over: `data`, `tensor`, `pipeline`, `expert` or `context`."""
    ranks: int
    count: int
    """Calls in an iteration, on one device."""
    each: int | Fraction
    """Payload of one call in bytes, counted once."""
    algorithm: str = "ring"

    @property
    def payload(self) -> int | float:
        """Bytes of all calls, counted once."""
        return plain(Fraction(self.count) * self.each)

    @property
    def share(self) -> Fraction:
        """Bytes that one device sends for a byte of payload."""
        if self.operation == "send":
            return Fraction(1)
        if self.algorithm == "tree":
            return Fraction(2 if self.operation == "all_reduce" else 1)
        halves = 2 if self.operation == "all_reduce" else 1
        return Fraction(halves * (self.ranks - 1), self.ranks)

    @property
    def wire(self) -> int | float:
        """Bytes that one device sends."""
        return plain(self.share * self.count * self.each)

    @property
    def wire_total(self) -> int | float:
        """Bytes that all devices of one group send."""
        if self.operation == "send":
            return self.payload
        halves = 2 if self.operation == "all_reduce" else 1
        return plain(Fraction(halves * (self.ranks - 1)) * self.count * self.each)

    @property
    def steps(self) -> int:
        """Messages that follow each other in one call."""
        if self.operation == "send":
            return 1
        halves = 2 if self.operation == "all_reduce" else 1
        if self.algorithm == "tree":
            return halves * math.ceil(math.log2(self.ranks))
        return halves * (self.ranks - 1)

    def seconds(self, *, bandwidth: float, latency: float = 0.0) -> float:
        """Time of all calls: `count * steps * alpha + wire * beta`, with beta = 1 / bandwidth."""
        return self.count * self.steps * latency + float(self.wire) / bandwidth


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What one device takes part in during an iteration."""

    name: str
    collectives: tuple[Collective, ...]
    boundaries: Breakdown
    """Bytes over each boundary of the pipeline, in each direction, for one replica."""

    def __getitem__(self, name: str) -> Collective:
        for collective in self.collectives:
            if collective.name == name:
                return collective
        known = ", ".join(c.name for c in self.collectives) or "none: there is one device"
        raise KeyError(f"no collective {name!r}; there are {known}")

    @property
    def payload(self) -> Breakdown:
        """Bytes counted once, by collective."""
        return total(
            f"payload of {self.name}",
            "B",
            *(product(c.name, "B", c.operation, calls=c.count, each=c.each) for c in self),
        )

    @property
    def wire(self) -> Breakdown:
        """Bytes that one device sends, by collective."""
        return total(
            f"bytes sent by a device for {self.name}",
            "B",
            *(
                product(
                    c.name,
                    "B",
                    f"{c.algorithm} {c.operation} over {c.ranks}",
                    share=c.share,
                    calls=c.count,
                    each=c.each,
                )
                for c in self
            ),
        )

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.collectives)

    def explain(self) -> str:
        """The derivation of what a device sends, line by line."""
        return self.wire.explain()

    __str__ = explain
