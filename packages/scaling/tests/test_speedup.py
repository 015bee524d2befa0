"""A recipe that is so many times cheaper by construction is found to be that."""

import math
import warnings

import numpy as np
import pytest
from scaling import Law, effective_speedup, fit_parametric, isoflop_runs, load_runs

LAW = Law(1.69, 406.4, 410.7, 0.34, 0.28)


def cheaper(law, factor):
    """The law of a recipe that needs 1 / factor of the compute for the same loss, at any size."""
    gamma = law.alpha * law.beta / (law.alpha + law.beta)
    return Law(law.E, law.A * factor**-gamma, law.B * factor**-gamma, law.alpha, law.beta)


def test_a_noiseless_speedup_is_exact():
    a, b = (fit_parametric(isoflop_runs(law)) for law in (cheaper(LAW, 1.7), LAW))
    for compute in (1e19, 1e21, 1e23):
        found = effective_speedup(a, b, compute)
        assert found.factor == pytest.approx(1.7, rel=1e-5)
        back = effective_speedup(b, a, compute * found.factor)
        assert back.factor == pytest.approx(1 / found.factor, rel=1e-5)
        best = b.law.cheapest(found.loss)
        assert best.compute == pytest.approx(compute * found.factor, rel=1e-6)


@pytest.mark.parametrize(
    ("sets", "least"),
    # About the 1 % quantiles of a coverage of 95 %.
    [(3, 2), pytest.param(40, 34, marks=pytest.mark.exhaustive)],
)
def test_the_interval_holds_the_factor(sets, least):
    held = 0
    for seed in range(sets):
        a = fit_parametric(isoflop_runs(cheaper(LAW, 1.5), noise=3e-3, seed=seed, per_budget=5))
        b = fit_parametric(isoflop_runs(LAW, noise=3e-3, seed=seed + 99, per_budget=5))
        held += 1.5 in effective_speedup(a, b, 1e21).interval
    assert held >= least


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_a_law_that_bends_widens_the_interval():
    runs = isoflop_runs(LAW, noise=1e-3, span=25)
    bent = load_runs(
        {
            "N": runs.parameters,
            "D": runs.tokens,
            "loss": runs.loss + 0.3 * np.log(runs.tokens / 1e9) ** 2 / 40,
        }
    )
    other = fit_parametric(isoflop_runs(LAW, noise=1e-3, seed=1))
    straight = effective_speedup(fit_parametric(runs), other, 1e20).interval
    wide = effective_speedup(fit_parametric(bent), other, 1e20).interval
    assert math.log(wide.high / wide.low) > 1.5 * math.log(straight.high / straight.low)


def test_a_loss_that_the_other_never_reaches_costs_infinitely_much():
    a = fit_parametric(isoflop_runs(Law(1.2, 406.4, 410.7, 0.34, 0.28)))
    b = fit_parametric(isoflop_runs(Law(1.9, 406.4, 410.7, 0.34, 0.28)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = effective_speedup(a, b, 1e24)
    assert found.factor == math.inf
    assert found.interval.high == math.inf
    with pytest.raises(ValueError, match="compute = 0"):
        effective_speedup(a, b, 0)
