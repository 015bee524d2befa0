"""A fitted law and what it was fitted to: what every kind of uncertainty starts from."""

from __future__ import annotations

from dataclasses import dataclass

from scaling.fit.search import Loss
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
