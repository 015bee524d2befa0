"""Backtests: fit the runs below a cut in compute and compare the intervals with the later runs.

A backtest is the only check of an interval that does not assume the law. The drift that a backtest
finds within the runs of a fit already widens the intervals of this fit
(`scaling.uncertainty.drift`).
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaling.equality import ComparesArrays
from scaling.fit.parametric import ParametricFit, fit_parametric
from scaling.isoflop.fit import IsoflopFit, fit_isoflop
from scaling.law import Interval
from scaling.runs import Runs, ScalingWarning, require_runs
from scaling.tables.grouping import select_below_cuts
from scaling.units import FLOPS_PER_PARAMETER_TOKEN

METHODS = ("parametric", "isoflop")


@dataclass(frozen=True, eq=False, repr=False)
class BacktestRow(ComparesArrays):
    """The predictions of one method at one cut."""

    method: str
    #: Compute in FLOPs of the largest fitted run.
    cut: float
    runs: int
    held_out: int
    #: Decades of compute from the cut to the largest run of the table.
    decades: float
    #: Predicted best number of parameters at the largest run's compute, and its interval.
    size: float
    size_interval: Interval
    #: Best number of parameters at the same compute according to a fit of all runs.
    full_fit_size: float
    #: Median of |predicted / observed - 1| over held-out runs; nan for an IsoFLOP fit.
    loss_error: float
    #: Number of held-out losses inside their 95 % intervals; 0 for an IsoFLOP fit.
    losses_covered: int
    #: Number of held-out losses that were predicted; 0 for an IsoFLOP fit.
    losses: int

    @property
    def size_covered(self) -> bool:
        """True if the interval contains the best size according to a fit of all runs."""
        return self.full_fit_size in self.size_interval


def backtest(
    runs: Runs, *, fractions: Sequence[float] = (0.4, 0.6, 0.8), methods: Sequence[str] = METHODS
) -> tuple[BacktestRow, ...]:
    """Fit the runs below cuts in compute, and return one row per fit with its predictions.

    Each cut leaves one of the `fractions` of the runs, ordered by 6 N D, and the fit predicts the
    runs above the cut. A method that cannot fit the runs below a cut has no row for this cut.
    Raises `TypeError` if `runs` is not the result of `load_runs`. Raises `ValueError` if a method
    or a fraction is invalid, or if no method can fit the runs below any cut.
    """
    require_runs(runs)
    if unknown := set(methods) - set(METHODS):
        raise ValueError(f"expected methods among {METHODS}, got {sorted(unknown)}")
    if not all(0 < fraction < 1 for fraction in fractions):
        raise ValueError(f"expected fractions between 0 and 1, got {tuple(fractions)}")
    compute = FLOPS_PER_PARAMETER_TOKEN * runs.parameters * runs.tokens
    highest = float(compute.max())
    rows: list[BacktestRow] = []
    reasons: list[str] = []
    with warnings.catch_warnings():
        # Fits of few runs are expected to issue warnings.
        warnings.simplefilter("ignore", ScalingWarning)
        for method in methods:
            try:
                whole = _fit(method, runs)
            except ValueError as error:
                reasons.append(f"{method}: {error}")
                continue
            law = whole.law if isinstance(whole, ParametricFit) else whole
            full_fit_size = law.optimal(highest).parameters
            for below in select_below_cuts(compute, fractions):
                cut = float(compute[below].max())
                try:
                    rows.append(_predict_held_out(method, runs, below, cut, highest, full_fit_size))
                except ValueError as error:
                    reasons.append(f"{method} up to {cut:.3g} FLOPs: {error}")
    if not rows:
        reasons = reasons or [f"fractions = {tuple(fractions)} leave no later runs"]
        raise ValueError("no cut of these runs can be fitted:\n" + "\n".join(reasons))
    return tuple(rows)


def _fit(method: str, runs: Runs) -> ParametricFit | IsoflopFit:
    """Return the fit of a method; raise `ValueError` if the runs do not identify its law."""
    fit = fit_parametric(runs) if method == "parametric" else fit_isoflop(runs)
    if fit.unidentified:
        raise ValueError(fit.unidentified)
    return fit


def _predict_held_out(
    method: str,
    runs: Runs,
    below: NDArray[np.bool_],
    cut: float,
    highest: float,
    full_fit_size: float,
) -> BacktestRow:
    """Fit the runs below a cut and compare the predictions with the other runs."""
    fit = _fit(method, runs[below])
    held_out = runs[~below]
    best = fit.optimal(highest)
    losses = 0
    covered = 0
    error = math.nan
    if isinstance(fit, ParametricFit):
        models = zip(held_out.parameters, held_out.tokens, strict=True)
        predictions = [fit.predict(float(n), float(d)) for n, d in models]
        pairs = zip(held_out.loss, predictions, strict=True)
        covered = sum(loss in prediction.interval for loss, prediction in pairs)
        losses = len(held_out)
        predicted = np.array([prediction.loss for prediction in predictions])
        error = float(np.median(np.abs(predicted / held_out.loss - 1)))
    return BacktestRow(
        method=method,
        cut=cut,
        runs=int(below.sum()),
        held_out=len(held_out),
        decades=math.log10(highest / cut),
        size=best.parameters,
        size_interval=(best.intervals or {})["parameters"],
        full_fit_size=full_fit_size,
        loss_error=error,
        losses_covered=covered,
        losses=losses,
    )
