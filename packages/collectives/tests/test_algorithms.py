"""Every algorithm of every collective gives the float64 result for every kind of tensor."""

import hashlib
import itertools
import random
import threading
import time
from collections import Counter

import collectives
import numpy as np
import pytest
import torch
import torch.distributed as dist
from collectives import collective
from collectives.algorithms import dispatch, gloo
from collectives.algorithms.gloo import GlooGroups
from collectives.choice import tuning
from collectives.choice.cost import MIN_WINS, Sample, list_candidates
from collectives.groups import get_communicator
from collectives.shared_memory import segment
from host_layout import prepare_rank  # noqa: F401
from sent_bytes import counted
from worker_pool import run_on_shared_ranks, run_ranks

# The numbers of ranks of a group, and how often each is drawn. Five ranks need a tree of three
# levels, and are on three hosts if two ranks share a host.
WORLDS = {1: 1, 2: 5, 3: 3, 4: 3, 5: 2}
MORE_WORLDS = WORLDS | {6: 2}
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
LAYOUTS = ("", "strided", "transposed", "scalar", "shared")
# Emulated hosts: all ranks on one host, two ranks per host, one rank per host.
RANKS_PER_HOST = (6, 2, 1)
# Sizes close to a slice, a slot and a piece, and sizes without common divisors.
SIZES = (0, 1, 2, 7, 64, 1000, 4099)
LARGE = (70_001, 150_000)


def draw_small_values(generator, shape, dtype):
    """Return values whose sums and products over six ranks are exact in every dtype."""
    low = 0 if dtype in (torch.uint8, torch.bool) else -2
    values = torch.randint(low, 3, shape, generator=generator)
    if dtype == torch.bool:
        return values > 0
    return values.to(dtype)


def compute_reference(op, parts):
    """Return the reduction in float64 or complex128, in rank order."""
    wide = torch.complex128 if parts.is_complex() else torch.float64
    dtype, parts = parts.dtype, parts.to(wide)
    result = {
        "SUM": lambda: parts.sum(0),
        "AVG": lambda: parts.sum(0) / len(parts),
        "PRODUCT": lambda: parts.prod(0),
        "MIN": lambda: parts.amin(0),
        "MAX": lambda: parts.amax(0),
    }[op]()
    return (result != 0) if dtype == torch.bool else result.to(dtype)


def lay_out(tensor, how, group):
    """Return the same values in another layout, or in memory that the ranks share."""
    if how == "strided":
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    if how == "transposed" and tensor.dim() == 1 and tensor.numel() % 2 == 0:
        return tensor.view(2, -1).t().contiguous().t()
    if how == "scalar" and tensor.numel() == 1:
        return tensor.view(())
    if how == "shared":
        return collectives.shared_empty(tensor.shape, dtype=tensor.dtype, group=group).copy_(tensor)
    return tensor


def make_poisoned(shape, dtype):
    return torch.full(shape, 99).to(dtype)


