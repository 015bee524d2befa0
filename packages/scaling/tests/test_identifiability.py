"""Fits of designs that do not identify a law have intervals from 0 to infinity, and the cause."""

import copy
import dataclasses
import json
import math
import pickle
import re

import numpy as np
import pytest
from scaling import (
    Form,
    Law,
    ScalingWarning,
    backtest,
    bootstrap,
    effective_speedup,
    fit_isoflop,
    fit_law,
    fit_parametric,
    isoflop_runs,
    load_runs,
    plot,
    report,
)
from scaling.__main__ import main
from scaling.fit.identifiability import (
    MIN_SINGULAR_VALUE,
    compute_singular_values,
    explain_unidentified,
)
from scaling.uncertainty.posterior import sample_posterior

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


def draw_runs(n, d, jitter, noise, seed=0):
    random = np.random.default_rng(seed)
    n = n * np.exp(jitter * random.uniform(-1, 1, len(n)))
    d = d * np.exp(jitter * random.uniform(-1, 1, len(d)))
    loss = LAW.predict(n, d) * np.exp(noise * random.standard_normal(len(n)))
    return load_runs({"N": n, "D": d, "loss": loss})


@pytest.mark.filterwarnings("ignore:rows .* repeat earlier ones")
@pytest.mark.parametrize("jitter", [0.0, 0.02])
@pytest.mark.parametrize("noise", [0.0, 5e-3])
@pytest.mark.parametrize("name", DESIGNS)
def test_design_that_does_not_identify_the_law_gives_unbounded_intervals_and_the_cause(
    name, noise, jitter
):
    n, d, cause = DESIGNS[name]
    runs = draw_runs(n, d, jitter, noise)
    if np.ptp(runs.loss) == 0:
        runs = draw_runs(n, d, jitter, 1e-6)
    cause = f"do not identify a law: .*{cause}"
    with pytest.raises(ValueError, match=cause):
        fit_law("chinchilla", runs)
    with pytest.warns(ScalingWarning, match=cause):
        fit = fit_parametric(runs)
    with pytest.warns(ScalingWarning, match="budget"):
        valleys = fit_isoflop(runs)
    assert re.search(cause, fit.unidentified)
    for result in (fit, valleys):
        require_unbounded(result)
    with pytest.warns(ScalingWarning, match=cause):
        prediction = fit.predict(1e9, 1e11)
    assert math.isnan(prediction.loss)
    assert (prediction.interval.low, prediction.interval.high) == (0, math.inf)
    assert prediction.reason == fit.unidentified


def require_unbounded(fit):
    with pytest.warns(ScalingWarning, match=re.escape(fit.unidentified)):
        best = fit.optimal(1e22)
    assert fit.warnings == (fit.unidentified,)
    assert best.reason == fit.unidentified
    assert fit.unidentified in str(best)
    for name in ("parameters", "tokens", "loss"):
        assert math.isnan(getattr(best, name))
        assert (best.intervals[name].low, best.intervals[name].high) == (0, math.inf)


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_nothing_shows_an_arbitrary_law_of_runs_that_do_not_identify_it():
    """The numbers of the fit are nan, and everything that depends on the law raises the cause."""
    runs = draw_runs(SIZES, 20 * SIZES, 0.0, 5e-3)
    fit = fit_parametric(runs, prove=True)
    assert np.isnan([*fit.law.constants, fit.objective, *fit.residuals]).all()
    assert np.isnan([fit.law.exponent, fit.law.predict(1e9, 2e10)]).all()
    assert math.isnan(fit.law.optimal(1e22).parameters)
    assert not fit.proof.holds
    for copied in (pickle.loads(pickle.dumps(fit)), copy.deepcopy(fit)):
        assert copied == fit
        assert copied.optimal(1e22) == fit.optimal(1e22)
        assert copied.predict(1e9, 1e11) == fit.predict(1e9, 1e11)
    assert repr(fit).endswith(fit.unidentified)
    good = fit_parametric(isoflop_runs(LAW, noise=1e-3)[::6])
    for call in (
        lambda: fit.posterior,
        lambda: fit.drift,
        lambda: bootstrap(fit),
        lambda: plot(fit),
        lambda: plot(fit_isoflop(runs)),
        lambda: effective_speedup(good, fit, 1e20),
        lambda: effective_speedup(fit, good, 1e20),
        lambda: backtest(runs),
    ):
        with pytest.raises(ValueError, match=r"do not identify a law: .*20 tokens|fewer than two"):
            call()
    for invalid in (-1.0, math.nan):
        with pytest.raises(ValueError, match="expected a positive and finite compute"):
            fit.optimal(invalid)
        with pytest.raises(ValueError, match="expected positive and finite numbers"):
            fit.predict(1e9, invalid)
    page = report(runs, at=[1e22])
    assert page.count("unknown [0, inf]") >= 4
    assert "20 tokens per parameter" in page
    assert "<figure>" not in page


