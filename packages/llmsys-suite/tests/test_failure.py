"""A failure on any rank ends the whole run, and two runs never share a folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from llmsys_suite import start
from llmsys_suite.config import STAGES, RunConfig, UsageError
from llmsys_suite.folder import FolderTaken, RunFolder, claim_folder
from llmsys_suite.ranks import launch, worker
from llmsys_suite.ranks.failure import FailureWatch, report_failure
from llmsys_suite.ranks.launch import INTERRUPTED
from worker_pool import try_ranks

LLMSYS = [sys.executable, "-m", "llmsys_suite"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SECONDS_TO_END = 20.0


def run_stages(config_values, messages, fail=None):
    """Run the stages of a run as this rank, with its messages in a file.

    With `fail`, the stage `links` is replaced: rank `fail[0]` executes `fail[1]` and the others
    execute `fail[2]`.
    """
    from llmsys_suite.ranks import worker
    from llmsys_suite.ranks.launch import STORE
    from llmsys_suite.stages import links

    rank = int(os.environ["RANK"])
    os.environ[STORE] = os.environ["STORE_FILE"]
    file = os.open(f"{messages}.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    if fail is not None:
        failing_rank, action, others = fail

        def failing_stage(run):
            names = {"os": os, "time": time, "dist": dist, "torch": torch, "run": run}
            if run.rank == failing_rank:
                time.sleep(0.2)
                Path(f"{messages}.failed").touch()
                exec(action, names)
            exec(others, names)

        links.run = failing_stage
    status, _ = worker.run_rank(RunConfig.from_json(config_values))
    return status


def launch_ranks(tmp_path, config, fail=None):
    """Run two ranks that fail; return their exit statuses and messages."""
    values = json.loads(json.dumps(claim_folder(config).to_json()))
    outcomes = try_ranks(
        run_stages, 2, values, str(tmp_path / "messages"), fail, backend="", timeout=120
    )
    messages = "".join((tmp_path / f"messages.{rank}").read_text() for rank in range(2))
    return [outcome.exit_code for outcome in outcomes], messages


@pytest.mark.parametrize(
    ("rank", "others"),
    [
        pytest.param(0, "dist.all_reduce(torch.ones(1))", id="in a collective"),
        pytest.param(1, "run.wait_for_ranks()", id="waiting for all ranks"),
        pytest.param(1, "time.sleep(600)", id="in local work"),
    ],
)
def test_exception_on_one_rank_ends_every_rank(tmp_path, rank, others):
    config = RunConfig(stages=("links", "report"), size="mini", out=tmp_path / "run")
    fail = (rank, "raise ValueError('no')", others)
    statuses, messages = launch_ranks(tmp_path, config, fail)
    assert statuses == [1, 1]
    # This takes a few tenths of a second on an idle machine; the limit is for a busy machine.
    assert time.time() - (tmp_path / "messages.failed").stat().st_mtime < 60
    assert f"rank {rank}: ValueError: no" in messages
    folder = RunFolder(tmp_path / "run")
    assert folder.summary["status"] == "incomplete"
    assert folder.failure == ("links", f"rank {rank}: ValueError: no")


#: Runs as each rank. All stages return at once, except the one in which rank 1 fails.
FAILS_IN_STAGE = """
import os, sys, types
import torch.distributed as dist
from llmsys_suite.ranks import worker

def run(run):
    if run.stage == os.environ["FAILING_STAGE"]:
        if run.rank == 1:
            exec(os.environ["FAILING_ACTION"])
        dist.barrier()

worker.importlib = types.SimpleNamespace(import_module=lambda name: types.SimpleNamespace(run=run))
if __name__ == "__main__":
    sys.exit(worker.main())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("action", ["raise ValueError('no')", "os.kill(os.getpid(), 9)"])
def test_failure_in_any_stage_ends_the_run(tmp_path, monkeypatch, capfd, stage, action):
    (tmp_path / "fails_in_stage.py").write_text(FAILS_IN_STAGE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAILING_STAGE", stage)
    monkeypatch.setenv("FAILING_ACTION", f"open('{tmp_path}/failed', 'w').close(); {action}")
    config = claim_folder(RunConfig(stages=tuple(STAGES), size="mini", out=tmp_path / "run"))
    assert launch.launch(config, "fails_in_stage") == 1
    assert time.time() - (tmp_path / "failed").stat().st_mtime < SECONDS_TO_END
    messages = capfd.readouterr().err
    assert "rank 1: ValueError: no" in messages or "rank 1 was killed by SIGKILL" in messages
    folder = RunFolder(tmp_path / "run")
    assert folder.summary["status"] == "incomplete"
    assert [*folder.summary["stages"]] == [*STAGES][: [*STAGES].index(stage)]


#: Starts a child that ends with its parent, prints its process and ends.
LEAVES_A_CHILD = """
import subprocess, sys
code = "import os, time; from llmsys_suite.ranks.failure import end_with_parent;"
code += "end_with_parent(os.getppid()); print('ready', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid)
"""


def test_child_of_a_process_that_has_ended_ends_too():
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_A_CHILD], capture_output=True, text=True, check=True
    )
    child = Path("/proc", done.stdout.strip())
    limit = time.monotonic() + 30
    with suppress(FileNotFoundError):
        while "Z" not in (child / "stat").read_text().split()[2]:
            assert time.monotonic() < limit
            time.sleep(0.05)