def start_random_call(choose, generator, group):
    """Start a random collective, the same on every rank; return it with its reference."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    topology = get_communicator(group).topology
    kind = choose.choice(KINDS)
    single = list_candidates(kind, topology.ranks_per_host, shared=topology.is_single_host)
    algorithm = "auto" if choose.random() < 0.4 else choose.choice(single)
    dtype, size = choose.choice(DTYPES), choose.choice(SIZES)
    if choose.random() < 0.02:
        size = choose.choice(LARGE)
    real = dtype.is_floating_point
    ops = [
        op
        for op in OPS
        if not (op == "AVG" and not (real or dtype.is_complex))
        and not (op in ("MIN", "MAX") and dtype.is_complex)
    ]
    op, root = choose.choice(ops), choose.randrange(world)
    # Memory to share is slow to set up.
    how = choose.choices(LAYOUTS, weights=(6, 5, 4, 4, 1))[0]
    asynchronous = choose.random() < 0.3
    go = {"group": group, "async_op": asynchronous, "algorithm": algorithm}
    if kind in ("reduce_scatter", "all_to_all"):
        everyone = draw_small_values(generator, (world, world * size), dtype)
    else:
        everyone = draw_small_values(generator, (world, size), dtype)
    mine = lay_out(everyone[rank].clone(), how, group)
    redop = getattr(dist.ReduceOp, op)
    if kind == "all_reduce":
        out, want = mine, compute_reference(op, everyone)
        work = collectives.all_reduce(mine, redop, **go)
    elif kind == "reduce_scatter":
        out, want = (
            make_poisoned((size,), dtype),
            compute_reference(op, everyone).view(world, size)[rank],
        )
        work = collectives.reduce_scatter_tensor(out, mine, redop, **go)
    elif kind == "all_gather":
        out, want = make_poisoned((world * size,), dtype), everyone
        work = collectives.all_gather_into_tensor(out, mine, **go)
    elif kind == "broadcast":
        out, want = mine, everyone[root]
        work = collectives.broadcast(out, group_src=root, **go)
    else:
        out = make_poisoned((world * size,), dtype)
        want = everyone.view(world, world, size)[:, rank]
        work = collectives.all_to_all_single(out, mine.reshape(-1), **go)
    return work, out, want, (kind, algorithm, op, dtype, size, how, topology.ranks_per_host)


def let_hosts_have(ranks):
    """Emulate hosts with `ranks` ranks each for the groups created from now on."""
    segment.identify_host = lambda: f"host {dist.get_rank() // ranks}"


def run_random_sequences(worlds, count):
    """Run sequences of up to three pending calls on groups of several sizes; count the calls.

    The groups of the same ranks differ in which of them share a host.
    """
    groups = {}
    for ranks, world in itertools.product(RANKS_PER_HOST, worlds):
        ranks = min(ranks, world)
        if (ranks, world) not in groups:
            let_hosts_have(ranks)
            groups[ranks, world] = group = dist.new_group(list(range(world)))
            if dist.get_rank() < world:
                # Default prices, so that "auto" does not measure.
                get_communicator(group).cost_models |= dict.fromkeys(KINDS, collectives.CostModel())
    done = Counter()
    for number in range(count):
        choose = random.Random(number)
        generator = torch.Generator().manual_seed(number)
        world = choose.choices([*worlds], weights=worlds.values())[0]
        ranks = min(choose.choice(RANKS_PER_HOST), world)
        if dist.get_rank() >= world:
            continue
        let_hosts_have(ranks)
        for work, out, want, what in [
            start_random_call(choose, generator, groups[ranks, world])
            for _ in range(choose.randint(1, 3))
        ]:
            if work is not None:
                work.wait()
            assert torch.equal(out.reshape(-1), want.reshape(-1)), f"sequence {number}: {what}"
            done[what] += 1
    return done


@pytest.mark.parametrize(
    ("worlds", "count", "covered"),
    [
        (WORLDS, 200, 0.75),
        pytest.param(MORE_WORLDS, 3000, 1.0, marks=pytest.mark.exhaustive),
    ],
    ids=["usual", "all"],
)
def test_random_sequences_equal_float64_result(worlds, count, covered):
    done = run_on_shared_ranks(run_random_sequences, max(worlds), worlds, count, timeout=900)[0]
    assert done.total() > count
    kinds, _, _, dtypes, _, layouts, hosts = map(set, zip(*done, strict=True))
    assert (kinds, dtypes, layouts) == (set(KINDS), set(DTYPES), set(LAYOUTS))
    assert {sum(ranks) for ranks in hosts} == worlds.keys()
    # Every algorithm runs on every topology that supports it, with every op.
    called = {(kind, algorithm, ranks) for kind, algorithm, *_, ranks in done}
    combinations = {
        (kind, algorithm, ranks)
        for kind, ranks in itertools.product(KINDS, ((2,), (3,), (1, 1), (2, 2), (2, 1), (1, 1, 1)))
        for algorithm in ("auto", *list_candidates(kind, ranks))
    }
    assert len(called & combinations) >= covered * len(combinations)
    reductions = {(kind, op) for kind, _, op, *_ in done}
    assert reductions >= {(kind, op) for kind in ("all_reduce", "reduce_scatter") for op in OPS}


def run_every_combination():
    world, rank = dist.get_world_size(), dist.get_rank()
    for kind, size in itertools.product(
        ("all_reduce", "reduce_scatter", "all_gather"), (5, 300_001)
    ):
        for algorithm in list_candidates(kind, (world,)):
            generator = torch.Generator().manual_seed(size)
            if kind == "all_reduce":
                parts = torch.randn(world, size, generator=generator)
                out = parts[rank].clone()
                collectives.all_reduce(out, algorithm=algorithm)
                want = parts.double().sum(0)
            elif kind == "reduce_scatter":
                parts = torch.randn(world, world * size, generator=generator)
                out = torch.full((size,), torch.nan)
                collectives.reduce_scatter_tensor(out, parts[rank], algorithm=algorithm)
                want = parts.double().sum(0).view(world, size)[rank]
            else:
                parts = torch.randn(world, size, generator=generator)
                out = torch.full((world * size,), torch.nan)
                collectives.all_gather_into_tensor(out, parts[rank], algorithm=algorithm)
                want = parts.double().view(-1)
            torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=2e-6)


def test_long_float_tensors_agree_with_float64():
    assert run_on_shared_ranks(run_every_combination, 3) == [None] * 3


def compute_digests():
    """Return a digest of the bits of an average, by algorithm."""
    digests = {}
    for algorithm in list_candidates("all_reduce", (dist.get_world_size(),)):
        tensor = torch.randn(100_003, generator=torch.Generator().manual_seed(dist.get_rank()))
        collectives.all_reduce(tensor, dist.ReduceOp.AVG, algorithm=algorithm)
        digests[algorithm] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    return digests


def test_all_ranks_get_identical_bits():
    results = run_on_shared_ranks(compute_digests, 3)
    assert results == [results[0]] * 3
    assert len(results[0]) == 3


def sum_in_narrow_dtype():
    """Sum 1 and four values of half its last place, which 16-bit sums would lose."""
    sums = set()
    for dtype in (torch.bfloat16, torch.complex32):
        step = torch.finfo(dtype).eps / 2
        for algorithm in list_candidates("all_reduce", (dist.get_world_size(),)):
            value = 1.0 if dist.get_rank() == 0 else step
            tensor = torch.full((1000,), value).to(dtype)
            collectives.all_reduce(tensor, algorithm=algorithm)
            sums |= {(dtype, (value.real - 1.0) / step) for value in tensor.tolist()}
    return sums


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_bfloat16_is_summed_in_float32():
    sums = {(torch.bfloat16, 4.0), (torch.complex32, 4.0)}
    assert run_on_shared_ranks(sum_in_narrow_dtype, 5) == [sums] * 5


def exchange_uneven_parts():
    rank, world = dist.get_rank(), dist.get_world_size()
    # Rank i sends i + 2 j rows of two to rank j.
    for algorithm in ("auto", *list_candidates("all_to_all", (world,))):
        for scale in (1, 40_000):
            send = [scale * (rank + 2 * j) for j in range(world)]
            receive = [scale * (i + 2 * rank) for i in range(world)]
            rows = torch.full((sum(send), 2), float(rank))
            out = torch.full((sum(receive), 2), torch.nan)
            # Sizes may be an array.
            splits = np.array(receive), torch.tensor(send)
            collectives.all_to_all_single(out, rows, *splits, algorithm=algorithm)
            want = torch.cat([torch.full((n, 2), float(i)) for i, n in enumerate(receive)])
            assert torch.equal(out, want)


def test_all_to_all_accepts_splits_of_any_length():
    assert run_on_shared_ranks(exchange_uneven_parts, 3) == [None] * 3


def count_wire_bytes(world):
    """Return the bytes that a rank sends for a tensor of 1 MiB."""
    size = 1 << 20
    flat = torch.zeros(size // 4)
    sent = {}
    calls = {
        "all_reduce": lambda a: collectives.all_reduce(flat, algorithm=a),
        "reduce_scatter": lambda a: collectives.reduce_scatter_tensor(
            flat[: size // 4 // world].clone(), flat, algorithm=a
        ),
        "all_gather": lambda a: collectives.all_gather_into_tensor(
            flat, flat[: size // 4 // world].clone(), algorithm=a
        ),
    }
    for kind, call in calls.items():
        with counted() as messages:
            call("ring")
        sent[kind] = sum(messages) / size
    return sent


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_ring_sends_the_minimum_number_of_bytes(world):
    part = (world - 1) / world
    for sent in run_ranks(count_wire_bytes, world, world):
        for kind, fraction in sent.items():
            assert fraction == (2 * part if kind == "all_reduce" else part)


def run_gloo_collectives():
    """Run gloo's own collectives by name and by `auto`, and check what is refused."""
    rank, world = dist.get_rank(), dist.get_world_size()
    segment.identify_host = lambda: f"host {rank}"
    dispatch.tune = lambda kind, call, hosts, *_, **options: collectives.CostModel(
        samples=(Sample(kind, "gloo", 1, tuple(hosts), 1e-9),)
    )
    go = {"algorithm": "gloo"}
    for numel in (0, 1000):
        everyone = torch.randn(
            world, numel, generator=torch.Generator().manual_seed(numel)
        ).double()
        for op, want in (("SUM", everyone.sum(0)), ("AVG", everyone.mean(0))):
            tensor = everyone[rank].float()
            collectives.all_reduce(tensor, getattr(dist.ReduceOp, op), **go)
            torch.testing.assert_close(tensor, want.float(), rtol=1e-6, atol=1e-6)
        largest = torch.full((numel,), rank)
        collectives.all_reduce(largest, dist.ReduceOp.MAX, **go)
        assert (largest == world - 1).all()
        whole = torch.arange(float(world * numel)).view(world, numel)
        out = torch.full((numel,), torch.nan)
        collectives.reduce_scatter_tensor(out, whole.flatten(), **go)
        assert torch.equal(out, world * whole[rank])
        # The second call uses the existing gloo group.
        for _ in range(2):
            copy = everyone[rank].float().repeat(2, 1).t()[:, 1].requires_grad_()
            with torch.no_grad():
                collectives.all_reduce(copy, dist.ReduceOp.AVG, **go)
            torch.testing.assert_close(copy, everyone.mean(0).float(), rtol=1e-6, atol=1e-6)
            local = everyone[rank].clone()
            collectives.reduce(local, world - 1)
            expected = everyone.sum(0) if rank == world - 1 else everyone[rank]
            torch.testing.assert_close(local, expected)
            for dtype in (torch.float32, torch.bool, torch.complex64):
                sent, received = (whole + rank * numel).to(dtype).t(), torch.ones(numel, world)
                received = received.to(dtype).t()
                collectives.all_to_all_single(received, sent.t())
                want = torch.stack([whole[rank] + r * numel for r in range(world)]).to(dtype)
                assert torch.equal(received, want), (dtype, numel)
        gathered = torch.full((world * numel,), torch.nan, dtype=torch.bfloat16)
        collectives.all_gather_into_tensor(gathered, torch.full((numel,), rank).bfloat16(), **go)
        first_column = gathered.view(world, numel)[:, :1].flatten()
        assert torch.equal(first_column, torch.arange(world if numel else 0).bfloat16())
        tensor = torch.full((numel,), rank)
        collectives.broadcast(tensor, 1, **go)
        assert (tensor == 1).all()
    with pytest.raises(ValueError, match="cannot run by 'gloo'"):
        collectives.all_reduce(torch.ones(3).bfloat16(), **go)
    with pytest.raises(ValueError, match="cannot run by 'gloo'"):
        collectives.all_reduce(torch.ones(3), dist.ReduceOp.MAX, **go)
    with pytest.raises(ValueError, match="cannot run by 'gloo'"):
        collectives.all_to_all_single(torch.ones(world), torch.ones(world), **go)


