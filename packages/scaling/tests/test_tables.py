"""Tables of any format are read correctly, or refused with the wrong cell."""

import csv
import io
import itertools
import json
import math
import os
import re
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from figures import assert_at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling import ScalingWarning, load_runs
from scaling.tables.names import is_method_name, recognize

COLUMNS = ("parameters", "tokens", "loss")


def round_to_digits(value, digits):
    return float(f"{value:.{digits}g}")


@st.composite
def draw_tables(draw):
    """Return (columns, digits): numbers that have `digits` significant digits."""
    count = draw(st.integers(3, 9))
    digits = draw(st.integers(4, 7))
    size = st.floats(7, 11).map(lambda e: round_to_digits(10**e, digits))
    n = draw(st.lists(size, min_size=count, max_size=count, unique=True))
    ratios = draw(st.lists(st.floats(0.5, 300), min_size=count, max_size=count))
    loss = draw(st.lists(st.floats(1.5, 9.9), min_size=count, max_size=count))
    d = [round_to_digits(a * b, digits) for a, b in zip(n, ratios, strict=True)]
    return {"parameters": n, "tokens": d, "loss": [round_to_digits(x, 5) for x in loss]}, digits


def write_suffixed(value, digits, comma):
    for letter, unit in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= unit:
            return f"{value / unit:.{digits}g}".replace(".", "," if comma else ".") + letter
    return str(value)


def write_grouped(mark):
    return lambda value, digits, comma: f"{value:,.0f}".replace(",", mark)


def write_scientific(value, digits, comma):
    return f"{value:.{digits - 1}e}".replace(".", "," if comma else ".")


def write_powers(value, digits, comma):
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa.replace('.', ',' if comma else '.')} x 10^{int(exponent)}"


NAMES = {
    "parameters": ["N", "params", "n_params", "Model Size", "modelParams", "model/num_parameters"],
    "tokens": ["D", "tokens", "train_tokens", "Training Tokens", "throughput/total_tokens"],
    "loss": ["loss", "val_loss", "eval/loss", "Final validation loss", "evalLoss", "summary.loss"],
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(table=draw_tables(), data=st.data())
def test_table_in_any_format_gives_the_same_runs(tmp_path_factory, table, data):
    columns, digits = table
    draw = data.draw
    comma = draw(st.booleans(), label="decimal comma")
    mark = draw(st.sampled_from([";"] if comma else [",", ";", "\t", "|"]), label="delimiter")
    styles = [
        write_suffixed,
        write_scientific,
        write_powers,
        write_grouped(" "),
        write_grouped("_"),
        write_grouped("'"),
    ]
    styles += [] if comma else [write_grouped(",")]
    names = {ours: draw(st.sampled_from(NAMES[ours]), label=ours) for ours in COLUMNS}
    unit = {}
    for ours in ("parameters", "tokens"):
        if draw(st.booleans(), label=f"unit of {ours}"):
            letter = draw(st.sampled_from(["_B", " (M)", " [1e9]", "_billions"]))
            unit[ours] = 1e6 if "M" in letter else 1e9
            names[ours] += letter
    cells = {}
    for ours in ("parameters", "tokens"):
        style = write_scientific if ours in unit else draw(st.sampled_from(styles), label=ours)
        cells[ours] = [style(v / unit.get(ours, 1), digits, comma) for v in columns[ours]]
    cells["loss"] = [f"{x:.4f}".replace(".", "," if comma else ".") for x in columns["loss"]]
    # Two of the unrelated columns have the short names of ours.
    extra = {"layers": ["12"], "seed": ["0"], "note": ["a, b"]}
    if names["parameters"] != "N" and not names["parameters"].startswith("N"):
        extra["n"] = ["24"]
    if names["tokens"] != "D" and not names["tokens"].startswith("D"):
        extra["d"] = ["768"]
    count = len(columns["loss"])
    everything = {names[k]: cells[k] for k in COLUMNS} | {k: v * count for k, v in extra.items()}
    order = draw(st.permutations(list(everything)), label="order")
    out = io.StringIO()
    writer = csv.writer(out, delimiter=mark)
    writer.writerow(order)
    blank = draw(st.integers(0, 2), label="rows without a loss")
    rows = [[everything[name][i] for name in order] for i in range(count)]
    empty = [
        [("" if k == names["loss"] else everything[k][0]) for k in order] for _ in range(blank)
    ]
    writer.writerows(rows[:1] + empty + rows[1:])
    lines = out.getvalue().splitlines()
    for at in sorted(draw(st.lists(st.integers(0, len(lines)), max_size=3)), reverse=True):
        lines.insert(at, draw(st.sampled_from(["# made by hand", "", "   "])))
    encoding = draw(st.sampled_from(["utf-8", "utf-8-sig"]))
    path = tmp_path_factory.mktemp("table") / "runs.csv"
    path.write_text("\n".join(lines), encoding=encoding)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = load_runs(path)
    assert len(runs) == count
    within = {
        "parameters": 2 * 10.0 ** (1 - digits),
        "tokens": 2 * 10.0 ** (1 - digits),
        "loss": 1e-4,
    }
    for ours in COLUMNS:
        np.testing.assert_allclose(getattr(runs, ours), columns[ours], rtol=within[ours])
        assert repr(names[ours]) in runs.explanation
    messages = [str(w.message) for w in caught if "is blank or nan in" in str(w.message)]
    assert len(messages) == (blank > 0)
    assert not blank or f"is blank or nan in {blank} rows" in messages[0]


BASE = {"N": [1e8, 2e8, 4e8], "D": [1e10, 2e10, 2e10], "loss": [3.4, 3.2, 3.1]}


@pytest.mark.parametrize(
    "source",
    [
        {"runs": [dict(zip(BASE, row, strict=True)) for row in zip(*BASE.values(), strict=True)]},
        {k: dict(enumerate(v)) for k, v in BASE.items()},
        {f"run-{i}": {k: v[i] for k, v in BASE.items()} for i in range(3)},
    ],
)
def test_same_runs_in_any_container(source):
    runs = load_runs(source)
    for ours, name in zip(COLUMNS, BASE, strict=True):
        np.testing.assert_allclose(getattr(runs, ours), BASE[name])


def test_several_lists_of_records_are_refused_and_one_is_explained():
    records = [dict(zip(BASE, row, strict=True)) for row in zip(*BASE.values(), strict=True)]
    assert "the records are those of 'runs'" in load_runs({"runs": records, "n": 3}).explanation
    with pytest.raises(ValueError, match=r"\['runs', 'results'\] are several lists of records"):
        load_runs({"runs": records, "results": records[:2]})
    # Hugging Face's dataset viewer and MLflow's REST API return long tables in pages.
    for page in ({"num_rows_total": 4}, {"next_page_token": "x"}):
        with pytest.raises(ValueError, match="'rows' has one page of a longer list"):
            load_runs({"rows": records} | page)
    assert len(load_runs({"rows": records, "num_rows_total": 3, "next_page_token": ""})) == 3


@pytest.mark.parametrize("library", ["pandas", "polars", "polars.lazy", "pyarrow"])
def test_data_frames_of_any_library_are_tables(library):
    module = pytest.importorskip(library.split(".")[0], reason=f"{library} is not installed here")
    table = BASE | {"state": ["finished", "crashed", "finished"], "note": ["a", None, "b"]}
    frame = module.table(table) if library == "pyarrow" else module.DataFrame(table)
    if library == "polars.lazy":
        frame = frame.lazy()
    with pytest.warns(ScalingWarning, match="1 runs are not 'finished'"):
        runs = load_runs(frame)
    assert runs.parameters.tolist() == [1e8, 4e8]
    blank = BASE | {"loss": [3.4, None, 3.1]}
    frame = module.table(blank) if library == "pyarrow" else module.DataFrame(blank)
    with pytest.warns(ScalingWarning, match=r"blank or nan in 1 rows \(2\)"):
        assert load_runs(frame).rows == (1, 3)


def test_mlflow_exports_are_read(tmp_path):
    """Both the columns of `mlflow.search_runs` and the answer of its REST API are read."""
    columns = {
        "run_id": ["a", "b", "c"],
        "status": ["FINISHED", "FAILED", "FINISHED"],
        "metrics.val_loss": BASE["loss"],
        "params.n_params": list(map(str, BASE["N"])),
        "params.tokens": list(map(str, BASE["D"])),
        "tags.mlflow.runName": ["x", "y", "z"],
    }
    with pytest.warns(ScalingWarning, match="1 runs are not 'finished'"):
        assert load_runs(columns).tokens.tolist() == [1e10, 2e10]
    runs = []
    for i in range(3):
        params = [{"key": "n_params", "value": str(BASE["N"][i])}]
        params.append({"key": "tokens", "value": str(BASE["D"][i])})
        metrics = [{"key": "val_loss", "value": BASE["loss"][i], "timestamp": 1, "step": 9}]
        info = {"run_id": "abc"[i], "status": "FINISHED", "lifecycle_stage": "active"}
        runs.append({"info": info, "data": {"metrics": metrics, "params": params}})
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": runs}))
    np.testing.assert_allclose(load_runs(path).tokens, BASE["D"])


def test_rows_of_one_metric_each_are_read():
    """TensorBoard's scalars have a row per run, step and tag; a size is logged once per run."""
    rows = []
    for i in range(3):
        rows.append({"run": f"r{i}", "tag": "n_params", "step": 0, "value": BASE["N"][i]})
        for step in (10, 20):
            tags = {"tokens": BASE["D"][i] * step / 20, "eval/loss": BASE["loss"][i] + 2 / step}
            for tag, value in tags.items():
                rows.append({"run": f"r{i}", "tag": tag, "step": step, "value": value})
    with pytest.warns(ScalingWarning) as caught:
        runs = load_runs(rows)
    messages = " ".join(str(w.message) for w in caught)
    assert "'eval/loss' is blank or nan in 3 rows" in messages
    assert "3 earlier ones are left out" in messages
    np.testing.assert_allclose(runs.parameters, BASE["N"])
    np.testing.assert_allclose(runs.tokens, BASE["D"])
    np.testing.assert_allclose(runs.loss, np.add(BASE["loss"], 0.1))
    assert "each row is a metric, named by 'tag'" in runs.explanation
    # Columns of these names in a table of runs do not hide its runs.
    extra = {"key": ["a", "b", "c"], "value": [1, 2, 3], "step": [5, 6, 7]}
    np.testing.assert_allclose(load_runs(BASE | extra).loss, BASE["loss"])


def test_files_of_other_formats_are_refused_with_the_remedy(tmp_path):
    for name in ("events.out.tfevents.1700000000.host", "runs.parquet", "latin.csv"):
        (tmp_path / name).write_bytes(b"N,D,loss\n1e8,2e9,3\xe9\n" if "latin" in name else b"\x00")
        with pytest.raises(ValueError, match=r"is not text in UTF-8: .* pass the DataFrame"):
            load_runs(tmp_path / name)


@pytest.mark.timing
def test_a_million_rows_are_read_in_5_seconds(tmp_path):
    random = np.random.default_rng(0)
    n, d = 10 ** random.uniform([[7], [9]], [[9], [11]], (2, 1_000_000))
    table = {"N": n.round(), "D": d.round(), "loss": 2 + random.random(1_000_000)}
    path = tmp_path / "runs.csv"
    np.savetxt(
        path, np.transpose(list(table.values())), "%.9g", ",", header="N,D,loss", comments=""
    )
    for source in (table, path):
        start = time.process_time()
        assert len(load_runs(source)) == 1_000_000
        seconds = time.process_time() - start
        figure = f"scaling: a million rows read from a {type(source).__name__}"
        assert_at_most(figure, 5, seconds, "s")


def test_every_choice_is_a_line_of_the_explanation(tmp_path):
    path = tmp_path / "runs.csv"
    text = "# by hand\nset;params_M;steps;tokens_per_step;val_ppl;state;seed;loss_std\n"
    for i, x in enumerate((30.5, 25.25, 22.125)):
        text += f"c4;{100 * 2**i};{2**i}000;1048576;{x};finished;0;0.1\n"
    path.write_text(
        text + "pile;100;1000;1048576;31.5;finished;0;0.1\nc4;9;1000;1048576;;crashed;0;1\n"
    )
    with pytest.warns(ScalingWarning):
        explanation = load_runs(path, where={"set": "c4"}).explanation
    for line in (
        "3 of 5 rows",
        "cells are separated by ';'",
        "1 lines that start with '#' are comments",
        "'params_M'",
        "in units of 1e+06",
        "'steps * tokens_per_step'",
        "nats, of perplexity",
        "6 N D",
        "rows where 'set' is 'c4'",
        "column 'state' says that 1 runs are not 'finished'",
        "not used: set, state, seed, loss_std",
    ):
        assert line in explanation, (line, explanation)


def test_wandb_csv_with_python_literals_and_levanter_gigaflops_is_read(tmp_path):
    path = tmp_path / "project.csv"
    with path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["", "summary", "config", "name"])
        for i in range(3):
            n, d = BASE["N"][i], BASE["D"][i]
            summary = {"eval/loss": BASE["loss"][i], "train/loss": 1.0, "_step": 10}
            summary |= {"eval/macro_loss": BASE["loss"][i] + 0.1}
            summary |= {"throughput/total_tokens": d, "throughput/total_gflops": 6 * n * d / 1e9}
            summary |= {"throughput/tokens_per_second": 1e5, "grad/norm": float("nan")}
            writer.writerow(
                [i, summary, {"model": {"n_layer": 12}, "parameter_count": n}, f"run-{i}"]
            )
    runs = load_runs(path)
    np.testing.assert_allclose(runs.loss, BASE["loss"])
    np.testing.assert_allclose(runs.compute, 6 * np.multiply(BASE["N"], BASE["D"]))
    assert "'summary.throughput/total_gflops'" in runs.explanation
    assert "loss by 'summary.eval/loss', not 'summary.eval/macro_loss'" in runs.explanation


