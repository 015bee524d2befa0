import math

import numpy as np
import pytest
from scaling import (
    Law,
    bootstrap,
    fit_parametric,
    isoflop_runs,
    load_runs,
    loss_at,
    optimum,
    profile,
)
from scaling.fit import newton
from scaling.fit.varpro import Problem
from scaling.synthetic import CHINCHILLA
from scaling.uncertainty.quantity import named_quantity

QUANTITIES = [
    named_quantity("alpha"),
    named_quantity("exponent"),
    optimum("parameters", 1e24),
    loss_at(1e11, 1e13),
]


@pytest.fixture(scope="module")
def fit():
    return fit_parametric(isoflop_runs(noise=5e-3, seed=3), "squares")


@pytest.mark.parametrize(
    ("sets", "least", "most"),
    [
        # At a coverage of 95 %, fewer than 19 of 24 have a probability of 0.1 %.
        (24, 19, 24),
        pytest.param(500, 465, 487, marks=pytest.mark.exhaustive),
    ],
)
def test_bootstrap_intervals_cover_the_truth_in_95_percent_of_synthetic_tables(sets, least, most):
    truths = [float(q.evaluate(CHINCHILLA.constants[None])[0]) for q in QUANTITIES]
    covered = np.zeros(len(QUANTITIES))
    for seed in range(sets):
        fit = fit_parametric(isoflop_runs(noise=5e-3, seed=seed))
        resampled = bootstrap(fit, resamples=200, seed=seed)
        covered += [t in resampled.interval(q) for t, q in zip(truths, QUANTITIES, strict=True)]
    assert (covered >= least).all(), covered
    assert (covered <= most).all(), covered


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_resample_equals_fit_of_repeated_runs(fit):
    resampled = bootstrap(fit, resamples=100, seed=5)
    n = len(fit.runs)
    counts = np.random.default_rng(5).multinomial(n, np.full(n, 1 / n), 100)
    for i in (0, 57, 99):
        repeated = fit.runs[np.repeat(np.arange(n), counts[i])]
        np.testing.assert_allclose(
            resampled.constants[i], fit_parametric(repeated, "squares").law.constants, rtol=1e-5
        )


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_runs_with_a_common_error_are_resampled_together():
    """All runs of a budget have the same error, so 72 runs are worth nine."""
    target = loss_at(1e10, 2e11)
    covered = {None: 0, "budget": 0}
    truth = CHINCHILLA.predict(1e10, 2e11)
    for seed in range(16):
        exact = isoflop_runs(noise=5e-4, seed=seed)
        shared = np.repeat(np.random.default_rng(seed).normal(0, 5e-3, 9), 8)
        loss = exact.loss * np.exp(shared)
        runs = load_runs({"N": exact.parameters, "D": exact.tokens, "loss": loss})
        fit = fit_parametric(runs)
        for by in covered:
            covered[by] += truth in bootstrap(fit, resamples=120, by=by).interval(target)
    assert covered["budget"] >= 14
    assert covered[None] <= covered["budget"] - 2


def test_resampling_by_label_keeps_runs_of_a_label_together(fit):
    labels = np.arange(len(fit.runs)) % 6
    resampled = bootstrap(fit, resamples=100, seed=5, by=labels)
    counts = np.random.default_rng(5).multinomial(6, np.full(6, 1 / 6), 100)
    repeated = fit.runs[np.repeat(np.arange(len(labels)), counts[7][labels])]
    np.testing.assert_allclose(
        resampled.constants[7], fit_parametric(repeated, "squares").law.constants, rtol=1e-5
    )
    with pytest.raises(ValueError, match="72 labels, 3 of them different"):
        bootstrap(fit, by=np.arange(72) % 3)


