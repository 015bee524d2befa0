"""Synthetic runs that follow a known law, to compare fits with the truth."""

import math
from collections.abc import Sequence

import numpy as np

from scaling.law import Law
from scaling.runs import Runs, load_runs
from scaling.units import FLOPS_PER_PARAMETER_TOKEN

#: The rounded constants printed in Hoffmann et al. 2022, appendix D.3.
CHINCHILLA = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)

#: FLOPs of the IsoFLOP curves in Hoffmann et al. 2022, figure 3.
BUDGETS = (6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21)


def isoflop_runs(
    law: Law = CHINCHILLA,
    *,
    budgets: Sequence[float] = BUDGETS,
    per_budget: int = 8,
    span: float = 40.0,
    shift: float = 1.0,
    noise: float = 0.0,
    seed: int = 0,
) -> Runs:
    """Return synthetic IsoFLOP runs of a law, with `per_budget` sizes at each budget.

    The sizes of a budget are evenly spaced in log N about `shift` times the optimal size, and the
    largest is `span` times the smallest. `noise` is the standard deviation of log loss. Raises
    `ValueError` if `noise` is negative or not finite.
    """
    if not 0 <= noise < math.inf:
        raise ValueError(f"expected a finite noise >= 0, got noise = {noise}")
    rng = np.random.default_rng(seed)
    steps = np.linspace(-0.5, 0.5, per_budget)
    n = np.concatenate([law.optimal(c).parameters * shift * span**steps for c in budgets])
    c = np.repeat(budgets, per_budget)
    d = c / (FLOPS_PER_PARAMETER_TOKEN * n)
    loss = law.predict(n, d) * np.exp(noise * rng.standard_normal(n.size))
    # Without units, `load_runs` rejects the unusual tokens per parameter that some laws imply.
    units = {"parameters": 1.0, "tokens": 1.0, "loss": 1.0}
    return load_runs({"parameters": n, "tokens": d, "compute": c, "loss": loss}, units=units)
