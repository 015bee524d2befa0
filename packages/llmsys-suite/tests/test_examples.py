"""Each launch script of examples/ trains the same model on the same batches to the same loss."""

import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from scaling import sweep_learning_rate
from worker_pool import run_on_shared_ranks

FOLDER = Path(__file__).parents[1] / "examples"
RATES = FOLDER / "learning_rate.py"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path != RATES)


def read_last_losses(*scripts: str) -> list[float]:
    losses = []
    for script in scripts:
        main = runpy.run_path(script)["main"]
        main.__globals__["STEPS"] = 3
        losses.append(main())
    return losses


@pytest.fixture(scope="module")
def alone() -> float:
    """Return the loss of one process, from the simplest script."""
    ((loss,),) = run_on_shared_ranks(read_last_losses, 1, str(FOLDER / "naive_data_parallel.py"))
    return loss


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[Path, list[float]]:
    """Return the losses of both ranks from each script; the same two processes run them all."""
    ranks = run_on_shared_ranks(read_last_losses, 2, *map(str, EXAMPLES))
    return dict(zip(EXAMPLES, zip(*ranks, strict=True), strict=True))


def test_there_is_one_for_each_parallelism():
    assert [path.stem for path in EXAMPLES] == [
        "fully_sharded",
        "naive_data_parallel",
        "overlapped_data_parallel",
        "pipeline",
        "tensor_parallel",
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_two_ranks_train_as_one_process_does(example, on_two_ranks, alone):
    for loss in on_two_ranks[example]:
        assert loss == pytest.approx(alone, rel=1e-4)


def test_the_language_model_is_a_task_of_a_sweep():
    final_loss = partial(runpy.run_path(str(RATES))["final_loss"], steps=20)
    sweep = sweep_learning_rate(final_loss, rates=[1e-4, 1e-2, 3.0], batch_sizes=[4])
    assert sweep.best_rates[0] == pytest.approx(1e-2, rel=0.9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_alone_and_under_torchrun(example):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for command in ([sys.executable], [*torchrun, "--nproc-per-node", "2"]):
        done = subprocess.run(
            [*command, example], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "s per step, loss" in done.stdout