def test_gloo_algorithm_equals_our_algorithms():
    assert run_on_shared_ranks(run_gloo_collectives, 3) == [None] * 3


def make_more_kinds_of_calls_than_gloo_runs():
    """Return the number of gloo groups after three kinds of calls, two of which gloo can run."""
    rank, world = dist.get_rank(), dist.get_world_size()
    segment.identify_host = lambda: f"host {rank}"
    dispatch.tune = lambda kind, call, hosts, *_, **options: collectives.CostModel(
        samples=(Sample(kind, "gloo", 1, tuple(hosts), 1e-9),)
    )
    gloo.MAX_GROUPS = 2
    for numel in (1, 2, 3, 1):
        tensor = torch.ones(numel)
        collectives.all_reduce(tensor)
        assert tensor.tolist() == [world] * numel
    return len(get_communicator().gloo.groups)


def test_gloo_runs_a_limited_number_of_kinds_of_calls():
    assert gloo.MAX_GROUPS == 64
    assert run_ranks(make_more_kinds_of_calls_than_gloo_runs, 2) == [2, 2]


def exchange_more_kinds_than_gloo_runs():
    """Queue several all-to-alls on rank 0 before the first one runs; rank 1 waits for each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    segment.identify_host = lambda: f"host {rank}"
    gloo.MAX_GROUPS = 2
    collectives.barrier()
    works, outputs = [], []
    if rank == 1:
        store.wait(["all calls are queued"])
    for numel in (2, 4, 6, 8, 2):
        outputs.append(torch.empty(numel))
        local = torch.full((numel,), float(rank))
        works.append(collectives.all_to_all_single(outputs[-1], local, async_op=True))
        if rank == 1:
            works[-1].wait()
    if rank == 0:
        store.set("all calls are queued", "")
    for work, output in zip(works, outputs, strict=True):
        work.wait()
        assert output.view(world, -1).unique(dim=1).tolist() == [[0.0], [1.0]]
    return len(get_communicator().gloo.groups)


def test_number_of_gloo_groups_does_not_depend_on_the_progress_of_a_rank():
    # Otherwise the ranks would choose different algorithms for the same call.
    assert run_ranks(exchange_more_kinds_than_gloo_runs, 2, timeout=60) == [2, 2]


def reduce_twice_without_waiting():
    """Reduce a tensor with gaps twice; the first call is asynchronous and nobody waits for it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    segment.identify_host = lambda: f"host {rank}"
    go = {"algorithm": "gloo"}
    tensor = torch.zeros(4, 2)[:, 0]
    collectives.all_reduce(tensor, **go)
    progress = get_communicator().progress
    flatten = collective.flatten
    run = GlooGroups.run

    def flatten_and_wait(tensor):
        flat = flatten(tensor)
        if threading.current_thread() is threading.main_thread():
            while progress.last is not None:
                time.sleep(0.001)
        return flat

    def run_late(self, *args):
        time.sleep(0.1)
        run(self, *args)

    collective.flatten, GlooGroups.run = flatten_and_wait, run_late
    tensor.fill_(1.0)
    collectives.all_reduce(tensor, async_op=True, **go)
    collectives.all_reduce(tensor, **go)
    return tensor.tolist() == [world**2] * 4


