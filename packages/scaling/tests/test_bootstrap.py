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
from scaling.uncertainty.quantity import quantity

ASKED = [quantity("alpha"), quantity("exponent"), optimum("parameters", 1e24), loss_at(1e11, 1e13)]


@pytest.fixture(scope="module")
def fit():
    return fit_parametric(isoflop_runs(noise=5e-3, seed=3), "squares")


@pytest.mark.parametrize(
    ("sets", "least", "most"),
    [
        # Of a coverage of 95 % the 0.3 % quantile, and none or all of forty.
        (40, 33, 40),
        pytest.param(500, 465, 487, marks=pytest.mark.exhaustive),
    ],
)
def test_intervals_hold_the_truth_in_95_percent_of_synthetic_sets(sets, least, most):
    held = np.zeros(len(ASKED))
    for seed in range(sets):
        found = fit_parametric(isoflop_runs(noise=5e-3, seed=seed))
        drawn = bootstrap(found, resamples=200, seed=seed)
        held += [float(q.of(CHINCHILLA.constants[None])[0]) in drawn.interval(q) for q in ASKED]
    assert (held >= least).all(), held
    assert (held <= most).all(), held


def test_a_resample_is_the_fit_of_the_repeated_runs(fit):
    drawn = bootstrap(fit, resamples=100, seed=5)
    n = len(fit.runs)
    counts = np.random.default_rng(5).multinomial(n, np.full(n, 1 / n), 100)
    for i in (0, 57, 99):
        repeated = fit.runs[np.repeat(np.arange(n), counts[i])]
        np.testing.assert_allclose(
            drawn.constants[i], fit_parametric(repeated, "squares").law.constants, rtol=1e-5
        )


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_runs_that_share_an_error_are_drawn_together():
    """All runs of a budget are off alike, as by one order of the data: seventy-two are nine."""
    asked, held = loss_at(1e10, 2e11), {None: 0, "budget": 0}
    truth = CHINCHILLA.predict(1e10, 2e11)
    for seed in range(16):
        exact = isoflop_runs(noise=5e-4, seed=seed)
        shared = np.repeat(np.random.default_rng(seed).normal(0, 5e-3, 9), 8)
        loss = exact.loss * np.exp(shared)
        runs = load_runs({"N": exact.parameters, "D": exact.tokens, "loss": loss})
        found = fit_parametric(runs)
        for by in held:
            held[by] += truth in bootstrap(found, resamples=120, by=by).interval(asked)
    assert held["budget"] >= 14
    assert held[None] <= held["budget"] - 2


def test_a_resample_by_label_takes_all_runs_of_a_label_or_none(fit):
    labels = np.arange(len(fit.runs)) % 6
    drawn = bootstrap(fit, resamples=100, seed=5, by=labels)
    counts = np.random.default_rng(5).multinomial(6, np.full(6, 1 / 6), 100)
    repeated = fit.runs[np.repeat(np.arange(len(labels)), counts[7][labels])]
    np.testing.assert_allclose(
        drawn.constants[7], fit_parametric(repeated, "squares").law.constants, rtol=1e-5
    )
    with pytest.raises(ValueError, match="72 labels, 3 of them different"):
        bootstrap(fit, by=np.arange(72) % 3)


def test_bootstrap_and_profile_agree_where_errors_are_normal():
    """On average: one sample's bootstrap is wider or narrower by a tenth."""
    ratios = []
    for seed in range(12):
        found = fit_parametric(isoflop_runs(noise=5e-3, seed=seed, per_budget=24), "squares")
        drawn = bootstrap(found, resamples=1000)
        for asked in ASKED:
            one, two = drawn.interval(asked), profile(found, asked).interval
            estimate = asked.of(found.law.constants[None])[0]
            assert estimate in one
            assert estimate in two
            ratios.append(math.log(one.high / one.low) / math.log(two.high / two.low))
    np.testing.assert_allclose(np.reshape(ratios, (12, -1)).mean(0), 1, atol=0.08)


def test_the_profile_is_the_least_objective_among_laws_that_imply_the_value(fit):
    """Against a brute search: alpha held, the other four free."""
    curve = profile(fit, "alpha")
    problem = Problem.of(fit.runs)
    best = newton.objective(problem, problem.centered(fit.law)[None], math.inf)[0]
    kappa = 2 * best / (len(fit.runs) - 5)
    for value in (curve.interval.low, curve.interval.high):
        held = profile_by_grid(problem, value)
        assert 2 * (held - best) / kappa == pytest.approx(curve.threshold, rel=0.02)


def profile_by_grid(problem, alpha):
    """Least squares over E, a, b, beta by scipy."""
    from scipy.optimize import least_squares

    x, y = (np.log(c) - np.log(c).mean() for c in problem.columns.values())

    def errors(p):
        loss = p[0] + np.exp(p[1] - alpha * x) + np.exp(p[2] - p[3] * y)
        return np.log(loss) - problem.z

    found = least_squares(errors, [1.5, -1.0, -1.0, 0.3], xtol=1e-14, ftol=1e-14)
    return found.cost


@pytest.mark.parametrize("loss", ["huber", "lad"])
def test_the_profile_of_a_robust_loss_is_about_as_wide_as_its_bootstrap(loss):
    robust = fit_parametric(isoflop_runs(noise=5e-3, seed=4, per_budget=24), loss)
    one = bootstrap(robust, resamples=500).interval("exponent")
    two = profile(robust, "exponent").interval
    assert two.high - two.low == pytest.approx(one.high - one.low, rel=0.35)


def test_a_wider_level_gives_a_wider_interval_that_is_carried_to_the_optimum(fit):
    narrow, wide = (bootstrap(fit, resamples=1000, level=level) for level in (0.8, 0.99))
    a, b = (drawn.optimal(1e24).intervals for drawn in (narrow, wide))
    for name in ("parameters", "tokens", "loss"):
        assert b[name].low < a[name].low < a[name].high < b[name].high
    assert b["loss"].level == 0.99


def test_every_extrapolation_of_a_fit_carries_its_interval(fit):
    best = fit.optimal(1e24)
    assert best.loss in best.intervals["loss"]
    served = fit.optimal(1e24, inference_tokens=1e13)
    assert served.parameters in served.intervals["parameters"]
    assert served.parameters < best.parameters
    seen = fit.predict(1e12, 1e13)
    assert float(seen) in seen.interval


def test_the_seed_is_all_that_chance_depends_on(fit):
    a, b, c = (bootstrap(fit, resamples=100, seed=s).constants for s in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


def test_runs_without_noise_leave_only_drift():
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
