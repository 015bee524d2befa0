"""Ranks wait for each other as long as it takes; a stage that fails does not end the others."""

import os
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from llmsys_suite import worker
from llmsys_suite.config import RunConfig
from llmsys_suite.data import load_corpus
from llmsys_suite.folder import RunFolder
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.report.progress import Progress
from llmsys_suite.run import Run
from llmsys_suite.stages import attention, links, memory
from worker_pool import run_ranks


def a_run(folder=None, seconds=2):
    """This rank's place in a group whose collectives end after so many seconds."""
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
        folder=RunFolder.create(config, {}) if folder and rank == 0 else None,
        store=dist.FileStore(os.environ["STORE_FILE"], world),
    )
    worker.make_group(run)
    return run


def gather_with_a_slow_rank():
    run = a_run()
    if run.rank == 0:
        time.sleep(5)
    return run.gather(run.rank)


def test_a_stage_that_one_rank_works_at_may_outlast_the_timeout_of_collectives():
    assert run_ranks(gather_with_a_slow_rank, 2, backend="") == [[0, 1], [0, 1]]


def summed(run):
    total = torch.ones(1)
    dist.all_reduce(total)
    return {"sum": float(total)}


def stages_of_which_one_fails(folder, where, failing):
    # A busy machine may need some of them to make the next stage's group.
    run = a_run(folder, seconds=8)

    def fails(run):
        if run.rank == failing:
            raise ValueError("no such thing")
        if where == "in a collective":
            return summed(run)
        return {}

    with mock.patch.object(links, "run", fails), mock.patch.object(attention, "run", summed):
        worker.try_stage(run, "links")
        worker.try_stage(run, "attention")
    return run.results, run.failures


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["alone", "in a collective"])
def test_a_stage_that_fails_is_recorded_and_the_next_goes_on(tmp_path, where, failing):
    ranks = run_ranks(
        stages_of_which_one_fails, 2, str(tmp_path / "run"), where, failing, backend=""
    )
    for results, failures in ranks:
        assert results["links"]["failed"] == f"rank {failing}: ValueError: no such thing"
        assert results["attention"]["sum"] == 2.0
        assert failures == 1
    kept = RunFolder(tmp_path / "run").summary["stages"]
    assert kept["links"]["failed"] == f"rank {failing}: ValueError: no such thing"
    assert kept["attention"]["sum"] == 2.0


def a_stage_that_needs_one_that_failed():
    run = a_run()
    with mock.patch.object(links, "run", side_effect=ValueError("broken")):
        worker.try_stage(run, "links")
    with (
        mock.patch.dict(worker.STAGES, {"memory": ("links",)}),
        mock.patch.object(memory, "run", side_effect=AssertionError("it ran")),
    ):
        worker.try_stage(run, "memory")
    return run.results["memory"]["failed"], run.failures


def test_what_needs_a_stage_that_failed_says_so():
    assert (
        run_ranks(a_stage_that_needs_one_that_failed, 2, backend="")
        == [("it needs links, which failed", 1)] * 2
    )