def test_connected_call_reads_its_input_after_earlier_calls():
    assert run_ranks(reduce_twice_without_waiting, 2) == [True, True]


def reduce_nan(ranks_per_host):
    """Reduce a NaN of each rank with every op and algorithm, and by gloo wherever it can run."""
    rank, world = dist.get_rank(), dist.get_world_size()
    let_hosts_have(ranks_per_host)
    group = dist.new_group(list(range(world)))
    comm = get_communicator(group)
    algorithms = list_candidates("all_reduce", comm.topology.ranks_per_host)
    everyone = torch.arange(world * (world + 1.0)).view(world, world + 1)
    everyone.fill_diagonal_(torch.nan)
    for dtype, op in itertools.product((torch.float32, torch.float64, torch.bfloat16), OPS):
        by_gloo = ["gloo"] if comm.gloo.can_run("all_reduce", dtype, op) else []
        for algorithm in (*algorithms, *by_gloo):
            tensor = everyone[rank].to(dtype, copy=True)
            redop = getattr(dist.ReduceOp, op)
            collectives.all_reduce(tensor, redop, group=group, algorithm=algorithm)
            expected = compute_reference(op, everyone.to(dtype))
            torch.testing.assert_close(tensor, expected, equal_nan=True, msg=f"{algorithm} {op}")


