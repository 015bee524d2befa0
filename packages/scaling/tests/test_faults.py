import itertools
import math
import re
from functools import cache

import numpy as np
import pytest
from scaling import (
    Law,
    ScalingWarning,
    backtest,
    bootstrap,
    effective_speedup,
    fit_isoflop,
    fit_parametric,
    isoflop_runs,
    load_runs,
    plot,
    sweep_learning_rate,
)
from scaling.__main__ import main


@cache
def fit_clean_runs():
    """Return a fit of generated runs, which the tests do not change."""
    return fit_parametric(isoflop_runs(noise=1e-3))


GOOD = {"N": [1e6, 2e6, 4e6], "D": [1e7, 1e7, 2e7], "loss": [4.0, 3.9, 3.5]}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *itertools.product(["N", "D"], [0.0, -1.0, math.nan, math.inf, "n/a", None, "1-2B"]),
        *(("loss", value) for value in (0.0, -1.0, math.inf, "3.1?", "diverged")),
    ],
)
def test_value_that_is_not_positive_is_refused_with_row_and_column(column, value):
    bad = GOOD | {column: [*GOOD[column][:1], value, GOOD[column][2]]}
    with pytest.raises(ValueError, match=rf"column '{column}' .* row 2"):
        load_runs(bad)


def test_csv_row_is_named_by_its_line(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("N,D,loss\n1e6,1e7,4\n\n2e6,1e7,-3\n")
    with pytest.raises(ValueError, match=r"column 'loss' .* row 4: '-3'"):
        load_runs(path)


def test_ragged_row_is_named(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("N,D,loss\n1e6,1e7,4\n2e6,1e7,3,9\n")
    with pytest.raises(ValueError, match="line 3 has 4 cells under 3 columns"):
        load_runs(path)


def test_missing_columns_are_named():
    with pytest.raises(ValueError, match=r"has columns \['N', 'loss'\]; expected a loss"):
        load_runs({"N": [1.0], "loss": [1.0]})
    with pytest.raises(ValueError, match="contains no runs"):
        load_runs([])
    with pytest.raises(ValueError, match="expected columns of one length"):
        load_runs({"N": [1.0, 2.0], "D": [1.0], "loss": [1.0]})


def test_compute_that_is_not_6nd_is_named_beyond_the_tolerance():
    off = GOOD | {"C": [6e13, 1.2e14 * 1.3, 4.8e14]}
    with pytest.warns(ScalingWarning, match=r"column 'C' is not 6 N D within 10% in rows 2 "):
        load_runs(off)


def test_absurd_losses_and_repeated_rows_are_named():
    with pytest.warns(ScalingWarning, match="column 'loss' is above 14 nats in rows 2, which"):
        load_runs(GOOD | {"loss": [4.0, 55.0, 3.5]})
    with pytest.warns(ScalingWarning, match=r"rows 3 repeat earlier ones in \['D', 'N', 'loss'\]"):
        load_runs({"N": [1e6, 2e6, 1e6], "D": [1e7] * 3, "loss": [4.0, 3.9, 4.0]})


@pytest.mark.parametrize("fit", [fit_parametric, fit_isoflop])
def test_fewer_than_five_runs_are_refused(fit):
    with pytest.raises(ValueError, match="4 runs"):
        fit(isoflop_runs()[:4])


def test_one_budget_does_not_identify_an_isoflop_law():
    with pytest.warns(ScalingWarning, match="column 'compute' contains one budget, 1e"):
        fit = fit_isoflop(isoflop_runs(budgets=[1e19], per_budget=20, noise=1e-4))
    assert fit.valleys == ()
    assert math.isnan(fit.exponent)
    assert fit.exponent_interval.low == -math.inf


def test_five_runs_have_no_degrees_of_freedom_and_an_infinite_interval():
    runs = isoflop_runs(budgets=[1e18, 1e19, 1e20, 1e21, 1e22], per_budget=3, noise=1e-3)
    few = runs[[0, 4, 8, 10, 14]]
    with pytest.warns(ScalingWarning, match="no degrees of freedom"):
        fit = fit_parametric(few)
    with pytest.warns(ScalingWarning, match="between 0 and inf"):
        interval = fit.optimal(1e24).intervals["parameters"]
    assert (interval.low, interval.high) == (0, math.inf)
    assert str(interval) == "[0, inf] 95%"
    assert len(plot(fit).axes) >= 3
    # All intervals are unbounded, within the runs and beyond them.
    unbounded = [
        fit.predict(1e8, 1e9).interval,
        fit.predict(1e11, 1e13).interval,
        effective_speedup(fit, fit_parametric(runs), 1e23).interval,
        effective_speedup(fit_parametric(runs), fit, 1e23).interval,
    ]
    assert {(i.low, i.high) for i in unbounded} == {(0, math.inf)}


def test_interval_too_wide_to_use_is_a_warning():
    runs = isoflop_runs(budgets=[1e18, 3e18], per_budget=6, noise=0.02)
    with pytest.warns(ScalingWarning) as caught:
        fit_parametric(runs).optimal(1e26)
    assert any("do not determine it better" in str(w.message) for w in caught)


def test_misread_run_is_named():
    runs = isoflop_runs(noise=1e-3)
    loss = runs.loss.copy()
    loss[17] *= 1.3
    spoiled = load_runs({"N": runs.parameters, "D": runs.tokens, "loss": loss})
    with pytest.warns(ScalingWarning, match="in rows 18 is more than 10 standard deviations"):
        fit = fit_parametric(spoiled)
    # A Huber loss limits the effect of one bad run.
    clean = fit_parametric(runs[[i for i in range(len(runs)) if i != 17]])
    assert fit.law.alpha == pytest.approx(clean.law.alpha, rel=0.02)


def test_law_without_irreducible_loss_is_reported_at_its_bound():
    with pytest.warns(ScalingWarning, match="E = 0 is at its bound"):
        fit = fit_parametric(isoflop_runs(Law(0, 50, 60, 0.4, 0.5)), "squares")
    assert fit.law.E == 0
    assert fit.law.alpha == pytest.approx(0.4, abs=1e-6)


def test_losses_that_rise_with_compute_do_not_give_negative_sizes():
    runs = isoflop_runs(noise=1e-3)
    upside = load_runs({"N": runs.parameters, "D": runs.tokens, "loss": 10 - runs.loss})
    with pytest.warns(ScalingWarning, match="fewer than two budgets have a valley:\ncompute = 6e"):
        assert math.isnan(fit_isoflop(upside).scale)
    with pytest.warns(ScalingWarning):
        fit = fit_parametric(upside)
    for name in ("A", "B"):
        assert any(re.match(f"{name} = .* is at its bound", m) for m in fit.warnings)
    with pytest.warns(ScalingWarning):
        best = fit.optimal(1e24)
    assert best.parameters > 0
    assert best.intervals["parameters"].low > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: fit_parametric(f.runs, "l2"), "got 'l2'"),
        (lambda f: fit_parametric(f.runs, delta=0), "delta > 0 .*, got 0"),
        (lambda f: bootstrap(f, resamples=10), "expected at least 100 resamples, got 10"),
        (lambda f: bootstrap(f, by="seed"), "expected by='budget' or one label per run"),
        (lambda f: f.runs.without_highest(100), "72 runs, got count = 100"),
        (lambda f: f.runs.without_highest(72), "count < 72 runs, got count = 72"),
        (lambda f: f.optimal(math.inf), "compute = inf"),
        (lambda f: fit_isoflop(f.runs).optimal(math.nan), "compute = nan"),
        (lambda f: f.posterior.optimal(-1.0), "compute = -1.0"),
        (lambda f: f.predict(-1.0, 1e9), "parameters = -1.0"),
        (lambda f: fit_isoflop(f.runs, nearest=2), "nearest = 2"),
        (lambda f: fit_isoflop(f.runs, nearest=5.5), "an integer >= 3, got nearest = 5.5"),
        (lambda f: load_runs(GOOD, units={"parameters": "1e6"}), "positive number, got '1e6'"),
        (lambda f: load_runs(GOOD, units={"loss": -1}), "positive number, got -1"),
        (lambda f: f.runs.budgets(math.nan), "expected tolerance >= 0, got tolerance = nan"),
        (lambda f: sweep_learning_rate(seeds=0), "expected seeds to be an integer >= 1, got 0"),
        (lambda f: bootstrap(f, resamples=200).interval("gamma"), "got 'gamma'"),
        (lambda f: f.law.optimal(-1.0), "compute = -1.0"),
        (lambda f: f.law.predict(-1.0, 1e9), r"expected positive parameters and .*array\(-1"),
        (lambda f: sweep_learning_rate("cnn"), "'cnn' with 'sgd'"),
        *(
            (
                lambda f, options=options, task=task: sweep_learning_rate(task, **options),
                "expected positive and finite",
            )
            for task in ("linear", lambda rate, size, seed: 1.0)
            for options in (
                {"rates": [-1.0, 1.0], "batch_sizes": [1]},
                {"rates": [], "batch_sizes": [1]},
                {"rates": [1.0, math.nan], "batch_sizes": [1]},
                {"rates": [1.0], "batch_sizes": [0, 1]},
            )
        ),
    ],
)
def test_bad_arguments_are_refused_with_their_value(call, message):
    with pytest.raises(ValueError, match=message):
        call(fit_clean_runs())


