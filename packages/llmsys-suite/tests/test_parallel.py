"""A model that is split over ranks trains what one process trains, or is refused."""

import os
from pathlib import Path

import pytest
import torch
from llmsys_suite import splits
from llmsys_suite.audit import reference
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.data import load_corpus
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.ranks.rank import Run
from llmsys_suite.report.progress import Progress
from worker_pool import run_ranks

SHAPE = ModelConfig(d_model=16, d_ff=32, num_layers=4, num_heads=4, context=16)
STEPS = 10
CONFIG = RunConfig(rows=4, context=16, learning_rate=1e-2)


def a_run(config=CONFIG):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cpu = torch.device("cpu")
    return Run(
        config=config,
        rank=rank,
        world=world,
        device=cpu,
        corpus=load_corpus(Path(__file__)),
        recorder=Recorder(rank, cpu),
        progress=Progress(enabled=False),
    )


def far_from_one_process():
    run = a_run()
    trained = []
    for make in splits.SPLITS.values():
        if make.why_not(run, SHAPE):
            continue
        split = make(run, SHAPE)
        trained.append((split.train(run, STEPS), split.weights()))

    torch.manual_seed(CONFIG.seed)
    alone = Decoder(SHAPE)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=CONFIG.learning_rate)
    expected = []
    for step in range(STEPS):
        loss = alone.loss(*run.batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for losses, _ in trained:
        assert losses == pytest.approx(expected, rel=1e-5)
    return [reference.furthest(w, dict(alone.named_parameters()))[0] for _, w in trained]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_split_trains_the_weights_of_one_process(world):
    for distances in run_ranks(far_from_one_process, world):
        # Adam divides rounding by the size of small gradients; a wrong one moves weights by 5e-2.
        assert max(distances) < 1e-3


@pytest.mark.parametrize(
    ("make", "change", "complaint"),
    [
        (splits.TensorModel, {"num_heads": 1}, "num_heads 1 does not split over 2 ranks"),
        (splits.TensorModel, {"d_ff": 33}, "d_ff 33 does not split over 2 ranks"),
        (splits.SequenceModel, {"context": 15}, "context 15 does not split over 2 ranks"),
        (splits.DataTensorModel, {}, "2 ranks make no two pairs"),
        (splits.PipelineModel, {"num_layers": 1}, "1 layers do not make 2 stages"),
        (splits.Interleaved, {"num_layers": 3}, "3 layers do not make 4 stages"),
    ],
)
def test_what_does_not_split_is_refused(monkeypatch, make, change, complaint):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=complaint):
        make(a_run(), ModelConfig(**{**vars(SHAPE), **change}))