def test_run_that_diverged_at_the_end_of_a_history_is_reported():
    rows = [
        {"run": f"r{i}", "N": n, "tokens": s * 1e9, "step": s, "loss": 4 - 0.1 * s - i / 9}
        for i, n in enumerate((1e8, 3e8, 1e9))
        for s in range(1, 11)
    ]
    diverged = [r | ({"loss": "NaN"} if r["run"] == "r1" and r["step"] > 4 else {}) for r in rows]
    # Evaluations that are not logged at every step are usual.
    sparse = [r | ({"loss": ""} if r["step"] % 3 else {}) for r in rows]
    messages = []
    for table in (diverged, sparse):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs = load_runs(table)
        assert len(runs) == 3
        messages.append("\n".join(str(warning.message) for warning in caught))
    assert "blank or nan at the end of runs r1: their last loss is not the final one" in messages[0]
    assert "at the end of runs" not in messages[1]


def make_history_rows(column):
    """Return four evaluations of each of three runs that are named by a column."""
    return [
        {column: f"r{i}", "N": n, "tokens": s * 2e9, "_step": s, "loss": 4 - 0.1 * s - i / 9}
        for i, n in enumerate((1e8, 3e8, 1e9))
        for s in range(1, 5)
    ]


@pytest.mark.parametrize("column", ["run_id", "Run", "trial_id", "job_id", "exp_name", "name"])
def test_history_is_recognized_by_a_column_of_run_names(column):
    with pytest.warns(ScalingWarning, match="9 earlier ones are left out"):
        runs = load_runs(make_history_rows(column))
    assert runs.tokens.tolist() == [8e9] * 3


@pytest.mark.parametrize("history", [True, 1, 0, ["run_id"]])
def test_history_is_a_column_or_false(history):
    with pytest.raises(
        ValueError, match="expected history to be the column of run names, or False"
    ):
        load_runs(make_history_rows("run_id"), history=history)


@pytest.mark.parametrize("last", [0.0, 0.01, 0.1])
def test_setting_of_a_run_is_the_largest_rate_of_its_history(last):
    """Schedules that end at one rate would hide that the peaks differ."""
    rows = [
        {
            "run": f"{n:g}-{peak}",
            "N": n,
            "tokens": done * 1e10,
            "lr": last * 3e-4 if done == 1 else peak * (1 - done / 2),
            "loss": 4 - done + abs(np.log(peak / 1e-3)) / 9 - n / 1e10,
        }
        for n in (1e8, 3e8, 1e9)
        for peak in (3e-4, 1e-3, 3e-3)
        for done in (0.01, 0.5, 1.0)
    ]
    with (
        pytest.warns(ScalingWarning, match="18 earlier ones"),
        pytest.warns(ScalingWarning, match="6 runs of other settings"),
    ):
        runs = load_runs(rows)
    np.testing.assert_allclose(runs.loss, [3 - n / 1e10 for n in (1e8, 3e8, 1e9)])
    assert "'lr' changes within runs: the largest of each run is read" in runs.explanation


@pytest.mark.parametrize(
    ("step", "plan"),
    [("_step", "max_steps"), ("global_step", "trainer.num_train_steps"), ("step", "total_steps")],
)
def test_run_that_stopped_before_its_planned_steps_is_left_out(step, plan):
    rows = [
        {"N": n, "tokens": 1e10, step: s, plan: 1000, "loss": 3 - n / 1e10}
        for n, s in ((1e8, 999), (2e8, 400), (4e8, 1000), (8e8, 980))
    ]
    with pytest.warns(ScalingWarning, match=f"'{step}' is below '{plan}' in rows 2: 1 runs that"):
        assert load_runs(rows).parameters.tolist() == [1e8, 4e8, 8e8]
    assert len(load_runs(rows, ignore=plan)) == 4
    # Steps of gradient accumulation, or calls of wandb.log, are not the planned steps.
    assert len(load_runs([row | {step: row[step] / 3} for row in rows])) == 4


def test_steps_that_equal_the_plan_in_few_rows_are_refused_and_in_no_row_explained():
    rows = [
        {"N": n, "tokens": 1e10, "step": s, "max_steps": 1000, "loss": 3 - n / 1e10}
        for n, s in ((1e8, 1000), (2e8, 400), (4e8, 300))
    ]
    with pytest.raises(ValueError, match="'step' is 'max_steps' in only 1 of 3 rows"):
        load_runs(rows)
    assert len(load_runs(rows, ignore="max_steps")) == 3
    explanation = load_runs(rows[1:]).explanation
    assert "'step' is not compared with 'max_steps': no row has equal numbers" in explanation


@pytest.mark.parametrize("name", ["progress", "train/progress", "percent_complete"])
@pytest.mark.parametrize("cells", [[1, 0.4, 0.99], [100, 40, 98.5], ["100%", "1%", "100 %"]])
def test_run_whose_progress_is_not_complete_is_left_out(name, cells):
    with pytest.warns(ScalingWarning, match=rf"'{name}' is below 1\d* in rows 2: 1 runs that"):
        assert load_runs(BASE | {name: cells}).rows == (1, 3)
    with pytest.raises(ValueError, match=rf"'{name}' is at most 0.4, so no run has reached its en"):
        load_runs(BASE | {name: [0.4, 0.3, 0.4]})
    for other in (["good", "bad", "good"], [1, 1.0, "1"]):
        assert len(load_runs(BASE | {name: other})) == 3


def test_tokens_that_differ_from_steps_times_the_batch_are_refused_with_both_readings():
    steps = {"steps": np.divide(BASE["D"], 2**20), "batch_tokens": [2**20] * 3}
    assert (
        "'D' are those of all epochs: 'steps * batch_tokens' is equal"
        in load_runs(BASE | steps).explanation
    )
    half = steps | {"steps": steps["steps"] / 2}
    with pytest.raises(
        ValueError, match=r"\['D', 'steps \* batch_tokens'\] may each be the tokens"
    ):
        load_runs(BASE | half)
    for name, tokens in (("D", BASE["D"]), ("steps * batch_tokens", np.divide(BASE["D"], 2))):
        np.testing.assert_allclose(load_runs(BASE | half, columns={"tokens": name}).tokens, tokens)
    seen = {"N": BASE["N"], "loss": BASE["loss"], "tokens_seen": BASE["D"]}
    assert "'tokens_seen' are those of all epochs: the name" in load_runs(seen | half).explanation
    # The steps of wandb's logger are not those of the training.
    logged = {"_step": half["steps"], "batch_tokens": half["batch_tokens"]}
    np.testing.assert_allclose(load_runs(BASE | logged).tokens, BASE["D"])


def test_run_that_stopped_before_its_planned_epochs_is_left_out():
    """Exports of transformers' Trainer have max_steps = -1, and planned epochs."""
    plan = {"num_train_epochs": 3, "max_steps": -1}
    rows = [
        {"N": n, "tokens_seen": 1e10, "train/epoch": epoch, "train/global_step": 500, **plan}
        for n, epoch in ((1e8, 3.0), (2e8, 1.1), (4e8, 2.99), (8e8, 3.0))
    ]
    rows = [row | {"eval/loss": 3 - row["N"] / 1e10} for row in rows]
    with pytest.warns(ScalingWarning, match="'train/epoch' is below 'num_train_epochs' in rows 2"):
        assert load_runs(rows).parameters.tolist() == [1e8, 4e8, 8e8]
    # A planned number of steps overrides the number of epochs.
    assert len(load_runs([row | {"max_steps": 500} for row in rows])) == 4


@pytest.mark.parametrize(
    ("column", "mark", "unmarked"),
    [
        *(("outlier", True, False), ("exclude", "yes", ""), ("discard", 1, 0)),
        *(("excluded_from_fit", True, False), ("keep", False, True), ("use_in_fit", "no", "yes")),
        *(("bad", 1, 0), ("ok", "no", "yes"), ("use", 0, 1)),
    ],
)
def test_marked_rows_are_refused_with_both_readings(column, mark, unmarked):
    rows = [
        {"N": n, "D": 1e10, "loss": 3 - n / 1e10, column: mark if n == 2e8 else unmarked}
        for n in (1e8, 2e8, 4e8)
    ]
    remedy = rf"'{column}' marks 1 rows \(2\): .* where={{'{column}': {unmarked!r}}}"
    with pytest.raises(ValueError, match=remedy):
        load_runs(rows)
    assert len(load_runs(rows, where={column: unmarked})) == 2
    assert len(load_runs(rows, ignore=column)) == 3


def test_losses_of_the_validation_are_preferred_under_any_name():
    for name in ("valid_loss", "val_loss", "valid/loss", "holdout_loss"):
        table = {"N": BASE["N"], "D": BASE["D"], "train_loss": BASE["loss"], name: [1.5, 1.4, 1.3]}
        assert load_runs(table).loss.tolist() == [1.5, 1.4, 1.3]


