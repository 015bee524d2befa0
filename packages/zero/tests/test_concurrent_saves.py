"""Several jobs that save to one path or load from it, and saves that are killed at any point."""

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worker_pool import run_on_shared_ranks, run_ranks, try_ranks
from zero import FSDP, diagnostics, load_checkpoint, save_checkpoint
from zero.checkpoint import draft, storage
from zero.checkpoint.draft import PathLock

DEADLINE = 300.0


def build_filled_model(value, group=None):
    model = FSDP(nn.Linear(40, 30), group=group)
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def get_values(model):
    return torch.cat([p.reshape(-1) for p in model.gather_full_params().values()]).unique().tolist()


def create_job_groups():
    """Return this rank's job and process group, for two jobs of two ranks each."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = dist.get_rank() // 2
    return job, groups[job]


def save_at_once(path, rounds):
    """Save to one path from both jobs repeatedly; the first job loads between rounds."""
    job, group = create_job_groups()
    model, other = build_filled_model(1.0 + job, group), build_filled_model(0.0, group)
    draw, saved = random.Random(job), 0
    for _ in range(rounds):
        dist.barrier()
        time.sleep(draw.random() * 0.01)
        try:
            save_checkpoint(path, model, group=group)
            saved += 1
        except RuntimeError as error:
            if "is being saved to by" not in str(error):
                raise
        dist.barrier()
        if job == 0:
            load_checkpoint(path, other, group=group)
            assert get_values(other) in ([1.0], [2.0])
    return saved


def test_two_jobs_that_save_to_one_path_never_mix_their_files(tmp_path):
    saved = run_on_shared_ranks(save_at_once, 4, str(tmp_path / "last"), 12, timeout=DEADLINE)
    # In each round at least one of the two jobs saves.
    assert saved[0] + saved[2] >= 12
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last"]


def refuse_the_second(path):
    """Check that a save in progress locks its path only."""
    job, group = create_job_groups()
    model = build_filled_model(1.0 + job, group)
    link = Path(path).with_name("link")
    if dist.get_rank() == 0:
        link.symlink_to(path)
    dist.barrier()
    lock = PathLock(Path(path))
    if dist.get_rank() == 0:
        lock.acquire()
    dist.barrier()
    if job == 1:
        for target in (path, link):
            with pytest.raises(RuntimeError, match="is being saved to by process"):
                save_checkpoint(target, model, group=group)
        save_checkpoint(f"{path}-other", model, group=group)
    dist.barrier()
    lock.release()
    if job == 0:
        save_checkpoint(path, model, group=group)
        load_checkpoint(path, model, group=group)
        assert get_values(model) == [1.0]
    dist.barrier()
    if job == 1:
        save_checkpoint(path, model, group=group)
        load_checkpoint(path, model, group=group)
        assert get_values(model) == [2.0]
    return True


def test_the_second_of_two_jobs_is_refused_until_the_first_is_done(tmp_path):
    assert all(run_on_shared_ranks(refuse_the_second, 4, str(tmp_path / "last"), timeout=DEADLINE))
    assert not list(tmp_path.glob(".*"))


def save_without_locks(path):
    def flock(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    draft.fcntl.flock = flock
    with pytest.raises(RuntimeError, match=r"cannot be locked \(No locks available\), so"):
        save_checkpoint(path, build_filled_model(1.0))
    return True


def test_a_file_system_without_locks_is_refused(tmp_path):
    assert all(run_ranks(save_without_locks, 2, str(tmp_path / "last"), timeout=DEADLINE))
    assert not (tmp_path / "last").exists()


def save_on_separate_disks(path):
    """Save on ranks that see different folders under one path, like hosts without a shared disk."""
    save_one(path, 1.0)
    if dist.get_rank() == 1:
        storage.build_draft_path = lambda path, token: Path(f"{path}-of-host-1", token)
    with pytest.raises(RuntimeError, match=r"rank 1: .*save to a file system that all hosts share"):
        save_checkpoint(path, build_filled_model(2.0))
    return load_one(path)


def test_a_file_system_that_not_all_ranks_share_is_refused(tmp_path):
    path = str(tmp_path / "last")
    assert run_ranks(save_on_separate_disks, 2, path, timeout=DEADLINE) == [[1.0]] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_a_lock_file_that_its_holder_removed_is_not_locked(tmp_path):
    first, second = PathLock(tmp_path / "last"), PathLock(tmp_path / "last")
    first.acquire()
    real_open = os.open

    def release_between(*args):
        handle = real_open(*args)
        first.release()
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", release_between)
        second.acquire()
    third = PathLock(tmp_path / "last")
    with pytest.raises(RuntimeError, match="is being saved to"):
        third.acquire()
    second.release()
    third.acquire()
    third.release()
    assert not list(tmp_path.iterdir())


def test_a_lock_is_released_even_if_its_file_cannot_be_removed(tmp_path):
    lock = PathLock(tmp_path / "last")
    lock.acquire()

    def unlink(*args, **kwargs):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        lock.release()
    lock.acquire()
    lock.release()
    assert not list(tmp_path.iterdir())


KILLED_AT = ("before writing", "after writing", "between the renames", "before the clean-up")


def save_and_die(path, moment):
    """Save; then die at a moment of a second save."""
    save_one(path, 1.0)
    Path(path, "notes.txt").write_text("mine")
    model = build_filled_model(2.0)
    # No other survivor sends a report that could be waited for.
    diagnostics.GRACE_SECONDS = 0.1
    if dist.get_rank() == 0:
        rename = Path.rename

        def rename_and_die(file, target):
            rename(file, target)
            if target == draft.build_previous_path(Path(path)) and moment == KILLED_AT[2]:
                os._exit(3)
            if target == Path(path) and moment == KILLED_AT[3]:
                os._exit(3)
            return Path(target)

        Path.rename = rename_and_die
        if moment == KILLED_AT[0]:
            storage.FileSystemWriter.write_data = lambda *arguments: os._exit(3)
        if moment == KILLED_AT[1]:
            storage._publish = lambda *arguments: os._exit(3)
    save_checkpoint(path, model)


def save_one(path, value):
    save_checkpoint(path, build_filled_model(value))


def load_one(path):
    model = build_filled_model(0.0)
    load_checkpoint(path, model)
    return get_values(model)


def load_and_save(path):
    """Return the values before and after another save."""
    before = load_one(path)
    save_one(path, 3.0)
    return [before, load_one(path)]


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=[] if "renames" in moment else [pytest.mark.exhaustive])
        for moment in KILLED_AT
    ],
)
def test_a_save_that_is_killed_leaves_a_whole_checkpoint_and_no_lock(tmp_path, moment):
    path = tmp_path / "last"
    assert try_ranks(save_and_die, 2, str(path), moment, timeout=DEADLINE)[0].exit_code == 3
    expected = [2.0] if moment == KILLED_AT[3] else [1.0]
    assert (
        run_on_shared_ranks(load_and_save, 2, str(path), timeout=DEADLINE)
        == [[expected, [3.0]]] * 2
    )
    assert (path / "notes.txt").read_text() == "mine"
    # The next save removes the files of the killed one.
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


SYSTEM_CALLS = "%file,%desc"
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EIO")
POINTS = 200
# Files that do not exist: the calls that ask for them enclose the calls of a save in a log.
MARKS = "/a-save-starts", "/a-save-ended"


def save_traced(path, rank, injections, log):
    """Save while strace injects faults into the system calls of one rank."""
    model = build_filled_model(2.0)
    # No other survivor sends a report that could be waited for.
    diagnostics.GRACE_SECONDS = 0.1
    # A signal ends the wait of the traced rank, because waiting by a traced system call would make
    # the numbers of the calls depend on timing.
    is_traced = []
    signal.signal(signal.SIGUSR1, lambda *_: is_traced.append(True))
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == rank:
        while not is_traced:
            time.sleep(0.01)
    else:
        command = ["strace", "-f", "-o", log, "-e", f"trace={SYSTEM_CALLS}"]
        for injection in injections:
            command += ["-e", f"inject={injection}"]
        tracer = subprocess.Popen([*command, "-p", str(pids[rank])], stderr=subprocess.PIPE)
        assert b"attached" in tracer.stderr.readline()
        os.kill(pids[rank], signal.SIGUSR1)
    os.path.exists(MARKS[0])
    save_checkpoint(path, model)
    os.path.exists(MARKS[1])


def list_calls(log):
    """Return the system calls of the thread that saves, and the numbers of those of the save."""
    calls = {}
    for line in log.read_text().splitlines():
        thread, call = line.split(None, 1)
        if "(" in call and "resumed" not in call:
            calls.setdefault(thread, []).append(call)
    [calls] = [lines for lines in calls.values() if any(MARKS[0] in line for line in lines)]
    first, last = (next(i for i, line in enumerate(calls) if mark in line) for mark in MARKS)
    return [call.split("(")[0] for call in calls], range(first + 1, last)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("fault", ["kill", "error"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_at_any_system_call_of_a_save_leaves_a_whole_checkpoint(tmp_path, fault, rank):
    good = tmp_path / "good"
    path = tmp_path / "run" / "last"
    log = tmp_path / "log"
    run_ranks(save_one, 2, str(good), 1.0, timeout=DEADLINE)
    shutil.copytree(good, path)
    run_ranks(save_traced, 2, str(path), rank, [], str(log), timeout=DEADLINE)
    calls, of_the_save = list_calls(log)
    assert len(of_the_save) > 50
    loaded = {1.0: 0, 2.0: 0}
    for point in of_the_save[:: max(1, len(of_the_save) // POINTS)]:
        shutil.rmtree(path.parent)
        shutil.copytree(good, path)
        effect = "signal=KILL" if fault == "kill" else f"error={ERRORS[point % len(ERRORS)]}"
        name = calls[point]
        # strace counts each injection's calls per name.
        when = calls[: point + 1].count(name)
        injections = [f"{name}:{effect}:when={when}"]
        outcomes = try_ranks(
            save_traced, 2, str(path), rank, injections, str(log), timeout=DEADLINE
        )
        [value] = run_ranks(load_one, 1, str(path), timeout=DEADLINE)[0]
        loaded[value] += 1
        messages = [str(outcome.error) for outcome in outcomes if outcome.error]
        if fault == "error" and value == 1.0:
            assert messages, (point, name)
        for message in messages:
            assert "was not saved" in message or "was saved, but then" in message, message
    # Some calls come after the renames, or are not needed.
    assert loaded[1.0] > 10, loaded


def replace_while_loading(path):
    """Load a checkpoint that another job replaces after the load has checked it."""
    from zero.checkpoint.loading import Loading

    save_one(path, 1.0)
    save_one(f"{path}-new", 2.0)
    fill = Loading.fill

    def replace_then_fill(self):
        if dist.get_rank() == 0:
            os.rename(path, f"{path}-old")
            os.rename(f"{path}-new", path)
        dist.barrier()
        fill(self)

    Loading.fill = replace_then_fill
    with pytest.raises(RuntimeError, match="another job replaced the checkpoint while it was"):
        load_checkpoint(path, build_filled_model(0.0))
    return True


def test_a_checkpoint_that_is_replaced_during_a_load_is_refused(tmp_path):
    assert all(run_ranks(replace_while_loading, 2, str(tmp_path / "last"), timeout=DEADLINE))


def load_different(folder):
    for rank in range(2):
        save_one(f"{folder}/rank{rank}", 1.0 + rank)
    path = Path(folder) / f"rank{dist.get_rank()}"
    with pytest.raises(RuntimeError, match="ranks read different checkpoints"):
        load_checkpoint(path, build_filled_model(0.0))
    return True


def test_ranks_that_find_different_checkpoints_are_refused(tmp_path):
    assert all(run_on_shared_ranks(load_different, 2, str(tmp_path), timeout=DEADLINE))
