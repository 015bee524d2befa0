"""Misleading fits that use only the best run of each budget."""

import numpy as np
from scipy.optimize import curve_fit


def fit_shortcut(runs, method):
    """Return a function from compute to the best size, as found by a misleading method.

    The method uses the best run of each budget. "minimum" fits a line in logs through these runs.
    "minimum-offset" fits a C^b + c by least squares in N, which contradicts C = 6 N D.
    """
    best = [group[[int(np.argmin(group.loss))]] for group in runs.budgets()]
    c = np.array([run.compute[0] for run in best])
    n = np.array([run.parameters[0] for run in best])
    exponent, intercept = np.polyfit(np.log(c), np.log(n), 1)
    if method == "minimum":
        return lambda compute: float(np.exp(intercept) * compute**exponent)

    def law(c, a, b, offset):
        return a * c**b + offset

    # curve_fit uses absolute step sizes, so compute and sizes are divided by their means.
    start = [np.exp(intercept) * c.mean() ** exponent / n.mean(), exponent, 0.0]
    constants, _ = curve_fit(law, c / c.mean(), n / n.mean(), start, maxfev=20_000)
    return lambda compute: float(n.mean() * law(compute / c.mean(), *constants))
