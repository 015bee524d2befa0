"""Designs that do not identify a law are refused with the cause."""

import numpy as np
import pytest
from scaling import (
    Form,
    Law,
    fit_isoflop,
    fit_law,
    fit_parametric,
    isoflop_runs,
    load_runs,
)
from scaling.fit.identifiability import MIN_SINGULAR_VALUE, design_defect, singular_values

LAW = Law(1.69, 406.4, 410.7, 0.34, 0.28)
SIZES = np.geomspace(3e7, 3e9, 12)
SPREAD = np.geomspace(1e9, 3e11, 12)

#: Sizes, tokens and the cause that the error states, with a jitter of up to 2 %.
DESIGNS = {
    "20 tokens per parameter": (SIZES, 20 * SIZES, "(19.9|20|20.1) tokens per parameter"),
    "D follows N": (SIZES, 20 * SIZES * (SIZES / 1e8) ** 0.3, r"D = c N\^1.30"),
    "N follows D": (SIZES, 5e10 * (SIZES / 1e8) ** -0.5, r"D = c N\^-0.50"),
    "one budget": (SIZES, 1e20 / SIZES, r"one budget, 6 N D = (5\.9.|6|6\.0.)e[+]20"),
    "one size": (np.full(12, 1e8), SPREAD, r"'parameters' is (9\.9.e[+]07|1(\.01)?e[+]08) in all"),
    "one token count": (
        SIZES,
        np.full(12, 1e10),
        r"'tokens' is (9\.9.e[+]09|1(\.01)?e[+]10) in all",
    ),
    "one model": (
        np.full(12, 1e8),
        np.full(12, 1e10),
        r"(9\.9.e[+]07|1(\.01)?e[+]08) parameters and (9\.9.e[+]09|1(\.01)?e[+]10) tokens",
    ),
    "a curve": (SIZES, 20 * SIZES * np.exp(0.1 * np.log(SIZES / 3e8) ** 2), "cannot be told apart"),
    "two sizes": (np.repeat([1e8, 1e9], 6), np.tile(SPREAD[::2], 2), "cannot be told apart"),
    "two by two": (np.repeat([1e8, 1e9], 6), np.tile([1e9, 1e11], 6), "cannot be told apart"),
}


def runs_of(n, d, jitter, noise, seed=0):
    random = np.random.default_rng(seed)
    n = n * np.exp(jitter * random.uniform(-1, 1, len(n)))
    d = d * np.exp(jitter * random.uniform(-1, 1, len(d)))
    loss = LAW.predict(n, d) * np.exp(noise * random.standard_normal(len(n)))
    return load_runs({"N": n, "D": d, "loss": loss})


@pytest.mark.filterwarnings("ignore:rows .* repeat earlier ones")
@pytest.mark.parametrize("jitter", [0.0, 0.02])
@pytest.mark.parametrize("noise", [0.0, 5e-3])
@pytest.mark.parametrize("name", DESIGNS)
def test_design_that_does_not_identify_the_law_is_refused_with_its_cause(name, noise, jitter):
    n, d, cause = DESIGNS[name]
    runs = runs_of(n, d, jitter, noise)
    if np.ptp(runs.loss) == 0:
        runs = runs_of(n, d, jitter, 1e-6)
    for call in (
        fit_parametric,
        lambda runs: fit_law("chinchilla", runs),
    ):
        with pytest.raises(ValueError, match=f"do not identify a law: .*{cause}"):
            call(runs)
    with pytest.raises(ValueError, match="budget"):
        fit_isoflop(runs)


def test_one_run_off_the_line_does_not_identify_the_law():
    runs = runs_of(np.r_[SIZES, 1e9], np.r_[20 * SIZES, 1e9], 0.0, 1e-3)
    with pytest.raises(ValueError, match="cannot be told apart"):
        fit_parametric(runs)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_fewer_runs_than_constants_are_refused(count):
    with pytest.raises(ValueError, match=f"{count} runs cannot fix five constants"):
        fit_parametric(isoflop_runs()[:count])


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_designs_near_the_bound_are_refused_or_their_interval_covers_the_truth():
    """Fits of runs with jitter about D = 20 N are refused, or their interval covers the truth."""
    truth = LAW.optimal(1e22).parameters
    refused = 0
    covered = 0
    fitted = 0
    for jitter in (0.05, 0.1, 0.2, 0.5):
        for seed in range(2):
            runs = runs_of(SIZES, 20 * SIZES, jitter, 1e-3, seed)
            try:
                fit = fit_parametric(runs)
            except ValueError:
                refused += 1
                continue
            fitted += 1
            covered += truth in fit.optimal(1e22).intervals["parameters"]
    assert refused >= 1
    assert fitted >= 3
    assert covered >= 0.9 * fitted


def test_published_designs_are_far_from_the_bound():
    for options in ({}, {"span": 10}, {"budgets": [1e18, 1e19], "per_budget": 4}):
        runs = isoflop_runs(LAW, **options)
        assert design_defect(runs.parameters, runs.tokens) == ""
        x, y = np.log([runs.parameters, runs.tokens])
        x, y = x - x.mean(), y - y.mean()
        assert singular_values(np.stack([x, y, x**2 / 2, y**2 / 2])).min() > 10 * MIN_SINGULAR_VALUE


def test_numbers_replace_exponents_that_the_runs_do_not_identify():
    runs = runs_of(SIZES, 20 * SIZES, 0.0, 0.0)
    terms = {"E": "0", "A": "-0.34 * log(parameters)", "B": "-0.28 * log(tokens)"}
    fit = fit_law(Form("amplitudes", ["parameters", "tokens"], terms, {}), runs)
    assert fit.constants["E"] == pytest.approx(LAW.E, rel=1e-3)
    with pytest.raises(ValueError, match="do not identify step_batch"):
        fit_law("step_batch", {"tokens": [1e10] * 6, "batch": [1e5, 2e5, 1e5, 2e5, 3e5, 1e5]})


def test_runs_spread_over_decades_are_not_one_budget():
    """300 runs within 5 % of their neighbors span three decades, so they have no common budgets."""
    random = np.random.default_rng(0)
    compute = np.geomspace(1e18, 1e21, 300)
    n = np.sqrt(compute / 120) * np.exp(random.uniform(-1, 1, 300))
    runs = load_runs({"N": n, "D": compute / 6 / n, "loss": LAW.predict(n, compute / 6 / n)})
    groups = runs.budgets()
    assert sum(map(len, groups)) == 300
    assert max(g.compute.max() / g.compute.min() for g in groups) < 1.051
    assert not any("budget" in message for message in fit_parametric(runs).warnings)
