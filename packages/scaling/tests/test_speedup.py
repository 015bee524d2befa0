"""The speedup of a recipe that is cheaper by a known factor is recovered."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
from scaling import (
    CATALOG,
    Law,
    effective_speedup,
    fit_law,
    fit_parametric,
    isoflop_runs,
    load_runs,
)

LAW = Law(1.69, 406.4, 410.7, 0.34, 0.28)

#: Twelve runs, which have no drift to measure.
FEW = {"budgets": (1e19, 1e20, 1e21), "per_budget": 4}


def make_cheaper(law, factor):
    """Return the law of a recipe that needs 1 / factor of the compute for the same loss."""
    gamma = law.alpha * law.beta / (law.alpha + law.beta)
    return Law(law.E, law.A * factor**-gamma, law.B * factor**-gamma, law.alpha, law.beta)


def test_noiseless_speedup_is_exact():
    a, b = (fit_parametric(isoflop_runs(law, **FEW)) for law in (make_cheaper(LAW, 1.7), LAW))
    for compute in (1e19, 1e23):
        speedup = effective_speedup(a, b, compute)
        assert speedup.factor == pytest.approx(1.7, rel=1e-5)
        back = effective_speedup(b, a, compute * speedup.factor)
        assert back.factor == pytest.approx(1 / speedup.factor, rel=1e-5)
        best = b.law.optimal(compute * speedup.factor)
        assert best.loss == pytest.approx(speedup.loss, rel=1e-8)


@pytest.mark.parametrize(
    ("sets", "least"),
    # These are about the 1 % quantiles at a coverage of 95 %.
    [(1, 1), pytest.param(40, 34, marks=pytest.mark.exhaustive)],
)
def test_speedup_interval_covers_the_factor(sets, least):
    covered = 0
    for seed in range(sets):
        a = fit_parametric(
            isoflop_runs(make_cheaper(LAW, 1.5), noise=3e-3, seed=seed, per_budget=5)
        )
        b = fit_parametric(isoflop_runs(LAW, noise=3e-3, seed=seed + 99, per_budget=5))
        covered += 1.5 in effective_speedup(a, b, 1e21).interval
    assert covered >= least


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_lack_of_fit_widens_the_speedup_interval():
    runs = isoflop_runs(LAW, noise=1e-3, span=25)
    bent = load_runs(
        {
            "N": runs.parameters,
            "D": runs.tokens,
            "loss": runs.loss + 0.3 * np.log(runs.tokens / 1e9) ** 2 / 40,
        }
    )
    other = fit_parametric(isoflop_runs(LAW, noise=1e-3, seed=1, **FEW))
    straight = effective_speedup(fit_parametric(runs), other, 1e20).interval
    wide = effective_speedup(fit_parametric(bent), other, 1e20).interval
    assert math.log(wide.high / wide.low) > 1.5 * math.log(straight.high / straight.low)


def test_unreachable_loss_costs_infinite_compute():
    a = fit_parametric(isoflop_runs(Law(1.2, 406.4, 410.7, 0.34, 0.28), **FEW))
    b = fit_parametric(isoflop_runs(Law(1.9, 406.4, 410.7, 0.34, 0.28), **FEW))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        speedup = effective_speedup(a, b, 1e24)
    assert speedup.factor == math.inf
    assert speedup.interval.high == math.inf
    with pytest.raises(ValueError, match="expected a positive and finite compute, got compute = 0"):
        effective_speedup(a, b, 0)


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_interval_does_not_jump_where_the_loss_becomes_unreachable():
    """The error of both laws exceeds the distance from an irreducible loss to the other side."""
    target = LAW.optimal(1e23).loss
    a = fit_parametric(isoflop_runs(LAW, **FEW))
    laws = [dataclasses.replace(LAW, E=e) for e in (1.001 * target, 0.999 * target)]
    above, below = (
        effective_speedup(a, fit_parametric(isoflop_runs(law, **FEW)), 1e23) for law in laws
    )
    assert math.isinf(above.factor)
    assert math.isfinite(below.factor)
    assert above.interval.high == below.interval.high == math.inf
    assert 1 < below.interval.low < above.interval.low < 1.2 * below.interval.low


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_speedup_between_laws_of_any_form():
    """The same runs by two forms of law cost the same compute, and a known factor is found."""
    tied = Law(1.69, 410.0, 380.0, 0.3, 0.3)
    a = fit_law("tied", isoflop_runs(make_cheaper(tied, 1.7)))
    b = fit_parametric(isoflop_runs(tied, **FEW))
    speedup = effective_speedup(a, b, 1e21)
    assert speedup.factor == pytest.approx(1.7, rel=1e-5)
    assert 1.7 in speedup.interval
    noisy = fit_law("chinchilla", isoflop_runs(tied, noise=2e-3))
    same = effective_speedup(noisy, fit_law("tied", isoflop_runs(tied, noise=2e-3)), 1e20)
    assert 1.0 in same.interval
    assert same.interval.low < same.factor < same.interval.high


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_speedup_of_a_law_with_more_inputs_needs_their_values():
    form = CATALOG["mixture"]
    runs = isoflop_runs(noise=1e-3)
    n, d = np.tile(runs.parameters, 3), np.tile(runs.tokens, 3)
    granularity = np.repeat([1.0, 4.0, 16.0], len(runs))
    loss = form.predict(form.published, parameters=n, tokens=d, granularity=granularity)
    rows = {"parameters": n, "tokens": d, "granularity": granularity, "loss": loss}
    fit = fit_law("mixture", rows)
    fine = effective_speedup(fit, fit, 1e20, inputs={"granularity": 8})
    assert fine.factor == pytest.approx(1, rel=1e-6)
    with pytest.raises(ValueError, match=r"mixture also needs inputs=.'granularity'"):
        effective_speedup(fit, fit, 1e20)
    with pytest.raises(ValueError, match=r"neither law has the inputs \['granularty'\]"):
        effective_speedup(fit, fit, 1e20, inputs={"granularity": 8, "granularty": 8})
    with pytest.raises(
        ValueError, match=r"inputs\['granularity'\] to be positive and finite, got -1"
    ):
        effective_speedup(fit, fit, 1e20, inputs={"granularity": -1})
    tokens = np.geomspace(1e9, 1e11, 6)
    batches = fit_law("step_batch", {"tokens": tokens, "batch": tokens**0.5})
    with pytest.raises(ValueError, match="expected a law of the loss by parameters and tokens"):
        effective_speedup(fit, batches, 1e20, inputs={"granularity": 8})
