from dataclasses import replace

import numpy as np
import pytest
from scaling import (
    Law,
    bootstrap,
    fit_parametric,
    isoflop_runs,
    load_runs,
)
from scaling.law import compute_loss, compute_optima
from scaling.synthetic import CHINCHILLA
from scaling.uncertainty.bootstrap import Bootstrap
from scipy.special import ndtri, stdtrit

TARGETS = [
    "alpha",
    "exponent",
    lambda constants: compute_optima(constants, 1e24)[0],
    lambda constants: compute_loss(constants, 1e11, 1e13),
]


@pytest.fixture(scope="module")
def fit():
    return fit_parametric(isoflop_runs(noise=5e-3, seed=3), "squares")


@pytest.mark.parametrize(
    ("sets", "least", "most"),
    [
        # At a coverage of 95 %, fewer than 6 of 8 have a probability of 0.6 %.
        (8, 6, 8),
        pytest.param(500, 465, 487, marks=pytest.mark.exhaustive),
    ],
)
def test_bootstrap_intervals_cover_the_truth_in_95_percent_of_synthetic_tables(sets, least, most):
    truths = [
        CHINCHILLA.alpha,
        CHINCHILLA.exponent,
        CHINCHILLA.optimal(1e24).parameters,
        CHINCHILLA.predict(1e11, 1e13),
    ]
    covered = np.zeros(len(TARGETS))
    for seed in range(sets):
        fit = fit_parametric(isoflop_runs(noise=5e-3, seed=seed))
        resampled = bootstrap(fit, resamples=120, seed=seed)
        covered += [t in resampled.interval(q) for t, q in zip(truths, TARGETS, strict=True)]
    assert (covered >= least).all(), covered
    assert (covered <= most).all(), covered


@pytest.mark.parametrize("runs", [12, 20, 72])
@pytest.mark.parametrize("bias", [-0.5, 0.0, 0.5])
def test_interval_is_corrected_for_bias_and_for_the_five_fitted_constants(runs, bias):
    """The half-width is t sqrt(n / (n - 5)) deviations about the estimate minus the bias."""
    count = 20_001
    deviations = bias + ndtri((np.arange(count) + 0.5) / count)
    constants = np.tile(CHINCHILLA.constants, (count, 1))
    constants[:, 3] += 0.01 * deviations
    interval = Bootstrap(CHINCHILLA, constants, runs, runs).interval("alpha")
    half = stdtrit(runs - 5, 0.975) * np.sqrt(runs / (runs - 5))
    ends = np.array([interval.low, interval.high]) - CHINCHILLA.alpha
    np.testing.assert_allclose(ends, 0.01 * np.array([-bias - half, -bias + half]), rtol=0.02)


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

    def target(constants):
        return compute_loss(constants, 1e10, 2e11)

    covered = {None: 0, "budget": 0}
    truth = CHINCHILLA.predict(1e10, 2e11)
    for seed in range(10):
        exact = isoflop_runs(noise=5e-4, seed=seed)
        shared = np.repeat(np.random.default_rng(seed).normal(0, 5e-3, 9), 8)
        loss = exact.loss * np.exp(shared)
        runs = load_runs({"N": exact.parameters, "D": exact.tokens, "loss": loss})
        fit = fit_parametric(runs)
        for by in covered:
            covered[by] += truth in bootstrap(fit, resamples=120, by=by).interval(target)
    assert covered["budget"] >= 7  # the 0.1 % quantile of 10 tables at a coverage of 95 %
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


@pytest.mark.filterwarnings("ignore:.*the best size lies between:scaling.ScalingWarning")
@pytest.mark.filterwarnings("ignore:.* is far from any run:scaling.ScalingWarning")
def test_every_extrapolation_has_an_interval(fit):
    best = fit.optimal(1e24)
    seen = fit.predict(1e12, 1e13)
    answers = [(getattr(best, name), interval) for name, interval in best.intervals.items()]
    assert len(answers) == 3
    for value, interval in [*answers, (seen.loss, seen.interval)]:
        assert 0 < interval.low < value < interval.high < np.inf


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
        fit.posterior.optimal(1e24).intervals["parameters"],
        fit.optimal(fit.drift.start).intervals["parameters"],
    ):
        assert interval.high / interval.low == pytest.approx(1, abs=1e-6)


def test_budgets_are_grouped_by_compute_and_not_by_row_numbers(fit):
    expected = bootstrap(fit, resamples=200, by="budget").interval("alpha")
    # Two tables that were joined have some row numbers twice.
    runs = replace(fit.runs, rows=tuple(i // 9 for i in range(len(fit.runs))))
    joined = bootstrap(replace(fit, runs=runs), resamples=200, by="budget").interval("alpha")
    assert joined == expected
