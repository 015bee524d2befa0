"""Columns with two possible readings are read correctly, or refused with both readings."""

import itertools
import re
import warnings

import numpy as np
import pytest
from scaling import ScalingWarning, isoflop_runs, load_runs
from scaling.tables.names import recognize

RUNS = isoflop_runs(noise=2e-3)
N = RUNS.parameters
D = RUNS.tokens
C = RUNS.compute
LOSS = RUNS.loss
REST = {"tokens": D, "loss": LOSS}


def load_without_warnings(**columns):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = load_runs({**columns, **REST})
    np.testing.assert_allclose(runs.tokens, D)
    return runs


@pytest.mark.parametrize(
    "part",
    [
        *("embedding_params", "embeddingParams", "embed_params", "model/embedding_parameters"),
        *("n_embedding_params", "attention_params", "expert_params", "config.model.lora_params"),
        *("vocab_params_M", "frozen_params", "draft_params", "router_parameters"),
    ],
)
def test_part_of_the_parameters_is_not_read_as_the_parameters(part):
    assert recognize(part, "parameters") is None
    for name in ("params", "non_embedding_params", "total_params", "nonEmbeddingParams"):
        runs = load_without_warnings(**{part: N * 0.2, name: N})
        np.testing.assert_allclose(runs.parameters, N)
        assert repr(name) in runs.explanation
    with pytest.raises(ValueError, match="expected a loss and two of"):
        load_runs({part: N, **REST})


@pytest.mark.parametrize(
    "name",
    [
        *("non_embedding_params", "nonembedding_params", "n_non_embedding_params", "params_no_emb"),
        *("params_excl_embeddings", "params_without_embeddings", "model/numNonEmbeddingParameters"),
        *("non-embedding parameters", "nparams_nonemb"),
    ],
)
def test_non_embedding_parameters_are_recognized_and_explained(name):
    runs = load_without_warnings(**{name: N})
    np.testing.assert_allclose(runs.parameters, N)
    assert "(non-embedding)" in runs.explanation
    beside = load_without_warnings(**{name: N, "total_params": 1.2 * N})
    np.testing.assert_allclose(beside.parameters, 1.2 * N)
    assert f"chosen: parameters by 'total_params', not {name!r}" in beside.explanation
    with pytest.raises(ValueError, match=r"each be the parameters; choose one.* row .*wrong order"):
        load_runs({name: 1.2 * N, "total_params": N, **REST})


@pytest.mark.parametrize(
    "name", ["params_with_embeddings", "n_params_incl_emb", "paramsIncludingEmbeddings"]
)
def test_parameters_with_embeddings_are_read_beside_those_without(name):
    runs = load_without_warnings(**{name: 1.2 * N, "params_without_embeddings": N})
    np.testing.assert_allclose(runs.parameters, 1.2 * N)
    assert "(with embeddings)" in runs.explanation


@pytest.mark.parametrize("all_of_them", ["total_params", "params", "n_params", "model_size"])
@pytest.mark.parametrize(
    "active",
    [
        "active_params",
        "activated_params",
        "N_active",
        "params_active",
        "n_active_parameters",
        "activeParams",
    ],
)
def test_active_parameters_of_a_mixture_of_experts_are_read(active, all_of_them):
    runs = load_without_warnings(**{all_of_them: 8 * N, active: N})
    np.testing.assert_allclose(runs.parameters, N)
    np.testing.assert_allclose(runs.compute, C)
    assert f"chosen: parameters by {active!r}, not {all_of_them!r}" in runs.explanation
    with pytest.raises(ValueError, match=r"each be the parameters; .*wrong order"):
        load_runs({all_of_them: N, active: 8 * N, **REST})