@pytest.mark.parametrize("column", ["trial", "group", "seed", "job", "model", "host"])
def test_rows_that_may_be_a_history_are_refused_with_both_readings(column):
    rows = make_history_rows(column)
    with pytest.raises(ValueError, match=r"'_step' rises with the tokens.*history='…'.*=False"):
        load_runs(rows)
    with pytest.warns(ScalingWarning, match="9 earlier ones are left out"):
        assert len(load_runs(rows, history=column)) == 3
    assert len(load_runs(rows, history=False)) == 12
    assert len(load_runs([row | {"id": f"a{i}"} for i, row in enumerate(rows)])) == 12
    # An index or the key of a database counts rows, so it does not show that each is a run.
    with pytest.raises(ValueError, match="'_step' rises with the tokens"):
        load_runs([row | {"id": i} for i, row in enumerate(rows)])
    with pytest.raises(ValueError, match="history='no' is not a column"):
        load_runs(rows, history="no")
    with pytest.raises(ValueError, match="one size and different tokens"):
        load_runs([row | {"set": row["_step"]} for row in rows], history="set")


@pytest.mark.parametrize("spacing", [1.0, 1.003])
@pytest.mark.parametrize("shuffled", [False, True])
def test_checkpoints_without_run_names_or_steps_are_refused(spacing, shuffled):
    """Evenly spaced tokens, or many of them, are a history; doubled tokens are a grid of runs."""
    rows = [
        {"N": n, "D": 1e9 * s * spacing ** (s % 2), "loss": 4 - 0.1 * s - i / 9}
        for i, n in enumerate((1e8, 3e8, 1e9))
        for s in range(1, 6)
    ]
    order = np.random.default_rng(0).permutation(15) if shuffled else np.arange(15)
    rows = [rows[i] for i in order]
    with pytest.raises(ValueError, match=r"evenly spaced token counts.*history='…'"):
        load_runs(rows)
    assert len(load_runs(rows, history=False)) == 15
    grid = [row | {"D": 1e9 * 2 ** (row["D"] // 9e8)} for row in rows]
    runs = load_runs(grid)
    assert len(runs) == 15
    assert "every row is a run: no column" in runs.explanation
    assert "if the rows of a size are checkpoints of one training, pass a" in runs.explanation
    named = load_runs([row | {"run": f"r{i}"} for i, row in enumerate(grid)])
    assert "every row is a run: column 'run' has a different name in every row" in named.explanation
    many = [{"N": n, "D": 1e9 * 1.2**s, "loss": 4 - s / 50} for n in (1e8, 3e8) for s in range(25)]
    with pytest.raises(ValueError, match="evenly spaced token counts, or 20 with any"):
        load_runs(many)


@pytest.mark.parametrize("ratio", [2, 3, 4])
@pytest.mark.parametrize("checkpoints", [4, 5, 8, 10])
def test_checkpoints_of_trainings_of_two_lengths_are_refused(ratio, checkpoints):
    rows = [
        {"N": n, "D": 1e9 * length * k / checkpoints, "loss": 4 - k / 20 - length / 50}
        for n in (1e8, 4e8, 16e8)
        for length in (1, ratio)
        for k in range(1, checkpoints + 1)
    ]
    with pytest.raises(ValueError, match="evenly spaced token counts"):
        load_runs(rows)


@pytest.mark.parametrize("name", ["run{0}-step{1}00", "run{0}_ckpt_{1}", "run{0}/epoch={1}"])
def test_names_of_checkpoints_do_not_name_runs(name):
    rows = [
        {"run": name.format(i, s), "N": n, "D": 1e9 * s, "loss": 4 - s / 20 - i / 9}
        for i, n in enumerate((1e8, 3e8, 1e9))
        for s in range(1, 6)
    ]
    with pytest.raises(ValueError, match="evenly spaced token counts"):
        load_runs(rows)
    assert len(load_runs([row | {"run": f"run{i}"} for i, row in enumerate(rows)])) == 15


@pytest.mark.parametrize("names", [{}, {"run": "r{}"}])
@pytest.mark.parametrize("step", ["_step", "checkpoint"])
def test_history_with_the_tokens_of_the_whole_training_is_refused(names, step):
    """The tokens of a config are those of the end, so the rows of a run do not differ in them."""
    rows = [
        {"N": n, "D": 20 * n, step: f"m/step_{s}" if step == "checkpoint" else s, "loss": 4 - s / 9}
        | {k: v.format(i) for k, v in names.items()}
        for i, n in enumerate((1e8, 3e8, 1e9))
        for s in range(3)
    ]
    with pytest.raises(ValueError, match=f"'{step}' rises with the tokens of each size"):
        load_runs(rows)
    if names:
        with pytest.raises(ValueError, match="pass only the last row of each run"):
            load_runs(rows, history="run")
    # Repetitions have different times, but no different steps.
    seeds = [row | {step: "m/step_9", "seed": i % 3, "time": i} for i, row in enumerate(rows)]
    assert len(load_runs(seeds)) == 9


def test_name_beside_a_checkpoint_may_be_that_of_a_size():
    rows = [
        {"name": n, "ckpt": f"m/step_{s}", "N": n, "D": 20 * n * 2**s, "loss": 4 - s / 9 - i / 7}
        for i, n in enumerate((1e8, 3e8, 1e9))
        for s in range(3)
    ]
    with pytest.raises(ValueError, match="'ckpt' rises with the tokens of each size"):
        load_runs(rows)
    assert len(load_runs(rows, history=False)) == 9
    with pytest.warns(ScalingWarning, match="6 earlier ones are left out"):
        assert len(load_runs(rows, history="name")) == 3


@pytest.mark.parametrize("column", ["dir_name", "Run"])
def test_training_and_validation_of_one_run_are_not_read_as_two_runs(column):
    """TensorBoard writers of Keras and of `add_scalars` use one folder per data split."""
    rows = [
        {column: f"run{i}/loss_{part}", "N": n, "D": 20 * n, "loss": 3 - i / 9 - len(part) / 99}
        for i, n in enumerate((1e8, 3e8, 1e9))
        for part in ("train", "validation")
    ]
    with pytest.raises(ValueError, match=rf"{column}' names \[.*train', .*validation'\]"):
        load_runs(rows)
    assert len(load_runs(rows, history=False)) == 6
    assert len(load_runs(rows[1::2])) == 3


@pytest.mark.parametrize("column", ["_timestamp", "Wall time", "epoch", "iteration"])
def test_column_that_rises_during_a_training_shows_a_history(column):
    rows = [
        {"N": n, "D": 1e9 * 2**s, column: 10.0 * s, "loss": 4 - 0.1 * s - n / 1e10}
        for n in (1e8, 3e8)
        for s in range(4)
    ]
    with pytest.raises(ValueError, match=f"column '{column}' rises with the tokens"):
        load_runs(rows)


@pytest.mark.parametrize("setting", ["seed", "lr"])
def test_history_of_several_settings_without_run_names_is_refused(setting):
    """Rows at equal steps of different seeds or rates do not hide that the steps rise."""
    rows = [
        {"N": n, "D": 2e5 * s, "step": s, setting: k, "loss": 4 - s / 1e4 - n / 1e10 + k / 100}
        for n in (1e8, 3e8)
        for k in (1, 2, 3)
        for s in (1000, 1500, 2000, 3000)
    ]
    with pytest.raises(ValueError, match="column 'step' rises with the tokens"):
        load_runs(rows, units={"tokens": 1})


THOUSANDS = {"N": [125_000_000, 250_000_000, 500_000_000], "loss": [3.2, 3.0, 2.9]}


def test_sequence_length_that_differs_at_equal_tokens_is_a_setting():
    rows = [
        {"N": n, "steps": n // length, "gbs": 512, "seq_len": length, "loss": 3 - n / 1e9}
        for n in (2**27, 2**28, 2**29)
        for length in (1024, 2048)
    ]
    message = r"\['seq_len'\] differ .* where={'seq_len': '1024'}.*, and add a column of tokens"
    with pytest.raises(ValueError, match=message):
        load_runs(rows)
    assert len(load_runs(rows, where={"seq_len": 2048})) == 3


def test_thousands_of_steps_are_not_read_as_decimals():
    """1.000 steps may be one step or a thousand."""
    table = THOUSANDS | {"steps": ["1.000", "2.000", "4.000"], "tokens_per_step": [2**20] * 3}
    with pytest.raises(ValueError, match=r"'steps', row 1: '1\.000' may be 1\.000 or 1000; write"):
        load_runs(table)
    commas = table | {"steps": ["1,000", "2,000", "4,000"]}
    assert load_runs(commas).tokens.tolist() == [s * 1000 * 2.0**20 for s in (1, 2, 4)]
    # A step with another number of decimals shows that the mark starts decimals.
    assert load_runs(table | {"steps": ["1000.0", "2000.0", "4000.0"]}).tokens[0] > 1e9


def test_numbers_in_units_with_three_decimals_need_evidence_of_the_mark():
    table = {"params_M": ["125", "250", "500"], "tokens_M": ["2.500", "5.000", "9.500"]}
    with pytest.raises(ValueError, match=r"'tokens_M', row 1: '2.500' may be 2.500 or 2500"):
        load_runs(table | {"loss": [3.2, 3.0, 2.9]})
    billions = {"params_B": ["1.300", "2.700", "6.700"], "tokens_B": ["26.000", "54.000", "99.000"]}
    assert load_runs(billions | {"loss": ["2.215", "2.101", "2.004"]}).tokens[0] == 26e9
    commas = {k: [c.replace(".", ",") for c in v] for k, v in billions.items()}
    with pytest.raises(ValueError, match=r"may be 1\.300 or 1300"):
        load_runs(commas | {"loss": [2.215, 2.101, 2.004]})


@pytest.mark.parametrize("name", ["N", "D", "loss"])
def test_decimal_commas_are_refused_unless_semicolons_separate_the_cells(tmp_path, name):
    table = {"N": ["1e8", "2e8"], "D": ["2e9", "4e9"], "loss": ["3", "2"]}
    cell = {"N": "1,5e8", "D": "2,5B", "loss": "2,859"}[name]
    with pytest.raises(
        ValueError, match=f"column '{name}' .* row 1: '{cell}'; decimals start with"
    ):
        load_runs(table | {name: [cell, table[name][1]]})
    path = tmp_path / "runs.csv"
    path.write_text("N;D;loss\n1,5e8;2,5B;2,859\n2e8;4e9;2,7\n")
    runs = load_runs(path)
    assert (runs.parameters[0], runs.tokens[0], runs.loss[0]) == (1.5e8, 2.5e9, 2.859)
    assert "a comma in a number starts its decimals" in runs.explanation
    # Points in names, versions and dates do not matter, but points in numbers do.
    for note in ("gpt-1.3b", "31.12.2025", "2025.12.31", "2.11.0", "1.1.25 14:30"):
        path.write_text(f"N;D;loss;note\n1,5e8;2,5B;2,859;{note}\n2e8;4e9;2,7;\n")
        assert load_runs(path).loss.tolist() == [2.859, 2.7]
    path.write_text("N;D;loss;dropout\n1,5e8;2,5B;2,859;0.1\n2e8;4e9;2,7;0\n")
    with pytest.raises(ValueError, match="decimals start with"):
        load_runs(path)
    path.write_text("N;D;loss\n49,893,420;2,000,000,000;3\n82,260,344;4,000,000,000;2\n")
    assert load_runs(path).parameters[0] == 49_893_420


def test_sweep_is_recognized_if_tokens_differ_by_rounding():
    """Whole batches do not divide a token budget, so the settings of one budget differ by some."""
    rows = [
        {"N": n, "tokens": 1e10 // batch * batch, "batch_size": batch, "loss": 3 + i / 10}
        for n in (1e8, 4e8)
        for i, batch in enumerate((3e5, 7e5, 1.1e6))
    ]
    with pytest.warns(ScalingWarning, match="4 runs of other settings are left out"):
        assert load_runs(rows).loss.tolist() == [3.0, 3.0]


def test_steps_of_warmup_and_evaluation_are_not_factors_of_tokens():
    table = {"N": BASE["N"], "batch_tokens": [1e6] * 3, "loss": BASE["loss"]}
    table |= {"warmup_steps": [500] * 3, "eval_steps": [99] * 3, "eval_batch_tokens": [1e5] * 3}
    table |= {"gradient_accumulation_steps": [4] * 3}
    with pytest.raises(ValueError, match="expected a loss and two of"):
        load_runs(table)
    assert load_runs(table | {"total_steps": [1e3, 4e3, 9e3]}).tokens.tolist() == [1e9, 4e9, 9e9]


@pytest.mark.parametrize("name", ["n_expert", "expert_count", "numexperts", "num_local_experts"])
def test_number_of_experts_is_recognized_by_its_usual_names(name):
    base = {"params": BASE["N"], "D": BASE["D"], "loss": BASE["loss"]}
    with pytest.raises(ValueError, match="all parameters or the active ones"):
        load_runs(base | {name: [8, 8, 8]})


def test_whole_numbers_under_a_single_letter_are_not_read_as_losses():
    """L may be the number of layers, beside a loss that has an unusual name."""
    table = {"N": BASE["N"], "D": BASE["D"], "L": [6, 8, 12], "final": BASE["loss"]}
    with pytest.raises(ValueError, match=r"'L' is .*whole numbers may count layers"):
        load_runs(table)
    assert len(load_runs(table, columns={"loss": "final"})) == 3
    assert len(load_runs(table, units={"loss": 1})) == 3


@pytest.mark.parametrize("name", ["loss_base2", "loss (base 2)", "eval loss, base 10"])
def test_loss_in_another_base_is_not_read_as_nats(name):
    with pytest.raises(ValueError, match="expected a loss and two of"):
        load_runs({"N": BASE["N"], "D": BASE["D"], name: BASE["loss"]})


@pytest.mark.parametrize("name", ["top_k", "moe.topk", "n_experts"])
def test_parameters_beside_a_number_of_experts_are_refused(name):
    with pytest.raises(ValueError, match="may count all parameters or the active ones"):
        load_runs(BASE | {name: [2, 2, 2]})


@pytest.mark.parametrize("tokens", ["dataset_tokens", "tokens", "D", "train_tokens"])
@pytest.mark.parametrize(
    "epochs", ["epoch", "n_epoch", "train_epochs", "config.num_epochs", "num_repeats"]
)
def test_tokens_of_one_epoch_or_of_all_epochs_are_refused_with_both_remedies(tokens, epochs):
    table = {"N": BASE["N"], tokens: BASE["D"], "loss": BASE["loss"], epochs: [1, 2, 4]}
    with pytest.raises(ValueError, match=rf"'{tokens}' may count .* '{epochs}' is 2 in row 2"):
        load_runs(table)
    np.testing.assert_allclose(load_runs(table, columns={"tokens": tokens}).tokens, BASE["D"])
    np.testing.assert_allclose(load_runs(table, ignore=epochs).tokens, BASE["D"])
    per_epoch = load_runs(table, columns={"tokens": f"{epochs} * {tokens}"})
    np.testing.assert_allclose(per_epoch.tokens, np.multiply(BASE["D"], [1, 2, 4]))
    # One epoch, which may be counted from 0, has one reading.
    for once in ([1, 1, 1], [0, 0, 0], [0.99, 1.0, "1"], ["", None, 1]):
        assert len(load_runs(table | {epochs: once})) == 3
    for unclear in ([0.3, 0.3, 0.3], ["2 epochs"] * 3):
        with pytest.raises(ValueError, match="may count the tokens of all epochs, or those of one"):
            load_runs(table | {epochs: unclear})


def test_remedy_for_tokens_of_one_epoch_keeps_the_unit_of_the_name():
    table = {"N": BASE["N"], "tokens_B": [10, 20, 20], "epochs": [1, 2, 4], "loss": BASE["loss"]}
    with pytest.raises(ValueError, match=r"columns={'tokens': 'epochs \* tokens_B'}"):
        load_runs(table)
    runs = load_runs(table, columns={"tokens": "epochs * tokens_B"})
    assert runs.tokens.tolist() == [10e9, 40e9, 80e9]


def test_other_columns_may_prove_that_tokens_count_all_epochs():
    table = BASE | {"epochs": [1, 2, 4]}
    n, d = np.array(BASE["N"]), np.array(BASE["D"])
    proofs = {
        "'steps \\* batch_tokens' is equal": {"steps": d / 2**20, "batch_tokens": [2**20] * 3},
        "'tokens_seen' are those of all epochs: the name": {"tokens_seen": d},
        "'total_tokens' are those of all epochs: the name": {"total_tokens": d},
    }
    for choice, columns in proofs.items():
        renamed = {k: v for k, v in table.items() if k != "D"} if "name" in choice else table
        runs = load_runs(renamed | columns)
        np.testing.assert_allclose(runs.tokens, d)
        assert re.search(choice, runs.explanation)
    # A proof must hold in every row, and samples may be those of the data set.
    for columns in (
        {"compute": 6 * n * d},
        {"steps": d / 2**20 * [1, 1, 2], "batch_tokens": [2**20] * 3},
        {"train_samples": d / 2**10, "seq_len": [2**10] * 3},
    ):
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(ValueError, match=r"or those of one|may each be the tokens"),
        ):
            load_runs(table | columns)


def test_tokens_that_rise_within_the_runs_of_a_history_count_all_epochs():
    rows = [row | {"epoch": row["_step"] / 2} for row in make_history_rows("run")]
    with pytest.warns(ScalingWarning, match="9 earlier ones"):
        runs = load_runs(rows)
    assert "tokens by 'tokens' are those of all epochs: they rise within runs" in runs.explanation


def test_total_parameters_of_a_mixture_of_experts_are_refused():
    base = {"params": BASE["N"], "D": BASE["D"], "loss": BASE["loss"]}
    table = base | {"num_experts": [8, 8, 8]}
    with pytest.raises(ValueError, match=r"all parameters or the active ones.*active_params"):
        load_runs(table)
    assert len(load_runs(table, columns={"parameters": "params"})) == 3
    active = np.divide(BASE["N"], 4)
    np.testing.assert_allclose(load_runs(table | {"active_params": active}).parameters, active)
    assert len(load_runs(base | {"num_experts": [1, 1, 1]})) == 3


@pytest.mark.parametrize("column", ["attention_sparsity", "activation_sparsity"])
def test_sparsity_of_attention_leaves_the_number_of_parameters(column):
    base = {"params": BASE["N"], "D": BASE["D"], "loss": BASE["loss"]}
    assert len(load_runs(base | {column: [0.0, 0.5, 0.0]})) == 3


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        *(("is_moe", flag) for flag in (True, "yes", 1)),
        *(("moe", "True"), ("use_moe", "x")),
        *(("granularity", 8), ("sparsity", 0.875), ("expert_sparsity", 0.5)),
        *(("expansion_rate", 8), ("activation_ratio", 0.1)),
        *(("model", name) for name in ("Mixtral-8x7B", "qwen3-30B-A3B", "moe-1b", "64x1.5b")),
        *(("model", name) for name in ("OLMoE-1B", "DeepSeekMoE", "olmoe", "30b_a3b", "Mixtral")),
    ],
)
def test_mixture_of_experts_is_recognized_by_flags_numbers_and_names(column, cell):
    dense = {"model": "dense-7b", "activation_ratio": 1.0}.get(column, False)
    base = {"params": BASE["N"], "D": BASE["D"], "loss": BASE["loss"]}
    table = base | {column: [dense, cell, dense]}
    with pytest.raises(ValueError, match=rf"all parameters or the .* '{column}' is .* in row 2"):
        load_runs(table)
    assert len(load_runs(table, ignore=column)) == 3
    assert len(load_runs(table, columns={"parameters": "params"})) == 3
    assert len(load_runs(table | {"active_params": BASE["N"]})) == 3
    others = [f"{name}" for name in ("1x1b2c", "tomoe", "b8-l12")]
    assert len(load_runs(base | {column: others if column == "model" else [dense] * 3})) == 3


def test_sweep_is_read_as_its_best_setting_with_all_seeds():
    rows = [
        {"N": n, "D": d, "config.lr": lr, "seed": seed, "loss": 3 + 0.1 * abs(lr - 2) + seed / 100}
        for n in (1e8, 4e8)
        for d in (2e9, 8e9)
        for lr in (1, 2, 3)
        for seed in (0, 1)
    ]
    with pytest.warns(ScalingWarning, match=r"\['config.lr'\] differ.*16 runs of other settings"):
        runs = load_runs(rows)
    assert sorted(runs.loss) == [3.0] * 4 + [3.01] * 4
    assert "least mean loss" in runs.explanation
    # If a seed of the best rate diverged, its other seed is not read.
    diverged = [
        row | {"loss": float("nan") if row["config.lr"] == 2 and row["seed"] else row["loss"]}
        for row in rows
    ]
    crashed = [{"state": "crashed" if r["loss"] != r["loss"] else "finished"} for r in diverged]
    for ends in ([{}] * 24, crashed):
        with (
            pytest.warns(ScalingWarning, match="left out"),
            pytest.warns(ScalingWarning, match="if possible without a loss of nan, is"),
        ):
            runs = load_runs([row | end for row, end in zip(diverged, ends, strict=True)])
        assert sorted(runs.loss) == [3.1] * 4 + [3.11] * 4
    # A diverged seed may have stopped early, with fewer tokens than planned or without tokens.
    for spent in (0.37, 0.05, float("nan")):
        early = [r | {"D": r["D"] * (spent if r["loss"] != r["loss"] else 1)} for r in diverged]
        with (
            pytest.warns(ScalingWarning, match="left out"),
            pytest.warns(ScalingWarning, match="if possible without a loss of nan, is"),
        ):
            runs = load_runs(early)
        assert sorted(runs.loss) == [3.1] * 4 + [3.11] * 4
    # Only designs with at least the tokens of the diverged seed are affected.
    later = [row | {"D": row["D"] * (0.6 if row["loss"] != row["loss"] else 1)} for row in diverged]
    mixed = [row if row["D"] < 4e9 else end for row, end in zip(rows, later, strict=True)]
    with (
        pytest.warns(ScalingWarning, match="left out"),
        pytest.warns(ScalingWarning, match="if possible without a loss of nan, is"),
    ):
        runs = load_runs(mixed)
    assert sorted(runs.loss[runs.tokens < 4e9]) == [3.0] * 2 + [3.01] * 2
    assert sorted(runs.loss[runs.tokens > 4e9]) == [3.1] * 2 + [3.11] * 2
    # The run with this seed and fewer tokens finished, so the diverged run was the longer one.
    tiny = [r | {"D": r["D"] * (0.05 if r["loss"] != r["loss"] else 1)} for r in diverged]
    ended = [row if row["D"] == 2e9 else end for row, end in zip(rows, tiny, strict=True)]
    with (
        pytest.warns(ScalingWarning, match="left out"),
        pytest.warns(ScalingWarning, match="if possible without a loss of nan, is"),
    ):
        runs = load_runs(ended)
    assert sorted(runs.loss[runs.tokens < 4e9]) == [3.0] * 2 + [3.01] * 2
    assert sorted(runs.loss[runs.tokens > 4e9]) == [3.1] * 2 + [3.11] * 2
    # Without repetitions, all remaining runs of a diverged setting finished.
    single = [{k: v for k, v in row.items() if k != "seed"} for row in ended if row["seed"]]
    with (
        pytest.warns(ScalingWarning, match="left out"),
        pytest.warns(ScalingWarning, match="other settings"),
    ):
        assert sorted(load_runs(single).loss) == [3.01] * 2 + [3.11] * 2
    # Without seeds, each repetition may be the diverged run, also if larger models have seeds.
    unnamed = [{k: v for k, v in row.items() if k != "seed"} for row in ended]
    partly = [row | {"seed": row["seed"] if row["N"] > 1e8 else ""} for row in ended]
    for repeated in (unnamed, partly):
        with (
            pytest.warns(ScalingWarning, match="left out"),
            pytest.warns(ScalingWarning, match="if possible without a loss of nan, is"),
        ):
            runs = load_runs(repeated)
        has_seeds = (runs.parameters > 1e8) & (repeated is partly)
        assert sorted(runs.loss[~has_seeds]) == sorted([3.1, 3.11] * ((~has_seeds).sum() // 2))
        assert sorted(runs.loss[has_seeds]) == [3.0, 3.01, 3.1, 3.11][: has_seeds.sum()]
    only = [row for row in diverged if row["config.lr"] == 2 or row["N"] > 1e8]
    with (
        pytest.warns(ScalingWarning, match="left out"),
        pytest.warns(ScalingWarning, match="other settings"),
    ):
        assert sorted(load_runs(only).loss) == [3.0] * 2 + [3.1] * 2 + [3.11] * 2
    # A blank cell means that the loss is missing.
    missing = [
        row | {"loss": None if row["loss"] != row["loss"] else row["loss"]} for row in diverged
    ]
    with (
        pytest.warns(ScalingWarning, match="left out"),
        pytest.warns(ScalingWarning, match="other settings"),
    ):
        assert sorted(load_runs(missing).loss) == [3.0] * 4
    # A rate per size is not a sweep.
    scaled = [row | {"config.lr": 1 / row["N"], "loss": 3 + i / 99} for i, row in enumerate(rows)]
    assert len(load_runs(scaled)) == 24


@pytest.mark.parametrize(
    "column",
    [
        *("optimizer", "optimizer.name", "config.lr_scheduler_type", "schedule", "dtype"),
        *("activation_function", "posEmbType", "lr_decay_style", "lr_sched", "opt"),
        *("attn", "attention_type"),
    ],
)
def test_method_that_changes_with_the_budget_is_refused_with_both_readings(column):
    rows = [{"N": n, "D": 20 * n, "loss": 3 - n / 1e10} for n in (1e8, 2e8, 4e8, 8e8)]
    changed = [row | {column: "lion" if row["N"] > 3e8 else "adam"} for row in rows]
    message = rf"'{column}' has 2 values \(adam, lion\).*one law in spite .*or several laws"
    with pytest.raises(ValueError, match=message):
        load_runs(changed)
    assert len(load_runs(changed, where={column: "adam"})) == 2
    assert len(load_runs(changed, ignore=column)) == 4
    assert len(load_runs([row | {column: "Adam"} for row in rows])) == 4
    # Numbers that change with the size, such as the width, belong to one recipe.
    numbers = {"lr": 1e4, "width": 1e-5, "n_layer": 1e-7, column: 1e-3}
    assert (
        len(load_runs([row | {k: row["N"] * v for k, v in numbers.items()} for row in rows])) == 4
    )
    # A rate that was tuned at each size does not compare the methods.
    tuned = [
        row | {"lr": k, "loss": row["loss"] + 0.1 * abs(k - 2)}
        for row in changed
        for k in (1, 2, 3)
    ]
    with pytest.raises(ValueError, match=message):
        load_runs(tuned)


@pytest.mark.parametrize(
    ("column", "low", "high"),
    [
        *(("qk_norm", False, True), ("qk_norm", "no", "yes"), ("qk_norm", "", "x")),
        *(("dropout_rate", 0.0, 0.1), ("label_smoothing", 0.1, 0.2), ("window", 0, 4096)),
        *(("dropout", None, 0.1), ("adam_beta2", 0.95, 0.99)),
    ],
)
def test_switch_that_changes_with_the_scale_is_refused_with_both_readings(column, low, high):
    grid = list(itertools.product((1e8, 2e8, 4e8, 8e8), (10, 20, 40)))
    rows = [{"N": n, "D": r * n, "loss": 3 - n / 1e10 - r / 1e3} for n, r in grid]
    message = rf"'{column}' has 2 values .*one law in spite .*or several laws"
    quantities = (lambda row: row["N"], lambda row: row["N"] * row["D"])
    for quantity, border in zip(quantities, (3e8, 8e17), strict=True):
        changed = [row | {column: high if quantity(row) > border else low} for row in rows]
        with pytest.raises(ValueError, match=message):
            load_runs(changed)
        assert len(load_runs(changed, ignore=column)) == 12
        assert len(load_runs(changed, where={column: high})) >= 3
    alternating = [row | {column: high if row["N"] in (1e8, 4e8) else low} for row in rows]
    with pytest.raises(ValueError, match=message):
        load_runs(alternating)
    assert len(load_runs([row | {column: low} for row in rows])) == 12
    # A note about two runs is not a setting, and neither is a flag that does not follow the scale.
    noted = [row | {column: high if i in (4, 7) else low} for i, row in enumerate(rows)]
    assert len(load_runs(noted)) == 12
    scattered = [row | {column: high if i % 5 in (1, 3) else low} for i, row in enumerate(rows)]
    assert len(load_runs(scattered)) == 12


def test_columns_that_grow_with_the_scale_are_not_switches():
    grid = list(itertools.product((1e8, 2e8, 4e8, 8e8), (10, 20, 40)))
    natural = {"gpus": (1, 8), "lr": (3e-4, 1.5e-4), "min_lr": (3e-5, 1.5e-5), "seed": (0, 1)}
    natural |= {"kv_heads": (8, 16), "batch_size": (256, 512), "epoch": (0, 1)}
    rows = [
        {"N": n, "D": r * n, "loss": 3 - n / 1e10 - r / 1e3}
        | {name: values[int(n > 3e8)] for name, values in natural.items()}
        for n, r in grid
    ]
    assert len(load_runs(rows)) == 12


def test_switch_that_was_compared_at_each_budget_is_a_setting():
    rows = [
        {"N": n, "D": 20 * n, "dropout": k, "loss": 3 - n / 1e10 + abs(k - best) / 10}
        for n, best in ((1e8, 0), (2e8, 0), (3e8, 0), (4e8, 0.1), (5e8, 0.1), (8e8, 0.1))
        for k in (0, 0.1)
    ]
    with pytest.warns(ScalingWarning, match="6 runs of other settings are left out"):
        assert len(load_runs(rows)) == 6


def test_method_that_was_compared_at_each_budget_is_a_setting():
    rows = [
        {"N": n, "D": 20 * n, "optimizer": name, "loss": 3 - n / 1e10 + penalty}
        for n in (1e8, 2e8, 4e8, 8e8)
        for name, penalty in (("adam", 0.1), ("lion", 3e7 / n), ("sgd", 1.0))
    ]
    with pytest.warns(ScalingWarning, match="8 runs of other settings are left out"):
        assert len(load_runs(rows)) == 4
    # A method that is never the best need not be run everywhere, but the others must be.
    with pytest.warns(ScalingWarning, match="7 runs of other settings are left out"):
        assert len(load_runs(rows[:-1])) == 4
    with pytest.raises(ValueError, match="not every size and number of tokens was run with each"):
        load_runs(rows[1:])


def test_optima_and_marks_of_optima_are_not_methods():
    rows = [{"N": n, "D": 20 * n, "loss": 3 - n / 1e10} for n in (1e8, 2e8, 4e8, 8e8)]
    marked = [row | {"N_opt": "" if row["N"] > 3e8 else "1e8"} for row in rows]
    assert len(load_runs(marked)) == 4
    assert not is_method_name("is_opt")


def test_repetitions_and_rows_that_are_not_searched_are_explained():
    rows = [{"N": n, "D": 20 * n, "loss": 3 - n / 1e10 + k / 9} for n in (1e8, 2e8) for k in (0, 1)]
    choice = "2 runs with the size, tokens and settings of others are repetitions"
    assert choice in load_runs(rows).explanation
    many = load_runs({"N": [1e8] * 5001, "D": [2e9] * 5001, "loss": np.linspace(2, 3, 5001)})
    assert "only 5000 rows are searched for unknown settings" in many.explanation
    joined = {"N": [1e8] * 6000, "D": [2e9] * 6000, "loss": np.linspace(2, 3, 6000)}
    joined["recipe_v"] = [1] * 5500 + [2] * 500
    with pytest.raises(ValueError, match=r"columns \['recipe_v'\] differ between runs of one size"):
        load_runs(joined)


@pytest.mark.parametrize("known", [{}, {"lr": [1e-3, 2e-3]}])
def test_unknown_setting_of_joined_exports_is_found_in_a_large_table(known):
    # The rows of the second recipe are far from those of the first with the same N and D.
    n, d = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e7, 1e10, 60), [1e10, 2e10, 4e10]))
    rows = [
        {"N": n[i], "D": d[i], "loss": 3 + i / 1e3, "recipe_v": recipe, "lr": lr}
        for recipe in (1, 2)
        for lr in known.get("lr", [1e-3])
        for i in range(len(n))
    ]
    unrelated = [
        {"N": n, "D": d, "loss": 2.0, "recipe_v": 1, "lr": 1e-3}
        for n in np.geomspace(2e10, 2e12, 80)
        for d in np.geomspace(1e11, 1e15, 75)
    ]
    middle = len(rows) // 2
    joined = rows[:middle] + unrelated + rows[middle:]
    units = {"parameters": 1, "tokens": 1}
    with pytest.raises(ValueError, match=r"columns \['recipe_v'\] differ between runs of one size"):
        load_runs(joined, units=units, history=False)


def test_settings_that_are_written_differently_are_one_setting():
    rows = [
        {"N": n, "D": 2e9, "lr": lr, "seed": seed, "loss": 3 + (lr == "1e-3") + seed / 100}
        for n in (1e8, 4e8)
        for seed, form in enumerate(("3e-4", "0.0003", "0.00030000001"))
        for lr in (form, "1e-3")
    ]
    with pytest.warns(ScalingWarning, match=r"\['lr'\] differ.*6 runs of other settings"):
        assert sorted(load_runs(rows).loss) == [3.0, 3.0, 3.01, 3.01, 3.02, 3.02]


def test_zeros_that_are_written_differently_are_one_setting():
    rows = [
        {"N": n, "D": 2e9, "loss": 3.0 + 0.01 * k, "dropout": zero}
        for n in (1e8, 2e8, 4e8)
        for k, zero in enumerate(("0", "0.0"))
    ]
    assert len(load_runs(rows)) == 6


def test_setting_under_an_unusual_name_is_refused_with_both_readings():
    rows = [
        {
            "N": n,
            "D": d,
            "mystery": k,
            "seed": seed,
            "name": f"{n} {d} {k} {seed}",
            "loss": 3 + k + seed / 9,
        }
        for n in (1e8, 4e8)
        for d in (2e9, 8e9)
        for k in (1, 2)
        for seed in (0, 1)
    ]
    remedy = r"where={'mystery': '1'}, or read .* as repetitions with ignore=\['mystery'\]"
    with pytest.raises(ValueError, match=remedy):
        load_runs(rows)
    assert len(load_runs(rows, where={"mystery": 1})) == 8
    runs = load_runs(rows, ignore=["mystery"])
    assert len(runs) == 16
    assert "column 'mystery' is ignored" in runs.explanation
    with pytest.raises(ValueError, match=r"ignore to name columns among .* got \['host'\]"):
        load_runs(rows, ignore=["mystery", "host"])
    known = [{"gbsz" if k == "mystery" else k: v for k, v in row.items()} for row in rows]
    with pytest.warns(ScalingWarning, match=r"\['gbsz'\] differ.*8 runs of other settings"):
        assert len(load_runs(known)) == 8
    # One value, or a value per size, is not a setting that differs.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_runs([row | {"mystery": row["N"] / 2} for row in rows], history=False)
        load_runs([row | {"mystery": 1, "lr": 0.1} for row in rows], history=False)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        *(("name", text) for text in ("Average", "mean", "Mean over seeds", "std", "TOTAL")),
        *(("", "mean"), ("seed", "mean"), ("run_id", "avg"), ("statistic", "median")),
    ],
)
def test_rows_that_summarize_other_rows_are_refused(column, text):
    rows = [
        {column: f"{i}", "N": n, "D": 20 * n, "loss": 3 - i / 9}
        for i, n in enumerate((1e8, 3e8, 1e9))
    ]
    summary = {column: text, "N": 4.7e8, "D": 9.3e9, "loss": 2.9}
    with pytest.raises(ValueError, match=f"'{column}' says '{text}' in row 4, which may summarize"):
        load_runs([*rows, summary])
    assert len(load_runs([*rows, summary], ignore=[column])) == 4
    assert len(load_runs([*rows, summary | {column: "mean-field"}])) == 4
    extremes = [summary | {column: t, "loss": x} for t, x in (("min", 2.6), ("max", 3.1))]
    with pytest.raises(ValueError, match="drop 3 such rows"):
        load_runs([*rows, summary, *extremes])
    assert len(load_runs([*rows, *extremes])) == 5
    numbered = [row | {column: f"run {row[column]}"} for row in rows]
    with pytest.raises(ValueError, match="drop 1 such rows"):
        load_runs([*numbered, summary])
    # If every row says so, each is the mean of the seeds of a run.
    assert len(load_runs([row | {"stat": text} for row in rows])) == 3
    # A summary without a loss is left out anyway.
    with pytest.warns(ScalingWarning, match=r"blank or nan in 1 rows \(4\)"):
        assert len(load_runs([*rows, summary | {"loss": None}])) == 3


