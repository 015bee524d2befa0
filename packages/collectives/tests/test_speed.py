"""The guaranteed ratios to gloo's time, measured in interleaved rounds."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import collectives
import numpy as np
import pytest
import torch
import torch.distributed as dist
from collectives import bench
from emulated_hosts import emulated_hosts, explain_refusal, run_everywhere
from figures import assert_at_least, assert_at_most
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker_pool import run_ranks

pytestmark = pytest.mark.timing


def measure_ratios(sizes, percentile=50, rounds=15):
    """Return gloo's time over ours by size, for any tensor and for shared ones.

    The ratios of all rounds are reduced to a percentile, by default the median. At 100 MiB at most
    11 rounds are measured, because a round takes a second and its ratios vary little.
    """
    measured = {}
    for size in sizes:
        num_rounds = min(rounds, 11) if size == 100 * MIB else rounds
        plain = torch.randn(size // 4)
        shared = collectives.shared_empty(size // 4).copy_(plain)
        contenders = {
            "gloo": partial(dist.all_reduce, plain),
            "any": partial(collectives.all_reduce, plain),
            "shared": partial(collectives.all_reduce, shared),
        }
        times = bench.time_interleaved(
            contenders, size, quick=False, device="cpu", rounds=num_rounds
        )
        measured[size] = [
            float(np.percentile(times["gloo"].rounds / times[name].rounds, percentile))
            for name in ("any", "shared")
        ]
    return measured


KIB, MIB = 1 << 10, 1 << 20


# The ratios for any tensor and for tensors in `shared_empty`, by size.
GUARANTEED = {64 * KIB: (6, 10), MIB: (4, 6), 100 * MIB: (2.1, 6)}


@pytest.mark.parametrize("size", GUARANTEED)
def test_two_ranks_are_faster_than_gloo_by_the_guaranteed_factor(size):
    measured = run_ranks(measure_ratios, 2, (size,))[0][size]
    for kind, expected, ratio in zip(("any", "shared"), GUARANTEED[size], measured, strict=True):
        assert_at_least(f"collectives: gloo over {kind}, {size} bytes, 2 ranks", expected, ratio)


def measure_copies_and_reductions(size):
    """Return the median of the times of an all-reduce over those of a copy of the same bytes.

    A rank of two that reduces in shared memory reads and writes as many bytes as a copy does.
    """
    plain = torch.randn(size // 4)
    shared = collectives.shared_empty(size // 4).copy_(plain)
    contenders = {
        "copy": partial(torch.zeros_like(plain).copy_, plain),
        "shared": partial(collectives.all_reduce, shared),
    }
    times = bench.time_interleaved(contenders, size, quick=False, device="cpu", rounds=9)
    return float(np.median(times["shared"].rounds / times["copy"].rounds))


@pytest.mark.parametrize(("size", "most"), [(10 * MIB, 1.5), (100 * MIB, 1.3)])
def test_long_shared_tensors_are_reduced_at_the_speed_of_memory(size, most):
    ratio = max(run_ranks(measure_copies_and_reductions, 2, size))
    assert_at_most(f"collectives: all-reduce over copy, shared_empty, {size} bytes", most, ratio)


def test_four_ranks_are_faster_than_gloo_at_every_size():
    sizes = (KIB, 64 * KIB, MIB, 10 * MIB, 100 * MIB)
    measured = run_ranks(measure_ratios, 4, sizes, 50, 7)[0]
    for size, pair in measured.items():
        assert_at_least(f"collectives: gloo over ours, {size} bytes, 4 ranks", 1.5, min(pair))


@pytest.mark.parametrize("size", [KIB, 64 * KIB, MIB, 10 * MIB, 100 * MIB])
def test_busy_core_makes_ours_slower_than_gloo_in_less_than_a_tenth_of_the_rounds(size):
    """Measure two ranks while another program computes on one of the two cores."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        measured = run_ranks(measure_ratios, 2, (size,), 10, 21)[0][size]
    finally:
        busy.kill()
        busy.wait()
    for name, ratio in zip(("any tensor", "shared_empty"), measured, strict=True):
        figure = f"collectives: gloo over {name}, {size} bytes, busy core, tenth percentile"
        assert_at_least(figure, 1.0, ratio)


