import json
import subprocess
import sys

import numpy as np
import pytest
from scaling import (
    Law,
    fit_isoflop,
    fit_parametric,
    isoflop_runs,
    load_runs,
    plot,
    sweep_learning_rate,
)
from scaling.__main__ import main


@pytest.fixture
def file(tmp_path):
    runs = isoflop_runs(budgets=np.geomspace(1e19, 1e21, 4), noise=2e-3, per_budget=5)
    rows = [f"{n},{d},{x}" for n, d, x in zip(runs.parameters, runs.tokens, runs.loss, strict=True)]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(["N,D,loss", *rows]))
    return path


@pytest.mark.filterwarnings("ignore:.*the best size lies between:scaling.ScalingWarning")
def test_drawn_band_is_the_interval():
    fit = fit_parametric(isoflop_runs(noise=2e-3, per_budget=5))
    figure = plot(fit, up_to=1e24)
    growth, residuals, _ = figure.axes  # N and D, residuals, color bar
    for name, collection in zip(("parameters", "tokens"), growth.collections[:2], strict=True):
        band = collection.get_paths()[0].vertices
        at_end = band[np.isclose(band[:, 0], 1e24), 1]
        expected = fit.optimal(1e24).intervals[name]
        assert (at_end.min(), at_end.max()) == pytest.approx((expected.low, expected.high))
    np.testing.assert_allclose(residuals.collections[0].get_offsets()[:, 1], -fit.residuals)


@pytest.mark.filterwarnings("ignore:.*the best size lies between:scaling.ScalingWarning")
def test_bands_of_an_isoflop_fit_are_the_intervals_of_its_optima():
    fit = fit_isoflop(isoflop_runs(noise=2e-3))
    _, growth, _ = plot(fit, up_to=1e24).axes  # valleys, N and D, color bar
    best = fit.optimal(1e24)
    names = ("parameters", "tokens")
    for name, line, band in zip(names, growth.lines[:2], growth.collections, strict=True):
        assert line.get_ydata()[-1] == pytest.approx(getattr(best, name), rel=1e-9)
        vertices = band.get_paths()[0].vertices
        ends = vertices[np.isclose(vertices[:, 0], 1e24), 1]
        expected = best.intervals[name]
        assert (ends.min(), ends.max()) == pytest.approx((expected.low, expected.high), rel=1e-6)


def test_stars_mark_the_bottoms_of_valleys():
    fit = fit_isoflop(isoflop_runs(noise=1e-3))
    axes = plot(fit).axes[0]
    stars = [x for x in axes.lines if x.get_marker() == "*"]
    assert [x.get_xdata()[0] for x in stars] == [v.parameters for v in fit.valleys]


def test_sweep_is_drawn_with_its_best_rates():
    sweep = sweep_learning_rate(batch_sizes=(1, 2, 4, 8, 16), seeds=4, dimension=8)
    curves, best = plot(sweep).axes
    assert len(curves.get_legend().get_texts()) == 5
    np.testing.assert_array_equal(best.lines[0].get_ydata(), sweep.best_rates)


def test_fit_prints_laws_and_intervals_and_writes_a_figure(file, tmp_path, capsys):
    target = tmp_path / "fit.png"
    at = ["--at", "1e23", "1e24"]
    arguments = ["fit", str(file), *at, "--plot", str(target), "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert [best["compute"] for best in result["at"]] == [1e23, 1e24]
    assert all(best["intervals"]["parameters"]["low"] > 0 for best in result["at"])
    assert result["proof"]["landed"] == result["proof"]["converged"]
    assert target.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fit.png", "runs.csv"]


def test_json_output_is_valid_if_the_loss_is_not_modeled(file, capsys):
    assert main(["fit", str(file), "--at", "1e23", "--method", "parabola", "--json"]) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert result["at"][0]["loss"] is None
    assert result["at"][0]["intervals"]["tokens"]["low"] > 0


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_printed_law_of_tokens_has_the_ratio_of_the_runs(tmp_path, capsys):
    """Compute that includes attention is more than 6 N D."""
    runs = isoflop_runs(noise=1e-3)
    columns = zip(runs.parameters, runs.tokens, 1.2 * runs.compute, runs.loss, strict=True)
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(["N,D,C,loss", *(f"{n},{d},{c},{x}" for n, d, c, x in columns)]))
    assert main(["fit", str(path), "--method", "parabola"]) == 0
    assert "D_opt = C / (7.2 N_opt)" in capsys.readouterr().out


def test_fit_by_isoflop_prints_warnings_on_stderr(file, capsys):
    assert main(["fit", str(file), "--at", "1e23", "1e29", "--method", "parabola"]) == 0
    out, err = capsys.readouterr()
    assert "at 1e+23 FLOPs" in out
    assert "95%" in out
    assert "is far from any run" in err


def test_option_of_the_other_method_is_refused(file, capsys):
    assert main(["fit", str(file), "--at", "1e23", "--method", "parabola", "--loss", "lad"]) == 2
    assert "--loss is an option of --method parametric" in capsys.readouterr().err


@pytest.mark.fixed_seed("the module that shifts seeds in child processes imports torch")
def test_importing_needs_neither_torch_nor_matplotlib():
    code = (
        "import sys, scaling, scaling.__main__;"
        "assert not {'torch', 'matplotlib', 'pandas'} & set(sys.modules);"
        "scaling.fit_parametric(scaling.isoflop_runs(noise=1e-3)).optimal(1e24);"
        "assert not {'torch', 'matplotlib', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_fit_prints_explanation_takes_units_and_includes_drift(tmp_path, capsys):
    runs = isoflop_runs(noise=1e-3, span=25)
    bent = runs.loss + 0.3 * np.log(runs.tokens / 1e9) ** 2 / 40
    rows = [
        f"a,{n / 1e6},{d / 1e9},{x}"
        for n, d, x in zip(runs.parameters, runs.tokens, bent, strict=True)
    ]
    path = tmp_path / "millions.csv"
    path.write_text("\n".join(["set,N,D,loss", *rows, "b,1,1,9"]))
    units = ["--unit", "parameters=1e6", "--unit", "tokens=1e9", "--where", "set=a"]
    assert main(["fit", str(path), *units, "--at", "1e24", "--json"]) == 0
    interval = json.loads(capsys.readouterr().out)["at"][0]["intervals"]["parameters"]
    fit = fit_parametric(load_runs({"N": runs.parameters, "D": runs.tokens, "loss": bent}))
    narrow = fit.posterior.optimal(1e24).intervals["parameters"]
    assert interval["high"] / interval["low"] > 1.2 * narrow.high / narrow.low
    assert main(["fit", str(path), *units, "--method", "parabola"]) == 0
    assert "72 of 73 rows of" in capsys.readouterr().out


@pytest.mark.parametrize("other", [Law(1.69, 406.4, 410.7, 0.34, 0.28), (), [1.0]])
def test_other_results_are_not_drawn(other):
    with pytest.raises(TypeError, match="expected the result of fit_parametric, fit_isoflop"):
        plot(other)
