"""Times, FLOPs and memory of a training step by size, context and dtype."""

import importlib
import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from accounting.memory.live import make_state, training_step_memory
from llmsys_suite import cli
from llmsys_suite.config import UsageError
from llmsys_suite.model import Decoder, plain_attention
from llmsys_suite.step import kernels, process, report, sweep
from llmsys_suite.step.case import PHASES, Case
from llmsys_suite.step.process import Step
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

MINI = Case(size="mini", context=16, rows=2)


def format_process_output(seconds, rate=1e9):
    """Return the output of a process for the seconds of each part of each step."""
    return {
        "seconds": np.asarray(seconds).tolist(),
        "loss": 5.0,
        "peak_bytes": 2**30, "threads": 1, "product_rate": rate, "operators": [],
    }  # fmt: skip


def test_ten_steps_after_each_number_of_others_are_what_numpy_makes_of_them():
    seconds = np.random.default_rng(0).uniform(0.01, 0.02, (15, 3))
    for warmup in (0, 1, 2, 5):
        row = sweep.compute_row(MINI, format_process_output(seconds), warmup)
        counted = seconds[warmup : warmup + 10] * 1e3
        for part, phase in enumerate(("forward", "backward", "optimizer")):
            assert row[f"{phase}_mean_ms"] == pytest.approx(counted[:, part].mean())
            assert row[f"{phase}_std_ms"] == pytest.approx(counted[:, part].std(ddof=1))
        whole = np.sort(counted.sum(axis=1))
        assert row["step_p50_ms"] == pytest.approx(np.median(whole))
        assert (row["step_p10_ms"], row["step_p90_ms"]) == pytest.approx((whole[1], whole[8]))
        assert row["tokens_per_s"] == pytest.approx(2 * 16 / np.median(whole) * 1e3)
        assert row["mfu"] < row["hfu"]


def test_no_timed_step_in_float16_is_skipped():
    step = Step(Case(size="mini", context=16, rows=2, dtype="fp16"))
    before = step.model.head.weight.detach().clone()
    step.take_timed_step()
    assert not torch.equal(step.model.head.weight, before)


def test_a_step_that_overflows_float16_is_not_timed():
    step = Step(Case(size="mini", context=16, rows=2, dtype="fp16"))
    step.forward()
    step.backward()
    step.model.head.weight.grad.fill_(float("inf"))
    with pytest.raises(RuntimeError, match="overflowed at a loss scale of 1024"):
        step.optimize()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_flops_that_utilization_counts_are_those_that_torch_executes(checkpoint):
    case = Case(size="mini", context=16, rows=2, checkpoint=checkpoint)
    step = Step(case)
    with FlopCounterMode(display=False) as counter:
        step.forward()
        step.backward()
    assert case.count_executed_flops() == counter.get_total_flops()
    assert case.count_useful_flops() == Case(size="mini", context=16, rows=2).count_useful_flops()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_predicted_peak_is_that_of_the_step(checkpoint):
    case = Case(size="tiny", checkpoint=checkpoint)
    with torch.device("meta"):
        model = Decoder(case.model, plain_attention)
        tokens = torch.zeros(case.rows, case.context, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    make_state(optimizer)
    peak = training_step_memory(
        model, lambda: model.compute_loss(tokens, tokens), optimizer
    ).peak_bytes
    assert case.predict_peak_bytes() == pytest.approx(peak, rel=0.15)


def run_here(command, **options):
    """Run the module of a command in this process, and return its output as `subprocess.run`."""
    python, option, module, argument = command
    assert (python, option) == (sys.executable, "-m")
    assert options == {"capture_output": True, "text": True, "timeout": 120, "check": False}
    program = importlib.import_module(module)
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [module, argument]),
        mock.patch.object(program, "end_with_parent"),
        redirect_stdout(printed),
    ):
        program.main()
    return subprocess.CompletedProcess(command, 0, printed.getvalue(), "")


@pytest.mark.parametrize(
    "run", [run_here, pytest.param(subprocess.run, id="process", marks=pytest.mark.exhaustive)]
)
def test_a_case_runs_in_a_separate_process_and_lists_operators(run, monkeypatch):
    monkeypatch.setattr(sweep.subprocess, "run", run)
    ran = sweep.run_in_process(MINI, 120, profile=True)
    assert len(ran["seconds"]) == 15
    for phase in ran["operators"]:
        assert 1 <= len(phase["top"]) <= 10
        assert phase["total_ms"] < phase["timer_ms"]
        assert phase["attention_product_share"] <= phase["product_share"]
    assert ran["operators"][0]["attention_product_share"] > 0


