"""Bytes on the wire are as predicted: 1.0 S for stages 1 and 2, below 1.5 S for stage 3."""

import ctypes
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from emulated_hosts import emulated_hosts, explain_refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from worker_pool import run_on_shared_ranks, run_ranks
from zero import (
    FSDP,
    Communicator,
    DryRun,
    ShardedOptimizer,
    direct_all_gather,
    direct_reduce_scatter,
    wire_bytes,
)
from zero.gloo_collectives import DIRECT_ALL_REDUCE_BYTES, direct_all_reduce
from zero.optimizer.option_checks import CHECKSUM_BITS
from zero.partition import partition_by_element, partition_by_parameter

DEADLINE = 300.0
CLONE_NEWNET = 0x40000000  # of Linux's sched.h
REASON = explain_refusal()


def mark_exhaustive(value):
    return pytest.param(value, marks=pytest.mark.exhaustive)


def enter_host(namespace):
    """Move this rank into the network namespace of an emulated host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def read_sent_bytes(device):
    """Return the number of bytes that left through a network interface so far."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    [counters] = [line.split(":")[1].split() for line in lines if line.strip().startswith(device)]
    return int(counters[8])


def measure_steps_on_a_link(hosts):
    """Return the bytes sent in a step and their prediction, over the size, for each stage."""
    namespace, device, environment = hosts[int(os.environ["RANK"])]
    enter_host(namespace)
    os.environ.update(environment)
    dist.init_process_group("gloo")
    ratios = {}
    for stage in (1, 2, 3):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        size = sum(p.nbytes for p in model.parameters())
        if stage == 3:
            model = FSDP(model, shard=nn.Linear)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            communicator = model.communicator
        else:
            optimizer = ShardedOptimizer(
                model.parameters(),
                torch.optim.SGD,
                shard_gradients=stage == 2,
                bucket_size_mb=1,
                lr=0.1,
            )
            communicator = optimizer.communicator
        steps = []
        for _ in range(5):
            dist.barrier()
            before = read_sent_bytes(device)
            communicator.pop_bytes()
            model(torch.ones(4, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            steps.append(read_sent_bytes(device) - before)
        # The interface also counts retransmissions of TCP on a busy machine, so the minimum of many
        # steps is the number of bytes that the program sends.
        ratios[stage] = min(steps[1:]) / size, wire_bytes(communicator.pop_bytes(), 2) / size
    return ratios


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_bytes_on_a_link_are_as_predicted():
    with emulated_hosts(2, "10gbit") as hosts:
        places = [(host.namespace, host.device, host.environment(hosts)) for host in hosts]
        ranks = run_ranks(measure_steps_on_a_link, 2, places, backend="", timeout=DEADLINE)
    for stage, (actual, predicted) in [item for ratios in ranks for item in ratios.items()]:
        assert actual <= (1.51 if stage == 3 else 1.01)
        assert actual == pytest.approx(predicted, rel=0.01)


def scatter(dtype, size):
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = []
    for r in range(world):
        generator = torch.Generator().manual_seed(r)
        inputs.append(torch.randn(world * size, generator=generator).to(dtype))
    output = torch.full((size,), float("nan"), dtype=dtype)
    direct_reduce_scatter(output, inputs[rank])
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = torch.zeros(world * size, dtype=wide)
    for part in inputs:
        expected += part.to(wide)
    expected = expected.to(dtype)[rank * size : (rank + 1) * size]
    assert torch.equal(output, expected)


def gather(dtype, size):
    world, rank = dist.get_world_size(), dist.get_rank()
    expected = torch.arange(world * size, dtype=dtype)
    apart, together = torch.full((2, world * size), -1, dtype=dtype)
    mine = slice(rank * size, (rank + 1) * size)
    direct_all_gather(apart, expected[mine])
    together[mine] = expected[mine]
    direct_all_gather(together, together[mine], async_op=True).wait()
    assert torch.equal(apart, expected)
    assert torch.equal(together, expected)


def reduce_all(dtype, size):
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(world, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = torch.zeros(size, dtype=wide)
    for part in inputs:
        expected += part.to(wide)
    # A tensor that is not contiguous is reduced in place too.
    summed = torch.stack([inputs[rank]] * 2, 1)[:, 0]
    direct_all_reduce(summed)
    contiguous = inputs[rank].clone()
    direct_all_reduce(contiguous, async_op=True).wait()
    assert torch.equal(summed, expected.to(dtype))
    assert torch.equal(contiguous, summed)


def scatter_gather_and_reduce():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        scatter(dtype, 7)
        gather(dtype, 7)
        reduce_all(dtype, 7)
    large = torch.ones(DIRECT_ALL_REDUCE_BYTES)
    direct_all_reduce(large)
    assert bool((large == dist.get_world_size()).all())
    return True


def uses_direct_collectives():
    backends = ["gloo", "cpu:gloo"]
    if not torch.cuda.is_available():
        # The default backend of CPUs is gloo.
        backends.append(None)
    for backend in backends:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        assert Communicator().sums_in_place, backend
        dist.destroy_process_group()
    return True


def test_direct_collectives_are_used_on_gloo_by_any_name():
    assert all(run_ranks(uses_direct_collectives, 1, timeout=DEADLINE, backend=""))


@pytest.mark.parametrize("world", [*[mark_exhaustive(n) for n in (1, 2, 5)], 3])
def test_direct_collectives_are_exact_and_sum_in_rank_order(world):
    assert all(run_on_shared_ranks(scatter_gather_and_reduce, world, timeout=DEADLINE))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 50))
def test_every_element_has_one_owner_and_shards_are_even(numels, world, bucket):
    for cut in (partition_by_element, partition_by_parameter):
        partition = cut(numels, world, bucket)
        owned = [0] * sum(numels)
        starts = [sum(numels[:i]) for i in range(len(numels))]
        for rank in range(world):
            for piece in partition.list_shard_pieces(rank):
                assert cut is partition_by_element or piece.numel == numels[piece.index]
                for element in range(piece.start, piece.stop):
                    owned[starts[piece.index] + element] += 1
        assert all(count == 1 for count in owned)
    partition = partition_by_element(numels, world, bucket)
    for rank in range(world):
        numel = sum(
            high - low for low, high in (s.compute_shard(rank, world) for s in partition.spans)
        )
        assert numel == -(-sum(numels) // world)


def list_gpt2_shapes():
    """Return the parameter shapes of GPT-2 124M."""
    width = 768
    block = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
        (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *(block * 12), (width,), (width,)]


def test_shards_of_gpt2_are_even_where_whole_parameters_are_not():
    numels = [torch.Size(shape).numel() for shape in list_gpt2_shapes()]
    assert sum(numels) == 124_439_808

    def largest_over_mean(cut, world):
        partition = cut(numels, world, 1 << 23)
        sizes = [sum(piece.numel for piece in partition.list_shard_pieces(r)) for r in range(world)]
        return max(sizes) * world / sum(numels)

    for world in range(2, 17):
        assert largest_over_mean(partition_by_element, world) <= 1.01
    # The embedding has 31 % of the elements.
    assert largest_over_mean(partition_by_parameter, 16) > 4.9


def test_a_dry_run_predicts_the_traffic_of_any_number_of_ranks():
    with torch.device("meta"):
        model = torch.nn.Linear(64, 64, bias=False)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, group=DryRun(8))
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        sharded = FSDP(torch.nn.Linear(64, 64, bias=False), group=DryRun(8))
        sharded(torch.ones(2, 64)).sum().backward()
    size = 64 * 64 * 4
    # Four-byte flags: four per parameter (is its gradient used, averaged, cleared, is it written
    # to), one per bucket (reduce it again), and two per bit of the checksum of the options.
    assert optimizer.communicator.pop_bytes() == {
        "reduce_scatter": size,
        "all_gather": size,
        "all_reduce": 4 * (4 + 1 + 2 * CHECKSUM_BITS),
    }
    # Gathered for forward and for backward, because the first step does not know the last layer.
    assert sharded.communicator.pop_bytes() == {
        "reduce_scatter": size,
        "all_gather": 2 * size,
        "all_reduce": 4,
    }
    assert wire_bytes({"reduce_scatter": size, "all_reduce": size}, 8) == 3 * size * 7 / 8


def run_abandoned_call(call, deleted_path):
    """Delete the work of one rank before the other rank sends its blocks."""
    first = dist.get_rank() == 0
    while not first and not deleted_path.exists():
        time.sleep(0.01)
    large, small = torch.ones(1_000_000), torch.ones(500_000)
    pair = (small, large) if call is direct_reduce_scatter else (large, small)
    work = call(*pair, async_op=True)
    if not first:
        work.wait()
    del work, pair, large, small
    if first:
        deleted_path.touch()
    total = torch.ones(3)
    dist.all_reduce(total)
    return total.tolist()


@pytest.mark.parametrize("call", [direct_reduce_scatter, direct_all_gather])
def test_abandoned_work_does_not_block_the_group(call, tmp_path):
    outcomes = run_ranks(run_abandoned_call, 2, call, tmp_path / "deleted", timeout=60)
    assert outcomes == [[2.0] * 3] * 2
