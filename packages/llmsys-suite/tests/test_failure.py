"""A failure on any rank ends the whole run, and two runs never share a folder."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.folder import RunFolder, claim
from llmsys_suite.ranks.failure import FailureWatch, report_failure

LLMSYS = [sys.executable, "-m", "llmsys_suite"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SECONDS_TO_END = 20.0

#: Runs the command line with a stage `links` that fails on one rank while the others wait in it.
FAILING_STAGE = """
import os, sys, time
import torch, torch.distributed as dist
from llmsys_suite.ranks import worker
from llmsys_suite.stages import links

def run(run):
    if run.rank == {rank}:
        time.sleep(0.5)
        {action}
    {others}

links.run = run
if __name__ == "__main__":
    sys.exit(worker.main())
"""


def launch_failing_stage(tmp_path, monkeypatch, capfd, *, rank, action, others):
    """Launch two ranks whose stage `links` fails; return seconds, status, messages and folder."""
    from llmsys_suite.ranks import launch

    (tmp_path / "failing_stage.py").write_text(
        FAILING_STAGE.format(rank=rank, action=action, others=others)
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    config = claim(RunConfig(stages=("links", "report"), size="mini", out=tmp_path / "run"))
    start = time.monotonic()
    status = launch.launch(config, "failing_stage")
    return time.monotonic() - start, status, capfd.readouterr().err, RunFolder(tmp_path / "run")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "others",
    ["dist.all_reduce(torch.ones(1))", "run.wait_for_ranks()", "time.sleep(600)"],
    ids=["in a collective", "at a meeting of all ranks", "in work of its own"],
)
def test_exception_on_one_rank_ends_every_rank(tmp_path, monkeypatch, capfd, rank, others):
    seconds, status, messages, folder = launch_failing_stage(
        tmp_path, monkeypatch, capfd, rank=rank, action="raise ValueError('no')", others=others
    )
    assert status == 1
    assert seconds < SECONDS_TO_END
    assert f"rank {rank}: ValueError: no" in messages
    assert folder.summary["status"] == "incomplete"
    assert folder.failure == ("links", f"rank {rank}: ValueError: no")


def test_killed_rank_ends_every_rank(tmp_path, monkeypatch, capfd):
    seconds, status, messages, folder = launch_failing_stage(
        tmp_path,
        monkeypatch,
        capfd,
        rank=1,
        action="os.kill(os.getpid(), 9)",
        others="run.wait_for_ranks()",
    )
    assert status == 1
    assert seconds < SECONDS_TO_END
    assert "rank 1 was killed by SIGKILL" in messages
    assert folder.summary["status"] == "incomplete"


def started(command, out):
    """Start a run of the stage `train` and return it once it has measured steps."""
    process = subprocess.Popen(
        [*command, "run", "train", "--size", "mini", "--steps", "2000", "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    samples = out / "samples.jsonl"
    deadline = time.monotonic() + 120
    while not (samples.exists() and samples.stat().st_size > 2000):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    return process


@pytest.mark.parametrize("launcher", ["llmsys", "torchrun"])
def test_deleted_folder_ends_the_run_with_status_1(tmp_path, launcher):
    out = tmp_path / "run"
    command = LLMSYS if launcher == "llmsys" else [*TORCHRUN, "-m", "llmsys_suite"]
    process = started(command, out)
    shutil.rmtree(out)
    start = time.monotonic()
    _, messages = process.communicate(timeout=SECONDS_TO_END)
    assert time.monotonic() - start < SECONDS_TO_END
    assert process.returncode == 1
    assert "FileNotFoundError" in messages


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_ends_the_run_with_status_1(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this kernel or its rights do not allow to mount a tmpfs")
    try:
        process = started(LLMSYS, disk / "run")
        _, messages = process.communicate(timeout=60)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    assert process.returncode == 1
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
    claim(config)
    with pytest.raises(UsageError, match="belongs to another run; name another folder"):
        claim(config)


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outs = [claim(RunConfig()).out for _ in range(3)]
    assert len({*outs}) == 3
    for out in outs:
        assert RunFolder(out).config.out == out


def test_many_processes_claim_one_folder_and_one_succeeds(tmp_path):
    code = (
        "import sys; from pathlib import Path; from llmsys_suite.folder import claim;"
        "from llmsys_suite.config import RunConfig; claim(RunConfig(out=Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(8)]
    assert sorted(process.wait(60) for process in processes) == [0, *[1] * 7]


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
