"""The compiled engine and the Python that it stands for: the same steps, the same bits."""

import hashlib
import itertools
import threading
import time

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives.shared_memory import engine
from worker_pool import run_ranks

DTYPES = (*engine.DTYPES, torch.int8, torch.complex64)
SIZES = (0, 1, 1000, 8193, 300_001)
pytestmark = pytest.mark.skipif(bool(engine.why_not()), reason=engine.why_not())


def without_engine():
    engine.library, engine.reduces = lambda: None, lambda *_: False


def values(rank, numel, dtype):
    generator = torch.Generator().manual_seed(100 * numel + rank)
    if dtype.is_floating_point or dtype.is_complex:
        found = torch.randn(numel, generator=generator, dtype=torch.float64)
        if numel > 100:
            found[3 + rank], found[50], found[60] = torch.nan, torch.inf, -0.0
        return found.to(dtype)
    return torch.randint(-100 * dtype.is_signed, 100, (numel,), generator=generator).to(dtype)


def everything(python_ranks):
    """Bytes of the results of all collectives, by what was called."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank in python_ranks:
        without_engine()
    found = {}
    for dtype, numel in itertools.product(DTYPES, SIZES):
        tensor = values(rank, numel, dtype)
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            real = dtype.is_floating_point
            if (op == "AVG" and not real) or (op in ("MIN", "MAX") and dtype.is_complex):
                continue
            what, reduce_op = (str(dtype), numel, op), getattr(dist.ReduceOp, op)
            plain = tensor.clone()
            collectives.all_reduce(plain, reduce_op)
            shared = collectives.shared_empty(numel, dtype=dtype).copy_(tensor)
            collectives.all_reduce(shared, reduce_op)
            scattered = torch.empty(numel, dtype=dtype)
            collectives.reduce_scatter_tensor(scattered, tensor.repeat(world), reduce_op)
            found[what] = plain, shared.clone(), scattered
        gathered = torch.empty(numel * world, dtype=dtype)
        collectives.all_gather_into_tensor(gathered, tensor)
        told = tensor.clone()
        collectives.broadcast(told, world - 1)
        turned = torch.empty(numel * world, dtype=dtype)
        collectives.all_to_all_single(turned, tensor.repeat(world))
        found[str(dtype), numel] = gathered, told, turned
        collectives.barrier()
    return {what: [digest(tensor) for tensor in each] for what, each in found.items()}


def digest(tensor):
    """The same for the same bits; a NaN is a NaN, whatever it carries."""
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), torch.nan)
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_the_engine_gives_the_bits_that_python_gives_also_where_ranks_differ_in_it(world):
    python = run_ranks(everything, world, tuple(range(world)))
    # Where one rank has no compiler, that of another rank does the same steps.
    for python_ranks in ((), (0,)):
        compiled = run_ranks(everything, world, python_ranks)
        for rank in range(world):
            wrong = [what for what in python[rank] if compiled[rank][what] != python[rank][what]]
            assert not wrong, (rank, python_ranks)


def many_ticks():
    """Short calls without a pause: whoever overtakes by a tick or reads too early shows it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.empty(64)
    for i in range(3000):
        tensor.fill_(i + rank)
        collectives.all_reduce(tensor)
        want = i * world + world * (world - 1) / 2
        assert (tensor == want).all(), (i, tensor[0], want)
    # Steps in Python between ticks of the engine, whose fences are all there are on ARM.
    sent, received = torch.empty(world, dtype=torch.int8), torch.empty(world, dtype=torch.int8)
    for i in range(300):
        collectives.all_to_all_single(received, sent.fill_((i + rank) % 100))
        assert received.tolist() == [(i + source) % 100 for source in range(world)]


@pytest.mark.parametrize("world", [2, 4])
def test_thousands_of_short_calls_never_read_before_or_after_their_tick(world):
    run_ranks(many_ticks, world)


def busy():
    """Seconds of an asynchronous all-reduce of 25 MiB while Python computes: gloo's and ours."""
    tensor, seconds = torch.zeros(25 << 18), []
    for _ in range(9):
        turn = []
        for call in (dist.all_reduce, collectives.all_reduce):
            collectives.barrier()
            start = time.perf_counter()
            work = call(tensor, async_op=True)
            while not work.is_completed():
                sum(range(1000))
            turn.append(time.perf_counter() - start)
        seconds.append(turn)
    return sorted(theirs / ours for theirs, ours in seconds)[len(seconds) // 2]


@pytest.mark.timing
def test_an_asynchronous_call_beside_busy_python_is_faster_than_gloos():
    assert min(run_ranks(busy, 2)) >= 1.5


def interrupted():
    """A rank that waits in the engine still hears that its own group was given up."""
    from collectives.communicator import communicator

    comm, store = communicator(), dist.distributed_c10d._get_default_store()

    def give_up():
        comm.abort()
        # So long a wait does not hear of it.
        time.sleep(0.2)
        store.set("given up", "yes")

    collectives.barrier()
    timer = threading.Timer(0.2, give_up)
    if dist.get_rank() == 0:
        timer.start()
    else:
        store.wait(["given up"])
    start = time.monotonic()
    with pytest.raises(collectives.RankLost, match="rank 0"):
        collectives.all_reduce(torch.ones(10))
    seconds = time.monotonic() - start
    if dist.get_rank() == 0:
        timer.join()
    return seconds


def test_abort_ends_a_call_that_waits_and_is_told_to_the_others():
    assert max(run_ranks(interrupted, 2)) < 5
