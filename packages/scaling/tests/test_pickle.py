"""Fits, laws and their answers can be pickled, copied and compared at any time."""

import copy
import functools
import pickle

import numpy as np
import pytest
import scaling
from scaling import fit_isoflop, fit_law, fit_parametric, isoflop_runs

RUNS = isoflop_runs(budgets=np.geomspace(1e18, 1e22, 5), per_budget=4, span=10.0, noise=2e-3)
STEPS = {"tokens": np.geomspace(1e9, 1e11, 6), "batch": [1e5, 2e5, 4e5, 7e5, 1.2e6, 2e6]}
SWEPT = {"lr": [1e-3, 2e-3, 4e-3] * 2, "bs": [32] * 3 + [64] * 3, "loss": [3.1, 3, 3.2] * 2}


@functools.cache
def get_fit():
    """Return one fit that results which are made from a fit share."""
    return build_parametric()


def build_parametric():
    fit = fit_parametric(RUNS)
    fit.optimal(1e23)
    fit.predict(1e9, 1e10)
    return fit


def build_isoflop():
    fit = fit_isoflop(RUNS)
    fit.optimal(1e23)
    return fit


RESULTS = {
    "runs": lambda: RUNS,
    "law": lambda: get_fit().law,
    "parametric": build_parametric,
    "isoflop": build_isoflop,
    "posterior": lambda: get_fit().posterior,
    "bootstrap": lambda: scaling.bootstrap(get_fit(), resamples=100),
    "drift": lambda: get_fit().drift,
    "step law": lambda: fit_law("step_batch", STEPS),
    "tied law": lambda: fit_law("tied", RUNS),
    "form": lambda: scaling.CATALOG["tied"],
    "sweep": lambda: scaling.fit_sweep(SWEPT),
    "backtest": lambda: scaling.backtest(RUNS, methods=["isoflop"]),
    "speedup": lambda: scaling.effective_speedup(get_fit(), get_fit(), 1e22),
}


@functools.cache
def get_result(name):
    return RESULTS[name]()


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
@pytest.mark.parametrize("name", RESULTS)
def test_results_can_be_pickled_copied_and_compared(name):
    result = get_result(name)
    for restored in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result), RESULTS[name]()):
        assert restored == result
    assert result != "a fit"


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
@pytest.mark.parametrize("name", RESULTS)
def test_results_print_in_ten_lines(name):
    result = get_result(name)
    for item in result if isinstance(result, tuple) else [result]:
        for text in (repr(item), str(item)):
            assert len(text.splitlines()) <= 10
            assert max(map(len, text.splitlines())) < 1000


@pytest.mark.filterwarnings("ignore:.*the best size lies between:scaling.ScalingWarning")
def test_pickled_fit_gives_the_same_answers():
    fit = pickle.loads(pickle.dumps(fit_parametric(RUNS)))
    assert fit.optimal(1e24) == get_fit().optimal(1e24)
    restored = pickle.loads(pickle.dumps(fit))
    assert restored.optimal(1e23) == fit.optimal(1e23)
    law = fit_law("step_batch", STEPS)
    restored = pickle.loads(pickle.dumps(law))
    assert restored.interval("c") == law.interval("c")
    np.testing.assert_array_equal(restored.predict(tokens=1e12), law.predict(tokens=1e12))


def test_fits_of_other_runs_are_not_equal():
    assert fit_parametric(RUNS) != fit_parametric(RUNS[:-1])
    assert fit_isoflop(RUNS) != fit_isoflop(isoflop_runs(noise=2e-3, seed=1))
    assert RUNS[:-1] != RUNS


def test_interval_of_a_positive_amplitude_is_positive():
    """With few rows, quantiles that are widened without logs would end below zero."""
    tokens = np.geomspace(2e9, 1e11, 8)
    for seed in range(6):
        noise = np.exp(0.1 * np.random.default_rng(seed).standard_normal(8))
        fit = fit_law("step_batch", {"tokens": tokens, "batch": 0.58 * tokens**0.571 * noise})
        interval = fit.interval("c")
        assert 0 < interval.low < fit.constants["c"] < interval.high
