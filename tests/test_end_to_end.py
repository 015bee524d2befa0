"""The command as a user types it: a whole run, bad input, Ctrl-C and a killed worker."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from figures import assert_at_most, select_by_avx512
from llmsys_suite import cli
from llmsys_suite.audit import stage_checks
from llmsys_suite.config import RunConfig
from llmsys_suite.folder import RunFolder
from llmsys_suite.learning import evaluation
from llmsys_suite.measure.samples import VARIANT_NAMES
from llmsys_suite.ranks import launch, worker
from llmsys_suite.report.sections import build_plan_rows
from llmsys_suite.stages import links, parallel, scale
from worker_pool import run_ranks

LLMSYS = [sys.executable, "-m", "llmsys_suite"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def command(monkeypatch, capsys):
    """Return a function that runs a command in this process: exit status, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["llmsys", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


#: The configuration of a short run of a narrow model. The stage scale takes a time that is
#: proportional to the measured steps.
SHORT = """
size = "16x48x2x2"
learning_rate = 0.01
rows = 4
context = 32
steps = 1
warmup = 6
learn = 8
"""


def run_as_rank(values):
    """Run all stages as this rank, with fewer repetitions; return the exit status."""
    os.environ[launch.STORE] = os.environ["STORE_FILE"]
    links.SIZES = stage_checks.links.SIZES = (1 << 20,)
    parallel.ITERATIONS = stage_checks.parallel.ITERATIONS = 4
    scale.SEEDS = stage_checks.scale.SEEDS = 1
    evaluation.WRITTEN_TOKENS = 20
    return worker.run_rank(RunConfig.from_json(values))[0]


def launch_in_pool(config):
    """Launch a run in processes that have imported torch already; return its exit status."""
    return max(run_ranks(run_as_rank, config.world, config.to_json(), backend="", timeout=600))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One short run of every stage, shared by the tests that read its folder."""
    folder = tmp_path_factory.mktemp("run")
    out = folder / "run"
    (folder / "short.toml").write_text(SHORT)
    arguments = ["llmsys", "run", "--config", str(folder / "short.toml"), "--out", str(out)]
    with (
        mock.patch.object(launch, "launch", launch_in_pool),
        mock.patch.object(sys, "argv", arguments),
        redirect_stdout(io.StringIO()) as printed,
        pytest.raises(SystemExit) as exit,
    ):
        cli.main()
    return out, exit.value.code, printed.getvalue()


def test_a_run_ends_with_every_audit_check_green(finished):
    out, status, printed = finished
    assert not status, printed
    assert re.search(r"audit: (\d+)/\1 passed", printed)
    checks = json.loads((out / "checks.json").read_text())
    assert len(checks) > 50
    assert all(check["passed"] for check in checks)


@pytest.mark.timing
def test_a_whole_run_takes_the_stated_time_and_what_was_planned(tmp_path):
    out = tmp_path / "run"
    start = time.monotonic()
    command = [*LLMSYS, "run", "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr.readline()
        seconds_to_first_line = time.monotonic() - start
        run.stderr.read()
    assert run.returncode == 0
    seconds = time.monotonic() - start
    assert_at_most("suite: first line of a run", 2, seconds_to_first_line, "s")
    assert_at_most("suite: a whole run", select_by_avx512(150, 187), seconds, "s")
    assert (out / "report.html").stat().st_size <= 1e6
    assert max(read_stage_peaks(out).values()) <= 1536
    folder = RunFolder.open(out)
    ratios = {
        row["figure"]: row["ratio"]
        for row in build_plan_rows(folder.results, folder.read_json("evidence.json"))
    }
    assert ratios.pop("peak of a step, MiB") == pytest.approx(1, abs=0.1)
    # The counted bytes include the headers of messages.
    assert ratios.pop("DDP's wire, MiB per rank") == pytest.approx(1, abs=0.01)
    assert set(ratios.values()) == {1}


def test_the_folder_holds_what_the_readme_says(finished):
    out, *_ = finished
    names = {path.name for path in out.iterdir()}
    reports = {"report.md", "report.html", "inspect.html", "model.safetensors"}
    records = {"env.json", "config.json", "samples.jsonl", "summary.json", "checks.json"}
    assert names >= records | reports
    assert not any(name.endswith(".part") for name in names)
    assert json.loads((out / "summary.json").read_text())["status"] == "complete"


def test_the_loss_falls_on_real_text(finished):
    out, *_ = finished
    losses = json.loads((out / "summary.json").read_text())["stages"]["train"]["losses"]
    assert all(curve[-1] < 0.9 * curve[0] for curve in losses.values())
    assert tuple(losses) == VARIANT_NAMES


def test_the_report_is_one_page_that_fetches_nothing(finished):
    out, *_ = finished
    page = (out / "report.html").read_text()
    assert len(page.encode()) <= 1e6
    assert page.count("<svg") == 4
    assert not re.search(r"<(script|link|img|iframe)", page)
    assert not re.search(r"(src|href)=['\"]http", page)


def test_every_rank_every_step_every_phase_is_kept_raw(finished):
    out, *_ = finished
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    flat = [s for s in samples if s["stage"] == "train" and s["variant"] == "ddp flat"]
    assert {(s["rank"], s["step"]) for s in flat} == {(r, s) for r in (0, 1) for s in range(7)}
    assert {s["phase"] for s in flat} == {
        "step",
        "forward",
        "backward",
        "communication",
        "optimizer",
    }


def test_the_bench_has_a_flat_row_for_every_variant_of_each_case(finished):
    from llmsys_suite import bench

    out, *_ = finished
    rows = bench.collect_rows(json.loads((out / "summary.json").read_text())["stages"])
    assert Counter(row["case"] for row in rows) == {
        "train": len(VARIANT_NAMES),
        "attention": 4,
        "compress": 7,
    }
    assert all(isinstance(value, (str, int, float)) for row in rows for value in row.values())


def read_stage_peaks(out):
    """Return the peak memory of the largest process in each stage, in MiB."""
    stages = json.loads((out / "summary.json").read_text())["stages"]
    return {stage: result["peak_process_mib"] for stage, result in stages.items()}


def test_no_process_takes_more_than_one_and_a_half_gibibytes(finished):
    out, *_ = finished
    assert {stage: mib for stage, mib in read_stage_peaks(out).items() if mib > 1536} == {}


def test_a_tampered_record_is_red_and_fails(finished):
    out, *_ = finished
    from llmsys_suite.audit import training_checks

    folder = RunFolder.open(out)
    stages, samples = folder.results, folder.samples()
    victim = next(s for s in samples if s["variant"] == "zero 1" and "loss" in s)
    victim["loss"] *= 1.001
    evidence = folder.read_json("evidence.json")
    checks = training_checks.check_training(
        folder.config, stages["plan"], stages["train"], samples, evidence
    )
    assert [c.name for c in checks if not c.passed] == [
        "losses, trained again",
        "all losses",
        "reported losses",
    ]


def test_an_edited_folder_is_one_line_and_status_2(finished, tmp_path, command):
    out, *_ = finished
    copy = shutil.copytree(out, tmp_path / "copy")
    (copy / "samples.jsonl").write_text("")
    status, _, errors = command("compare", out, copy)
    assert status == 2
    assert errors.strip().endswith(
        "samples.jsonl was changed, added or deleted; restore it or run again"
    )


def test_the_report_is_made_again_and_a_run_is_not_compared_with_itself(finished, command):
    out, *_ = finished
    before = (out / "report.html").read_text()
    status, printed, _ = command("report", out)
    assert status == 0
    assert "## Train" in printed
    assert (out / "report.html").read_text().count("<svg") == before.count("<svg")
    status, _, errors = command("compare", out, out)
    assert status == 2
    assert "contain the same samples; expected different runs" in errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "trane"],
        ["run", "--size", "huge"],
        ["run", "--data", "nowhere"],
        ["run", "--resume", "nowhere"],
        ["run", "--size", "10B"],
        ["run", "--out", "/proc/llmsys/run"],
        ["report", "nowhere"],
        ["compare", "nowhere", "nowhere"],
    ],
)
def test_bad_input_is_one_line_and_status_2_and_writes_nothing(
    arguments, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    status, _, errors = command(*arguments)
    assert status == 2
    lines = [line for line in errors.splitlines() if not line.endswith("this machine")]
    assert len(lines) == 1
    assert lines[0].startswith("llmsys: ")
    assert list(tmp_path.iterdir()) == []


def list_children(process):
    done = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(pid) for pid in done.stdout.split()]


def start(*options):
    return subprocess.Popen(
        [*LLMSYS, "run", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A process that a background job starts ignores SIGINT, and the tests may be such a job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def assert_gone(pids):
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a worker is left behind"
        time.sleep(0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["ctrl-c", "launcher killed", "worker killed"])
def test_an_interrupted_run_keeps_its_samples_and_leaves_no_process(how, tmp_path):
    out = tmp_path / "run"
    process = start("train", "--size", "mini", "--steps", "2000", "--out", out)
    deadline = time.monotonic() + 120
    samples = out / "samples.jsonl"
    while not (samples.exists() and samples.stat().st_size > 2000):
        assert time.monotonic() < deadline, process.communicate()[1]
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.2)
    workers = list_children(process)
    assert len(workers) == 2
    if how == "ctrl-c":
        process.send_signal(signal.SIGINT)
    elif how == "worker killed":
        os.kill(workers[1], signal.SIGKILL)
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert_gone(workers)
    assert json.loads((out / "summary.json").read_text())["status"] == "incomplete"
    assert (out / "samples.jsonl").stat().st_size > 2000
    if how == "worker killed":
        assert "rank 1 was killed by SIGKILL" in errors


def is_catching_sigterm(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "world"),
    [
        pytest.param(signal.SIGINT, 1, id="ctrl-c"),
        pytest.param(signal.SIGTERM, 2, id="sigterm"),
    ],
)
def test_an_interrupt_saves_what_was_learned_and_stops(number, world, tmp_path, command):
    out = tmp_path / "run"
    options = ["--size", "16x48x1x1", "--steps", 1, "--warmup", 0, "--learn", 10**6]
    options += ["--world", world]
    process = start("learn", *options, "--out", out)
    while "learn ..." not in (line := process.stderr.readline()):
        assert line, process.poll()
    workers, deadline = list_children(process), time.monotonic() + 120
    assert len(workers) == world
    while not all(map(is_catching_sigterm, workers)):  # before that there is nothing to save
        assert time.monotonic() < deadline, "no worker has begun to learn"
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert_gone(workers)
    assert (out / "checkpoint").is_dir(), errors
    assert (out / "samples.jsonl").stat().st_size > 2000
    assert json.loads((out / "summary.json").read_text())["status"] == "incomplete"
    _, report, _ = command("report", out)
    assert "this run was cut off before the end of learn" in report


DIES_ONCE = """
import os, sys, threading, time
from llmsys_suite.cli import main
def die_after_a_checkpoint():
    while not os.path.isdir(sys.argv[-1] + "/checkpoint"):
        time.sleep(0.05)
    os._exit(3)
if os.environ["TORCHELASTIC_RESTART_COUNT"] + os.environ["RANK"] == "01":
    threading.Thread(target=die_after_a_checkpoint, daemon=True).start()
main()
"""


@pytest.mark.exhaustive
def test_torchruns_elastic_restart_goes_on_from_the_last_checkpoint(tmp_path):
    (tmp_path / "dies.py").write_text(DIES_ONCE)
    run = ["run", "learn", "--preset", "cpu", "--size", "mini", "--steps", "1", "--warmup", "0"]
    run += ["--learn", "800", "--out", tmp_path / "run"]
    done = subprocess.run(
        [*TORCHRUN, "--max-restarts", "1", tmp_path / "dies.py", *run],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    learn = json.loads((tmp_path / "run" / "summary.json").read_text())["stages"]["learn"]
    assert 200 <= learn["begun_at"] < 800
    assert len(learn["losses"]) == 800


@pytest.mark.exhaustive
def test_it_runs_under_torchrun(tmp_path):
    run = ["run", "parallel", "--preset", "cpu", "--size", "mini", "--out", tmp_path / "run"]
    done = subprocess.run(
        [*TORCHRUN, "-m", "llmsys_suite", *run],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "complete"