def test_learn_on_hosts_without_a_shared_file_system_is_refused(tmp_path):
    config = RunConfig(stages=("plan", "train", "learn", "report"), out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"rank 5 on .* does not see the run folder"):
        worker.require_shared_folder(config, 5)
    worker.require_shared_folder(replace(config, stages=("plan", "report")), 5)
    worker.require_shared_folder(claim_folder(config), 5)


#: Runs as each rank: rank 1 is killed, and rank 0 would work for longer than any test.
KILLED_RANK = """
import os, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
time.sleep(600)
"""
#: Runs as each rank, and works for longer than any test.
WORKING_RANK = """
import os, pathlib, time
pathlib.Path(__file__).with_name("rank" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def launch_program(tmp_path, monkeypatch):
    """Return a function that launches a program as each rank of a run in `tmp_path / "run"`."""

    def run(program):
        (tmp_path / "program_of_rank.py").write_text(program)
        paths = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        monkeypatch.setenv("PYTHONPATH", paths)
        config = claim_folder(
            RunConfig(stages=("links", "report"), size="mini", out=tmp_path / "run")
        )
        return launch.launch(config, "program_of_rank")

    return run


def test_killed_rank_ends_every_rank(launch_program, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("llmsys_suite.ranks.launch.FAILURE_SECONDS", 0.5)
    assert launch_program(KILLED_RANK) == 1
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err
    assert RunFolder(tmp_path / "run").summary["status"] == "incomplete"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_launcher_ends_every_rank(launch_program, tmp_path, number, capfd):
    # The processes of pytest-xdist may ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def send_when_started():
        files = [tmp_path / f"rank{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=send_when_started, daemon=True).start()
    try:
        assert launch_program(WORKING_RANK) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    for rank in range(2):
        process = (tmp_path / f"rank{rank}").read_text()
        assert not Path("/proc", process).exists()
    assert f"the measurements so far are in {tmp_path / 'run'}" in capfd.readouterr().err
    assert RunFolder(tmp_path / "run").summary["status"] == "incomplete"


def test_ranks_that_do_not_end_are_killed_at_one_time(monkeypatch):
    monkeypatch.setattr(launch, "SAVING_SECONDS", 1.0)
    busy = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    command = [sys.executable, "-c", f"{busy}; time.sleep(600)"]
    with ExitStack() as stack:
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
        for rank in ranks:
            stack.enter_context(rank)
            rank.stdout.readline()
        start_time = time.monotonic()
        launch._end(ranks)
        assert time.monotonic() - start_time < 3
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL] * 4


def test_run_is_launched_on_a_thread_that_cannot_handle_signals(launch_program):
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(launch_program, "").result() == 0


def test_interrupt_of_a_run_from_python_is_not_a_failure_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "execute", lambda config: (INTERRUPTED, config.out))
    with pytest.raises(KeyboardInterrupt, match="the measurements so far are in"):
        start.run(RunConfig(out=tmp_path / "run"))


def make_long_config(out):
    """Return the configuration of a run of `train` that takes longer than any test."""
    return RunConfig(
        stages=("plan", "train"), size="mini", rows=2, context=16, steps=10**6, out=out
    )


def call_when_measured(out, action):
    """Start a thread that calls `action` once the run in `out` has measured steps."""

    def wait():
        samples = out / "samples.jsonl"
        while not (samples.exists() and samples.stat().st_size > 2000):
            time.sleep(0.02)
        times.append(time.monotonic())
        action()

    times = []
    threading.Thread(target=wait, daemon=True).start()
    return times


def test_deleted_folder_ends_every_rank(tmp_path):
    out = tmp_path / "run"
    times = call_when_measured(out, lambda: shutil.rmtree(out))
    statuses, messages = launch_ranks(tmp_path, make_long_config(out))
    assert statuses == [1, 1]
    assert "FileNotFoundError" in messages or "was deleted" in messages
    assert len(times) == 1


def test_deleted_folder_ends_a_stage_that_writes_nothing(tmp_path):
    config = RunConfig(stages=("links", "report"), size="mini", out=tmp_path / "run")
    delete = "import shutil; shutil.rmtree(run.out)"
    statuses, messages = launch_ranks(tmp_path, config, (1, delete, "time.sleep(600)"))
    assert statuses == [1, 1]
    assert time.time() - (tmp_path / "messages.failed").stat().st_mtime < 60
    assert f"the run folder {tmp_path / 'run'} was deleted" in messages


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["llmsys", "torchrun"])
def test_deleted_folder_ends_the_launcher_with_status_1(tmp_path, launcher):
    out = tmp_path / "run"
    command = LLMSYS if launcher == "llmsys" else [*TORCHRUN, "-m", "llmsys_suite"]
    process = subprocess.Popen(
        [*command, "run", "train", "--size", "mini", "--steps", "20000", "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    times = call_when_measured(out, lambda: shutil.rmtree(out))
    _, messages = process.communicate(timeout=180)
    assert time.monotonic() - times[0] < SECONDS_TO_END
    assert process.returncode == 1
    assert "FileNotFoundError" in messages or "was deleted" in messages


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_ends_every_rank(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this kernel or its permissions do not allow mounting a tmpfs")
    try:
        statuses, messages = launch_ranks(tmp_path, make_long_config(disk / "run"))
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    assert statuses == [1, 1]
    assert "No space left on device" in messages


def test_watch_of_another_rank_receives_the_first_message(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    received = []
    arrived = threading.Event()

    def receive(message):
        received.append(message)
        arrived.set()

    watch = FailureWatch(store, receive)
    assert report_failure(store, "rank 1: first") == "rank 1: first"
    assert report_failure(store, "rank 0: second") == "rank 1: first"
    assert arrived.wait(10)
    assert received == ["rank 1: first"]
    watch.stop()


def test_lost_store_counts_as_a_failure():
    store = dist.TCPStore("localhost", 0, 1, is_master=True)
    arrived = threading.Event()
    received = []

    def receive(message):
        received.append(message)
        arrived.set()

    watch = FailureWatch(dist.TCPStore("localhost", store.port, 1, is_master=False), receive)
    del store
    assert arrived.wait(60)
    assert "the rendezvous store is lost" in received[0]
    watch.stop()


def test_folder_is_claimed_by_one_run(tmp_path):
    config = RunConfig(out=tmp_path / "run")
    claim_folder(config)
    with pytest.raises(UsageError, match="is not empty; name another folder"):
        claim_folder(config)


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outs = [claim_folder(RunConfig()).out for _ in range(3)]
    assert len({*outs}) == 3
    for out in outs:
        assert RunFolder(out).config.out == out


def test_all_names_that_a_run_tries_are_in_its_refusal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tried = []

    def taken(config, out):
        tried.append(str(out))
        raise FolderTaken("taken")

    monkeypatch.setattr("llmsys_suite.folder._claim", taken)
    with pytest.raises(UsageError) as refused:
        claim_folder(RunConfig())
    assert str(refused.value).startswith(f"{tried[0]} to {tried[-1]} are not empty; name a folder")
    assert len({*tried}) == 99


@pytest.mark.fixed_seed("the module that shifts seeds in child processes imports torch")
def test_many_processes_claim_one_folder_and_one_succeeds(tmp_path):
    code = (
        "import sys; from pathlib import Path; from llmsys_suite.folder import claim_folder;"
        "from llmsys_suite.config import RunConfig; claim_folder(RunConfig(out=Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(4)]
    assert sorted(process.wait(60) for process in processes) == [0, 1, 1, 1]


@pytest.mark.exhaustive
def test_torchrun_ranks_share_the_folder_that_rank_0_claims(tmp_path):
    done = subprocess.run(
        [*TORCHRUN, "-m", "llmsys_suite", "run", "plan", "--size", "mini"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["status"] == "complete"


#: Rank 1 of the first attempt dies, after rank 0 has claimed a folder.
DIES_ONCE = """
import os, threading, time
from pathlib import Path
from llmsys_suite.cli import main

def die():
    while not [*Path("runs").glob("*/env.json")]:
        time.sleep(0.02)
    os._exit(3)

if os.environ["TORCHELASTIC_RESTART_COUNT"] + os.environ["RANK"] == "01":
    threading.Thread(target=die, daemon=True).start()
main()
"""


@pytest.mark.exhaustive
def test_restart_by_torchrun_continues_in_the_folder_of_the_first_attempt(tmp_path):
    (tmp_path / "dies.py").write_text(DIES_ONCE)
    done = subprocess.run(
        [*TORCHRUN, "--max-restarts", "1", "dies.py", "run", "plan", "--size", "mini"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["status"] == "complete"