def test_a_case_that_does_not_fit_or_end_is_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(sweep, "read_available_memory_bytes", lambda device: 2**30)
    with pytest.raises(sweep.LeftOut, match=r"needs [\d.]+ GiB; a case may use 0.8 GiB"):
        sweep.require_fit(Case(size="2.7B"))
    with pytest.raises(sweep.LeftOut, match=r"did not end within 0.01 s"):
        sweep.run_in_process(MINI, 0.01)
    (row,) = sweep.measure([Case(size="xl")])
    assert "needs" in row["note"]


@pytest.mark.parametrize(
    ("status", "message", "why"),
    [
        (1, "Traceback\nRuntimeError: no such kernel\n", "RuntimeError: no such kernel"),
        (-9, "UserWarning: something else\n", "ended by SIGKILL"),
        (-40, "", "ended by signal 40"),  # a real-time signal without a name
        (1, "", "without a message"),
    ],
)
def test_the_reason_of_a_failed_process_is_reported(monkeypatch, status, message, why):
    ends = subprocess.CompletedProcess([], status, "", message)
    monkeypatch.setattr(sweep.subprocess, "run", lambda *a, **k: ends)
    with pytest.raises(sweep.LeftOut, match=why):
        sweep.run_in_process(MINI, 60)


def test_precision_and_checkpointing_are_those_of_the_case():
    half, checkpointed = (
        Step(Case(size="mini", dtype="fp16")),
        Step(Case(size="mini", checkpoint=True)),
    )
    assert half.scaler.is_enabled()
    half.take_timed_step()
    plain = Step(Case(size="mini"))
    for step in (plain, checkpointed):
        step.forward()
        step.backward()
    for expected, other in zip(
        plain.model.parameters(), checkpointed.model.parameters(), strict=True
    ):
        torch.testing.assert_close(expected.grad, other.grad)
    with Step(Case(size="mini", dtype="bf16")).autocast:
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_kinds_of_operators_are_distinguished():
    def event(key, us, count=1):
        return SimpleNamespace(
            key=key,
            count=count,
            self_cpu_time_total=us,
            device_type=DeviceType.CPU,
            is_user_annotation=False,
        )

    events = [event("aten::mm", 60, 3), event("aten::bmm", 30, 2), event("aten::_softmax", 10),
              event("Optimizer.step", 99)]  # fmt: skip
    row = kernels.summarize(events, "cpu")
    assert row["total_ms"] == pytest.approx(0.1)
    assert row["top"][0] == {"operator": "mm", "calls": 3, "ms": 0.06, "share": 0.6}
    assert row["product_share"] == pytest.approx(0.9)
    assert row["attention_product_share"] == pytest.approx(0.3)
    assert row["softmax_share"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--sizes", ","], "expected at least one size, context and dtype"),
        (["--sizes", "huge"], "size 'huge' is unknown; choose from mini, tiny"),
        (
            ["--contexts", "128,many"],
            "expected --contexts to be integers such as 128,512, got 128,many",
        ),
        (["--contexts", "2"], "expected context to be an integer >= 8, got 2"),
        (["--dtype", "int8"], "dtype 'int8' is unknown"),
        (["--rows", "0"], "expected rows to be an integer >= 1, got 0"),
        (["--time-limit", "0"], "--time-limit to be a number of seconds > 0, got 0"),
        (["--profile"], "--profile needs --out"),
        (["--out", "/proc/none"], "/proc/none cannot be written"),
        (["--out", "."], ". exists and is not empty"),
    ],
)
def test_a_case_that_cannot_be_timed_is_refused_in_one_line(
    options, complaint, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["llmsys", "step", *options])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert complaint in errors[0]


def test_times_in_the_table_have_no_exponent():
    times = {f"{phase}_mean_ms": 999.7 for phase in PHASES}
    times |= {f"{phase}_std_ms": 99.7 for phase in PHASES}
    cells = report._format_cells(Case().get_labels() | times | {"note": ""})
    assert cells[2:5] == ["1,000 ± 99.7"] * 3


def test_the_tables_are_printed_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sweep, "run_in_process", lambda case, *_, **k: process.measure(case, profile=k["profile"])
    )
    monkeypatch.setattr(process, "measure_product_rate", lambda *_: 1e10)
    out = tmp_path / "rows"
    lines = list(
        report.benchmark(
            sizes="mini,mini",
            contexts="16,016",
            dtypes="bf16,bf16",
            compiled=False,
            checkpointed=True,
            rows=1,
            limit=60.0,
            profile=True,
            device="cpu",
            out=out,
        )
    )
    text = "\n".join(lines)
    assert text.count("| mini, 1 x 16, bf16, checkpoint |") == 4
    assert "e+0" not in text
    assert " 0% |" not in text
    rows = json.loads((out / "rows.json").read_text())["rows"]
    assert len(rows) == 8
    assert all(phase["top"] for row in rows for phase in row["operators"])


def test_an_unknown_device_is_refused():
    with pytest.raises(UsageError, match="device 'tpu' is unknown"):
        Case(device="tpu")
