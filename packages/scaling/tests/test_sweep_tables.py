"""In tables of sweeps, settings stay apart and diverged runs do not change a best rate."""

import csv
import math
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from scaling import CATALOG, ScalingWarning, fit_law, fit_sweep, fit_sweeps

RATES = np.geomspace(1e-4, 1e-2, 7)


def make_curve(best, size=64, limit=1.0, diverged=11.09, **more):
    """Return the rows of a curve with its bottom at `best` that diverges above `limit`."""
    return [
        {
            "lr": rate,
            "bs": size,
            "loss": 3 + 0.05 * np.log(rate / best) ** 2 if rate < limit else diverged,
            **more,
        }
        for rate in RATES
    ]


@pytest.mark.parametrize("diverged", [11.09, 7.1, 1e3, np.inf, "nan", "diverged"])
@pytest.mark.parametrize("limit", [1.5e-3, 3e-3, 6e-3])
def test_diverged_runs_are_left_out_with_a_count(limit, diverged):
    rows = make_curve(1e-3, limit=limit, diverged=diverged)
    count = int((limit <= RATES).sum())
    with pytest.warns(ScalingWarning, match=rf"that {count} of 7 runs diverged \(rows"):
        sweep = fit_sweep(rows)
    assert sweep.best_rates == pytest.approx([1e-3], rel=0.05)
    assert sweep.diverged == count
    assert f"{count} of 7 runs diverged" in sweep.explanation
    clean = fit_sweep(make_curve(1e-3))
    assert clean.diverged == 0
    assert clean.best_rates == pytest.approx([1e-3], rel=0.01)


def test_rate_at_which_one_repetition_diverged_is_not_used():
    rows = make_curve(1e-3, seed=0) + make_curve(1e-3, limit=4e-3, seed=1)
    with pytest.warns(ScalingWarning, match="2 of 14 runs diverged"):
        sweep = fit_sweep(rows)
    assert sweep.best_rates == pytest.approx([1e-3], rel=0.05)
    assert np.isinf(sweep.log_loss[0, -2:]).all()


