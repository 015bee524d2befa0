"""How far apart workers may drift.

Notable:
- one number tells the three apart. A worker's clock is how many gradients it has pushed. It may
  read the parameters while it is at most `bound` ahead of the slowest worker (Ho et al., "More
  Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013, section 2):
  0 is bulk-synchronous, infinity is asynchronous, and what lies between is stale-synchronous;
- `averages` is the other difference: the gradients of one bulk-synchronous step make one update
  (their mean, summed in the order of the workers), so that training equals training in a single
  process and is the same, bit for bit, in every run. Otherwise a gradient is an update by itself,
  applied as it arrives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Consistency(Protocol):
    """What a server asks of a consistency."""

    @property
    def bound(self) -> float:
        """The most clocks by which a reader may be ahead of the slowest worker."""

    @property
    def averages(self) -> bool:
        """Whether the gradients of one clock make one update."""


@dataclass(frozen=True)
class BulkSynchronous:
    """Everyone waits for everyone; the mean of their gradients is one update."""

    @property
    def bound(self) -> float:
        """Zero: nobody reads until all have written."""
        return 0

    @property
    def averages(self) -> bool:
        """One update a step."""
        return True


@dataclass(frozen=True)
class StaleSynchronous:
    """A worker reads while it is at most `bound` clocks ahead of the slowest.

    At clock c it therefore sees every gradient of every worker with a clock below c - bound, all
    its own, and perhaps newer ones.
    """

    bound: int

    def __post_init__(self) -> None:
        if isinstance(self.bound, bool) or not isinstance(self.bound, int):
            raise TypeError(f"the staleness bound is {self.bound!r}; give a whole number of clocks")
        if self.bound < 0:
            raise ValueError(f"the staleness bound is {self.bound}; it is 0 or more")

    @property
    def averages(self) -> bool:
        """A gradient is an update."""
        return False


@dataclass(frozen=True)
class Asynchronous:
    """Nobody waits for anybody (Recht et al., "Hogwild!", 2011; Dean et al., 2012)."""

    @property
    def bound(self) -> float:
        """Infinity: no wait."""
        return math.inf

    @property
    def averages(self) -> bool:
        """A gradient is an update."""
        return False