@pytest.mark.parametrize("setting", ["lr", "batch_size", "optimizer"])
def test_sweep_whose_run_name_is_that_of_the_size_is_read(setting):
    """A name of several rows with equal tokens is not a history if a setting differs."""
    values = ("sgd", "adam", "lion") if setting == "optimizer" else (1, 2, 3)
    rows = [
        {"run": f"{n:g}", "N": n, "D": 20 * n, setting: v, "loss": 3 + 0.1 * abs(k - 1)}
        for n in (1e8, 4e8)
        for k, v in enumerate(values)
    ]
    with pytest.warns(ScalingWarning, match=rf"\['{setting}'\] differ.*4 runs of other settings"):
        assert load_runs(rows).loss.tolist() == [3.0, 3.0]
    # A rate that decays while the loss falls is that of a history with the tokens of its end.
    decaying = [row | {"loss": 3 - k / 9} for k, row in enumerate(rows)]
    with pytest.raises(ValueError, match="tokens are those of the whole training"):
        load_runs(decaying)
    # Two rows of one name and setting are a history, or repetitions without a seed.
    with pytest.raises(ValueError, match="tokens are those of the whole training"):
        load_runs([*rows, rows[0]])


SIZES = {"N": [1e8, 2e8, 4e8], "loss": [3.2, 3.0, 2.9]}
STEPS = [1000, 2000, 4000]