NO_HOSTS = explain_refusal()
needs_hosts = pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)


@needs_hosts
def test_reduce_scatter_on_a_slow_link_sends_half_of_gloos_bytes(tmp_path):
    path, size = tmp_path / "rows.json", 8 * MIB
    command = [sys.executable, "-m", "collectives.bench", "--json", str(path)]
    command += ["--cases", "reduce_scatter", "all_reduce", "--sizes", str(size)]
    with emulated_hosts(2, "1gbit") as hosts:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        assert run_everywhere(hosts, command, environment, seconds=300) == [0, 0]
    rows = json.loads(path.read_text())
    assert {row["hosts"] for row in rows} == {2}
    by_case = {(row["case"], row["algorithm"]): row for row in rows}
    gloo, ring = (by_case["reduce_scatter", name] for name in ("gloo", "ring"))
    assert ring["wire_bytes"] <= 0.51 * gloo["wire_bytes"]
    assert_at_most("collectives: ring over gloo, reduce-scatter", 0.55, 1 / ring["ratio_p50"])
    # Headers add less than 2 %. A call may return while its last bytes wait in the send buffer of
    # the socket, where they are not counted yet.
    assert 0.99 < by_case["all_reduce", "ring"]["wire_bytes"] / size < 1.02


@needs_hosts
@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        # One run for all sizes, because the measurement of "auto" takes most of the time.
        (2, (KIB, 64 * KIB, MIB, 16 * MIB)),
        pytest.param(2, (100 * MIB,), marks=pytest.mark.exhaustive),
        pytest.param(3, (KIB, 64 * KIB, MIB, 16 * MIB), marks=pytest.mark.exhaustive),
        pytest.param(3, (100 * MIB,), marks=pytest.mark.exhaustive),
    ],
)
def test_auto_between_hosts_is_at_least_as_fast_as_gloo(count, sizes, tmp_path):
    script, path = Path(__file__).with_name("beside_gloo.py"), tmp_path / "ratios.json"
    command = [sys.executable, str(script), str(path), *map(str, sizes)]
    with emulated_hosts(count, "1gbit") as hosts:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        assert run_everywhere(hosts, command, environment, seconds=300) == [0] * count
    measured = json.loads(path.read_text())
    assert len(measured) == 6 * len(sizes)
    for size in sizes:
        ratios = {name: r for name, r in measured.items() if name.endswith(f" {size}")}
        slowest = max(ratios, key=ratios.get)
        figure = f"collectives: auto over gloo between {count} hosts, {slowest} bytes"
        # The Python of a call takes about 0.1 ms on both hosts, and a short message 0.5 ms. The
        # ratio was 1.56 for 1 KiB on an Intel Xeon, and up to 1.85 for 1 KiB on an AMD EPYC.
        assert_at_most(figure, 1.85 if size <= 64 * KIB else 1.05, ratios[slowest])


