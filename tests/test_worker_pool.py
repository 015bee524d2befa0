"""The pool reports what ranks return, raise, and how they die."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worker_pool import (
    RankFailed,
    case_folder,
    close_shared_ranks,
    run_on_shared_ranks,
    run_ranks,
    try_ranks,
)


def sum_ranks():
    tensor = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor


def fail_on_rank_one(how):
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("seven")
        os._exit(3)
    return "fine"


def sleep_a_minute():
    time.sleep(60)


def test_values_come_back_by_rank():
    assert [value.item() for value in run_ranks(sum_ranks, 3)] == [3.0, 3.0, 3.0]


def test_an_exception_is_raised_with_its_traceback():
    with pytest.raises(RankFailed, match=r"rank 1(.|\n)*ValueError: seven"):
        run_ranks(fail_on_rank_one, 2, "raise")


def test_a_death_is_reported_with_its_exit_code():
    good, bad = try_ranks(fail_on_rank_one, 2, "die")
    assert good.value == "fine"
    assert bad.exit_code == 3


def test_a_hang_ends_at_the_timeout():
    start = time.monotonic()
    # Without a process group, which two ranks might not have set up by then.
    (outcome,) = try_ranks(sleep_a_minute, 1, timeout=0.3, backend="")
    assert outcome.exit_code == -9
    assert time.monotonic() - start < 30


def describe_process(values):
    """Return the process, the sum over the ranks, a random number and an attribute's values."""
    values_of_module = globals().setdefault("seen_values", [])
    values_of_module.extend(values)
    return os.getpid(), sum_ranks().item(), torch.rand(1).item(), values_of_module


def write_file():
    """Return the folder of a file that this rank writes."""
    Path(case_folder(), str(dist.get_rank())).touch()
    return case_folder()


def test_shared_ranks_serve_many_calls_in_new_process_groups():
    first = run_on_shared_ranks(describe_process, 2, [1])
    second = run_on_shared_ranks(describe_process, 2, [2])
    # The processes and their modules stay; random numbers are those of a new process.
    assert [(*of_first[:3], [1, 2]) for of_first in first] == second
    assert first[0][2] == first[1][2] == run_ranks(describe_process, 1, [])[0][2]
    folder, same_folder = run_on_shared_ranks(write_file, 2)
    assert folder == same_folder
    assert not Path(folder).exists()


def test_calls_with_more_and_fewer_ranks_share_processes():
    pids_of_two = [pid for pid, *_ in run_on_shared_ranks(describe_process, 2, [])]
    three_results = run_on_shared_ranks(describe_process, 3, [])
    assert [pid for pid, *_ in three_results[:2]] == pids_of_two
    assert [total for _, total, *_ in three_results] == [3.0] * 3
    assert run_on_shared_ranks(describe_process, 1, [])[0][:2] == (pids_of_two[0], 0.0)


def test_shared_ranks_are_new_after_a_failure():
    pids = [pid for pid, *_ in run_on_shared_ranks(describe_process, 2, [])]
    with pytest.raises(RankFailed, match=r"rank 1(.|\n)*ValueError: seven"):
        run_on_shared_ranks(fail_on_rank_one, 2, "raise")
    after = run_on_shared_ranks(describe_process, 2, [3])
    assert [(total, seen) for _, total, _, seen in after] == [(1.0, [3])] * 2
    assert not {pid for pid, *_ in after}.intersection(pids)
    close_shared_ranks()
    after_close = run_on_shared_ranks(describe_process, 2, [])
    assert [seen for *_, seen in after_close] == [[]] * 2


def test_rank_that_hangs_is_reported_with_its_stack():
    # On a busy machine, the start of the rank and of its process group may take longer.
    run_on_shared_ranks(describe_process, 1, [])
    with pytest.raises(RankFailed, match=r"rank 0: still running after 2 s(.|\n)*sleep_a_minute"):
        run_on_shared_ranks(sleep_a_minute, 1, timeout=2, backend="")