@pytest.mark.parametrize(
    "factors",
    [
        {"steps": STEPS, "batch_tokens": [2**20] * 3},
        {"train/steps": STEPS, "tokens_per_step": [2**20] * 3},
        {"max_steps": STEPS, "global_batch_size": [512] * 3, "config.seq_len": [2048] * 3},
        {"consumed_samples": [512 * s for s in STEPS], "seq_length": [2048] * 3},
    ],
)
def test_tokens_are_steps_times_the_batch_in_tokens(factors):
    runs = load_runs(SIZES | factors)
    assert runs.tokens.tolist() == [s * 2.0**20 for s in STEPS]
    assert " * ".join(factors) in runs.explanation


@pytest.mark.parametrize("batch", ["batch_size", "per_device_train_batch_size", "micro_batch_size"])
def test_batch_of_unknown_extent_is_refused_until_the_product_is_named(batch):
    table = SIZES | {"steps": STEPS, batch: [512] * 3, "seq_len": [2048] * 3}
    product = f"steps * {batch} * seq_len"
    devices = "" if batch == "batch_size" else r" \* accumulation_steps \* devices"
    remedy = f"'{batch}' may be the batch of one device.*{batch} \\* seq_len{devices}'"
    with pytest.raises(ValueError, match=remedy):
        load_runs(table)
    assert load_runs(table, columns={"tokens": product}).tokens[0] == 1000 * 2**20
    with pytest.raises(ValueError, match="there are no columns"):
        load_runs(table, columns={"tokens": "steps * length"})
    two = table | {"batch_tokens": [2**20] * 3, "tokens_per_step": [2**19] * 3}
    with pytest.raises(ValueError, match="may each be a factor"):
        load_runs(two)


