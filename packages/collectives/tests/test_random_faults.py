"""Random sequences of calls with a random fault: every survivor gets an error in time.

Each sequence runs on the registered backend with torch's own names. A rank dies, hangs or calls
something else at a random call; every other rank must end with an error that is this package's.
"""

import os
import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from worker_pool import try_ranks

TIMEOUT = 6.0
# Starting up on a busy machine, and the seconds beyond the timeout that telling who it was takes.
SLACK = 12.0
FAULTS = ("dies", "hangs", "shape", "dtype", "op", "order")


def some_call(choose, rank, world):
    """A call that is the same on all ranks, and one that is not but for its place in the order."""
    numel = choose.choice((1, 100, 5000, 300_000))
    kind = choose.choice(("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"))
    asynchronous = choose.random() < 0.4

    def go(numel=numel, dtype=torch.float32, op=dist.ReduceOp.SUM, kind=kind):
        short, long = torch.ones(numel, dtype=dtype), torch.ones(numel * world, dtype=dtype)
        call = {
            "all_reduce": lambda: dist.all_reduce(short, op, async_op=asynchronous),
            "broadcast": lambda: dist.broadcast(short, 0, async_op=asynchronous),
            "all_gather": lambda: dist.all_gather_into_tensor(long, short, async_op=asynchronous),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(
                short, long, op, async_op=asynchronous
            ),
            "all_to_all": lambda: dist.all_to_all_single(
                torch.empty_like(long), long, async_op=asynchronous
            ),
        }[kind]
        work = call()
        if kind in ("all_reduce", "reduce_scatter"):
            if work is not None:
                work.wait()
            assert (short == (world if op == dist.ReduceOp.SUM else 1)).all()
        return work

    return go, kind


def sequence(seed):
    import collectives.backend

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE_FILE"], world)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=world, timeout=limit)
    choose = random.Random(seed)
    length, fault = choose.randrange(2, 8), choose.choice(FAULTS)
    at, odd = choose.randrange(length), choose.randrange(world)
    works = []
    for i in range(length):
        go, kind = some_call(choose, rank, world)
        start = time.monotonic()
        if i == at and rank == odd:
            if fault == "dies":
                os._exit(7)
            if fault == "hangs":
                time.sleep(TIMEOUT + 4)
                os._exit(7)
        try:
            if i == at and rank == odd and fault == "shape":
                # An all-to-all's lengths are each rank's own; there its kind is what differs.
                go(7) if kind != "all_to_all" else dist.barrier()
            elif i == at and rank == odd and fault == "dtype":
                go(dtype=torch.float64)
            elif i == at and rank == odd and fault == "op" and kind.endswith("reduce"):
                go(op=dist.ReduceOp.MAX)
            elif i == at and rank == odd and fault in ("op", "order"):
                dist.barrier()
            else:
                works.append(go())
            if i == at:
                for work in works:
                    if work is not None:
                        work.wait()
                works.clear()
        except (collectives.RankLost, collectives.Mismatch) as error:
            found = error.ranks, str(error), time.monotonic() - start
            break
        except RuntimeError as error:
            raise AssertionError(f"{fault}: an error that names no rank: {error}") from error
    else:
        raise AssertionError(f"rank {rank}: silent, though rank {odd} {fault} at call {at}")
    ranks, told, seconds = found
    # Of two ranks that differ either may be the odd one.
    named = odd in ranks or rank == odd or (world == 2 and fault not in ("dies", "hangs"))
    return i == at and named, fault, seconds, told


def check(seed):
    world = random.Random(1000 + seed).choice((2, 3))
    for outcome in try_ranks(sequence, world, seed, backend="", timeout=90):
        if outcome.exit_code == 7:
            continue
        assert not outcome.failed, (seed, outcome.trace or outcome.exit_code)
        named, fault, seconds, told = outcome.value
        assert named, (seed, fault, told)
        assert seconds < TIMEOUT + SLACK, (seed, fault, seconds)


@pytest.mark.parametrize("seed", range(3))
def test_a_fault_in_a_random_sequence_is_told_to_every_survivor(seed):
    check(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3, 303))
def test_faults_in_many_random_sequences_are_told_to_every_survivor(seed):
    check(seed)
