"""Scaling laws of language models: fits to training runs, with calibrated intervals.

>>> runs = load_runs("runs.csv")                     # the loss and two of N, D, C
>>> fit = fit_parametric(runs)                       # L = E + A / N^alpha + B / D^beta
>>> fit.optimal(1e24)                                # N, D, loss and their intervals
"""

from scaling.fit.parametric import ParametricFit, fit_parametric
from scaling.isoflop.fit import IsoflopFit, fit_isoflop
from scaling.law import Interval, Law, Optimum
from scaling.laws.fit import LawFit, fit_law
from scaling.laws.form import CATALOG, Form
from scaling.page import report
from scaling.plot import plot
from scaling.runs import Runs, ScalingWarning, load_runs
from scaling.sweeps.batch_size import exact_rate, sweep_learning_rate
from scaling.sweeps.sweep import Sweep
from scaling.sweeps.table import fit_sweep, fit_sweeps
from scaling.synthetic import isoflop_runs
from scaling.uncertainty.backtest import BacktestRow, backtest
from scaling.uncertainty.bootstrap import Bootstrap, bootstrap
from scaling.uncertainty.posterior import Posterior, Prediction
from scaling.uncertainty.speedup import Speedup, effective_speedup

__all__ = [
    "CATALOG",
    "BacktestRow",
    "Bootstrap",
    "Form",
    "Interval",
    "IsoflopFit",
    "Law",
    "LawFit",
    "Optimum",
    "ParametricFit",
    "Posterior",
    "Prediction",
    "Runs",
    "ScalingWarning",
    "Speedup",
    "Sweep",
    "backtest",
    "bootstrap",
    "effective_speedup",
    "exact_rate",
    "fit_isoflop",
    "fit_law",
    "fit_parametric",
    "fit_sweep",
    "fit_sweeps",
    "isoflop_runs",
    "load_runs",
    "plot",
    "report",
    "sweep_learning_rate",
]