@pytest.mark.parametrize("options", [[], ["--method", "parabola"], ["--json"]])
def test_command_line_prints_answers_before_it_says_that_there_is_no_figure(
    tmp_path, capsys, options
):
    table = "\n".join(f"{n},{20 * n},{2 + 400 / n**0.34}" for n in SIZES)
    (tmp_path / "runs.csv").write_text(f"N,D,loss\n{table}\n")
    figure = tmp_path / "figure.png"
    arguments = ["fit", str(tmp_path / "runs.csv"), "--at", "1e22", *options]
    assert main(arguments) == 0
    answers = capsys.readouterr()
    assert main([*arguments, "--plot", str(figure)]) == 2
    printed = capsys.readouterr()
    cause = "fewer than two budgets" if "parabola" in options else "do not identify a law"
    if options == ["--json"]:
        assert json.loads(printed.out)["at"] == json.loads(answers.out)["at"]
    else:
        assert printed.out == answers.out
        assert "parameters  nan         [0, inf] 95%" in printed.out
    assert cause in printed.out
    assert re.search(rf"scaling: no figure is written: .*{cause}", printed.err)
    assert not figure.exists()


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_fits_without_degrees_of_freedom_state_the_reason():
    runs = isoflop_runs(LAW, noise=1e-3)
    five = fit_parametric(runs[[0, 7, 27, 64, 71]]).optimal(1e22)
    assert "five runs leave no degrees of freedom" in five.reason
    assert five.intervals["parameters"].high == math.inf
    two = fit_isoflop(isoflop_runs(LAW, budgets=[1e19, 1e20])).optimal(1e22)
    assert "two budgets leave no degrees of freedom" in two.reason
    assert (two.intervals["parameters"].low, two.intervals["parameters"].high) == (0, math.inf)
    assert fit_parametric(runs).optimal(1e22).reason == ""
    assert fit_isoflop(runs).optimal(1e22).reason == ""


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
@pytest.mark.parametrize("cause", ["five runs", "no sampled law"])
def test_every_answer_with_infinite_intervals_has_a_reason(cause):
    runs = isoflop_runs(LAW, noise=1e-3)
    good = fit_parametric(runs[::6])
    if cause == "five runs":
        fit = fit_parametric(runs[[0, 7, 27, 64, 71]])
        answers = [bootstrap(fit, resamples=100).optimal(1e19)]
    else:
        # The losses rise, so most sampled laws have a negative amplitude: here, both of two laws.
        fit = fit_parametric(dataclasses.replace(runs, loss=10 - runs.loss))
        fit.__dict__["posterior"] = sample_posterior(fit, draws=2)
        answers = []
    answers += [fit.optimal(1e19), fit.optimal(1e24), fit.posterior.optimal(1e19)]
    answers += [fit.predict(1e9, 1e10), fit.predict(1e12, 1e14), fit.posterior.predict(1e9, 1e10)]
    for answer in answers:
        assert cause in answer.reason
        assert cause in str(answer)
        assert answer.coverage == ""
    for speedup in (effective_speedup(fit, good, 1e21), effective_speedup(good, fit, 1e21)):
        assert (speedup.interval.low, speedup.interval.high) == (0, math.inf)
        assert cause in speedup.reason
    assert effective_speedup(good, good, 1e21).reason == good.predict(1e9, 1e10).reason == ""


def test_law_of_as_many_rows_as_constants_states_the_reason():
    runs = isoflop_runs(LAW, noise=1e-3)
    with pytest.warns(ScalingWarning, match="5 rows leave no degrees of freedom for the 5"):
        fit = fit_law("chinchilla", runs[[0, 7, 27, 64, 71]])
    assert (fit.interval("alpha").low, fit.interval("alpha").high) == (-math.inf, math.inf)
    speedup = effective_speedup(fit, fit_law("chinchilla", runs), 1e21)
    assert (speedup.interval.high, speedup.reason) == (math.inf, fit.reason)


def test_one_run_off_the_line_does_not_identify_the_law():
    runs = draw_runs(np.r_[SIZES, 1e9], np.r_[20 * SIZES, 1e9], 0.0, 1e-3)
    with pytest.warns(ScalingWarning, match="cannot be told apart"):
        fit = fit_parametric(runs)
    require_unbounded(fit)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_fewer_runs_than_constants_are_refused(count):
    with pytest.raises(ValueError, match=f"{count} runs cannot fix five constants"):
        fit_parametric(isoflop_runs()[:count])


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_intervals_of_designs_near_the_bound_cover_the_truth():
    """Runs with jitter about D = 20 N identify the law or not; every interval covers the truth."""
    truth = LAW.optimal(1e22).parameters
    unbounded = 0
    covered = []
    for jitter in (0.05, 0.1, 0.2, 0.5):
        for seed in range(2):
            fit = fit_parametric(draw_runs(SIZES, 20 * SIZES, jitter, 1e-3, seed))
            covered.append(truth in fit.optimal(1e22).intervals["parameters"])
            unbounded += bool(fit.unidentified)
    assert 1 <= unbounded <= len(covered) - 3
    assert sum(covered) >= unbounded + 0.9 * (len(covered) - unbounded)


def test_published_designs_are_far_from_the_bound():
    for options in ({}, {"span": 10}, {"budgets": [1e18, 1e19], "per_budget": 4}):
        runs = isoflop_runs(LAW, **options)
        assert explain_unidentified(runs.parameters, runs.tokens) == ""
        x, y = np.log([runs.parameters, runs.tokens])
        x, y = x - x.mean(), y - y.mean()
        assert (
            compute_singular_values(np.stack([x, y, x**2 / 2, y**2 / 2])).min()
            > 10 * MIN_SINGULAR_VALUE
        )


def test_numbers_replace_exponents_that_the_runs_do_not_identify():
    runs = draw_runs(SIZES, 20 * SIZES, 0.0, 0.0)
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