@pytest.mark.parametrize("folder", ["throughput", "run/log", "train_log"])
def test_logarithms_beside_their_column_are_not_read(folder):
    """OLMo exports both columns."""
    column = f"{folder}/total_training_Gflops"
    logarithms = {f"{folder}/total_training_log_Gflops": np.log10(C / 1e9)}
    runs = load_runs({"N": N, "loss": LOSS, column: C / 1e9, **logarithms})
    np.testing.assert_allclose(runs.compute, C)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("log10_compute", "by a column 'compute' of 10 ** 'log10_compute'"),
        ("train/log2_flops", "by a column 'flops' of 2 ** 'train/log2_flops'"),
        ("ln(params)", "by a column 'params' of e ** 'ln(params)'"),
        ("logD", "by a column 'd' of base ** 'logD'"),
        ("total_log_Gflops", "by a column 'gflops' of base ** 'total_log_Gflops'"),
        # A prefix such as `wandb_log` may name the logger, so the message names both readings.
        (
            "wandb_log_flops",
            "by a column 'flops' of base ** 'wandb_log_flops', or confirm numbers that are not "
            "logarithms with columns={'compute': 'wandb_log_flops'}",
        ),
        ("ln_loss", "by a column 'loss' of e ** 'ln_loss'"),
    ],
)
def test_refused_logarithms_are_named_with_their_conversion(name, remedy):
    known = {"N": N, "D": D} if name == "ln_loss" else {"loss": LOSS}
    with pytest.raises(ValueError, match=f"replace the logarithms .*{re.escape(remedy)}"):
        load_runs({**known, name: np.log10(C)})


@pytest.mark.parametrize(
    "name", ["log_perplexity", "val_log_ppl", "logppl", "ln(ppl)", "log_loss", "val_logLoss"]
)
def test_log_perplexity_and_log_loss_are_not_read_until_they_are_named(name):
    table = {"N": N, "D": D, name: LOSS + 1}
    with pytest.raises(ValueError, match=r"name another column with columns={'loss': '…'}"):
        load_runs(table)
    np.testing.assert_array_equal(load_runs(table, columns={"loss": name}).loss, LOSS + 1)
    np.testing.assert_array_equal(load_runs(table | {"loss": LOSS}).loss, LOSS)


@pytest.mark.parametrize(
    ("ours", "first", "second"),
    [
        ("parameters", "params", "n_params"),
        ("parameters", "total_params", "trainable_params"),
        ("parameters", "config.model.n_params", "summary.model_size"),
        ("tokens", "train_tokens", "dataset_tokens"),
        ("tokens", "tokens_seen", "total_tokens"),
        ("compute", "flops", "train_compute"),
    ],
)
def test_columns_of_the_same_quantity_must_agree(ours, first, second):
    right = {"parameters": N, "tokens": D, "compute": C}[ours]
    table = {"N": N, "D": D, "loss": LOSS}
    table.pop({"parameters": "N", "tokens": "D"}.get(ours), None)
    for names in ((first, second), (second, first)):
        agreeing = load_runs({**table, names[0]: right, names[1]: right * 1.001})
        assert f"chosen: {ours} by" in agreeing.explanation
        with pytest.raises(
            ValueError, match=rf"may each be the {ours}; choose one with"
        ) as refused:
            load_runs({**table, names[0]: right, names[1]: right * 1.5})
        assert repr(first) in str(refused.value)
        assert repr(second) in str(refused.value)
        chosen = load_runs(
            {**table, names[0]: right, names[1]: right * 1.5}, columns={ours: names[0]}
        )
        np.testing.assert_allclose(getattr(chosen, ours), right)


@pytest.mark.parametrize(
    "other",
    [
        *("batch_size", "hidden_size", "window_size", "checkpoint_size", "time_budget"),
        *("peak_flops", "inference_flops", "achieved_flops", "warmup_tokens", "decay_tokens"),
    ],
)
def test_columns_of_other_quantities_do_not_replace_single_letters(other):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = load_runs({"N": N, "D": D, "loss": LOSS, other: N * 3})
    for ours, right in (("parameters", N), ("tokens", D), ("compute", C)):
        np.testing.assert_allclose(getattr(runs, ours), right)


def test_rival_with_blank_cells_must_agree_in_the_others():
    blank = np.arange(72) % 2 == 0
    for others, message in ((N, ""), (1.5 * N, "may each be the parameters")):
        table = {"n_params": N, "size": np.where(blank, np.nan, others), **REST}
        if message:
            with pytest.raises(ValueError, match=message):
                load_runs(table)
        else:
            assert "with which 'size' agrees" in load_runs(table).explanation