def measure_cost_of_call():
    """Return the processor time of a call in a group of one rank, which moves no bytes."""
    tensor, seconds = torch.zeros(KIB // 4), []
    for _ in range(21):
        start = time.thread_time()
        for _ in range(100):
            collectives.all_reduce(tensor)
        seconds.append((time.thread_time() - start) / 100)
    return float(np.median(seconds))


def test_short_call_costs_at_most_50_us_of_processor_time():
    microseconds = 1e6 * run_ranks(measure_cost_of_call, 1)[0]
    assert_at_most("collectives: processor time of a short call", 50, microseconds, "us")


def measure_cost_of_gloo_call():
    """Return the extra processor time of a call that runs on gloo, compared with torch's.

    The least of many times is compared: a call waits for a thread of gloo, and waking up takes
    processor time, which depends on the core of that thread.
    """
    tensor = torch.zeros(KIB // 4)
    calls = {"ours": partial(collectives.all_reduce, tensor, algorithm="gloo"),
             "torch": partial(dist.all_reduce, tensor)}  # fmt: skip
    least = dict.fromkeys(calls, math.inf)
    for _ in range(200):
        for name, call in calls.items():
            start = time.thread_time()
            for _ in range(10):
                call()
            least[name] = min(least[name], (time.thread_time() - start) / 10)
    return least["ours"] - least["torch"]


def test_call_on_gloo_costs_a_few_microseconds_more_than_torchs():
    microseconds = 1e6 * run_ranks(measure_cost_of_gloo_call, 1)[0]
    # 13 us on an Intel Xeon, 11 to 28 us on an AMD EPYC, and 48 us on an older one without AVX-512.
    assert_at_most("collectives: a call on gloo beyond torch's", 48, microseconds, "us")


def test_mpi_library_is_at_most_as_fast(tmp_path):
    pytest.importorskip("mpi4py", reason="mpich and mpi4py are not dependencies")
    mpiexec = shutil.which("mpiexec") or str(Path(sys.executable).with_name("mpiexec"))
    script = Path(__file__).with_name("beside_mpi.py")
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
        timeout=300,
    )
    rows = json.loads(done.stdout)
    measured = {(row["algorithm"], row["size_bytes"]): row["mpi_over_it"] for row in rows}
    assert_at_least("collectives: MPI over ours, 64 KiB", 1.0, measured["auto", 64 * KIB])


MEGABYTES = 25


def measure_busy_and_idle():
    """Return the median times of an asynchronous call while the caller computes, and waits."""
    tensor, seconds = torch.zeros(MEGABYTES * 1_000_000 // 4), {"idle": [], "busy": []}
    for i in range(22):
        collectives.barrier()
        start, work = time.perf_counter(), collectives.all_reduce(tensor, async_op=True)
        if i % 2:
            work.wait()
        else:
            x = 0
            while not work.is_completed():
                x += 1
        seconds["idle" if i % 2 else "busy"].append(time.perf_counter() - start)
    return float(np.median(seconds["busy"][1:])), float(np.median(seconds["idle"][1:]))


def test_asynchronous_call_needs_no_interpreter():
    busy, idle = run_ranks(measure_busy_and_idle, 2)[0]
    assert_at_most("collectives: call beside busy Python over one beside idle", 1.3, busy / idle)


def measure_all_to_all_ratios(size):
    sent, received = torch.randn(size // 4), torch.empty(size // 4)
    contenders = {
        "gloo": partial(dist.all_to_all_single, received, sent),
        "ours": partial(collectives.all_to_all_single, received, sent),
    }
    times = bench.time_interleaved(contenders, size, quick=False, device="cpu", rounds=15)
    return float(np.median(times["gloo"].rounds / times["ours"].rounds))


@pytest.mark.parametrize("size", [KIB, 64 * KIB, MIB, 25 * MIB])
def test_all_to_all_is_faster_than_gloos(size):
    measured = run_ranks(measure_all_to_all_ratios, 2, size)[0]
    assert_at_least(f"collectives: gloo over ours, all-to-all, {size} bytes", 1.5, measured)


def build_step(kind, group):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]
    network = nn.Sequential(*layers)
    if kind == "ddp":
        network = DistributedDataParallel(network, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in (*layers, network):
            fully_shard(layer, mesh=mesh)
    optimizer, batch = torch.optim.SGD(network.parameters(), lr=0.01), torch.randn(16, 1024)

    def step():
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()

    return step


def measure_steps(kind):
    """Return the time of a step on our backend over that on gloo, in interleaved rounds."""
    import collectives.backend  # noqa: F401

    both = {n: build_step(kind, dist.new_group(backend=n)) for n in ("gloo", "collectives")}
    times = bench.time_interleaved(both, 32 << 20, False, "cpu", rounds=40)
    return float(np.median(times["collectives"].rounds / times["gloo"].rounds))


@pytest.mark.parametrize(("kind", "most"), [("fsdp2", 0.65), ("ddp", 0.8)])
def test_step_of_torchs_trainers_is_faster_than_on_gloo(kind, most):
    measured = run_ranks(measure_steps, 2, kind)[0]
    assert_at_most(f"collectives: step of {kind} over one on gloo", most, measured)
