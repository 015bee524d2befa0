"""A fitted law and what it was fitted to: what every kind of uncertainty starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from scaling.fit.search import Loss
from scaling.fit.varpro import Problem
from scaling.law import Law
from scaling.runs import Array, Runs


@dataclass(frozen=True)
class Estimate:
    """A law without intervals, the runs, and the loss by which it fits them best."""

    runs: Runs
    law: Law
    loss: Loss
    delta: float
    residuals: Array
    """log of predicted over observed loss, one per run."""
    untuned: float
    """The weight of runs above the law; below one, they may have been tuned too little."""

    @cached_property
    def problem(self) -> Problem:
        """What was fitted, in the parameters of the search."""
        return Problem.of(self.runs, self.untuned)
