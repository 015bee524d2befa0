"""The cost of measuring, and measured peaks of memory."""

import resource
import statistics
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from figures import assert_at_most, select_by_avx512
from llmsys_suite import environment
from llmsys_suite.config import RunConfig
from llmsys_suite.folder import RunFolder
from llmsys_suite.measure import clocks, network
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.measure.samples import CORE_WAIT, SINGLE, compute_needed_seconds
from llmsys_suite.ranks.rank import Progress, Run
from llmsys_suite.stages import train
from llmsys_suite.stages.train import _train, count_received, take_timed_step
from llmsys_suite.text.data import load_corpus
from llmsys_suite.variants import VARIANTS
from llmsys_suite.variants.initial_weights import draw_initial_weights
from llmsys_suite.variants.single import Variant
from run_folders import create_folder
from worker_pool import run_on_shared_ranks, run_ranks

ROUNDS = 15


class Idle(Variant):
    """A variant whose phases do nothing."""

    alone = False

    def forward_backward(self, tokens, targets):
        for phase in ("forward", "backward"):
            with self.phase(phase):
                pass
        return 0.0

    def communicate(self):
        with self.phase("communication"):
            pass

    def update(self):
        with self.phase("optimizer"):
            pass


def measure_processor_seconds(folder):
    """Return the median seconds of recording a step (clocks, digests, samples) and of a step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cpu = torch.device("cpu")
    config = RunConfig(world=world, out=Path(folder))
    run = Run(
        config=config,
        rank=rank,
        world=world,
        device=cpu,
        corpus=load_corpus(Path(__file__)),
        recorder=Recorder(rank, cpu),
        progress=Progress(enabled=False),
    )
    run.folder = create_folder(config, {}) if rank == 0 else None
    batch = run.draw_batch(0, split=True)
    idle, real = Idle(run, run.model), VARIANTS["ddp flat"](run, run.model)
    overhead, trained = [], []
    for step in range(ROUNDS):
        begin = time.process_time()
        for _ in VARIANTS:
            received = count_received(run)
            take_timed_step(run, "idle", idle, step, batch)["received"] = received.count_bytes()
        run.flush_samples()
        overhead.append((time.process_time() - begin) / len(VARIANTS))
        begin = time.process_time()
        real.step(*batch)
        trained.append(time.process_time() - begin)
    return statistics.median(overhead), statistics.median(trained)


@pytest.mark.timing
def test_measuring_takes_about_a_hundredth_of_a_step(tmp_path):
    expected = select_by_avx512(0.01, 0.013)
    for overhead, trained in run_ranks(measure_processor_seconds, 2, str(tmp_path / "run")):
        assert_at_most("suite: measuring over a step", expected, overhead / trained)
    phases = {"step", "forward", "backward", "communication", "optimizer"}
    assert {sample["phase"] for sample in RunFolder(tmp_path / "run").samples()} == phases


def test_without_the_counter_of_waits_a_step_needs_its_wall_time(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    waited = clocks.read_core_wait_seconds()
    monkeypatch.setattr(clocks, "open", missing, raising=False)
    assert waited >= clocks.read_core_wait_seconds() == 0.0
    assert compute_needed_seconds({"seconds": 2.0, CORE_WAIT: 0.0}) == 2.0
    assert compute_needed_seconds({"seconds": 2.0, CORE_WAIT: 0.5}) == 1.5


def count_bytes_of_late_rank(folder, variant):
    """Return the bytes of the model, and the bytes that each rank counts; rank 0 starts late."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cpu = torch.device("cpu")
    config = RunConfig(
        size="mini", rows=world, context=16, world=world, warmup=0, steps=1, out=Path(folder)
    )
    run = Run(
        config=config,
        rank=rank,
        world=world,
        device=cpu,
        corpus=load_corpus(Path(__file__)),
        recorder=Recorder(rank, cpu),
        progress=Progress(enabled=False),
    )
    run.folder = create_folder(config, {}) if rank == 0 else None

    class Late(network.Received):
        def __init__(self):
            time.sleep(0.5 * (rank == 0))  # what others send meanwhile is not counted
            super().__init__()

    with mock.patch.object(network, "Received", Late):
        trained = VARIANTS[variant](run, run.model)
        _train(run, {variant: trained})
        trained.close()
    recorded = run.folder.samples() if rank == 0 else []
    size = sum(4 * w.numel() for w in draw_initial_weights(run).values())
    return size, [s["received"] for s in recorded if "received" in s]


@pytest.mark.skipif(not network.is_available(), reason="this kernel's sockets do not count")
@pytest.mark.parametrize("variant", ["ddp bucketed", "parameter server"])
def test_a_rank_that_is_late_to_its_counter_counts_all_that_it_is_sent(tmp_path, variant):
    ranks = run_on_shared_ranks(count_bytes_of_late_rank, 2, str(tmp_path / "run"), variant)
    (size, trained), _ = ranks
    assert len(trained) == 2
    for received in trained:
        assert 0.99 * size - 64 < received < 1.2 * size


def count_living_variants(folder):
    """Train two variants one after another; count the earlier variants when one is constructed."""
    cpu = torch.device("cpu")
    names = [SINGLE, "ddp bucketed"]
    config = RunConfig(size="mini", rows=2, context=16, world=1, steps=1, out=Path(folder))
    run = Run(
        config=config,
        rank=0,
        world=1,
        device=cpu,
        corpus=load_corpus(Path(__file__)),
        recorder=Recorder(0, cpu),
        progress=Progress(enabled=False),
        folder=create_folder(config, {}),
    )
    run.results["plan"] = SimpleNamespace(
        variants_fit_together=False, step_flops_causal=1, peak=1.0
    )
    references, living = [], []

    def construct(variant, *arguments, original=Variant.__init__):
        living.append(sum(reference() is not None for reference in references))
        references.append(weakref.ref(variant))
        original(variant, *arguments)

    with (
        mock.patch.object(train, "list_variants", return_value=names),
        mock.patch.object(Variant, "__init__", construct),
    ):
        train.run(run)
    return living


def test_variants_that_do_not_fit_together_are_freed_one_by_one(tmp_path):
    living = run_on_shared_ranks(count_living_variants, 1, str(tmp_path / "run"))
    assert living == [[0, 0]]


PEAKS = """
import subprocess, sys
from llmsys_suite.environment import forget_peak_memory, read_peak_memory_bytes
held = bytearray(300 << 20)
print(read_peak_memory_bytes())
ask = "from llmsys_suite.environment import read_peak_memory_bytes; print(read_peak_memory_bytes())"
print(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout)
del held
forget_peak_memory()
print(read_peak_memory_bytes())
"""


@pytest.mark.fixed_seed("the module that shifts seeds in child processes imports torch")
def test_a_peak_is_that_of_this_process_since_it_was_forgotten_not_of_the_one_that_started_it():
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    with_array, started, forgotten = map(int, done.stdout.split())
    assert with_array > 300 * 2**20
    assert started < 200 * 2**20
    assert forgotten < 200 * 2**20


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_fallback_of_a_peak_is_in_the_unit_of_the_system(monkeypatch, system, unit):
    monkeypatch.setattr(environment, "_read_lines", lambda path: [])
    monkeypatch.setattr(environment.sys, "platform", system)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert environment.read_peak_memory_bytes() >= unit * largest
    assert environment.read_peak_memory_bytes() < 2 * unit * largest