def test_single_letter_must_agree_with_the_column_that_is_read():
    with pytest.raises(ValueError, match=r"'tokens', 'D'\] may each be the tokens"):
        load_runs({"N": N, "D": D, "tokens": 3 * D, "loss": LOSS})
    widths = {"params": N, "tokens": D, "loss": LOSS, "n": [24] * 72, "d": [4096] * 72}
    assert "'d' is too small to be that" in load_runs(widths).explanation


BAD = np.arange(72) % 9 == 0


STATE_COLUMNS = [
    *("state", "State", "run_state", "runState", "status", "job_status", "sys/state"),
    *("attributes.status", "info.run_status", "trial_status", "TrialState"),
    *("outcome", "phase", "result", "Run", "how_it_ended"),
]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("finished", "crashed"),
        ("FINISHED", "KILLED"),
        ("COMPLETED", "CANCELLED by 1000"),
        ("completed", "in_progress"),
        ("RunStatus.SUCCEEDED", "RunStatus.FAILED"),
        ("TrialState.COMPLETE", "TrialState.PRUNED"),
        ("JOB_STATE_SUCCEEDED", "JOB_STATE_RUNNING"),
        ("success", "OUT_OF_MEMORY"),
        ("✅ finished", "❌ crashed"),
    ],
)
def test_unfinished_runs_are_left_out_under_any_column_name(good, bad):
    loss = np.where(BAD, 1.2 * LOSS, LOSS)
    for column in STATE_COLUMNS:
        table = {"N": N, "D": D, "loss": loss, column: [bad if b else good for b in BAD]}
        with pytest.warns(
            ScalingWarning, match=rf"column '{column}' says that 8 runs are not 'fin"
        ):
            runs = load_runs(table)
        np.testing.assert_allclose(runs.loss, LOSS[~BAD])
        assert "8 runs are not 'finished'" in runs.explanation


@pytest.mark.parametrize("blank", [None, "", "nan"])
def test_run_without_a_state_among_runs_with_states_is_left_out(blank):
    table = {"N": N, "D": D, "loss": LOSS, "state": [blank if b else "finished" for b in BAD]}
    with pytest.warns(ScalingWarning, match="8 runs are not 'finished'"):
        assert len(load_runs(table)) == 64


@pytest.mark.parametrize(
    ("column", "good", "bad"),
    [
        ("finished", True, False),
        ("is_completed", "yes", "no"),
        ("converged", True, False),
        ("sys/failed", "False", "True"),
        ("crashed", 0, 1),
        ("diverged", "false", "true"),
        ("diverged", "N", "Y"),
        ("failed", "F", "T"),
        ("diverged", "", "x"),
        ("done", "x", ""),
        ("notes", "", "diverged"),
        ("problem", None, "OOM"),
        ("exit_code", 0, 137),
        ("ExitCode", "0:0", "1:0"),
        ("exitCode", "0", "1"),
        ("exit_status", "0", ""),
    ],
)
def test_flags_and_exit_codes_are_states(column, good, bad):
    table = {"N": N, "D": D, "loss": LOSS, column: [bad if b else good for b in BAD]}
    with pytest.warns(ScalingWarning, match="8 runs are not 'finished'"):
        assert len(load_runs(table)) == 64


def test_unknown_state_is_refused_with_its_readings():
    unclear = "may mean finished or stopped early"
    unknown = "is not a known state"
    words = {"TERMINATED": unclear, "stopped": unclear, "sort of": unknown, "7": unknown}
    for word, reading in words.items():
        table = {"N": N, "D": D, "loss": LOSS, "status": np.where(BAD, word, "FINISHED").tolist()}
        message = f"'status' says '.*' in row 1, which {reading}: .*where=.'status': .*ignore="
        with pytest.raises(ValueError, match=message):
            load_runs(table)
        assert len(load_runs(table, ignore="status")) == len(N)
        assert len(load_runs(table, where={"status": "FINISHED"})) == 64
        assert len(load_runs(table, where={"status": word})) == 8


