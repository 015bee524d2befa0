"""The compiled engine compared with the Python implementation: the same steps and bits."""

import gc
import hashlib
import os
import threading
import time
import weakref
from datetime import timedelta

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives.algorithms import dispatch
from collectives.groups import get_communicator
from collectives.shared_memory import engine
from collectives.shared_memory.arena import ONE_SHOT_BYTES, PIECE_BYTES
from worker_pool import run_ranks, try_ranks

DTYPES = (*engine.DTYPES, torch.int8, torch.complex64)


ALL_SIZES_OF = (torch.float32, torch.bfloat16)


def list_sizes(dtype, all_sizes):
    """Return numbers of elements: few, more than one shot, and more than two slots or one piece."""
    more_than_one_shot, more_than_a_piece = (
        limit // dtype.itemsize + 1 for limit in (ONE_SHOT_BYTES, PIECE_BYTES)
    )
    return (0, 1, 1000, more_than_one_shot, more_than_a_piece)[:: 1 if all_sizes else 3]


pytestmark = pytest.mark.skipif(bool(engine.explain_refusal()), reason=engine.explain_refusal())


def without_engine():
    engine.get_name = lambda: ""


def draw_values(rank, numel, dtype):
    generator = torch.Generator().manual_seed(100 * numel + rank)
    if dtype.is_floating_point or dtype.is_complex:
        result = torch.randn(numel, generator=generator, dtype=torch.float64)
        if numel > 100:
            result[3 + rank] = torch.nan
            result[50] = torch.inf
            result[60] = -0.0
        return result.to(dtype)
    return torch.randint(-100 * dtype.is_signed, 100, (numel,), generator=generator).to(dtype)


def run_everything(python_ranks, dtypes_with_all_sizes):
    """Return digests of the results of all collectives, by call."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank in python_ranks:
        without_engine()
    result = {}
    cases = [
        (dtype, numel)
        for dtype in DTYPES
        for numel in list_sizes(dtype, dtype in dtypes_with_all_sizes)
    ]
    for dtype, numel in cases:
        tensor = draw_values(rank, numel, dtype)
        shared = collectives.shared_empty(numel, dtype=dtype)
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            real = dtype.is_floating_point
            if (op == "AVG" and not real) or (op in ("MIN", "MAX") and dtype.is_complex):
                continue
            what, reduce_op = (str(dtype), numel, op), getattr(dist.ReduceOp, op)
            plain = tensor.clone()
            collectives.all_reduce(plain, reduce_op)
            shared.copy_(tensor)
            collectives.all_reduce(shared, reduce_op)
            scattered = torch.empty(numel, dtype=dtype)
            collectives.reduce_scatter_tensor(scattered, tensor.repeat(world), reduce_op)
            result[what] = plain, shared.clone(), scattered
        gathered = torch.empty(numel * world, dtype=dtype)
        collectives.all_gather_into_tensor(gathered, tensor)
        received = tensor.clone()
        collectives.broadcast(received, world - 1)
        turned = torch.empty(numel * world, dtype=dtype)
        collectives.all_to_all_single(turned, tensor.repeat(world))
        result[str(dtype), numel] = gathered, received, turned
        collectives.barrier()
    return {
        what: [compute_digest(tensor) for tensor in tensors] for what, tensors in result.items()
    }


def compute_digest(tensor):
    """Return a hash of the tensor's bits, in which all NaNs are equal."""
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), torch.nan)
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


