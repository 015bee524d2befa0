"""Ranks wait for each other without a time limit, and read the same text."""

import os
import pkgutil
import time
from datetime import timedelta
from pathlib import Path

import llmsys_suite
import pytest
import torch
import torch.distributed as dist
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.ranks import worker
from llmsys_suite.ranks.rank import Progress, Run
from llmsys_suite.stages import scale
from llmsys_suite.text.data import load_corpus
from run_folders import create_folder
from worker_pool import run_ranks


def join_run(folder=None, seconds=2):
    """Join a group whose collectives time out after `seconds`."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker.TIMEOUT = timedelta(seconds=seconds)
    config = RunConfig(world=world, out=Path(folder or "."))
    run = Run(
        config=config,
        rank=rank,
        world=world,
        device=torch.device("cpu"),
        corpus=load_corpus(Path(__file__)),
        recorder=Recorder(rank, torch.device("cpu")),
        progress=Progress(enabled=False),
        folder=create_folder(config, {}) if folder and rank == 0 else None,
        store=dist.FileStore(os.environ["STORE_FILE"], world),
    )
    worker.make_group(run)
    return run


def test_no_module_takes_the_place_of_a_public_name():
    modules = {module.name for module in pkgutil.iter_modules(llmsys_suite.__path__)}
    assert not modules & {*llmsys_suite.__all__}


def gather_with_a_slow_rank():
    run = join_run()
    if run.rank == 0:
        time.sleep(2.5)
    return run.gather(run.rank)


def test_a_stage_that_one_rank_works_at_may_outlast_the_timeout_of_collectives():
    assert run_ranks(gather_with_a_slow_rank, 2, backend="") == [[0, 1], [0, 1]]


def refuse_different_texts():
    run = join_run()
    worker.require_same_text(run, "the same")
    with pytest.raises(UsageError, match=r"rank 1 on .* reads another text than rank 0 on"):
        worker.require_same_text(run, f"of rank {run.rank}")


def test_ranks_that_read_different_texts_are_refused():
    run_ranks(refuse_different_texts, 2, backend="")


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_divide_the_runs_of_the_scaling_law_by_their_steps(world):
    planned = scale.plan_runs(RunConfig(world=world))
    assigned = [scale.select_runs(planned, rank, world) for rank in range(world)]
    assert sorted(run for runs in assigned for run in runs) == sorted(planned)
    # The number of steps is proportional to the budget over the parameters.
    steps = [
        sum(budget / (26 * width**2 + 261 * width) for budget, width, _ in runs)
        for runs in assigned
    ]
    assert max(steps) < 1.15 * sum(steps) / world
