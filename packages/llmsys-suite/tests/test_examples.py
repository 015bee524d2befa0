"""Each launch script of examples/ trains the same model on the same batches to the same loss."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from worker_pool import run_ranks

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def last_loss(script: str) -> float:
    return runpy.run_path(script)["main"]()


@pytest.fixture(scope="module")
def alone() -> float:
    """The loss of one process, by the script that does least."""
    (loss,) = run_ranks(last_loss, 1, str(EXAMPLES[0].parent / "naive_data_parallel.py"))
    return loss


def test_there_is_one_for_each_parallelism():
    assert [path.stem for path in EXAMPLES] == [
        "fully_sharded",
        "naive_data_parallel",
        "overlapped_data_parallel",
        "pipeline",
        "tensor_parallel",
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_two_ranks_train_as_one_process_does(example, alone):
    for loss in run_ranks(last_loss, 2, str(example)):
        assert loss == pytest.approx(alone, rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_alone_and_under_torchrun(example):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for command in ([sys.executable], [*torchrun, "--nproc-per-node", "2"]):
        done = subprocess.run(
            [*command, example], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "s a step, loss" in done.stdout