def test_command_line_puts_bad_input_on_one_line_of_stderr(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    path.write_text("N,D,loss\n1e6,1e7,0\n")
    assert main(["fit", str(path)]) == 2
    assert capsys.readouterr().err.startswith("scaling: column 'loss' must be positive")
    assert main(["fit", str(tmp_path / "absent.csv")]) == 2
    assert "absent.csv" in capsys.readouterr().err
    path.write_text("N,D,loss\n1e6,1e7,4\n")
    for option, message in (
        (["--column", "loss"], "expected NAME=VALUE, got 'loss'"),
        (["--unit", "loss"], "expected NAME=VALUE, got 'loss'"),
        (["--where", "set=c4"], "there is no such column"),
        (["--where", "set=c4", "--where", "set=web"], "'set' has two values, 'c4' and 'web'"),
        (["--unit", "loss=nat"], "expected a number in 'loss=nat'"),
        (["--ignore", "set"], "expected ignore to name columns among"),
    ):
        assert main(["fit", str(path), *option]) == 2
        assert message in capsys.readouterr().err
    # Four rows of two sizes are a history of two runs, or four runs, which are too few for a fit.
    path.write_text("N,D,step,loss\n1e6,1e8,1,4\n1e6,2e8,2,3\n2e6,1e8,1,4\n2e6,2e8,2,3\n")
    for options, message in (([], "history="), (["--history", "no"], "4 runs cannot fix")):
        assert main(["fit", str(path), *options]) == 2
        assert message in capsys.readouterr().err


def test_wrong_types_are_refused_with_the_expected_type():
    runs = isoflop_runs(noise=1e-3)
    fit, valleys = fit_parametric(runs), fit_isoflop(runs)
    for fit_runs in (fit_parametric, fit_isoflop, backtest):
        with pytest.raises(TypeError, match="expected the result of load_runs, got dict"):
            fit_runs({"N": runs.parameters, "D": runs.tokens, "loss": runs.loss})
    for call in (fit.optimal, fit.law.optimal, valleys.optimal):
        for wrong in ("1e24", None, True, [1e24], np.array([1e23, 1e24])):
            with pytest.raises(TypeError, match=r"expected compute to be one number, got"):
                call(wrong)
    with pytest.raises(TypeError, match=r"expected parameters to be one number, got"):
        fit.predict(np.array([1e9, 2e9]), 1e11)
    for wrong in (valleys, fit.law, runs):
        with pytest.raises(TypeError, match=r"expected the result of fit_parametric\(runs\), got"):
            bootstrap(wrong)
        with pytest.raises(
            TypeError, match=r"expected the result of fit_parametric or fit_law, got"
        ):
            effective_speedup(fit, wrong, 1e24)