@pytest.mark.parametrize(("good", "bad"), [(0, 1), ("1", "0"), (True, False), ("yes", "no")])
def test_state_of_flags_is_refused_unless_all_rows_are_equal(good, bad):
    table = {"N": N, "D": D, "loss": LOSS, "run_status": [bad if b else good for b in BAD]}
    message = "'run_status' says only .*, which may each mean finished or failed: .*where=.*ignore="
    with pytest.raises(ValueError, match=message):
        load_runs(table)
    assert len(load_runs(table, ignore="run_status")) == len(N)
    assert len(load_runs(table, where={"run_status": good})) == 64
    assert len(load_runs(table | {"run_status": [good] * len(N)})) == len(N)
    seeds = {"random_state": table.pop("run_status")}
    assert len(load_runs(table | seeds)) == len(N)


@pytest.mark.parametrize("cells", [["train", "test"], ["CA", "NY"], [0.1, 0.2], [None, None]])
def test_column_of_other_values_is_not_read_as_states(cells):
    table = {"N": N, "D": D, "loss": LOSS, "state": cells * 36, "failed_at": cells * 36}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load_runs(table)) == 72


def test_table_without_finished_runs_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="contains no runs; column 'status' says that 72 runs"):
        load_runs({"N": N, "D": D, "loss": LOSS, "status": ["FAILED"] * 72})


@pytest.mark.parametrize("factor", [1e-9, 1e-6, 1e-3, 1e3])
@pytest.mark.parametrize(("column", "other"), list(itertools.permutations(["N", "D", "C"], 2)))
def test_column_in_another_unit_is_refused_unless_its_unit_is_passed(column, other, factor):
    columns = {"N": N, "D": D, "C": C}
    table = {column: columns[column] * factor, other: columns[other], "loss": LOSS}
    named = rf"'{column}'.*units="
    with pytest.raises(ValueError, match=named):
        load_runs(table)
    ours = {"N": "parameters", "D": "tokens", "C": "compute"}
    runs = load_runs(table, units={ours[column]: 1 / factor, ours[other]: 1})
    np.testing.assert_allclose(runs.compute, C)
    with pytest.raises(ValueError, match=named):
        load_runs({**columns, column: columns[column] * factor, "loss": LOSS})


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 1e3])
@pytest.mark.parametrize("column", ["N", "D"])
def test_row_in_another_unit_is_refused_with_its_cell(column, factor):
    table = {"N": np.repeat([1e8, 3e8, 1e9, 3e9], 3), "loss": LOSS[:12]}
    table["D"] = table["N"] * np.tile([10, 20, 40], 4)
    assert len(load_runs(table)) == 12
    table[column][7] *= factor
    with pytest.raises(ValueError, match=rf"'{column}' is .* in row 8"):
        load_runs(table)
    few = {k: v[6:9] for k, v in table.items()}
    if factor < 1e3:
        with pytest.raises(ValueError, match=rf"'{column}' is .* in row 2"):
            load_runs(few)
    named = {"N (M)": table["N"] / 1e6, "D (B)": table["D"] / 1e9, "loss": LOSS[:12]}
    with pytest.raises(ValueError, match="row 8"):
        load_runs(named)
    if table[column].min() > 1000:
        assert len(load_runs(table, units={"parameters": 1, "tokens": 1})) == 12


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("N", "2*params"),
        ("N", "sqrt(params)"),
        ("D", "1/tokens"),
        ("D", "(0.5 * tokens)"),
        ("loss", "1 / loss"),
        ("loss", "exp(loss)"),
        ("loss", "loss - 1.69"),
        ("loss", "val_loss-E"),
        ("loss", "load_balancing_loss"),
    ],
)
def test_functions_of_a_quantity_are_not_read_as_the_quantity(name, column):
    table = {"N": N, "D": D, "loss": LOSS}
    table[column] = table.pop(name)
    with pytest.raises(ValueError, match="expected a loss and two of parameters, tokens and"):
        load_runs(table)


