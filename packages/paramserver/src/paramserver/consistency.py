"""How far apart workers may drift.

Notable:
- one number tells the three apart. A worker's clock is how many gradients it has pushed. It may
  read the parameters while it is at most `bound` ahead of the slowest worker (Ho et al., "More
  Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013, section 2):
  0 is bulk-synchronous, infinity is asynchronous, and what lies between is stale-synchronous;
- `averages` is the other difference: the gradients of one bulk-synchronous step make one update
  (their mean, summed in the order of the workers), so that training equals training in a single
  process and is the same, bit for bit, in every run. Otherwise a gradient is an update by itself,
  applied as it arrives;
- `LocalSteps` is bulk-synchronous too, but what is pushed is what some steps of a worker's own
  optimizer have changed: DiLoCo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paramserver.compression import Compression

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


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
    """Nobody waits for anybody (Recht et al., "Hogwild!", 2011; Dean et al., 2012).

    With `scale_by_staleness` a gradient that was computed with parameters `s` versions older than
    those it is applied to counts 1 / (1 + s) (Zhang et al., "Staleness-aware Async-SGD for
    Distributed Deep Learning", 2016, equation 7, counted from zero).
    """

    scale_by_staleness: bool = False

    def __repr__(self) -> str:
        return f"Asynchronous({'scale_by_staleness=True' if self.scale_by_staleness else ''})"

    @property
    def bound(self) -> float:
        """Infinity: no wait."""
        return math.inf

    @property
    def averages(self) -> bool:
        """A gradient is an update."""
        return False


NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the paper (section 3.1), with its learning rate and momentum."""


@dataclass(frozen=True)
class LocalSteps:
    """A worker takes `steps` steps by itself; the mean change is the gradient of `outer`.

    DiLoCo (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    2023, algorithm 1): with theta the parameters pulled and theta_i those of worker i after `steps`
    steps, the servers' optimizer is given mean_i(theta - theta_i). `compression` encodes what goes
    to the servers and what comes back.
    """

    steps: int
    outer: OptimizerFactory = NESTEROV
    compression: Compression | None = None

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"{self.steps!r} local steps; give a whole number from 1 on")

    @property
    def bound(self) -> float:
        """Zero: a round begins when all have ended the last one."""
        return 0

    @property
    def averages(self) -> bool:
        """One update a round."""
        return True
