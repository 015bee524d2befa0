"""Step times beside torch's implementations, interleaved in one run on an idle machine."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from emulated_hosts import emulated_hosts, run_everywhere, why_not
from figures import assert_at_least, assert_at_most
from torch import nn
from worker_pool import run_ranks
from zero import FSDP, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.timing
REASON = why_not()
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def command(path):
    return [sys.executable, "-m", "zero.bench", "--rounds", "7", "--json", str(path)]


def steps(path):
    rows = json.loads(Path(path).read_text())
    return {row["name"]: row for row in rows if row["case"] == "step"}


@pytest.fixture(scope="module")
def on_the_loopback(tmp_path_factory):
    path = tmp_path_factory.mktemp("loopback") / "rows.json"
    subprocess.run(command(path), check=True, timeout=400, env=ENVIRONMENT)
    return steps(path)


def check_ratio(row, expected):
    """Fail if a step takes more than `expected` of the rival's time."""
    figure = f"zero: step of {row['name']} over {row['rival']}, link {row['link']}"
    assert_at_most(figure, expected, row["ratio_p50"])


@pytest.mark.parametrize(("stage", "expected"), [(1, 1.0), (2, 1.0), (3, 0.7)])
def test_no_stage_is_slower_than_torchs_on_the_loopback(on_the_loopback, stage, expected):
    check_ratio(on_the_loopback[f"stage{stage}"], expected)


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_steps_on_a_throttled_link_are_faster_than_torchs(tmp_path):
    path = tmp_path / "rows.json"
    with emulated_hosts(2, "2gbit") as hosts:
        assert run_everywhere(hosts, command(path), ENVIRONMENT, seconds=400) == [0, 0]
    rows = steps(path)
    for name, expected in (("stage1", 0.65), ("stage2", 0.65), ("stage3", 0.6)):
        check_ratio(rows[name], expected)
    for name, most in (("stage1", 1.01), ("stage2", 1.01), ("stage3", 1.51)):
        assert rows[name]["sent_over_parameters"] <= most


def evicted(path):
    """Return every file of a folder after removing it from the page cache."""
    files = [file for file in Path(path).iterdir() if file.is_file()]
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return files


def reading_and_loading(path, write):
    """Return the time of reading files twice, from the disk and from memory, over that of a load.

    A load checks every byte before it changes any, and holds no copy of what it has checked: it
    reads once from the disk and once from the page cache.
    """
    model = FSDP(nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)]))
    write(path, model)
    memory = torch.ones(8 * 4096**2 // dist.get_world_size()).view(torch.uint8).numpy()

    def read(files):
        """Return the seconds to read the files; each rank reads its half, as a load does."""
        dist.barrier()
        start = time.perf_counter()
        for file in files:
            half = file.stat().st_size // dist.get_world_size()
            with file.open("rb", buffering=0) as handle:
                handle.seek(half * dist.get_rank())
                for at in range(0, min(half, len(memory)), 1 << 24):
                    handle.readinto(memoryview(memory)[at : at + (1 << 24)])
        dist.barrier()
        return time.perf_counter() - start

    ratios = []
    for _ in range(7):
        files = evicted(path)
        from_disk, from_cache = read(files), read(files)
        evicted(path)
        dist.barrier()
        start = time.perf_counter()
        load_checkpoint(path, model)
        dist.barrier()
        load = time.perf_counter() - start
        ratios.append((from_disk + from_cache) / load)
    return statistics.median(ratios)


@pytest.mark.parametrize("write", [save_checkpoint])
def test_loading_takes_little_longer_than_the_disk(tmp_path, write):
    torch.manual_seed(0)
    arguments = str(tmp_path / "last"), write
    twice = run_ranks(reading_and_loading, 2, *arguments, timeout=400)[0]
    assert_at_least(f"zero: {write.__name__}, reading twice over a load", 0.9, twice)
