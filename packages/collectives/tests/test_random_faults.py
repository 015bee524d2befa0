"""Random sequences of calls with a random fault: every survivor gets an error in time.

Each sequence runs on the registered backend with torch's own names, on one host or on several that
share nothing but messages. A rank dies (before a call or at any moment in it), hangs (asleep or
stopped by a signal) or calls something else; every other rank must end with an error that names it,
within the timeout and two seconds, and results until then must be right.

Processes go from one sequence to the next until one of them is dead or stopped.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives.algorithms import dispatch
from collectives.choice.cost import NATIVE, CostModel, Sample, candidates
from collectives.choice.tuning import SIZES
from collectives.shared_memory import segment
from worker_pool import try_ranks

SLACK = 2.0
# How long ranks wait for each other between sequences, on a busy machine.
PATIENCE = timedelta(seconds=60)
KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter",
         "all_to_all", "barrier")  # fmt: skip
REDUCES, ROOTED = ("all_reduce", "reduce", "reduce_scatter"), ("reduce", "broadcast", "gather")
MISMATCHES = ("shape", "dtype", "op", "root", "order")
HANGS, DEATHS = ("hangs", "is stopped"), ("dies", "is killed")
# More of those after which the processes live on.
FAULTS = ("none", *MISMATCHES, *MISMATCHES, *HANGS, *DEATHS)
PLACES = ("together", "together", "apart", "pairs")
REAL_HOST = segment.host_identity


class Call:
    """One collective on small numbers that tell whose they are; `start` it, then `verify`."""

    def __init__(self, kind, numel, root, asynchronous):
        self.kind, self.numel, self.root, self.asynchronous = kind, numel, root, asynchronous
        self.dtype, self.op = torch.float32, dist.ReduceOp.SUM
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def start(self):
        rank, world, root, kind = self.rank, self.world, self.root, self.kind
        go = {"async_op": self.asynchronous}
        own = self.own = torch.full((self.numel,), rank + 1.0, dtype=self.dtype)
        long = self.long = own.repeat(world)
        parts = self.parts = list(long.clone().chunk(world)) if self.numel else [own] * world
        here = parts if rank == root else None
        if kind == "all_reduce":
            return dist.all_reduce(own, self.op, **go)
        if kind == "reduce":
            return dist.reduce(own, root, self.op, **go)
        if kind == "broadcast":
            return dist.broadcast(own, root, **go)
        if kind == "all_gather":
            return dist.all_gather_into_tensor(long, own, **go)
        if kind == "gather":
            return dist.gather(own, here, root, **go)
        if kind == "reduce_scatter":
            return dist.reduce_scatter_tensor(own, long, self.op, **go)
        if kind == "scatter":
            return dist.scatter(own, here, root, **go)
        if kind == "all_to_all":
            self.result = torch.zeros_like(long)
            return dist.all_to_all_single(self.result, long, **go)
        return dist.barrier(**go)

    def verify(self):
        world, everyone = self.world, self.world * (self.world + 1) / 2
        by_rank = [[r + 1.0] * self.numel for r in range(world)]
        if self.kind in ("all_reduce", "reduce_scatter"):
            assert (self.own == everyone).all(), self.kind
        elif self.kind == "reduce":
            assert (self.own == (everyone if self.rank == self.root else self.rank + 1)).all()
        elif self.kind in ("broadcast", "scatter"):
            assert (self.own == self.root + 1).all(), self.kind
        elif self.kind == "all_gather":
            assert [part.tolist() for part in self.long.chunk(world)] == by_rank
        elif self.kind == "all_to_all":
            assert [part.tolist() for part in self.result.chunk(world)] == by_rank
        elif self.kind == "gather" and self.rank == self.root:
            assert [part.tolist() for part in self.parts] == by_rank

    def differ(self, fault):
        """Be another call than the others make: in what the fault says, if it can differ so.

        Of what is empty nothing is sent between hosts, and nothing can be wrong.
        """
        if self.numel == 0 and fault != "shape":
            fault = "order"
        if fault == "shape" and self.kind not in ("barrier", "all_to_all", "gather", "scatter"):
            self.numel += 1
        elif fault == "dtype" and self.kind != "barrier":
            self.dtype = torch.float64
        elif fault == "op" and self.kind in REDUCES:
            self.op = dist.ReduceOp.MAX
        elif fault == "root" and self.kind in ROOTED:
            self.root = (self.root + 1) % self.world
        else:
            self.kind = "all_reduce" if self.kind == "barrier" else "barrier"


class Stalls:
    """How much later than it should this process runs: what the machine keeps it waiting."""

    def __init__(self):
        self.late, self._over = [], False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        while not self._over:
            before = time.monotonic()
            time.sleep(0.05)
            self.late.append((before, time.monotonic() - before - 0.05))

    def since(self, start):
        """Seconds since a time of time.monotonic, as long as a stall is one that matters."""
        return sum(late for at, late in self.late if at >= start - 0.05 and late > 0.05)

    def end(self):
        self._over = True


def place(where, rank):
    a_host = {"together": 0, "apart": 1, "pairs": 2}[where]
    segment.host_identity = (lambda: f"host {rank // a_host}") if a_host else REAL_HOST


def any_model(kind, call, hosts, wire, agree, *, native):
    """What a measurement could have said: so that each algorithm is met now and then."""
    names = (*candidates(kind, hosts, shared=False), *[NATIVE] * native)
    samples = [
        Sample(kind, n, size, tuple(hosts), random.random(), random.choice((0.5, 1.0)))
        for n in names
        for size in SIZES
    ]
    model = replace(CostModel.fit(samples), samples=tuple(samples))
    return CostModel.from_json(agree(model.to_json()))


def sequences(world_seed, first, most, timeout):
    """Sequences until one of them ends a process; what this rank found out in each."""
    import collectives.backend  # noqa: F401

    # The first fit imports it: on a busy machine for longer than a short timeout lasts.
    import scipy.optimize  # noqa: F401

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    control = dist.FileStore(os.environ["STORE_FILE"], world)
    dispatch.tune = any_model
    control.set(f"pid/{rank}", str(os.getpid()))
    found = []
    for i in range(first, first + most):
        choose = random.Random(f"{world_seed} {i}")
        fault, odd = choose.choice(FAULTS), choose.randrange(world)
        ends = fault in ("dies", "is killed", "is stopped")
        survivors = [r for r in range(world) if not (ends and r == odd)]
        try:
            found.append(sequence(choose, fault, odd, control, i, timeout))
        finally:
            # Whoever hangs does so until the others have told what they found; and where one found
            # what it should not, no other is to wait for it, nor all for one that is stopped.
            control.set(f"told/{i}/{rank}", "")
            control.wait([f"told/{i}/{r}" for r in survivors], PATIENCE)
            if ends and rank == survivors[0]:
                with suppress(ProcessLookupError):
                    os.kill(int(control.get(f"pid/{odd}")), signal.SIGKILL)
        if ends:
            break
        dist.destroy_process_group()
    return found


def sequence(choose, fault, odd, control, i, timeout):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where, length = choose.choice(PLACES), choose.randrange(1, 7)
    place(where, rank)
    dispatch._models.clear()
    at, moment = choose.randrange(length), choose.random() ** 3 * 0.02
    calls = [
        (choose.choice(KINDS), choose.choice((0, 1, 100, 5000, 300_000)), choose.randrange(world))
        for _ in range(length)
    ]
    waits = [choose.random() < 0.6 for _ in range(length)]
    store = dist.FileStore(f"{os.environ['STORE_FILE']}.{i}", world)
    limit = timedelta(seconds=30)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=world, timeout=limit)
    dist.group.WORLD.set_timeout(timedelta(seconds=timeout))
    case = f"{fault} of rank {odd} at {at} of {calls} {waits} {where}, world {world}"
    errors, slowest, pending, stalled = [], 0.0, [], Stalls()

    def attempt(function, index):
        """The function's value; its error is kept, with the call's number."""
        nonlocal slowest
        start = time.monotonic()
        try:
            return function()
        except (collectives.RankLost, collectives.Mismatch) as error:
            errors.append((index, type(error).__name__, error.ranks, str(error)))
        finally:
            slowest = max(slowest, time.monotonic() - start - stalled.since(start))
        return None

    def finish(call, work, index):
        before = len(errors)
        if work is not None:
            attempt(work.wait, index)
        # The odd one's own call was another one.
        if len(errors) == before and not (rank == odd and index == at):
            call.verify()

    for index, arguments in enumerate(calls):
        call = Call(*arguments, asynchronous=not waits[index])
        if index == at and rank == odd:
            if fault == "dies":
                os._exit(7)
            if fault == "hangs":
                others = [f"told/{i}/{r}" for r in range(world) if r != odd]
                control.wait(others, PATIENCE)
                return case, fault, [], 0.0
            if fault in ("is killed", "is stopped"):
                how = signal.SIGKILL if fault == "is killed" else signal.SIGSTOP
                threading.Timer(moment, os.kill, (os.getpid(), how)).start()
            if fault in MISMATCHES:
                call.differ(fault)
        before = len(errors)
        work = attempt(call.start, index)
        if len(errors) == before:
            if waits[index]:
                finish(call, None, index)
            else:
                pending.append((call, work, index))
    for each in pending:
        finish(*each)
    if rank == odd and fault in ("is killed", "is stopped"):
        time.sleep(60)
    # What a rank had all it needed of it hears of at its next call, at the latest.
    last = Call("all_reduce", 10, 0, False)
    before = len(errors)
    attempt(last.start, length)
    if len(errors) == before:
        last.verify()
    lives_on = fault == "none" or (fault in MISMATCHES and where == "together")
    if lives_on and len(errors) > (fault != "none"):
        raise AssertionError(f"{case}: the group is to live on, but {errors}")
    if fault != "none" and not errors:
        raise AssertionError(f"{case}: rank {rank} heard nothing")
    for index, kind, ranks, told in errors:
        # Of two ranks that differ either may be the odd one.
        named = odd in ranks or (fault in MISMATCHES and f"rank {odd} called" in told)
        soon = fault in MISMATCHES and index < at
        if not named or soon:
            raise AssertionError(f"{case}: rank {rank} at call {index} got {kind}: {told}")
    if slowest > timeout + SLACK:
        raise AssertionError(f"{case}: rank {rank} waited for {slowest:.2f} s")
    stalled.end()
    return case, fault, [told for *_, told in errors], slowest


def check(seed, count, timeout):
    """So many sequences; how often each fault was met, and the longest wait for an error."""
    done, met, slowest = 0, Counter(), 0.0
    while done < count:
        world = random.Random(f"{seed} {done}").choice((2, 3, 4))
        how = seed, done, count - done, timeout
        outcomes = try_ranks(sequences, world, *how, backend="", timeout=900)
        told = [o.value for o in outcomes if o.exit_code not in (7, -signal.SIGKILL)]
        for outcome in outcomes:
            assert outcome.exit_code in (None, 7, -signal.SIGKILL), (seed, done, outcome)
        if errors := [o for o in outcomes if o.error is not None]:
            pytest.fail(f"{seed} from {done}:\n" + "\n".join(o.trace for o in errors))
        assert len({len(each) for each in told}) == 1, (seed, done, told)
        for case in zip(*told, strict=True):
            met[case[0][1]] += 1
            slowest = max(slowest, *(seconds for *_, seconds in case))
        done += len(told[0])
    return met, slowest


@pytest.mark.parametrize("seed", range(2))
def test_a_fault_in_a_random_sequence_is_told_to_every_survivor(seed):
    # A busy machine must be heard in the little time that a roll call takes.
    met, slowest = check(seed, 8, 8.0)
    assert sum(met.values()) == 8
    assert slowest < 8.0 + SLACK


@pytest.mark.exhaustive
@pytest.mark.parametrize("tenth", range(10))
def test_faults_in_ten_thousand_random_sequences_are_told_to_every_survivor(tenth):
    # Most of the time all ranks wait for a timeout, so many worlds may do so at once.
    with ThreadPoolExecutor(10) as pool:
        seeds = [f"{tenth} {i}" for i in range(10)]
        counts = [met for met, _ in pool.map(check, seeds, [100] * 10, [5.0] * 10)]
    met = sum(counts, Counter())
    assert sum(met.values()) == 1000
    assert set(met) == set(FAULTS)