# Ranks without the engine compute the same bits.
@pytest.mark.parametrize(
    ("world", "python_ranks", "dtypes_with_all_sizes"),
    [
        (2, (), ALL_SIZES_OF),
        pytest.param(2, (), DTYPES, marks=pytest.mark.exhaustive),
        pytest.param(3, (), DTYPES, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_engine_and_python_give_identical_bits(world, python_ranks, dtypes_with_all_sizes):
    python = run_ranks(run_everything, world, tuple(range(world)), dtypes_with_all_sizes)
    compiled = run_ranks(run_everything, world, python_ranks, dtypes_with_all_sizes)
    for rank in range(world):
        wrong = [what for what in python[rank] if compiled[rank][what] != python[rank][what]]
        assert not wrong, rank


def reduce_without_one_engine():
    if dist.get_rank() == 0:
        without_engine()
    shared = collectives.shared_empty(20_000).fill_(1.0)
    collectives.all_reduce(shared)
    received = torch.empty(2)
    collectives.all_to_all_single(received, torch.full((2,), float(dist.get_rank())))
    return shared.unique().tolist(), received.tolist(), collectives.describe().engine


def test_engine_is_not_used_if_one_rank_has_none():
    for total, received, used in run_ranks(reduce_without_one_engine, 2):
        assert (total, received) == ([2.0], [0.0, 1.0])
        assert used == "Python (another rank of this host has no engine, or a different one)"


def run_many_ticks(num_calls):
    """Make short calls without a pause, which show a rank that reads another tick's data."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.empty(64)
    for i in range(num_calls):
        tensor.fill_(i + rank)
        collectives.all_reduce(tensor)
        want = i * world + world * (world - 1) / 2
        assert (tensor == want).all(), (i, tensor[0], want)
    # Python runs steps between ticks of the engine, which provide the only fences on ARM.
    sent, received = torch.empty(world, dtype=torch.int8), torch.empty(world, dtype=torch.int8)
    for i in range(num_calls // 10):
        collectives.all_to_all_single(received, sent.fill_((i + rank) % 100))
        assert received.tolist() == [(i + source) % 100 for source in range(world)]


@pytest.mark.parametrize(
    ("world", "num_calls"),
    [(2, 700), (4, 200), pytest.param(4, 20_000, marks=pytest.mark.exhaustive)],
)
def test_short_calls_never_read_data_of_another_tick(world, num_calls):
    run_ranks(run_many_ticks, world, num_calls)


def start_calls_of_round(i, rank, world, ranks):
    """Start the calls of one round; yield each handle, its result and the expected value."""
    total = sum(range(world))
    for numel in (1, 5000, 200_000):
        tensor = torch.full((numel,), float(rank + i))
        work = collectives.all_reduce(tensor, async_op=True)
        yield work, tensor, torch.full((numel,), total + i * world * 1.0)
    if i % 3 == 0:
        received = torch.empty(world, dtype=torch.int64)
        work = collectives.all_to_all_single(received, rank + ranks, async_op=True)
        yield work, received, ranks + rank
    if i % 5 == 0:
        gathered = torch.empty(world, dtype=torch.int16)
        local = torch.full((1,), rank, dtype=torch.int16)
        work = collectives.all_gather_into_tensor(gathered, local, async_op=True)
        yield work, gathered, ranks.to(torch.int16)
    if i % 7 == 0:
        with collectives.checked():
            received = torch.full((3,), float(rank))
            work = collectives.broadcast(received, 0, async_op=True)
        yield work, received, torch.zeros(3)
    if i % 9 == 0:
        # The engine does not reduce this dtype.
        tensor = torch.full((4,), rank, dtype=torch.int8)
        work = collectives.all_reduce(tensor, async_op=True)
        yield work, tensor, torch.full((4,), total, dtype=torch.int8)


def run_queued_calls(compiled):
    """Check asynchronous calls of all kinds; the engine runs some of them, and Python others."""
    if not compiled:
        without_engine()
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = torch.arange(world)
    wants, works = [], []
    for i in range(23):
        for work, result, want in start_calls_of_round(i, rank, world, ranks):
            works.append(work)
            wants.append((result, want))
        if i % 11 == 0:
            now = torch.ones(5)
            collectives.all_reduce(now)
            assert all(work.is_completed() for work in works)
            assert (now == world).all()
    futures = [work.get_future() for work in works]
    for work, future, (result, want) in zip(works, futures, wants, strict=True):
        work.wait()
        assert future.wait()[0] is result
        assert work.is_success()
        assert torch.equal(result, want), (result, want)
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    work = collectives.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    assert (tensor == world).all()
    work.wait()
    del tensor, work
    # A synchronous call waits for the last asynchronous call of any thread.
    collectives.barrier()
    end = time.monotonic() + 10
    while gone() is not None and time.monotonic() < end:
        gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("world", "compiled"),
    [
        (3, True),
        (3, False),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((1, True), (1, False), (2, True), (2, False))
        ),
    ],
)
def test_asynchronous_calls_of_all_kinds_keep_their_order(world, compiled):
    run_ranks(run_queued_calls, world, compiled)


def call_from_many_threads():
    """Make synchronous calls on one thread and asynchronous calls on another, with one group."""
    tensors = [torch.ones(3000) for _ in range(300)]
    works = []

    def start_calls():
        works.extend(collectives.all_reduce(tensor, async_op=True) for tensor in tensors)

    calls_before = get_communicator().operation.number
    later = threading.Thread(target=start_calls)
    later.start()
    for _ in range(300):
        now = torch.full((3000,), 2.0)
        collectives.all_reduce(now)
        assert (now == 2).all()
    later.join()
    collectives.barrier()
    assert len(works) == 300
    assert all(work.is_success() for work in works)
    assert all((tensor == 1).all() for tensor in tensors)
    assert get_communicator().operation.number == calls_before + 601


def test_synchronous_and_asynchronous_threads_share_a_group():
    run_ranks(call_from_many_threads, 1)


def run_slices_of_one_buffer():
    """Return whether the engine runs asynchronous calls on parts of one buffer, and the results."""
    rank, world = dist.get_rank(), dist.get_world_size()
    jobs = []
    make_job = dispatch.make_job

    def recorded(*args):
        jobs.append(make_job(*args))
        return jobs[-1]

    dispatch.make_job = recorded
    buffer = torch.arange(16.0) + 100 * rank
    whole, local = buffer[: 4 * world], buffer[4 * world : 4 * world + 4]
    collectives.reduce_scatter_tensor(local, whole, async_op=True).wait()
    reduced = local.tolist()
    local.fill_(rank)
    collectives.all_gather_into_tensor(whole, local, async_op=True).wait()
    gathered = whole.tolist()
    # A shifted input overlaps the output, so it must be copied.
    shifted = buffer[4 * world - 2 : 4 * world + 2]
    expected = whole.new_empty(4 * world)
    collectives.all_gather_into_tensor(expected, shifted.clone())
    collectives.all_gather_into_tensor(whole, shifted, async_op=True).wait()
    return [job is not None for job in jobs], reduced, gathered, torch.equal(whole, expected)


def test_engine_runs_calls_on_separate_slices_of_one_buffer():
    for rank, (in_engine, reduced, gathered, is_shifted) in enumerate(
        run_ranks(run_slices_of_one_buffer, 2)
    ):
        assert in_engine == [True, True]
        assert reduced == [100.0 + 2 * (4 * rank + i) for i in range(4)]
        assert gathered == [0.0] * 4 + [1.0] * 4
        assert is_shifted


def compute_until_over(work):
    while not work.is_completed():
        sum(range(1000))


TIMEOUT = 4.0
# The survivors of a rank that hangs compute until the timeout.
TIMEOUT_OF_HANGS = 2.0


def fails_beside_python(compiled, how):
    """Lose the last rank while the other ranks compute during their calls."""
    if not compiled:
        without_engine()
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    store = dist.FileStore(os.environ["STORE_FILE"], world)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    tensors = [torch.ones(400_000) for _ in range(4)]
    collectives.all_reduce(tensors[0], async_op=True).wait()
    collectives.barrier()
    if how == "hangs":
        limit = timedelta(seconds=TIMEOUT_OF_HANGS)
        dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
    odd = rank == world - 1
    if odd and how != "differs":
        if how == "hangs":
            store.wait([f"over {survivor}" for survivor in range(rank)], timedelta(seconds=60))
        os._exit(1)
    start = time.monotonic()
    if how == "differs":
        works = [collectives.all_reduce(tensors[1], async_op=True)]
        works.append(collectives.all_reduce(tensors[2][odd:], async_op=True))
        works.append(collectives.all_reduce(tensors[3], async_op=True))
        for work in works:
            compute_until_over(work)
        assert [work.is_success() for work in works] == [True, False, True]
        with pytest.raises(collectives.Mismatch, match=f"rank {world - 1} called all_reduce"):
            works[1].wait()
        assert (tensors[2] == 1).all()
        assert (tensors[3] == world).all()
    else:
        works = [collectives.all_reduce(tensor, async_op=True) for tensor in tensors[1:]]
        for work, match in zip(works, (f"rank {world - 1}", "earlier", "earlier"), strict=True):
            compute_until_over(work)
            with pytest.raises(collectives.RankLost, match=match) as caught:
                work.wait()
            assert caught.value.ranks == (world - 1,)
    seconds = time.monotonic() - start
    # A survivor that ended at once would be taken for lost by a slower one.
    store.set(f"over {rank}", "")
    store.wait([f"over {other}" for other in range(2)], timedelta(seconds=60))
    return seconds


@pytest.mark.parametrize(
    ("how", "compiled"),
    [
        ("dies", True),
        ("hangs", True),
        ("differs", True),
        *(pytest.param(how, False, marks=pytest.mark.exhaustive) for how in ("dies", "hangs")),
        ("differs", False),
    ],
)
def test_fault_is_reported_in_time_while_the_caller_computes(how, compiled):
    outcomes = try_ranks(fails_beside_python, 3, compiled, how, backend="")
    for outcome in outcomes[: 3 if how == "differs" else 2]:
        assert not outcome.failed, outcome.trace
        assert outcome.value < (TIMEOUT_OF_HANGS + 2 if how == "hangs" else TIMEOUT)


def abort_while_waiting():
    """Abort the group while the engine waits for another rank."""
    comm, store = get_communicator(), dist.distributed_c10d._get_default_store()
    collectives.barrier()
    tick = comm.topology.arena.tick

    def abort():
        while comm.topology.arena.tick == tick:
            time.sleep(0.001)
        comm.abort()

    thread = threading.Thread(target=abort)
    if dist.get_rank() == 0:
        thread.start()
    else:
        # This rank joins the call only after it has failed on the other rank.
        store.wait(["has failed"])
    start = time.monotonic()
    with pytest.raises(collectives.RankLost, match="rank 0"):
        collectives.all_reduce(torch.ones(10))
    seconds = time.monotonic() - start
    if dist.get_rank() == 0:
        store.set("has failed", "")
        thread.join()
    return seconds


def test_abort_ends_waiting_calls_on_every_rank():
    assert max(run_ranks(abort_while_waiting, 2)) < 5