def test_rates_that_differ_by_rounding_are_one_rate():
    """A tracker may store one of two seeds in float32, or write 3e-4 as 0.0003."""
    rows = make_curve(7e-4, seed=0) + [
        r | {"lr": float(np.float32(r["lr"]))} for r in make_curve(7e-4)
    ]
    rows = [r | {"seed": i // 7} for i, r in enumerate(rows)]
    sweep = fit_sweep(rows)
    assert sweep.rates == pytest.approx(RATES)
    assert sweep.best_rates == pytest.approx([7e-4], rel=0.01)
    # The rows of one rate differ by another setting, even if the rate is written in two forms.
    texts = [
        {"lr": text, "bs": 8, "loss": 3 + 0.1 * abs(i - 1), "width": width}
        for width, form in ((256, "{:g}"), (512, "{:.1e}"))
        for i, text in enumerate(map(form.format, (1e-4, 3e-4, 9e-4)))
    ]
    with pytest.raises(ValueError, match="'width' takes 2 values"):
        fit_sweep(texts)


def test_steep_curves_do_not_count_as_diverged():
    """Half the mean squared error of a regression spans decades on both sides of its best rate."""
    rows = [{"lr": rate, "bs": 8, "loss": (1e-6 + np.log(rate / 1e-3) ** 2) ** 2} for rate in RATES]
    assert fit_sweep(rows).diverged == 0


@pytest.mark.parametrize(
    ("column", "values"),
    [
        *((name, (1e8, 1e9)) for name in ("N", "n_params", "model_size", "config.params")),
        *((name, (1e9, 1e10)) for name in ("D", "tokens", "train_tokens")),
        *(("optimizer", v) for v in (("adam", "muon"), ("adam", None))),
        *(("weight_decay", (0.0, 0.1)), ("dataset", ("c4", "dclm")), ("layers", (12, 24))),
    ],
)
def test_runs_of_several_settings_are_not_repetitions(column, values):
    best = (3e-3, 3e-4)
    rows = [r for b, v in zip(best, values, strict=True) for r in make_curve(b, **{column: v})]
    with pytest.raises(ValueError, match=rf"column '{column}' takes 2 values .*where=.*fit_sweeps"):
        fit_sweep(rows)
    for value, expected in zip(values, best, strict=True):
        assert fit_sweep(rows, where={column: value}).best_rates == pytest.approx(
            [expected], rel=0.02
        )
    apart = fit_sweeps(rows, column)
    assert [*apart] == [(str(v),) for v in values]
    best_rates = [sweep.best_rates[0] for sweep in apart.values()]
    np.testing.assert_allclose(best_rates, best, rtol=0.02)


@pytest.mark.parametrize("column", ["optimizer", "dataset", "config.recipe", "schedule"])
def test_rates_or_batch_sizes_of_different_settings_are_not_one_sweep(column):
    """One curve through rates of two optimizers, or one law of their best rates, mixes both."""
    by_rate = [row | {column: "a" if i < 4 else "b"} for i, row in enumerate(make_curve(1e-3))]
    by_size = make_curve(1e-3, **{column: "a"}) + make_curve(3e-3, size=128, **{column: "b"})
    for rows in (by_rate, by_size):
        with pytest.raises(ValueError, match=rf"'{column}' takes 2 values \(a, b\)"):
            fit_sweep(rows)
        assert np.isfinite(fit_sweep(rows, ignore=column).best_rates).all()
    # A warmup or a weight decay may be chosen by the rate.
    scaled = [row | {"weight_decay": 1e-4 / row["lr"]} for row in make_curve(1e-3)]
    assert fit_sweep(scaled).best_rates == pytest.approx([1e-3], rel=0.01)


def test_history_of_a_sweep_without_run_names_is_refused():
    rows = [
        row | {"_step": 100 * s + i, "_timestamp": 7.0 * s + i, "loss": row["loss"] + 1 / s}
        for i, row in enumerate(make_curve(1e-3))
        for s in range(1, 20)
    ]
    message = r"column '_step' differs .* a history or .*: keep the last"
    with pytest.raises(ValueError, match=message):
        fit_sweep(rows)
    assert fit_sweep(rows[18::19], ignore="_step").best_rates == pytest.approx([1e-3], rel=0.01)


@pytest.mark.parametrize("last", [0.01, 0.1, 1.0])
def test_history_of_a_sweep_whose_rates_decay_is_refused(last):
    """The last rates of a schedule would be read as the rates, a hundred times too small."""
    rows = [
        row
        | {"run": f"r{i}", "step": 1000 * done, "loss": row["loss"] + 1 - done}
        | {"lr": row["lr"] * (1 - done * (1 - last))}
        for i, row in enumerate(make_curve(1e-3) + make_curve(2e-3, size=128))
        for done in (0.01, 0.5, 1.0)
    ]
    with pytest.raises(ValueError, match="a history"):
        fit_sweep(rows)


def test_trainings_of_several_lengths_are_not_one_sweep():
    rows = [row | {"max_steps": 1000 * (1 + i % 2)} for i, row in enumerate(make_curve(1e-3))]
    with pytest.raises(ValueError, match=r"'max_steps' differs .* of several lengths"):
        fit_sweep(rows)
    # At a fixed number of tokens, larger batches take fewer steps.
    fixed = make_curve(1e-3, step=1000) + make_curve(1e-3, size=128, step=500)
    assert np.isfinite(fit_sweep(fixed).best_rates).all()


def test_diverged_runs_of_a_sweep_may_have_stopped_early():
    rows = [row | {"_step": 1000 - i % 2} for i, row in enumerate(make_curve(1e-3))]
    rows[-1] |= {"_step": 80, "loss": "nan"}
    with pytest.warns(ScalingWarning, match="1 of 7 runs diverged"):
        assert fit_sweep(rows).best_rates == pytest.approx([1e-3], rel=0.01)


@pytest.mark.parametrize(
    ("column", "usual", "crashed"),
    [
        ("state", "finished", "crashed"),
        ("diverged", False, True),
        ("step", 1000, 80),
        ("progress", 1.0, 0.08),
    ],
)
def test_rate_of_a_diverged_run_that_did_not_finish_is_not_used(column, usual, crashed):
    """The other seed of the rate has the least loss, but only because it survived."""
    more = {"max_steps": 1000} if column == "step" else {}
    rows = make_curve(1e-3, seed=0) + make_curve(1e-3, seed=1)
    rows = [row | more | {column: usual} for row in rows]
    k = int(np.argmin([row["loss"] for row in rows]))
    rows[k] |= {column: crashed, "loss": float("nan")}
    with pytest.warns(ScalingWarning, match="1 of 14 runs diverged"):
        sweep = fit_sweep(rows)
    assert np.isinf(sweep.log_loss[0]).sum() == 1
    assert sweep.diverged == 1


@pytest.mark.parametrize("state", [{"state": "running"}, {"State": "PREEMPTED"}, {"killed": True}])
def test_loss_of_nan_is_missing_if_the_run_is_not_over(state):
    name = next(iter(state))
    usual = {name: False if name == "killed" else "finished"}
    rows = [row | usual for row in (*make_curve(1e-3, seed=0), *make_curve(1e-3, seed=1))]
    rows[3] |= state | {"loss": float("nan")}
    with pytest.warns(ScalingWarning, match="those runs are left out"):
        sweep = fit_sweep(rows)
    assert sweep.diverged == 0
    assert np.isfinite(sweep.log_loss[0]).all()


def test_run_of_a_sweep_that_stopped_early_is_left_out():
    rows = [row | {"step": 1000, "max_steps": 1000} for row in make_curve(1e-3)]
    rows.append(rows[3] | {"step": 300, "loss": 9.0})
    with pytest.warns(ScalingWarning, match="'step' is below 'max_steps' in rows 8: 1 runs"):
        assert fit_sweep(rows).best_rates == pytest.approx([1e-3], rel=0.01)


def test_rates_that_bracket_no_best_rate_are_reported():
    for count in (2, 3):
        rows = [row for row in make_curve(1e-3) if row["lr"] >= RATES[-count]]
        with pytest.warns(ScalingWarning, match="at the edge of the rates"):
            assert np.isnan(fit_sweep(rows).best_rates).all()


def test_two_columns_that_may_be_the_loss_are_named():
    rows = [
        row | {"train/loss": row["loss"], "val/loss": row.pop("loss")} for row in make_curve(1e-3)
    ]
    with pytest.raises(ValueError, match=r"\['train/loss', 'val/loss'\] may each be the loss"):
        fit_sweep(rows)


def test_columns_and_rows_of_a_sweep_are_ignored_or_refused_as_those_of_runs():
    rows = make_curve(1e-3, host="a") + make_curve(1e-3, host="b")
    with pytest.raises(ValueError, match="column 'host' takes 2 values"):
        fit_sweep(rows)
    assert fit_sweep(rows, ignore="host").best_rates == pytest.approx([1e-3], rel=0.01)
    assert [*fit_sweeps(rows, "bs", ignore=["host"])] == [("64",)]
    with pytest.raises(ValueError, match="'seed' says 'mean' in row 8, which may summarize"):
        fit_sweep(make_curve(1e-3, seed=0) + make_curve(1e-3, seed="mean"))


def test_sizes_at_different_batch_sizes_are_not_one_sweep():
    rows = make_curve(3e-3, size=64, N="100M") + make_curve(3e-4, size=128, N="1B")
    with pytest.raises(ValueError, match="column 'N' takes 2 values"):
        fit_sweep(rows)


def test_seeds_names_dates_and_measurements_are_not_settings():
    rows = []
    for seed in range(3):
        for i, row in enumerate(make_curve(1e-3) + make_curve(2e-3, size=128)):
            # At a fixed number of steps, larger batches see more tokens.
            more = {"tokens": 1e4 * row["bs"], "params": 1e8 * (1 + 1e-4 * seed), "seed": seed}
            more |= {"name": f"run-{seed}-{i}", "seconds": 100.0 + i / 7 + seed / 3}
            rows.append(row | more)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sweep = fit_sweep(rows)
    assert sweep.best_rates == pytest.approx([1e-3, 2e-3], rel=0.02)


def test_rows_of_one_seed_are_one_repetition_in_any_order():
    random = np.random.default_rng(0)
    rates = np.geomspace(1e-4, 1e-2, 7)
    rows = []
    for seed in range(4):
        common = random.normal(0, 0.01)
        for rate in rates:
            loss = 3 + 0.1 * np.log(rate / 1e-3 + common) ** 2 + random.normal(0, 1e-3)
            rows.append({"lr": rate, "batch_size": 64, "seed": seed, "loss": loss})
    expected = fit_sweep(rows).intervals[0]
    for missing in (0, 1):
        present = rows[missing:]
        intervals = [
            fit_sweep([present[i] for i in random.permutation(len(present))]).intervals[0]
            for _ in range(5)
        ]
        ends = [(interval.low, interval.high) for interval in intervals]
        np.testing.assert_allclose(ends, np.tile(ends[0], (5, 1)), rtol=1e-12)
        np.testing.assert_allclose(ends[0], (expected.low, expected.high), rtol=0.02)


def test_history_of_a_sweep_is_refused():
    """The early losses of a run are not repetitions of its final one."""
    rows = [row | {"run_id": f"r{i}"} for i, row in enumerate(make_curve(1e-3))]
    early = [row | {"loss": row["loss"] + 2} for row in rows]
    with pytest.raises(ValueError, match="'run_id' names a run in several rows"):
        fit_sweep([*rows, *early])
    with pytest.raises(ValueError, match="'run_id' names a run in several rows"):
        fit_sweeps([row | {"N": 1e8} for row in [*rows, *early]], by="N")
    named = [row | {"run_id": f"r{i}"} for i, row in enumerate(make_curve(1e-3) * 2)]
    assert fit_sweep(named).best_rates == pytest.approx([1e-3], rel=0.01)


def test_unfinished_runs_of_a_sweep_are_left_out():
    rows = make_curve(1e-3, status="FINISHED") + [
        row | {"loss": 1.0} for row in make_curve(1e-3, status="FAILED")
    ]
    with pytest.warns(ScalingWarning, match="'status' says that 7 runs are not 'finished'"):
        assert fit_sweep(rows).best_rates == pytest.approx([1e-3], rel=1e-3)


def test_best_rate_lies_between_the_neighbors_of_the_least_loss():
    """A parabola through five points would leave a shallow valley next to a steep rise."""
    random = np.random.default_rng(0)
    for _ in range(200):
        loss = 3 + np.sort(random.exponential(0.1, 7))[np.abs(np.arange(7) - 3) * 2 % 7]
        loss += random.exponential(0.3, 7) * (np.arange(7) != 3)
        rows = [{"lr": r, "bs": 1, "loss": z} for r, z in zip(RATES, loss, strict=True)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScalingWarning)
            best_rate = fit_sweep(rows).best_rates[0]
        at = int(np.argmin(loss))
        if 0 < at < 6:
            assert RATES[at - 1] <= best_rate <= RATES[at + 1]


FOLDER = Path(os.environ.get("SCALING_DATA", "/nonexistent")) / "scaling"


@pytest.mark.skipif(
    not (FOLDER / "step_dense.csv").exists(),
    reason="SCALING_DATA names no folder with scaling/step_dense.csv",
)
@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_step_law_grid_is_seventeen_sweeps():
    table = FOLDER / "step_dense.csv"
    with pytest.raises(ValueError, match=r"takes .* values .*by=\['D', 'N'\]"):
        fit_sweep(table)
    with table.open() as file:
        settings = {(row["N"], row["D"]) for row in csv.DictReader(file)}
    sweeps = fit_sweeps(table, ["N", "D"])
    assert {*sweeps} == settings
    assert len(sweeps) == 17
    for sweep in sweeps.values():
        for best, curve in zip(sweep.best_rates, sweep.loss, strict=True):
            tried = np.flatnonzero(np.isfinite(curve))
            at = int(np.argmin(curve[tried]))
            if np.isfinite(best):
                low, high = tried[max(at - 1, 0)], tried[min(at + 1, len(tried) - 1)]
                assert sweep.rates[low] <= best <= sweep.rates[high]


def find_best_setting(sweep):
    """Return the batch size and rate of least loss, interpolated between those of the sweep."""
    known = np.isfinite(sweep.best_rates)
    sizes = sweep.batch_sizes[known]
    least = np.where(np.isfinite(sweep.loss), sweep.loss, np.inf).min(1)[known]
    # The bottom of the losses over the batch size is found as that over the rate.
    across = fit_sweep({"lr": sizes, "bs": np.ones(len(sizes)), "loss": least})
    size = across.best_rates[0]
    if np.isnan(size):  # The least loss is at the smallest or the largest batch size.
        size = sizes[np.argmin(least)]
    rate = np.exp(np.interp(np.log(size), np.log(sizes), np.log(sweep.best_rates[known])))
    return size, rate


@pytest.mark.skipif(
    not (FOLDER / "step_dense.csv").exists(),
    reason="SCALING_DATA names no folder with scaling/step_dense.csv",
)
@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_published_exponents_of_step_law_lie_in_the_intervals_of_its_runs():
    best = []
    assert len((FOLDER / "step_dense.csv").read_text().splitlines()) == 1 + 1911
    for (n, d), sweep in fit_sweeps(FOLDER / "step_dense.csv", ["N", "D"]).items():
        size, rate = find_best_setting(sweep)
        best.append([float(n), float(d), rate, 2048 * size])  # a sequence has 2048 tokens
    names = ("parameters", "tokens", "rate", "batch")
    rows = dict(zip(names, np.transpose(best), strict=True))
    # The widths are stated in the README.
    stated = {
        ("step_rate", "alpha"): (-1.15, -0.16),
        ("step_rate", "beta"): (0.09, 0.52),
        ("step_batch", "beta"): (0.28, 1.01),
    }
    readme = " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    scatter = {"step_rate": 0.4, "step_batch": 0.7}
    for (law, name), (low, high) in stated.items():
        fit = fit_law(law, rows, "squares")
        assert np.std(fit.residuals) == pytest.approx(scatter[law], abs=0.05)
        interval = fit.interval(name)
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.01)
        assert CATALOG[law].published[name] in interval
        assert f"{low} to {high}" in readme


def test_batch_sizes_with_points_are_refused_if_these_may_separate_thousands():
    rows = [{"lr": rate, "bs": "1.024", "loss": 2.0 + rate} for rate in (0.1, 0.2, 0.4)]
    with pytest.raises(ValueError, match=r"'1.024' may be 1.024 or 1024; write the column without"):
        fit_sweep(rows)


def test_unknown_columns_of_a_sweep_are_refused():
    rows = [{"lr": rate, "bs": 8, "loss": 2.0 + rate} for rate in (0.1, 0.2, 0.4)]
    with pytest.raises(ValueError, match=r"got \['learning_rate'\]"):
        fit_sweep(rows, columns={"learning_rate": "lr"})
    for by in ((), "size"):
        with pytest.raises(ValueError, match="expected by to name columns"):
            fit_sweeps(rows, by)


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
@pytest.mark.parametrize(
    ("count", "seeds", "is_random", "noise", "tables", "expected"),
    [
        (9, 3, False, 5e-4, 20, 0.95),
        (12, 1, True, 5e-4, 20, 0.92),
        (25, 1, True, 5e-4, 20, 0.92),
        # The README states the coverage of 100 tables.
        pytest.param(12, 1, True, 5e-4, 100, 0.94, marks=pytest.mark.exhaustive),
        pytest.param(25, 1, True, 5e-4, 100, 0.91, marks=pytest.mark.exhaustive),
        pytest.param(61, 1, False, 3e-3, 100, 0.71, marks=pytest.mark.exhaustive),
        pytest.param(61, 3, False, 3e-3, 100, 0.93, marks=pytest.mark.exhaustive),
    ],
)
def test_interval_covers_the_best_rate_of_random_rates(
    count, seeds, is_random, noise, tables, expected
):
    """Rates of a random search, or of seeds that differ slightly, may be arbitrarily close."""
    random = np.random.default_rng(0)
    batch_sizes = 2 ** np.arange(3, 9)
    covered = []
    for _ in range(tables):
        rows = []
        for size in batch_sizes.tolist():
            distances = np.linspace(-2.5, 2.5, count)
            if is_random:
                distances = random.uniform(-2.5, 2.5, count)
            for seed in range(seeds):
                logs = np.log(1e-3 * size) + distances + seed * 2e-4
                losses = 2.5 + 0.02 * distances**2 + random.normal(0, noise, count)
                rows += [
                    {"lr": rate, "batch_size": size, "seed": seed, "loss": loss}
                    for rate, loss in zip(np.exp(logs), losses, strict=True)
                ]
        intervals = fit_sweep(rows).intervals
        pairs = zip(batch_sizes, intervals, strict=True)
        covered += [
            i.low <= 1e-3 * size * np.exp(1e-4 * (seeds - 1)) <= i.high for size, i in pairs
        ]
    # Six intervals per table; 2.6 standard deviations of their coverage.
    tolerance = 2.6 * math.sqrt(expected * (1 - expected) / len(covered))
    assert np.mean(covered) == pytest.approx(expected, abs=tolerance)


def test_interval_from_zero_to_infinity_states_the_reason():
    """Three rates of one seed fix a parabola, but do not show the noise of its bottom."""
    rows = make_curve(1e-3) + make_curve(1e-3, size=128)[2:5]
    sweep = fit_sweep(rows)
    assert np.isfinite(sweep.best_rates).all()
    assert [math.isinf(interval.high) for interval in sweep.intervals] == [False, True]
    assert "at batch sizes 128 have intervals of (0, inf), because" in sweep.explanation
    assert "(0, inf)" not in fit_sweep(make_curve(1e-3)).explanation


STUCK_RATES = [1e-4, 1.78e-4, 3.16e-4, 5.6e-4, 1e-3, 1.78e-3, 3.16e-3, 5.6e-3, 1e-2]


@pytest.mark.parametrize("stuck", [4.0, 5.0, 7.0, 10.8, 50.0])
def test_losses_of_stuck_runs_do_not_move_the_best_rate(stuck):
    losses = [4.70, 4.02, 3.56, 3.25, 3.07, 3.00, 3.03, stuck, stuck]
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        sweep = fit_sweep({"lr": STUCK_RATES, "batch_size": [256] * 9, "loss": losses})
    assert sweep.best_rates[0] == pytest.approx(1.993e-3, rel=1e-3)
    assert sweep.diverged == {4.0: 0, 5.0: 1}.get(stuck, 2)
    assert len(messages) == (stuck > 4)


def draw_sweep(random):
    """Return a sweep that is steeper above its best rate, and flags of the runs that diverged."""
    step = random.choice([1.4, 1.78, 2.0, 3.0])
    count = int(random.integers(7, 11))
    x = np.log(step) * (np.arange(count) - random.integers(3, count - 2))
    x += np.log(step) * random.uniform(-0.5, 0.5)
    steepness = np.where(x > 0, random.uniform(1, 4) ** np.tanh(np.abs(x)), 1)
    rise = 10 ** random.uniform(-2.3, -1.2) * x**2 * steepness
    rise += 10 ** random.uniform(-4, -2.5) * random.standard_normal(count)
    loss = 3 * np.exp(rise)
    is_highest = np.arange(count) >= count - random.integers(0, 3)
    has_diverged = is_highest & (loss < (stuck := random.choice([4.5, 7.0, 10.8])))
    loss[has_diverged] = stuck
    return {"lr": 1e-3 * np.exp(x), "batch_size": [256] * count, "loss": loss}, has_diverged


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_diverged_runs_are_found_in_generated_sweeps():
    random = np.random.default_rng(0)
    right = []
    wrong = []
    for _ in range(200):
        table, has_diverged = draw_sweep(random)
        marked = np.isinf(fit_sweep(table).log_loss[0])
        right += marked[has_diverged].tolist()
        wrong += marked[~has_diverged].tolist()
    assert np.mean(right) >= 0.8
    assert np.mean(wrong) <= 0.02


def test_losses_that_rise_by_instability_do_not_move_the_best_rate():
    rates = 1.25e-4 * 2.0 ** np.arange(8)
    losses = [3.9, 3.5, 3.25, 3.08, 3.00, 3.04, 4.2, 6.0]
    with pytest.warns(ScalingWarning, match="1 of 8 runs diverged"):
        sweep = fit_sweep({"lr": rates, "batch_size": [256] * 8, "loss": losses})
    assert sweep.best_rates[0] == pytest.approx(2.25e-3, rel=0.02)
