"""Each kind of doubt is one warning: it is raised where it should be, and nowhere else."""

import warnings

import numpy as np
import pytest
from scaling import Law, ScalingWarning, fit_isoflop, fit_parametric, isoflop_runs, load_runs

LAW = Law(1.69, 406.4, 410.7, 0.34, 0.28)


def told(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


def bent(strength, noise=2e-3, seed=0, skew=0.0):
    """Runs of no law of the form: the data exponent changes with scale, or the valleys lean."""
    runs = isoflop_runs(LAW, span=25)
    n, d = runs.parameters, runs.tokens
    by_tokens = LAW.B * d**-LAW.beta * np.exp(strength * np.log(d / 1e9) ** 2)
    by_size = LAW.A * n**-LAW.alpha * np.exp(skew * np.log(n / 1e9) ** 2)
    errors = np.exp(noise * np.random.default_rng(seed).standard_normal(len(n)))
    return load_runs({"N": n, "D": d, "loss": (LAW.E + by_size + by_tokens) * errors})


def test_a_law_that_holds_is_not_said_to_bend_and_one_that_does_not_is():
    sound = [
        told(lambda s=s: fit_parametric(isoflop_runs(LAW, noise=3e-3, seed=s))) for s in range(30)
    ]
    assert sum("no law of this form" in " ".join(messages) for messages in sound) <= 1
    for seed in range(3):
        messages = told(lambda: fit_parametric(bent(0.04, seed=seed)))  # noqa: B023
        assert sum("no law of this form" in m for m in messages) == 1


def test_heavy_tails_and_misread_runs_are_no_bend():
    runs = isoflop_runs(LAW, noise=2e-3)
    loss = runs.loss.copy()
    loss[[3, 40]] *= 1.2
    spoiled = load_runs({"N": runs.parameters, "D": runs.tokens, "loss": loss})
    assert not any("no law of this form" in m for m in told(lambda: fit_parametric(spoiled)))


def test_methods_that_contradict_each_other_say_so_both():
    """Valleys whose bottoms go as C^0.7 and whose depth knows nothing of it: no law of the form."""
    runs = isoflop_runs(LAW, span=10, per_budget=9)
    bottom = 3e8 * (runs.compute / 6e18) ** 0.7
    u = np.log(runs.parameters / LAW.optimal(6e18).parameters) - np.log(bottom / 3e8) / 2
    errors = np.exp(1e-3 * np.random.default_rng(0).standard_normal(len(u)))
    loss = (1.5 + 1.5 * (runs.compute / 6e18) ** -0.1 + 0.03 * u**2) * errors
    odd = load_runs({"N": runs.parameters, "D": runs.tokens, "loss": loss})
    fits = []
    told(lambda: fits.extend([fit_isoflop(odd), fit_parametric(odd)]))
    said = [told(lambda f=f: f.optimal(1e22)) for f in fits]
    assert sum("the methods contradict each other" in m for m in said[0]) == 1
    sound = fit_isoflop(isoflop_runs(LAW, noise=1e-3))
    assert not told(lambda: sound.optimal(1e23))


def test_an_answer_far_from_any_run_says_so_once():
    fit = fit_parametric(isoflop_runs(LAW, noise=1e-3))
    assert not told(lambda: fit.optimal(1e24))
    served = told(lambda: fit.optimal(1e24, inference_tokens=1e18))
    assert sum("is far from any run" in m for m in served) == 1
    assert "times smaller than the smallest" in " ".join(served)
    beyond = told(lambda: fit.optimal(1e27))
    assert sum("times the compute of the largest" in m for m in beyond) == 1


def test_many_budgets_with_one_fault_are_one_warning():
    """Points read off a figure: compute is a little different everywhere."""
    runs = isoflop_runs(LAW, span=25, per_budget=3, budgets=np.geomspace(1e18, 1e22, 40))
    messages = told(lambda: fit_isoflop(runs))
    assert len(messages) == len(set(messages)) <= 6
    gaps = [m for m in messages if "apart leave the best size to the form" in m]
    assert len(gaps) == 1
    assert "and 37 more" in gaps[0]


@pytest.mark.parametrize("seed", range(3))
def test_sound_runs_raise_no_warning(seed):
    runs = isoflop_runs(LAW, noise=2e-3, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScalingWarning)
        fit_parametric(runs).optimal(1e24)
        fit_isoflop(runs).optimal(1e24)
