"""A model that is split over ranks trains as in one process, or raises an error."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llmsys_suite.audit import reference
from llmsys_suite.config import (
    Layout,
    RunConfig,
    UsageError,
    build_possible_layouts,
    find_group_size,
)
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.ranks.rank import Progress, Run
from llmsys_suite.splits.split_model import SplitModel
from llmsys_suite.stages import parallel
from llmsys_suite.text.data import load_corpus
from worker_pool import run_ranks

SHAPE = ModelConfig(d_model=16, d_ff=32, num_layers=4, num_heads=4, context=16)
STEPS = 4
CONFIG = RunConfig(world=2, rows=4, context=16, learning_rate=1e-2)


def make_run(config=CONFIG):
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


def test_groups_of_ranks_are_as_large_as_the_heads_allow():
    for world, heads, size in ((8, 12, 4), (4, 4, 2), (8, 8, 4), (6, 12, 3), (4, 25, 1), (1, 4, 1)):
        shape = ModelConfig(d_model=2 * heads, d_ff=96, num_layers=2, num_heads=heads)
        assert find_group_size(shape, world) == size


def test_reference_loss_takes_the_rows_of_one_rank_at_a_time(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    run, seen = make_run(RunConfig(size="mini", rows=4, context=16)), []
    original = Decoder.forward

    def forward(self, tokens):
        assert not torch.is_grad_enabled()
        seen.append(len(tokens))
        return original(self, tokens)

    batch = run.draw_batch(0)
    torch.manual_seed(run.config.seed)
    expected = float(Decoder(run.model).compute_loss(*batch).detach())
    monkeypatch.setattr(Decoder, "forward", forward)
    assert parallel.compute_single_loss(run, *batch) == pytest.approx(expected, rel=1e-6)
    assert seen == [2, 2]


def measure_distance_from_one_process():
    run = make_run()
    trained = []
    for layout in build_possible_layouts(SHAPE, run.world, CONFIG.rows).values():
        split = SplitModel(run, SHAPE, layout)
        losses = [
            parallel.average_over_ranks(run, split.step(*split.draw_batch(step)))
            for step in range(STEPS)
        ]
        trained.append((losses, split.gather_weights()))

    torch.manual_seed(CONFIG.seed)
    alone = Decoder(SHAPE)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=CONFIG.learning_rate)
    expected = []
    for step in range(STEPS):
        loss = alone.compute_loss(*run.draw_batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for losses, _ in trained:
        assert losses == pytest.approx(expected, rel=1e-5)
    return [
        reference.find_largest_distance(w, dict(alone.named_parameters()))[0] for _, w in trained
    ]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_split_trains_the_weights_of_one_process(world):
    for distances in run_ranks(measure_distance_from_one_process, world):
        # Adam divides rounding by the size of small gradients, which enlarges it.
        assert max(distances) < 1e-3


def test_microbatches_are_whole_rows_for_any_number_of_rows():
    for rows in range(1, 20):
        for ranks in (2, 3, 4):
            count = Layout(pipeline=ranks).count_microbatches(rows)
            assert rows % count == 0
            assert count == rows or count >= ranks


@pytest.mark.parametrize(
    ("layout", "change", "complaint"),
    [
        (Layout(tensor=2), {"num_heads": 1}, "num_heads 1 is not a multiple of 2"),
        (Layout(tensor=2), {"d_ff": 33}, "d_ff 33 is not a multiple of 2"),
        (Layout(data=3), {}, "4 rows are not a multiple of 3 replicas"),
        (Layout(pipeline=2), {"num_layers": 1}, "1 layers do not split into 2 pipeline stages"),
    ],
)
def test_models_that_cannot_be_split_are_refused(monkeypatch, layout, change, complaint):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=complaint):
        SplitModel(make_run(), replace(SHAPE, **change), layout)