def test_units_of_loss_and_kinds_of_parameters_are_explained():
    bits = load_runs({"N": BASE["N"], "D": BASE["D"], "bpb": BASE["loss"]})
    assert "bits per byte" in bits.explanation
    perplexity = {"N": BASE["N"], "D": BASE["D"], "val_ppl": np.exp(BASE["loss"])}
    np.testing.assert_allclose(load_runs(perplexity).loss, BASE["loss"])
    in_bits = BASE | {"ppl": np.exp2(BASE["loss"]).round(2)}
    with pytest.raises(ValueError, match=r"'loss' may be in bits, because ln 'ppl' is ln 2 times"):
        load_runs(in_bits)
    for unit in (1, np.log(2)):
        loss = load_runs(in_bits, units={"loss": unit}).loss
        np.testing.assert_allclose(loss, np.multiply(unit, BASE["loss"]))
    training = BASE | {"train_ppl": np.exp(np.subtract(BASE["loss"], 0.9)), "ppl": [9, 5, "-"]}
    assert "loss by 'loss', not 'ppl'" in load_runs(training).explanation
    counted = {"non_embedding_params": BASE["N"], "tokens": BASE["D"], "loss": BASE["loss"]}
    assert "non-embedding" in load_runs(counted).explanation
    both = counted | {"total_params": np.multiply(2, BASE["N"])}
    runs = load_runs(both)
    np.testing.assert_allclose(runs.parameters, np.multiply(2, BASE["N"]))
    assert "'total_params'" in runs.explanation
    assert "not used: non_embedding_params" in runs.explanation


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"N": [100, 200, 400]}, r"'N' is 100 in row 1: expected at least 1000 parameters.*1e6"),
        ({"D": [10, 20, 20]}, r"column 'D' is 10 in row 1.*'tokens': 1e9. if .* are billions"),
        (
            {"D": [1e4, 2e4, 2e4]},
            r"'D' is 10000 and column 'N' is 1e\+08 in row 1.*outside 0.1 to",
        ),
        ({"C": [6e15, 2.4e16, 4.8e16]}, "column 'C' is .* is 0.001 times 6 N D"),
        ({"C": [6e18, 2.4e22, 4.8e19]}, "column 'C' is 2.4e[+]22 and .* in row 2"),
        ({"D": [1e10, 20, 2e10]}, "column 'D' is 20 in row 2: expected .* correct the cell"),
        ({"N": [100, 200, 400], "D": [2e4, 4e4, 4e4]}, r"'N' is 100 .* units=.'parameters': 1e6"),
        ({"loss": [18.5, 17.3, 15.1]}, "'loss' is 18.5 in row 1: most rows are above 14 nats"),
        ({"loss": [0.021, 0.02, 0.02]}, "'loss' is 0.021 in row 1: most rows are below 0.1 nats"),
        ({"loss": [306, 299, 280]}, "'loss' is 306 in row 1: most rows are above 14 nats"),
    ],
)
def test_numbers_on_the_wrong_scale_are_refused_with_their_cell(change, message):
    with pytest.raises(ValueError, match=message):
        load_runs(BASE | change)


@pytest.mark.parametrize(
    ("column", "name", "unit", "key"),
    [
        ("N", "params (M)", 1e6, "parameters"),
        ("N", "params_B", 1e9, "parameters"),
        ("D", "tokens (M)", 1e6, "tokens"),
        ("D", "tokens (B)", 1e9, "tokens"),
        ("C", "compute (1e18 FLOPs)", 1e18, "compute"),
    ],
)
def test_full_count_in_a_column_with_a_unit_is_refused_with_its_cell(column, name, unit, key):
    other = {"N": "D"}.get(column, "N")
    counts = (BASE | {"C": [6e18, 2.4e19, 4.8e19]})[column]
    table = {other: BASE[other], "loss": BASE["loss"]}
    cells = [count / unit for count in counts]
    np.testing.assert_allclose(getattr(load_runs(table | {name: cells}), key), counts)
    # Two of three rows are full counts, so they are not the exception.
    message = rf"in units of 1e\+.* row [23] means .* confirm the numbers with units=.'{key}': 1e\+"
    with pytest.raises(ValueError, match=message):
        load_runs(table | {name: [cells[0], *counts[1:]]})


def test_small_losses_can_be_confirmed():
    runs = load_runs(BASE | {"loss": [0.021, 0.02, 0.02]}, units={"loss": 1})
    assert runs.loss.tolist() == [0.021, 0.02, 0.02]


def test_throughput_is_refused_with_its_remedy():
    table = {**BASE, "tflops": [400, 410, 420]}
    for column in (None, "D"):
        table.pop(column, None)
        with pytest.raises(ValueError, match=r"FLOPs per second, with ignore=\['tflops'\]"):
            load_runs(table)


def test_compute_on_the_wrong_scale_is_refused_without_other_columns():
    runs = {"N": BASE["N"], "loss": BASE["loss"], "C": [0.006, 0.024, 0.048]}
    with pytest.raises(ValueError, match=r"'C' is 0.006 in row 1, which leaves .*'compute': 1e18"):
        load_runs(runs)
    runs["C"] = [6e12, 2.4e13, 4.8e13]
    with pytest.raises(ValueError, match=r"'C' is .* and column 'N' is .* outside 0.1 to 2000"):
        load_runs(runs)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("compute (1e18 FLOPs)", 1e18),
        ("1e21 FLOP", 1e21),
        ("ZFLOPs", 1e21),
        ("train_compute_zflops", 1e21),
        ("C (PF-days)", 8.64e19),
        ("compute_exaflops", 1e18),
        ("Compute [zettaFLOPs]", 1e21),
    ],
)
def test_unit_of_compute_may_be_anywhere_in_a_name(name, unit):
    compute = 6 * np.multiply(BASE["N"], BASE["D"])
    runs = load_runs({"N": BASE["N"], name: compute / unit, "loss": BASE["loss"]})
    np.testing.assert_allclose(runs.tokens, BASE["D"])


