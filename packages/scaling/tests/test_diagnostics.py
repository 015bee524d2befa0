"""Each diagnostic is one warning, which is issued if and only if it applies."""

import warnings

import numpy as np
import pytest
from scaling import Law, ScalingWarning, fit_isoflop, fit_parametric, isoflop_runs, load_runs
from scaling.uncertainty.diagnostics import compute_lack_of_fit

LAW = Law(1.69, 406.4, 410.7, 0.34, 0.28)


def collect_warnings(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


def draw_bent_runs(strength, noise=2e-3, seed=0, skew=0.0):
    """Return runs that do not follow a law: exponents change with scale, or valleys are skewed."""
    runs = isoflop_runs(LAW, span=25)
    n, d = runs.parameters, runs.tokens
    by_tokens = LAW.B * d**-LAW.beta * np.exp(strength * np.log(d / 1e9) ** 2)
    by_size = LAW.A * n**-LAW.alpha * np.exp(skew * np.log(n / 1e9) ** 2)
    errors = np.exp(noise * np.random.default_rng(seed).standard_normal(len(n)))
    return load_runs({"N": n, "D": d, "loss": (LAW.E + by_size + by_tokens) * errors})


def test_bend_warning_appears_only_if_the_law_does_not_hold():
    sound = [
        collect_warnings(lambda s=s: fit_parametric(isoflop_runs(LAW, noise=3e-3, seed=s)))
        for s in range(6)
    ]
    assert sum("no law of this form" in " ".join(messages) for messages in sound) <= 1
    for seed in range(2):
        messages = collect_warnings(lambda: fit_parametric(draw_bent_runs(0.04, seed=seed)))  # noqa: B023
        assert sum("no law of this form" in m for m in messages) == 1


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_lack_of_fit_is_a_standard_deviation_of_the_residuals():
    fit = fit_parametric(draw_bent_runs(0.04))
    theta = fit.problem.from_constants(fit.law.constants)
    lack = compute_lack_of_fit(fit.problem, theta, fit.residuals)
    assert 0 < lack < np.sqrt(np.mean(fit.residuals**2))
    assert compute_lack_of_fit(fit.problem, theta, 2 * fit.residuals) == pytest.approx(2 * lack)


def test_heavy_tails_and_misread_runs_do_not_trigger_the_bend_warning():
    runs = isoflop_runs(LAW, noise=2e-3)
    loss = runs.loss.copy()
    loss[[3, 40]] *= 1.2
    spoiled = load_runs({"N": runs.parameters, "D": runs.tokens, "loss": loss})
    assert not any(
        "no law of this form" in m for m in collect_warnings(lambda: fit_parametric(spoiled))
    )


@pytest.fixture(scope="module")
def fit():
    return fit_parametric(isoflop_runs(LAW, noise=1e-3))


def test_answer_far_from_any_run_is_reported_once(fit):
    assert not collect_warnings(lambda: fit.optimal(1e22))
    below = collect_warnings(lambda: fit.optimal(1e14))
    assert sum("is far from any run" in m for m in below) == 1
    assert "times smaller than the smallest" in " ".join(below)
    beyond = collect_warnings(lambda: fit.optimal(1e27))
    assert sum("times the compute of the largest" in m for m in beyond) == 1


def test_wide_printed_interval_is_reported(fit):
    """The interval of noise alone is narrow here, but the printed one includes drift."""
    with pytest.warns(ScalingWarning, match="lies between .*, with noise and drift") as caught:
        interval = fit.optimal(1e24).intervals["parameters"]
    assert f"between {interval.low:.3g} and {interval.high:.3g}" in str(caught[0].message)
    noise = fit.posterior.optimal(1e24).intervals["parameters"]
    assert interval.high > 10 * interval.low
    assert noise.high < 10 * noise.low


def test_prediction_far_from_any_run_is_reported(fit):
    """Sizes and tokens in billions are the usual reason."""
    assert not collect_warnings(lambda: fit.predict(7e9, 140e9))
    messages = collect_warnings(lambda: fit.predict(7, 140))
    assert sum("parameters and" in m and "far from any run" in m for m in messages) == 1


def test_same_problem_of_many_budgets_is_one_warning():
    """Compute that was read off a figure differs slightly from run to run."""
    runs = isoflop_runs(LAW, span=25, per_budget=3, budgets=np.geomspace(1e18, 1e22, 40))
    messages = collect_warnings(lambda: fit_isoflop(runs))
    assert len(messages) == len(set(messages)) <= 6
    gaps = [m for m in messages if "apart: the best size depends" in m]
    assert len(gaps) == 1
    assert "and 37 more" in gaps[0]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))]
)
def test_clean_runs_raise_no_warning(seed):
    runs = isoflop_runs(LAW, noise=2e-3, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScalingWarning)
        fit_parametric(runs).optimal(1e22)
        fit_isoflop(runs).optimal(1e22)
