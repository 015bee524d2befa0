"""The tolerances are a few times what honest runs show over seeds: neither less nor far more."""

import os
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from llmsys_suite.audit import inputs, probe, reference, tolerances
from llmsys_suite.config import RunConfig
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.ranks import worker
from llmsys_suite.ranks.rank import Progress, Run
from llmsys_suite.text.data import load_corpus
from llmsys_suite.variants import VARIANTS
from llmsys_suite.variants.initial_weights import build_seeded_model
from worker_pool import run_ranks

STEPS = 5


def measure_distances(seeds):
    """Return the largest distances over seeds: gradients, losses, and weight changes by Adam."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker.TIMEOUT = timedelta(minutes=5)
    largest = {"gradient": 0.0, "loss": 0.0, "moved": 0.0}
    run = None
    for seed in seeds:
        config = RunConfig(size="mini", rows=8, context=32, world=world, seed=seed)
        if run is None:
            run = Run(
                config=config,
                rank=rank,
                world=world,
                device=torch.device("cpu"),
                corpus=load_corpus(),
                recorder=Recorder(rank, torch.device("cpu")),
                progress=Progress(enabled=False),
                store=dist.FileStore(os.environ["STORE_FILE"], world),
            )
            worker.make_group(run)
        run.config = config
        for probed in probe.probe(run).values():
            for distance, _ in probed["weights"]:
                largest["gradient"] = max(largest["gradient"], distance)
        model, batch = build_seeded_model(run, run.model), run.draw_batch(0)
        exact = reference.compute_mean_loss(
            inputs.get_float64_parameters(model), *batch, run.model.num_heads
        )
        with torch.no_grad():
            largest["loss"] = max(
                largest["loss"], abs(float(model.compute_loss(*batch)) / exact - 1)
            )
        largest["moved"] = max(largest["moved"], measure_weight_changes(run))
    return largest


def measure_weight_changes(run):
    """Return the distance of the weight changes by Adam on two ranks from those on one."""
    start = probe.draw_initial_weights(run)
    ends = []
    for name in ("single process", "ddp flat"):
        variant = VARIANTS[name](run, run.model)
        rank, world = (0, 1) if variant.alone else (run.rank, run.world)
        for step in range(STEPS):
            batch = partial(
                run.corpus.draw_batch, rows=8, context=32, seed=run.config.seed, step=step
            )
            variant.step(*batch(rank=rank, world=world))
        ends.append(
            {n: w.double() - start[n].double() for n, w in variant.gather_weights().items()}
        )
    return reference.find_largest_distance(ends[1], ends[0])[0]


def assert_between(seeds):
    for largest in run_ranks(measure_distances, 2, seeds, backend="", timeout=60 + 20 * len(seeds)):
        assert tolerances.GRADIENT / 50 < largest["gradient"] < tolerances.GRADIENT / 2
        assert tolerances.REPLAYED_LOSS / 100 < largest["loss"] < tolerances.REPLAYED_LOSS / 2
        assert largest["moved"] < tolerances.WEIGHT_CHANGE * STEPS**0.5 / 2


@pytest.mark.fixed_seed("the independent sampler has its own generator")
def test_tolerances_are_a_few_times_the_honest_distance():
    assert_between(range(1))


@pytest.mark.exhaustive
def test_tolerances_are_a_few_times_the_honest_distance_over_many_seeds():
    assert_between(range(1, 60))