@pytest.mark.parametrize("name", ["Params in billions", "billion params", "N_B", "N (B)"])
def test_suffix_of_a_cell_overrides_the_unit_of_its_column(name):
    cells = ["0.1", "200M", "0.4B"]
    runs = load_runs({name: cells, "D": BASE["D"], "loss": BASE["loss"]})
    np.testing.assert_allclose(runs.parameters, BASE["N"])


@pytest.mark.parametrize("name", ["loss (bits)", "val_loss_bits", "eval/c4/bits_per_token", "loss"])
def test_bits_per_token_become_nats_but_bits_per_byte_and_of_weights_do_not(name):
    bytes_or_characters = ("bits_per_byte", "val_bpb", "loss (bits/byte)", "loss [bits/char]")
    for other in (*bytes_or_characters, "loss (4 bits)", "loss 8 bits"):
        runs = load_runs({"N": BASE["N"], "D": BASE["D"], other: BASE["loss"]})
        np.testing.assert_allclose(runs.loss, BASE["loss"])
    bits = np.divide(BASE["loss"], np.log(2))
    cells = [f"{bits[0]} bits", f"{BASE['loss'][1]} nats", f"{bits[2]} bits"]
    for losses in (cells, bits) if name != "loss" else (cells,):
        runs = load_runs({"N": BASE["N"], "D": BASE["D"], name: losses})
        np.testing.assert_allclose(runs.loss, BASE["loss"])


@pytest.mark.parametrize("name", ["batch_tokens", "log10_tokens", "context_tokens", "logD"])
def test_batch_tokens_and_logarithms_are_not_read_as_tokens(name):
    with pytest.raises(ValueError, match="expected a loss and two of"):
        load_runs({"N": BASE["N"], name: [5e5] * 3, "loss": BASE["loss"]})
    runs = {"N": BASE["N"], "D": BASE["D"], "loss": BASE["loss"], name: [5e5] * 3}
    np.testing.assert_allclose(load_runs(runs).tokens, BASE["D"])


@pytest.mark.parametrize(
    "name",
    [
        *("reducible_loss", "initial_loss", "excess_loss", "loss_gap", "log2_loss", "ln_loss"),
        *("init_loss", "start_loss", "target_loss", "teacher_loss", "kl_loss", "mtp_loss"),
        *("loss_ratio", "relative_loss", "predicted_val_loss", "val_loss_accuracy", "log10_ppl"),
        *("loss_se", "loss_sum", "val_loss_count", "loss_ci_low", "loss_upper", "neg_loss"),
    ],
)
def test_part_of_a_loss_is_not_read_as_the_loss(name):
    with pytest.raises(ValueError, match="expected a loss and two of"):
        load_runs({"N": BASE["N"], "D": BASE["D"], name: BASE["loss"]})


def test_loss_per_byte_or_character_is_described_and_not_preferred():
    for name, unit in (("loss_per_byte", "byte"), ("val_loss/char", "char"), ("byte loss", "byte")):
        table = {"N": BASE["N"], "D": BASE["D"], name: np.divide(BASE["loss"], 4)}
        assert f"(nats per {unit})" in load_runs(table).explanation
    np.testing.assert_allclose(load_runs(BASE | {"byte_loss": [1, 1, 1]}).loss, BASE["loss"])


def test_perplexity_per_byte_is_not_described_as_per_token():
    table = {"N": BASE["N"], "D": BASE["D"], "byte_perplexity": np.exp(BASE["loss"])}
    assert "(nats, of perplexity per byte)" in load_runs(table).explanation


def test_nested_columns_of_polars_are_flattened():
    polars = pytest.importorskip("polars", reason="polars is not installed here")
    config = [{"n_params": n} for n in BASE["N"]]
    summary = [{"tokens": d, "eval/loss": y} for d, y in zip(BASE["D"], BASE["loss"], strict=True)]
    frame = polars.DataFrame({"config": config, "summary": summary})
    np.testing.assert_allclose(load_runs(frame).loss, BASE["loss"])


def test_structured_array_is_a_table_and_plain_array_is_refused():
    table = np.rec.fromarrays([*BASE.values()], names=[*BASE])
    np.testing.assert_allclose(load_runs(table).tokens, BASE["D"])
    with pytest.raises(TypeError, match="expected a record that maps names to values"):
        load_runs(np.array([*BASE.values()]))


def test_masked_cells_are_blank():
    loss = np.ma.array(BASE["loss"], mask=[i == 1 for i in range(len(BASE["loss"]))])
    with pytest.warns(ScalingWarning, match=r"'loss' is blank or nan in 1 rows \(2\)"):
        assert 2 not in load_runs({**BASE, "loss": loss}).rows


def test_index_levels_of_a_dataframe_are_columns_and_repeated_columns_are_refused():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here")
    frame = pandas.DataFrame(BASE)
    for index in (["N"], ["N", "D"]):
        np.testing.assert_allclose(load_runs(frame.set_index(index)).tokens, BASE["D"])
    with pytest.raises(ValueError, match=r"several columns \['loss'\]"):
        load_runs(pandas.concat([frame, frame[["loss"]]], axis=1))


def test_unit_of_an_unknown_name_is_refused():
    for name in ("N", "loss_bits"):
        with pytest.raises(ValueError, match=rf"in units=…, got \['{name}'\]"):
            load_runs(BASE, units={name: 1e6})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "N;D;loss\n1,5e8;1e10;3.2157\n",
            "column 'N' .* row 2: '1,5e8'; decimals start with a point",
        ),
        ("N,D,loss,loss\n1e8,1e10,3,3\n", r"several columns \['loss'\]"),
        ("1e8,1e10,3\n2e8,1e10,3\n", "expected column names in the first line, got the numbers"),
        ("N D loss\n1e8 1e10 3\n", "is one column; separate cells by a comma"),
        ("| N | D | loss |\n|---|---|---|\n| 1B | 20B | 2.5 |\n", "column 'N' .* row 2: '---'"),
        ("N,D,loss\n1e8,1e10,3\nN,D,loss\n", "column 'N' .* row 3: 'N'"),
        ("N,D,loss_a,loss_b\n1e8,1e10,3,3\n", "may each be the loss; choose one"),
        ("N,D,loss\n1e8,52 GB,3\n", "'D' must contain numbers, but row 2: '52 GB'"),
        ("N,D,loss\n1e8,-1,3\n", "'D' must be positive and finite, but row 2: '-1'"),
        ("N,ratio,loss\n1e8,20,3\n", r"name another column with columns={'tokens': '…'}"),
        ("N,D,xyz\n1e8,20,3\n", r"name another column with columns={'loss': '…'}"),
        ("N,D,loss\n1e8,1e10,\n", "no runs with a loss"),
        ("N,D,loss\n1e8,7 parrots,3\n", "column 'D' .* row 2: '7 parrots'"),
        ("N,D,loss\n1,234,567,1e10,3\n", "line 2 has 5 cells under 3 columns"),
    ],
)
def test_unreadable_table_is_refused_with_its_cell(tmp_path, text, message):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_runs(path)


def test_several_data_sets_in_one_table_are_refused_with_both_readings():
    rows = [
        {"dataset": s, "N": n, "D": d, "loss": x + i}
        for i, s in enumerate(("c4", "web"))
        for n, d, x in zip(*([*v, v[0] * 1.5] for v in BASE.values()), strict=True)
    ]
    names = ["dataset", "data", "corpus", "subset", "config.recipe", "tokenizer_name", "split"]
    for name in [*names, "train_dataset", "data_mix", "vocab_size", "model_family", "model_type"]:
        renamed = [{name: row["dataset"]} | row | {"dataset": "one"} for row in rows]
        table = rows if name == "dataset" else renamed
        remedy = rf"where={{'{name}': 'c4'}}, or read all as one with ignore=\['{name}'\]"
        message = rf"'{name}' names 2 sets of runs \(c4, web\)"
        with pytest.raises(ValueError, match=f"{message}.*{remedy}"):
            load_runs(table)
        assert len(load_runs(table, ignore=[name])) == 8
    assert load_runs(rows, where={"dataset": "web"}).loss.min() > 4
    with pytest.raises(ValueError, match="no row has 'dataset' = 'pile'; it has c4, web"):
        load_runs(rows, where={"dataset": "pile"})
    # Three sets of three runs are several sets too, but names that all differ are those of runs.
    three = [
        {"dataset": s, "N": n, "D": d * n, "loss": 3 - n / 1e10 - d / 99}
        for s, d in (("c4", 10), ("web", 20), ("pile", 40))
        for n in BASE["N"]
    ]
    with pytest.raises(ValueError, match="'dataset' names 3 sets of runs"):
        load_runs(three)
    named = load_runs([row | {"dataset": i} for i, row in enumerate(three)])
    assert len(named) == 9
    assert "column 'dataset' names runs, not several data sets" in named.explanation
    with pytest.raises(ValueError, match="'dataset' names 8 sets of runs"):
        load_runs([row | {"dataset": max(i, 1)} for i, row in enumerate(three)])
    # An architecture or a type may be the name of a size.
    for name in ("arch", "model_type"):
        sizes = load_runs([row | {"dataset": "c4", name: f"gpt-{row['N']:g}"} for row in three])
        assert len(sizes) == 9
        assert f"column {name!r} names sizes or budgets" in sizes.explanation


def draw_table(random):
    """Return repetitions of several designs with a setting in most designs, a note and a date."""
    repetitions = int(random.integers(2, 5))
    num_settings = int(random.integers(2, repetitions + 1))
    varied = random.choice([1.0, 0.75, 0.6])
    rows = []
    for i in range(int(random.integers(4, 25))):
        is_varied = i == 0 or random.random() < varied
        for k in range(repetitions):
            row = {"N": 1e8 * 1.5**i, "D": 2e9 * 1.5**i, "loss": 3 - i / 99 + random.normal() / 300}
            row["flavor"] = "abcd"[k % num_settings] if is_varied else "a"
            row["note"] = "restarted" if random.random() < 0.08 else ""
            row["created"] = f"2024-01-{random.integers(1, 29)}"
            rows.append(row)
    return rows


@pytest.mark.exhaustive
def test_settings_are_found_in_generated_tables():
    random = np.random.default_rng(0)
    refused = {"flavor": [], "note": [], "created": []}
    for _ in range(100):
        rows = draw_table(random)
        for column, counts in refused.items():
            try:
                load_runs([{k: row[k] for k in ("N", "D", "loss", column)} for row in rows])
                counts.append(False)
            except ValueError:
                counts.append(True)
    assert np.mean(refused["flavor"]) >= 0.9
    assert np.mean(refused["note"]) <= 0.1
    assert np.mean(refused["created"]) <= 0.2


FOLDER = Path(os.environ.get("SCALING_DATA", "/nonexistent")) / "messy_tables"


