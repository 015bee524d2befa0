import json

import numpy as np
import pytest
from scaling import Runs, ScalingWarning, isoflop_runs, load_runs

N, D = np.array([1e6, 2e6, 4e6]), np.array([1e7, 1e7, 2e7])
LOSS = np.array([4.0, 3.9, 3.5])


def has_expected_columns(runs):
    np.testing.assert_allclose(runs.parameters, N)
    np.testing.assert_allclose(runs.tokens, D)
    np.testing.assert_allclose(runs.compute, 6 * N * D)
    np.testing.assert_allclose(runs.loss, LOSS)
    return True


@pytest.mark.parametrize("missing", ["parameters", "tokens", "compute"])
def test_any_two_of_parameters_tokens_and_compute_give_the_third(missing):
    columns = {"parameters": N, "tokens": D, "compute": 6 * N * D, "loss": LOSS}
    del columns[missing]
    assert has_expected_columns(load_runs(columns))


@pytest.mark.parametrize(
    "names",
    [
        ("N", "D", "C", "L"),
        ("params", "train_tokens", "flops", "val_loss"),
        ("Model Size", "Training Tokens", "Training FLOP", "loss"),
        ("n_params", "tokens_seen", "compute_budget", "final_loss"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "tsv"])
def test_files_of_every_kind_under_the_usual_names(tmp_path, names, suffix):
    rows = np.stack([N, D, 6 * N * D, LOSS], axis=1).tolist()
    path = tmp_path / f"runs.{suffix}"
    records = [dict(zip(names, row, strict=True)) for row in rows]
    mark = {"csv": ",", "tsv": "\t"}.get(suffix)
    if mark:
        path.write_text("\n".join(mark.join(map(str, row)) for row in [names, *rows]) + "\n")
    elif suffix == "json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("\n".join(map(json.dumps, records)))
    assert has_expected_columns(load_runs(path))


def test_column_of_any_name_can_be_passed():
    odd = {"N": N, "D": D, "loss": LOSS + 1, "eval/ce": LOSS}
    assert has_expected_columns(load_runs(odd, columns={"loss": "eval/ce"}))
    with pytest.raises(ValueError, match="no column 'nll'"):
        load_runs(odd, columns={"loss": "nll"})


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_wandb_export_without_the_runs_that_did_not_finish(tmp_path, suffix):
    path = tmp_path / f"wandb.{suffix}"
    states = ["finished", "crashed", "finished", "finished"]
    config = [{"n_params": n, "tokens": {"value": d}} for n, d in zip(N, D, strict=True)]
    summary = [{"val_loss": x} for x in LOSS]
    config.insert(1, {"n_params": 5, "tokens": {"value": 5}})
    summary.insert(1, {"val_loss": "NaN"})
    records = [
        {"name": "r", "state": a, "config": b, "summary": c}
        for a, b, c in zip(states, config, summary, strict=True)
    ]
    if suffix == "json":
        path.write_text(json.dumps(records))
    else:
        quoted = [
            ",".join(
                '"' + (v if isinstance(v, str) else json.dumps(v)).replace('"', '""') + '"'
                for v in r.values()
            )
            for r in records
        ]
        path.write_text("\n".join(["Name,State,config,summary", *quoted]))
    row = {"csv": 3, "json": 2}[suffix]
    with pytest.warns(ScalingWarning, match=rf"not 'finished' in rows {row}:"):
        assert has_expected_columns(load_runs(path))


def test_budgets_group_runs_of_equal_compute():
    compute = np.array([1e15, 2e15, 1.01e15, 2.01e15, 1e15])
    runs = load_runs({"N": [1e6, 2e6, 3e6, 4e6, 5e6], "C": compute, "loss": [3.0] * 5})
    assert [sorted(group.rows) for group in runs.budgets()] == [[1, 3, 5], [2, 4]]
    assert [sorted(group.rows) for group in runs.budgets(np.inf)] == [[1, 2, 3, 4, 5]]


def test_without_highest_drops_the_worst_and_keeps_the_order():
    runs = load_runs({"N": N, "D": D, "loss": [3.0, 5.0, 4.0]})
    assert runs.without_highest(1).rows == (1, 3)


def test_runs_left_out_by_their_loss_are_a_line_of_the_explanation():
    runs = load_runs({"N": [1e8, 2e8, 4e8], "D": [1e10] * 3, "loss": [3.3, 3.2, 3.1]})
    assert runs.without_highest(0).explanation == runs.explanation
    last = runs.without_highest(1).explanation.splitlines()[-1]
    assert last == "the 1 highest losses are left out: 2 runs"


def test_columns_of_different_lengths_are_not_runs():
    three, two = np.full(3, 1e9), np.full(2, 3.0)
    with pytest.raises(ValueError, match=r"expected columns of one length, got .*'loss': 2"):
        Runs(three, three, three, two, (1, 2, 3))


@pytest.mark.parametrize("noise", [-1.0, float("nan"), float("inf")])
def test_negative_noise_is_refused(noise):
    with pytest.raises(ValueError, match="expected a finite noise >= 0, got noise ="):
        isoflop_runs(noise=noise)


def test_runs_can_be_indexed_and_iterated():
    runs = load_runs({"N": [1e8, 2e8, 4e8], "D": [1e9, 2e9, 4e9], "loss": [3.2, 3.0, 2.9]})
    assert runs[-1].rows == (3,)
    assert [float(run.loss[0]) for run in runs] == [3.2, 3.0, 2.9]
    with pytest.raises(IndexError):
        runs[3]