@pytest.mark.parametrize("column", ["eval/0/loss", "run.1/loss", "exp/loss", "a - loss"])
def test_paths_with_numbers_are_not_functions(column):
    np.testing.assert_array_equal(load_runs({"N": N, "D": D, column: LOSS}).loss, LOSS)


def test_both_columns_in_millions_are_refused():
    with pytest.raises(ValueError, match="most runs are below"):
        load_runs({"N": N * 1e-5 + 1000, "D": D * 1e-5 + 1000, "loss": LOSS})


def test_numbers_out_of_the_usual_range_can_be_confirmed():
    """A unit of one confirms an unusual number of tokens per parameter."""
    table = {"N": [1e8, 2e8, 4e8], "D": [3e12, 3e12, 4e12], "loss": [2.9, 2.8, 2.7]}
    with pytest.raises(ValueError, match=r"outside 0\.1 to 2000"):
        load_runs(table)
    assert load_runs(table, units={"parameters": 1, "tokens": 1}).tokens[0] == 3e12
    named = {"params (M)": [100, 200, 400], "tokens_T": [3, 3, 4], "loss": table["loss"]}
    assert load_runs(named).tokens[0] == 3e12
    suffixed = {"N": ["100M", "200M", "400M"], "D": ["3T", "3T", "4T"], "loss": table["loss"]}
    assert load_runs(suffixed).tokens[0] == 3e12


@pytest.mark.parametrize("name", ["text_gb", "data (GB)", "corpus_bytes"])
def test_size_of_the_text_is_read_with_the_tokens_of_one_unit(name):
    """Tokens have no fixed number of bytes, so the user states how many one unit contains."""
    size = 1e9 * np.array([2.0, 4, 8, 16, 32, 64]) if "bytes" in name else np.arange(2.0, 13, 2)
    table = {"N": [1e8, 2e8, 4e8, 8e8, 1e9, 2e9], name: size, "loss": np.linspace(3, 2.5, 6)}
    with pytest.raises(ValueError, match="tokens that your tokenizer makes of one unit"):
        load_runs(table)
    unit = 0.23 if "bytes" in name else 2.3e8
    runs = load_runs(table, columns={"tokens": name}, units={"tokens": unit})
    np.testing.assert_allclose(runs.tokens, size * unit)
    for wrong in ({}, {"tokens": 1.0 if unit > 1 else 2.3e8}, {"tokens": 20 * unit}):
        with pytest.raises(ValueError, match="is a size of text: expected units="):
            load_runs(table, columns={"tokens": name}, units=wrong)
    # The name of a size of text does not say that it counts all epochs.
    options = {"columns": {"tokens": name}, "units": {"tokens": unit}}
    with pytest.raises(ValueError, match="may count the tokens of all epochs, or those of one"):
        load_runs(table | {"epochs": [2] * 6}, **options)
    assert len(load_runs(table | {"epochs": [2] * 6}, **options, ignore="epochs")) == 6


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_quotes_do_not_change_what_is_read_from_a_csv_file(tmp_path, mark, newline):
    """Files without quotes are read by a faster function."""
    lines = [
        "# a comment",
        "",
        mark.join(["run", " N ", "D", "loss"]),
        f" {mark}\u00a0{mark}{mark}",
    ]
    for i, loss in enumerate(LOSS[:6]):
        lines.append(mark.join([f"run {i}", f"{10 + i}M", f" {2 + i}e9", f"{loss:.4f} "]))
    lines.insert(6, "  # another comment")
    results = []
    for quote in ("", '"'):
        path = tmp_path / f"runs{len(quote)}.csv"
        text = newline.join([*lines, ""]).replace("run 0", f"{quote}run 0{quote}")
        path.write_text(text, newline="")
        results.append(load_runs(path))
    assert results[0].rows == results[1].rows == (5, 6, 8, 9, 10, 11)
    assert "2 lines that start with '#'" in results[0].explanation
    for name in ("parameters", "tokens", "loss"):
        np.testing.assert_array_equal(getattr(results[0], name), getattr(results[1], name))