def test_bootstrap_and_profile_agree_for_normal_errors():
    """They agree on average, since the bootstrap of a single table varies by a tenth."""
    ratios = []
    for seed in range(6):
        fit = fit_parametric(isoflop_runs(noise=5e-3, seed=seed, per_budget=24), "squares")
        resampled = bootstrap(fit, resamples=1000)
        for target in QUANTITIES:
            intervals = [resampled.interval(target), profile(fit, target).interval]
            estimate = target.evaluate(fit.law.constants[None])[0]
            assert all(estimate in interval for interval in intervals)
            widths = [math.log(interval.high / interval.low) for interval in intervals]
            ratios.append(widths[0] / widths[1])
    np.testing.assert_allclose(np.reshape(ratios, (6, -1)).mean(0), 1, atol=0.08)


def test_profile_is_least_objective_of_laws_that_imply_the_value(fit):
    """The independent reference is scipy's search with alpha fixed and the other four free."""
    curve = profile(fit, "alpha")
    problem = Problem.chinchilla(fit.runs)
    best = newton.objective(problem, problem.from_law(fit.law)[None], math.inf)[0]
    kappa = 2 * best / (len(fit.runs) - 5)
    for value in (curve.interval.low, curve.interval.high):
        objective = least_squares_with_fixed_alpha(problem, value)
        assert 2 * (objective - best) / kappa == pytest.approx(curve.threshold, rel=0.02)


def least_squares_with_fixed_alpha(problem, alpha):
    """Return the least half sum of squares over E, a, b and beta, by scipy."""
    from scipy.optimize import least_squares

    x, y = (np.log(c) - np.log(c).mean() for c in problem.columns.values())

    def errors(p):
        loss = p[0] + np.exp(p[1] - alpha * x) + np.exp(p[2] - p[3] * y)
        return np.log(loss) - problem.log_target

    return least_squares(errors, [1.5, -1.0, -1.0, 0.3], xtol=1e-14, ftol=1e-14).cost


@pytest.mark.parametrize("loss", ["huber", "lad"])
def test_profile_of_a_robust_loss_is_about_as_wide_as_its_bootstrap(loss):
    robust = fit_parametric(isoflop_runs(noise=5e-3, seed=4, per_budget=24), loss)
    by_bootstrap = bootstrap(robust, resamples=500).interval("exponent")
    by_profile = profile(robust, "exponent").interval
    width = by_bootstrap.high - by_bootstrap.low
    assert by_profile.high - by_profile.low == pytest.approx(width, rel=0.35)


def test_higher_level_gives_wider_intervals_of_the_optimum(fit):
    narrow, wide = (bootstrap(fit, resamples=1000, level=level) for level in (0.8, 0.99))
    a, b = (resampled.optimal(1e24).intervals for resampled in (narrow, wide))
    for name in ("parameters", "tokens", "loss"):
        assert b[name].low < a[name].low < a[name].high < b[name].high
    assert b["loss"].level == 0.99


def test_every_extrapolation_has_an_interval(fit):
    best = fit.optimal(1e24)
    assert best.loss in best.intervals["loss"]
    served = fit.optimal(1e24, inference_tokens=1e13)
    assert served.parameters in served.intervals["parameters"]
    assert served.parameters < best.parameters
    seen = fit.predict(1e12, 1e13)
    assert float(seen) in seen.interval


def test_bootstrap_depends_on_chance_only_through_its_seed(fit):
    a, b, c = (bootstrap(fit, resamples=100, seed=s).constants for s in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


def test_noiseless_runs_have_intervals_of_drift_alone():
    law = Law(2, 300, 600, 0.35, 0.4)
    runs = isoflop_runs(law)
    sure = load_runs({"N": runs.parameters, "D": runs.tokens, "loss": runs.loss})
    fit = fit_parametric(sure)
    for interval in (
        fit.resampled.optimal(1e24).intervals["parameters"],
        fit.optimal(fit.drift.highest).intervals["parameters"],
        profile(fit, optimum("parameters", 1e24)).interval,
    ):
        assert interval.high / interval.low == pytest.approx(1, abs=1e-6)
