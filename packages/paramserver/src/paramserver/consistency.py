"""How far apart workers may drift.

Notable:
- a worker's clock is how many gradients it has pushed. It may read while it is at most `bound`
  ahead of the slowest (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
  Parameter Server", 2013, section 2): 0 is bulk-synchronous, infinity asynchronous;
- `averages`: the gradients of one bulk-synchronous step make one update, their mean, summed in the
  order of the workers, so that every run is the same, bit for bit. Otherwise each is an update;
- `LocalSteps` is bulk-synchronous too, but what is pushed is what some steps of a worker's own
  optimizer have changed: DiLoCo.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

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

    bound: ClassVar[float] = 0  # nobody reads until all have written
    averages: ClassVar[bool] = True


@dataclass(frozen=True)
class StaleSynchronous:
    """A worker reads while it is at most `bound` clocks ahead of the slowest.

    At clock c it therefore sees every gradient of every worker with a clock below c - bound, all
    its own, and perhaps newer ones.
    """

    bound: int
    averages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.bound, bool) or not isinstance(self.bound, int):
            raise TypeError(f"the staleness bound is {self.bound!r}; give a whole number of clocks")
        if self.bound < 0:
            raise ValueError(f"the staleness bound is {self.bound}; it is 0 or more")


@dataclass(frozen=True)
class Asynchronous:
    """Nobody waits for anybody (Recht et al., "Hogwild!", 2011; Dean et al., 2012).

    With `scale_by_staleness` a gradient that was computed with parameters `s` versions older than
    those it is applied to counts 1 / (1 + s) (Zhang et al., "Staleness-aware Async-SGD for
    Distributed Deep Learning", 2016, equation 7, counted from zero).
    """

    scale_by_staleness: bool = False
    bound: ClassVar[float] = math.inf
    averages: ClassVar[bool] = False


NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the paper (section 3.1), with its learning rate and momentum."""


@dataclass(frozen=True)
class LocalSteps:
    """A worker takes `steps` steps by itself; the mean change is the gradient of `outer`.

    DiLoCo (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    2023, algorithm 1): with theta the parameters pulled and theta_i those of worker i after `steps`
    steps, the servers' optimizer is given mean_i(theta - theta_i). `compression` encodes what goes
    to the servers and what comes back.

    Streaming DiLoCo (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
    algorithm 2): of `fragments` equal parts of the model one is exchanged every `steps / fragments`
    steps, in turn. With `overlap`, while it travels a worker takes so many steps more; then
    parameters are `alpha` times its own plus 1 - `alpha` times what came (section 2.3).
    """

    steps: int
    outer: OptimizerFactory = NESTEROV
    compression: Compression | None = None
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.5
    bound: ClassVar[float] = 0  # a round begins when all have ended the last one
    averages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _whole_number("local steps", self.steps, 1)
        _whole_number("fragments", self.fragments, 1)
        _whole_number("steps of overlap", self.overlap, 0)
        if self.steps % self.fragments:
            text = f"{self.steps} local steps cannot be divided evenly among {self.fragments}"
            raise ValueError(f"{text} fragments; give a multiple")
        if self.overlap >= self.interval:
            text = f"an overlap of {self.overlap} steps with an exchange every {self.interval}"
            limit = f"at most {self.interval - 1}: one has to arrive before the next one leaves"
            raise ValueError(f"{text}; give {limit}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}, a share; give 0 to 1")

    @property
    def interval(self) -> int:
        """Local steps from one exchange to the next."""
        return self.steps // self.fragments


def _whole_number(what: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{value!r} {what}; give a whole number from {least} on")
