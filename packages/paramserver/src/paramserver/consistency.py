"""Consistency policies, which bound the staleness of workers and define updates.

A worker's clock is the clock at which it joined, plus its accepted pushes since then. A worker may
read the parameters while it is at most `bound` clocks ahead of the slowest worker. This is the
stale synchronous parallel model (Ho et al., "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", 2013, section 2). A bound of 0 is bulk-synchronous training, and an
infinite bound is asynchronous training.

A policy that averages applies one update per clock: the mean of all workers' gradients, summed in
the order of the worker numbers, so that every run gives bitwise identical results. Other policies
apply each gradient as a separate update.

`LocalSteps` is DiLoCo: it is bulk-synchronous, and a worker pushes the change of its parameters
over several steps of its local optimizer.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from paramserver.arguments import require_integer, require_number
from paramserver.compression import Integers
from paramserver.optimizers import OptimizerFactory


@dataclass(frozen=True)
class BulkSynchronous:
    """All workers wait for each other; the mean of their gradients is one update."""

    #: Largest number of clocks by which a reader may be ahead of the slowest worker.
    bound: ClassVar[float] = 0
    #: True if the mean of all gradients of a clock is applied as one update.
    averages: ClassVar[bool] = True


@dataclass(frozen=True)
class StaleSynchronous:
    """A worker may read while it is at most `bound` clocks ahead of the slowest worker.

    At clock c, the worker reads parameters that contain all gradients of clocks below c - `bound`
    and every gradient that the worker has pushed. They may contain newer gradients, too.

    Args:
        bound: number of clocks, an integer of at least 0.
    """

    bound: int
    averages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", require_integer("bound", self.bound, 0))


@dataclass(frozen=True)
class Asynchronous:
    """No worker waits for another (Recht et al., "Hogwild!", 2011; Dean et al., 2012)."""

    bound: ClassVar[float] = math.inf
    averages: ClassVar[bool] = False


#: The outer optimizer of the DiLoCo paper (section 3.1), with its learning rate and momentum.
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class LocalSteps:
    """DiLoCo: each worker takes `steps` local steps, and `outer` applies the mean change.

    Let theta be the pulled parameters, and theta_i the parameters of worker i after `steps` local
    steps. The outer optimizer on the servers receives mean_i(theta - theta_i) as its gradient
    (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    algorithm 1).

    Args:
        steps: local steps per round.
        outer: factory of the outer optimizer on the servers, or an `OptimizerSpec`.
        compression: encoding of pushed and pulled changes; None sends float values.
        fragments: number of equal parts of the model. One fragment is exchanged every
            `steps / fragments` steps, in rotation (Douillard et al., "Streaming DiLoCo with
            overlapping communication", 2025, algorithm 2).
        overlap: local steps that a worker takes while a fragment is exchanged.
        alpha: weight of the worker's parameters when the exchanged fragment arrives; the received
            parameters have weight 1 - `alpha` (section 2.3). Used with `overlap` only.
    """

    steps: int
    outer: OptimizerFactory = NESTEROV
    compression: Integers | None = None
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.5
    bound: ClassVar[float] = 0  # a round starts when all workers have finished the previous one
    averages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, minimum in (("steps", 1), ("fragments", 1), ("overlap", 0)):
            integer = require_integer(name, getattr(self, name), minimum)
            object.__setattr__(self, name, integer)
        if self.steps % self.fragments:
            raise ValueError(
                f"expected local steps that are a multiple of the {self.fragments} fragments, "
                f"got {self.steps}"
            )
        if self.overlap >= self.interval:
            raise ValueError(
                f"expected overlap < {self.interval}, the steps between two exchanges, "
                f"got {self.overlap}: an exchange must end before the next one starts"
            )
        if not 0 <= require_number("alpha", self.alpha) <= 1:
            raise ValueError(f"expected 0 <= alpha <= 1, got {self.alpha}")

    @property
    def interval(self) -> int:
        """Number of local steps between two exchanges."""
        return self.steps // self.fragments


Consistency = BulkSynchronous | StaleSynchronous | Asynchronous | LocalSteps


def require_policy(consistency: Consistency | None) -> Consistency:
    """Return a policy, or `BulkSynchronous()` for None; raise `TypeError` for other objects."""
    policy = BulkSynchronous() if consistency is None else consistency
    if not isinstance(policy, Consistency):
        raise TypeError(f"expected a policy, such as BulkSynchronous(), got {policy!r}")
    return policy


def as_local_steps(consistency: Consistency | None) -> LocalSteps | None:
    """Return the policy if it is `LocalSteps`, and None otherwise."""
    return consistency if isinstance(consistency, LocalSteps) else None