@pytest.mark.skipif(not FOLDER.exists(), reason="no messy_tables in the folder of SCALING_DATA")
@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_every_messy_table_gives_the_same_runs_or_is_refused():
    expected = load_runs(FOLDER / "wrapped.json")
    for path in FOLDER.iterdir():
        if path.name == "unitless.csv":
            with pytest.raises(ValueError, match=r"column 'N' is 49\.893 in row 2"):
                load_runs(path)
            continue
        runs = load_runs(path)
        present = np.isin(np.round(np.log(expected.tokens), 2), np.round(np.log(runs.tokens), 2))
        np.testing.assert_allclose(runs.parameters, expected.parameters[present], rtol=6e-4)
        np.testing.assert_allclose(runs.tokens, expected.tokens[present], rtol=6e-4)
        scale = 4.2 * np.log(2) if path.name == "bits.csv" else 1
        np.testing.assert_allclose(runs.loss * scale, expected.loss[present], rtol=1e-4)


def test_json_lines_are_read_and_broken_json_is_refused(tmp_path):
    path = tmp_path / "runs.json"
    records = [dict(zip(BASE, row, strict=True)) for row in zip(*BASE.values(), strict=True)]
    path.write_text("\n".join(map(json.dumps, records)))
    assert len(load_runs(path)) == 3
    path.write_text("\n".join(map(json.dumps, records)) + "\n{'N'")
    with pytest.raises(ValueError, match="line 4 is not valid JSON"):
        load_runs(path)


@pytest.mark.parametrize(
    ("name", "ours", "unit"),
    [
        ("non_embedding_params_M", "parameters", 1e6),
        ("model/num_non_embedding_params", "parameters", 1),
        ("Params (B)", "parameters", 1e9),
        ("config.model.n_params", "parameters", 1),
        ("total_gflops", "compute", 1e9),
        ("throughput/total_gflops", "compute", 1e9),
        ("Training compute (FLOP)", "compute", 1),
        ("compute_pf_days", "compute", 86_400e15),
        ("C [1e18]", "compute", 1e18),
        ("train_flops_e18", "compute", 1e18),
        ("tokens_B", "tokens", 1e9),
        ("num_train_tokens", "tokens", 1),
        ("D", "tokens", 1),
        ("train/tokens", "tokens", 1),
    ],
)
def test_name_is_recognized_with_its_unit(name, ours, unit):
    column = recognize(name, ours)
    assert column is not None
    assert column.unit == pytest.approx(unit)
    for other in NAMES:
        assert other == ours or recognize(name, other) is None


@pytest.mark.parametrize(
    "name",
    [
        *("tokens_per_second", "throughput/tflops_per_second", "flops_per_token", "mfu", "d_model"),
        *("tokens_per_param", "router_z_loss", "aux_loss", "loss_std", "lr", "val_tokens"),
        *(
            "unique_tokens",
            "local_tokens",
            "rank_tokens",
            "fwd_flops",
            "",
            "D/N",
            "tokens/params",
            "N/D",
            "token/param",
            "flops/params",
        ),
        *("data_GB", "throughput/theoretical_flops"),
    ],
)
def test_names_of_other_quantities_are_not_recognized(name):
    assert not any(recognize(name, k) for k in ("parameters", "tokens", "compute", "loss"))


def test_columns_of_keyed_cells_are_aligned_by_key():
    """The keys of JSON objects may have another order in each column."""
    parameters = {"a": 1e8, "b": 2e8, "c": 4e8, "d": 8e8}
    tokens = {"d": 8e10, "c": 4e10, "b": 2e10, "a": 1e10}
    loss = {"c": 2.7, "d": 2.5, "a": 3.3, "b": 3.0}
    runs = load_runs({"N": parameters, "D": tokens, "loss": loss})
    assert runs.parameters.tolist() == [1e8, 2e8, 4e8, 8e8]
    assert runs.tokens.tolist() == [1e10, 2e10, 4e10, 8e10]
    assert runs.loss.tolist() == [3.3, 3.0, 2.7, 2.5]


def test_series_with_different_indexes_are_refused():
    """By their labels pandas would align them; by position the pairs would be wrong."""
    pandas = pytest.importorskip("pandas")
    sizes, tokens = pandas.Series([1e8, 2e8]), pandas.Series([2e9, 4e9], index=[1, 0])
    with pytest.raises(ValueError, match="'N' and 'D' are Series with different indexes"):
        load_runs({"N": sizes, "D": tokens, "loss": sizes})


def test_metrics_that_are_logged_twice_at_one_step_are_refused():
    logged = [("N", 0, 1e8), ("tokens", 1, 2e9), ("loss", 1, 3.0), ("loss", 2, 2.9)]
    logged.append(("loss", 2, 2.8))
    rows = [{"run": "a", "tag": tag, "step": step, "value": value} for tag, step, value in logged]
    with pytest.raises(ValueError, match=r"'loss' has two values at step 2 of one run, 2\.9 and 2"):
        load_runs(rows)


def test_names_that_occur_flat_and_nested_are_refused():
    record = {"config.lr": 0.1, "config": {"lr": 0.2}, "N": 1e8, "D": 2e9, "loss": 3.0}
    with pytest.raises(ValueError, match=r"got the key and the path 'config\.lr'"):
        load_runs([record, record])


TWO_RUNS = ([1e9, 2e9], [2.5, 2.3])


@pytest.mark.parametrize(
    "text",
    [
        'N,D,loss,note\n1B,20B,2.5,"a\n# b"\n2B,40B,2.3,c\n',
        'note,N,D,loss\n"a\n\n# b",1B,20B,2.5\nc,2B,40B,2.3\n',
        "N,D,loss,note\n1B,20B,2.5,a\u2028b\n2B,40B,2.3,c\x0cd\n",
        "N,D,loss\r1B,20B,2.5\r2B,40B,2.3\r",
    ],
    ids=["comment", "blank line", "odd breaks", "carriage returns"],
)
def test_no_row_is_lost_to_line_breaks(tmp_path, text):
    path = tmp_path / "runs.csv"
    path.write_text(text, encoding="utf-8", newline="")
    runs = load_runs(path)
    assert (runs.parameters.tolist(), runs.loss.tolist()) == TWO_RUNS


def test_json_values_have_no_line_breaks_of_their_own(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text(
        '{"N": 1e9, "D": 2e10, "loss": 2.5, "note": "a\u2028b"}\n'
        '{"N": 2e9, "D": 4e10, "loss": 2.3}',
        encoding="utf-8",
    )
    assert load_runs(path).loss.tolist() == TWO_RUNS[1]


@pytest.mark.parametrize("content", ["[1, 2]", '"runs.csv"', "3"])
def test_json_without_records_is_refused(tmp_path, content):
    path = tmp_path / "runs.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"expected (a record|records)"):
        load_runs(path)


def test_metric_that_is_nan_is_not_logged_twice():
    rows = {"run": ["a"] * 9, "tag": ["loss", "tokens", "params"] * 3, "step": [1, 2, 3] * 3}
    rows["step"].sort()
    values = np.array([3.0, 1e9, 1e8, 2.9, 2e9, 1e8, math.nan, 3e9, 1e8])
    with pytest.warns(ScalingWarning) as caught:
        assert load_runs(rows | {"value": values}).tokens.tolist() == [2e9]
    assert any("'loss' is blank or nan at the end of runs a" in str(w.message) for w in caught)


def test_number_selects_cells_that_write_it_in_another_form():
    table = {"N": [1e9, 2e9, 3e9], "D": [2e10] * 3, "loss": [2.5, 2.4, 2.3]}
    rates = table | {"lr": ["3e-4", "0.0003", "0.001"]}
    assert len(load_runs(rates, where={"lr": 3e-4})) == 2
    versions = table | {"version": ["1.1", "1.10", "1.2"]}
    assert len(load_runs(versions, where={"version": "1.1"})) == 1


def test_column_is_not_read_as_two_quantities():
    table = {"N": [1e9, 2e9], "x": [2e10, 4e10], "loss": [2.5, 2.3]}
    letters = dict(zip("ncd", BASE.values(), strict=True))  # c, usually compute, is the tokens here
    named = {"parameters": "n", "tokens": "c", "loss": "d"}
    assert load_runs(letters, columns=named).loss.tolist() == BASE["loss"]
    with pytest.raises(ValueError, match="'N' cannot be both parameters and tokens"):
        load_runs(table, columns={"parameters": "N", "tokens": "N"})


def make_history(runs):
    """Return the rows of runs (name, parameters, times), one per 1e9 tokens."""
    rows = []
    for name, parameters, times in runs:
        for step in times:
            loss = 3 - 0.1 * step - 1e-11 * parameters
            rows.append({"run": name, "N": parameters, "tokens": step * 1e9, "loss": loss})
    return rows


@pytest.mark.parametrize("digits", [3, 4])
def test_history_is_recognized_if_its_sizes_follow_from_rounded_compute(digits):
    rows = make_history([(name, n, range(1, 8)) for name, n in (("a", 1.234e8), ("b", 5.67e8))])
    for row in rows:
        row["tokens"] = round_to_digits(1.37 * row["tokens"], digits)
        row["compute"] = round_to_digits(6 * row.pop("N") * row["tokens"], digits)
    with pytest.warns(ScalingWarning, match="12 earlier ones are left out"):
        assert len(load_runs(rows)) == 2


def test_history_with_repeated_tokens_is_refused():
    rows = make_history([(name, n, [1, 2, 4, 4, 8]) for name, n in (("a", 1e8), ("b", 5e8))])
    for history_of_runs in (None, "run"):
        with pytest.raises(ValueError, match="names 'a' in rows 3 and 4 with the same tokens"):
            load_runs(rows, history=history_of_runs)
    with pytest.warns(ScalingWarning, match="rows 4, 9 repeat earlier ones"):
        assert len(load_runs(rows, history=False)) == 10
    # Rows of one name with equal tokens are repetitions, or a history with planned tokens.
    rows = make_history([(name, n, [8, 8]) for name, n in (("a", 1e8), ("b", 5e8))])
    rows = [row | {"loss": row["loss"] + 0.01 * i} for i, row in enumerate(rows)]
    with pytest.raises(ValueError, match="tokens are those of the whole training"):
        load_runs(rows)
    assert len(load_runs(rows, history=False)) == 4
    assert len(load_runs([row | {"seed": i % 2} for i, row in enumerate(rows)])) == 4


@pytest.mark.parametrize("restart", [5, 4, 6])
def test_resumed_run_under_a_new_name_is_reported(restart):
    whole = [("b", 1e8, range(1, 11)), ("c", 5e8, range(1, 11)), ("d", 1e9, range(1, 4))]
    parts = [("a", 1e8, range(1, 6)), ("a-resumed", 1e8, range(restart, 11))]
    with pytest.warns(ScalingWarning) as caught:
        load_runs(make_history(parts + whole))
    messages = [str(w.message) for w in caught]
    assert (
        sum("a-resumed start where another run of the same size stops" in m for m in messages) == 1
    )
    with pytest.warns(ScalingWarning) as caught:
        load_runs(
            make_history([*whole, ("short", 1e8, range(1, 3)), ("sparse", 1e8, range(4, 25, 4))])
        )
    assert not any("another run of the same size" in str(w.message) for w in caught)


def test_large_table_of_tokens_and_compute_is_not_a_history():
    random = np.random.default_rng(0)
    n, d = 10 ** random.uniform([[8], [9]], [[10], [11]], (2, 10_000))
    loss = 1.7 + 400 / n**0.34 + 410 / d**0.28
    assert len(load_runs({"tokens": d, "compute": 6 * n * d, "loss": loss})) == 10_000