@pytest.mark.parametrize("ranks_per_host", [3, 1])
def test_nan_of_any_rank_reaches_every_rank(ranks_per_host):
    assert run_on_shared_ranks(reduce_nan, 3, ranks_per_host) == [None] * 3


def tune_once():
    """Check that a second group on the same hosts reuses the measurement of the first."""
    rank, world = dist.get_rank(), dist.get_world_size()
    segment.identify_host = lambda: f"host {rank}"
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    models, measured_kinds = [], []
    tune = dispatch.tune
    tuning.SECONDS_PER_SIZE = 0.01
    tuning.CALLS_PER_ROUND = {1 << 10: 4, 1 << 16: 2, 1 << 20: 1}

    def counted_tune(kind, *args, **options):
        measured_kinds.append(kind)
        return tune(kind, *args, **options)

    dispatch.tune = counted_tune
    for group in groups:
        collectives.all_reduce(torch.ones(100), group=group)
        models.append(get_communicator(group).cost_models["all_reduce"])
    measured = {sample.algorithm for sample in models[0].samples}
    for size in tuning.CALLS_PER_ROUND:
        by_algorithm = {s.algorithm: s for s in models[0].samples if s.size_bytes == size}
        best = min(by_algorithm, key=lambda name: by_algorithm[name].seconds)
        picked = models[0].choose("all_reduce", size, (1,) * world)
        # gloo's own, unless another algorithm was faster in most rounds.
        assert picked == "gloo" or by_algorithm[picked].wins >= MIN_WINS
        assert picked == best or best == "gloo" or by_algorithm[best].wins < MIN_WINS
    return models[0] == models[1], measured, measured_kinds


def test_hosts_are_measured_once_and_gloo_is_a_candidate():
    for same, measured, measured_kinds in run_ranks(tune_once, 2):
        assert same
        assert measured == {"ring", "tree", "gloo"}
        assert measured_kinds == ["all_reduce"]
