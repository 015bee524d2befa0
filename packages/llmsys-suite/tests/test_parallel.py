"""A model that is split over ranks trains what one process trains, or is refused."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llmsys_suite import splits
from llmsys_suite.audit import reference
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.ranks.progress import Progress
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import parallel
from llmsys_suite.text.data import load_corpus
from llmsys_suite.variants.three_dimensional import ThreeDimensional
from worker_pool import run_ranks

SHAPE = ModelConfig(d_model=16, d_ff=32, num_layers=4, num_heads=4, context=16)
STEPS = 10
CONFIG = RunConfig(world=2, rows=4, context=16, learning_rate=1e-2)


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


def test_groups_of_ranks_are_as_large_as_the_heads_allow(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for world, heads, size in ((8, 12, 4), (4, 4, 2), (8, 8, 4), (6, 12, 3), (4, 25, 1), (1, 4, 1)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        shape = ModelConfig(d_model=2 * heads, d_ff=96, num_layers=2, num_heads=heads)
        assert splits.DataTensorModel.group_size(a_run(), shape) == size


def test_reference_loss_takes_the_rows_of_one_rank_at_a_time(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    run, seen = a_run(RunConfig(size="mini", rows=4, context=16)), []
    original = Decoder.forward

    def forward(self, tokens):
        assert not torch.is_grad_enabled()
        seen.append(len(tokens))
        return original(self, tokens)

    batch = run.batch(0)
    torch.manual_seed(run.config.seed)
    expected = float(Decoder(run.model).loss(*batch).detach())
    monkeypatch.setattr(Decoder, "forward", forward)
    assert parallel.single_loss(run, *batch) == pytest.approx(expected, rel=1e-6)
    assert seen == [2, 2]


def split_in_three_dimensions(run, options):
    run = a_run(replace(run.config, **options))
    trained = ThreeDimensional(run, SHAPE)
    losses = [trained.step(*run.batch(step)) for step in range(STEPS)]
    return losses, trained.weights()


def far_from_one_process():
    run = a_run()
    trained = []
    for make in splits.SPLITS.values():
        if make.why_not(run, SHAPE):
            continue
        split = make(run, SHAPE)
        trained.append((split.train(run, STEPS), split.weights()))

    if run.world == 2:
        trained += [
            split_in_three_dimensions(run, grid) for grid in ({"tensor": 2}, {"pipeline": 2})
        ]

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
        (splits.DataTensorModel, {}, "2 ranks do not make groups that split 4 heads"),
        (splits.PipelineModel, {"num_layers": 1}, "1 layers do not make 2 stages"),
        (splits.Interleaved, {"num_layers": 3}, "3 layers do not make 4 stages"),
    ],
)
def test_what_does_not_split_is_refused(monkeypatch, make, change, complaint):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=complaint):
        make(a_run(), ModelConfig(**{**vars(SHAPE), **change}))
