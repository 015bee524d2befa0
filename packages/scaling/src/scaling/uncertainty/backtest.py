"""Foretell the past: fit the runs below a cut in compute, and hold the rest against the intervals.

Notable: it is the only judge of an interval that does not assume the law. What it finds within the
runs of a fit widens that fit's intervals already (see `drift`); here it is a table to look at.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaling.equality import ComparesArrays
from scaling.fit.parametric import ParametricFit, fit_parametric
from scaling.isoflop import IsoflopFit, fit_isoflop
from scaling.law import Interval
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Runs, ScalingWarning

METHODS = ("parametric", "isoflop")


@dataclass(frozen=True, eq=False)
class Foretold(ComparesArrays):
    """One method at one cut."""

    method: str
    cut: float
    """FLOPs of the largest run that was fitted."""
    runs: int
    held_out: int
    decades: float
    """From the cut to the largest run of all."""
    size: float
    """The best number of parameters there, as foretold."""
    size_interval: Interval
    size_by_all: float
    """The same by a fit of all runs."""
    loss_error: float
    """Median of |foretold / observed - 1| over the runs held out; nan for an IsoFLOP fit."""
    losses_held: int
    """How many of them lay in their 95 % intervals; 0 of 0 for an IsoFLOP fit."""
    losses: int

    @property
    def size_held(self) -> bool:
        """Whether the interval holds the best size by all runs."""
        return self.size_by_all in self.size_interval


def backtest(
    runs: Runs, *, shares: Sequence[float] = (0.4, 0.6, 0.8), methods: Sequence[str] = METHODS
) -> tuple[Foretold, ...]:
    """Fit the given shares of the runs, by compute, with each method, and foretell the rest.

    A method that cannot fit the runs below a cut (too few, or not at budgets) has no row there.
    ValueError where no method can fit any.
    """
    if unknown := set(methods) - set(METHODS):
        raise ValueError(f"methods {sorted(unknown)} are not among {METHODS}")
    if not all(0 < share < 1 for share in shares):
        raise ValueError(f"shares = {tuple(shares)}: each must lie between 0 and 1")
    compute = FLOPS_PER_PARAMETER_TOKEN * runs.parameters * runs.tokens
    top, cuts = float(compute.max()), np.unique(np.quantile(compute, shares, method="higher"))
    found: list[Foretold] = []
    reasons: list[str] = []
    with warnings.catch_warnings():
        # That a part of the runs carries little is what this is about.
        warnings.simplefilter("ignore", ScalingWarning)
        for method in methods:
            try:
                whole = _fit(method, runs)
                of = whole.law if isinstance(whole, ParametricFit) else whole
                by_all = of.optimal(top).parameters
                for cut in cuts:
                    below = compute <= cut * (1 + 1e-9)
                    if not below.all():
                        found.append(_foretell(method, runs, below, float(cut), top, by_all))
            except ValueError as error:
                reasons.append(f"{method}: {error}")
    if not found:
        raise ValueError("no cut of these runs can be fitted:\n" + "\n".join(reasons))
    return tuple(found)


def _fit(method: str, runs: Runs) -> ParametricFit | IsoflopFit:
    return fit_parametric(runs) if method == "parametric" else fit_isoflop(runs)


def _foretell(
    method: str, runs: Runs, below: NDArray[np.bool_], cut: float, top: float, by_all: float
) -> Foretold:
    fit, rest = _fit(method, runs[below]), runs[~below]
    best = fit.optimal(top)
    losses, held, error = 0, 0, math.nan
    if isinstance(fit, ParametricFit):
        models = zip(rest.parameters, rest.tokens, strict=True)
        foretold = [fit.predict(float(n), float(d)) for n, d in models]
        losses = len(rest)
        held = sum(z in p.interval for z, p in zip(rest.loss, foretold, strict=True))
        error = float(np.median(np.abs(np.array([p.loss for p in foretold]) / rest.loss - 1)))
    size = (best.parameters, (best.intervals or {})["parameters"], by_all)
    away = math.log10(top / cut)
    return Foretold(method, cut, int(below.sum()), len(rest), away, *size, error, held, losses)
