"""The pool reports what ranks return, raise, and how they die."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from worker_pool import RankFailed, run_ranks, try_ranks


def sum_of_ranks():
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
    assert [value.item() for value in run_ranks(sum_of_ranks, 3)] == [3.0, 3.0, 3.0]


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
