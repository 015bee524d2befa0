"""Runs drawn from a known law, to check a fit against the truth."""

from collections.abc import Sequence

import numpy as np

from scaling.law import Law
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Runs, load_runs

CHINCHILLA = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
"""The constants printed in Hoffmann et al. 2022, appendix D.3, rounded as there."""

BUDGETS = (6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21)
"""FLOPs of the IsoFLOP curves in Hoffmann et al. 2022, figure 3."""


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
    """IsoFLOP runs that `law` would give: `per_budget` sizes a factor of `span` apart, end to end.

    The sizes of a budget lie evenly in log N about `shift` times its optimum. `noise` is the
    standard deviation of log loss.
    """
    rng = np.random.default_rng(seed)
    steps = np.linspace(-0.5, 0.5, per_budget)
    n = np.concatenate([law.optimal(c).parameters * shift * span**steps for c in budgets])
    c = np.repeat(budgets, per_budget)
    d = c / (FLOPS_PER_PARAMETER_TOKEN * n)
    loss = law.predict(n, d) * np.exp(noise * rng.standard_normal(n.size))
    # Counted one by one, however few tokens a parameter a law of any exponents may ask for.
    units = {"parameters": 1.0, "tokens": 1.0, "loss": 1.0}
    return load_runs({"parameters": n, "tokens": d, "compute": c, "loss": loss}, units=units)


def planned_runs(law: Law = CHINCHILLA, *, budgets: Sequence[float] = BUDGETS) -> Runs:
    """Noiseless IsoFLOP runs as people plan them, who do not know the optimum yet.

    Eight sizes a budget, so that the tokens span 0.8e9 to 20e9 up to 1e20 FLOPs and 5e9 to 200e9
    above: the sizes are the same fixed distance apart, and the optimum lies where it will.
    """
    n, d = [], []
    for c in budgets:
        least, most = (0.8e9, 20e9) if c <= 1e20 else (5e9, 200e9)
        tokens = np.geomspace(most, least, 8)
        n.append(c / (FLOPS_PER_PARAMETER_TOKEN * tokens))
        d.append(tokens)
    sizes, tokens = np.concatenate(n), np.concatenate(d)
    return load_runs({"parameters": sizes, "tokens": tokens, "loss": law.predict(sizes, tokens)})
