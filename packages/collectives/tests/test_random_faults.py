"""Random sequences of calls with a random fault: every survivor gets an error in time.

Each sequence runs on the registered backend with torch's own names, on one host or on several that
share nothing but messages. A rank dies (before a call or at any moment in it), ends with an
uncaught exception, hangs (asleep or stopped by a signal), destroys or aborts its group, or calls
something else. Every other rank must end with an error that names this rank, within the timeout and
two seconds. Results until then must be right. After a loss, the survivors rebuild the group and
continue. If a rank "is restarted", it is killed, and new processes replace those of all ranks. They
use the store of the first processes under the next restart count, as under torchrun.

Processes go from one sequence to the next until one of them is dead or stopped.
"""

import ctypes
import os
import random
import signal
import sys
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
from collectives.choice.cost import NATIVE, CostModel, Sample, list_candidates
from collectives.choice.tuning import CALLS_PER_ROUND
from collectives.shared_memory import segment
from worker_pool import try_ranks

SLACK = 2.0
# Time that ranks wait for each other between sequences, on a busy machine.
PATIENCE = timedelta(seconds=60)
KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter",
         "all_to_all", "barrier")  # fmt: skip
REDUCES, ROOTED = ("all_reduce", "reduce", "reduce_scatter"), ("reduce", "broadcast", "gather")
MISMATCHES = ("shape", "dtype", "op", "root", "order")
HANGS, DEATHS = ("hangs", "is stopped"), ("dies", "is killed", "raises")
RESTARTED = "is restarted"
EXITS = ("destroys", "aborts")
# Mismatches are twice as frequent, because the processes survive them.
FAULTS = ("none", *MISMATCHES, *MISMATCHES, *HANGS, *DEATHS, *EXITS, RESTARTED)
# The faults that a signal causes at a random moment.
SIGNALS = {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP, RESTARTED: signal.SIGKILL}
# The faults that end the process of a rank, and its exit codes. The test kills a stopped process.
EXIT_CODES = {"dies": 7, "raises": 1, **dict.fromkeys(SIGNALS, -signal.SIGKILL)}
# Time that the exit of a process takes at most, on a busy machine.
EXIT_SECONDS = 60
PLACES = ("together", "together", "apart", "pairs")
REAL_HOST = segment.identify_host


class Call:
    """One collective on numbers that identify their rank; `start` it, then `verify`."""

    def __init__(self, kind, numel, root, asynchronous):
        self.kind = kind
        self.numel = numel
        self.root = root
        self.asynchronous = asynchronous
        self.dtype, self.op = torch.float32, dist.ReduceOp.SUM
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def start(self):
        rank, world = self.rank, self.world
        root, kind = self.root, self.kind
        go = {"async_op": self.asynchronous}
        local = self.local = torch.full((self.numel,), rank + 1.0, dtype=self.dtype)
        long = self.long = local.repeat(world)
        parts = self.parts = list(long.clone().chunk(world)) if self.numel else [local] * world
        root_parts = parts if rank == root else None
        if kind == "all_reduce":
            return dist.all_reduce(local, self.op, **go)
        if kind == "reduce":
            return dist.reduce(local, root, self.op, **go)
        if kind == "broadcast":
            return dist.broadcast(local, root, **go)
        if kind == "all_gather":
            return dist.all_gather_into_tensor(long, local, **go)
        if kind == "gather":
            return dist.gather(local, root_parts, root, **go)
        if kind == "reduce_scatter":
            return dist.reduce_scatter_tensor(local, long, self.op, **go)
        if kind == "scatter":
            return dist.scatter(local, root_parts, root, **go)
        if kind == "all_to_all":
            self.result = torch.zeros_like(long)
            return dist.all_to_all_single(self.result, long, **go)
        return dist.barrier(**go)

    def verify(self):
        world, everyone = self.world, self.world * (self.world + 1) / 2
        by_rank = [[r + 1.0] * self.numel for r in range(world)]
        if self.kind in ("all_reduce", "reduce_scatter"):
            assert (self.local == everyone).all(), self.kind
        elif self.kind == "reduce":
            assert (self.local == (everyone if self.rank == self.root else self.rank + 1)).all()
        elif self.kind in ("broadcast", "scatter"):
            assert (self.local == self.root + 1).all(), self.kind
        elif self.kind == "all_gather":
            assert [part.tolist() for part in self.long.chunk(world)] == by_rank
        elif self.kind == "all_to_all":
            assert [part.tolist() for part in self.result.chunk(world)] == by_rank
        elif self.kind == "gather" and self.rank == self.root:
            assert [part.tolist() for part in self.parts] == by_rank

    def differ(self, fault):
        """Deviate from the other ranks' call, in the property of the fault if the call has it.

        Empty tensors are not sent between hosts, so the order of calls differs instead.
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


def end_with_uncaught_exception():
    """End this process as the interpreter does after an exception that user code has raised.

    A process of the worker pool would catch the exception.
    """
    # The interpreter's end reports objects that the process of the worker pool still uses.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        raise ValueError("the user's code is wrong")
    except ValueError as error:
        sys.last_value = error
        ctypes.pythonapi.Py_Exit(EXIT_CODES["raises"])


class Stalls:
    """Measures how late this process runs because the machine is busy."""

    def __init__(self):
        self.late, self._over = [], False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        while not self._over:
            before = time.monotonic()
            time.sleep(0.05)
            self.late.append((before, time.monotonic() - before - 0.05))

    def since(self, start):
        """Return the seconds of significant stalls since a time of time.monotonic."""
        return sum(late for at, late in self.late if at >= start - 0.05 and late > 0.05)

    def end(self):
        self._over = True


def emulate_hosts(where, rank):
    a_host = {"together": 0, "apart": 1, "pairs": 2}[where]
    segment.identify_host = (lambda: f"host {rank // a_host}") if a_host else REAL_HOST


def draw_model(kind, call, hosts, wire, agree, *, native):
    """Return a random model in place of a measured one, so that every algorithm is used."""
    names = (*list_candidates(kind, hosts, shared=False), *[NATIVE] * native)
    samples = [
        Sample(kind, n, size, tuple(hosts), random.random(), random.choice((0.5, 1.0)))
        for n in names
        for size in CALLS_PER_ROUND
    ]
    model = replace(CostModel.fit(samples), samples=tuple(samples))
    return CostModel.from_json(agree(model.to_json()))


def connect(port, prefix):
    """Return a part of the test's store, over a new connection.

    The test's process serves the store. A killed rank can damage a file store.
    """
    return dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port))


def prepare(port, restart_count, first):
    """Prepare this process for sequences from `first` on; return the store of their ranks."""
    import collectives.backend  # noqa: F401

    # The first fit imports scipy, which takes longer than a short timeout on a busy machine.
    import scipy.optimize  # noqa: F401

    dispatch.tune = draw_model
    # The variables that torchrun sets.
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
    }
    return connect(port, f"control {restart_count} {first}")


def draw(seed, number, world):
    """Return the random numbers of a sequence, its fault and the rank that has the fault."""
    choose = random.Random(f"{seed} {number}")
    return choose, choose.choice(FAULTS), choose.randrange(world)


def end_process(pid, seconds):
    """Wait until a process has ended; kill it after a number of seconds."""
    deadline = time.monotonic() + seconds
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)


def run_restarted_sequence(seed, number, timeout, port, restart_count):
    """Run a sequence whose ranks have been restarted; no call may fail."""
    control = prepare(port, restart_count, number)
    choose, fault, odd = draw(seed, number, int(os.environ["WORLD_SIZE"]))
    assert fault == RESTARTED
    sequence = Sequence(choose, fault, odd, control, number, timeout, port)
    sequence.fault = "none"
    return sequence.run()


def run_sequences(seed, first, most, timeout, port, restart_count):
    """Run sequences until one of them ends a process; return this rank's results."""
    control = prepare(port, restart_count, first)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    control.set(f"pid/{rank}", str(os.getpid()))
    results = []
    for i in range(first, first + most):
        choose, fault, odd = draw(seed, i, world)
        ends = fault in EXIT_CODES
        survivors = [r for r in range(world) if not (ends and r == odd)]
        try:
            results.append(Sequence(choose, fault, odd, control, i, timeout, port).run())
        finally:
            # A rank that hangs does so until the other ranks have their results. No rank waits for
            # a rank that failed its check, or that is stopped.
            control.set(f"finished/{i}/{rank}", "")
            control.wait([f"finished/{i}/{r}" for r in survivors], PATIENCE)
            if ends and rank == survivors[0]:
                pid = int(control.get(f"pid/{odd}"))
                end_process(pid, EXIT_SECONDS if fault == "raises" else 0)
        if ends:
            break
        if dist.is_initialized():
            dist.destroy_process_group()
    return results


class Sequence:
    """One random sequence of calls on a new group, with one fault on one rank.

    All ranks draw the same random numbers, so they agree on the calls and on the fault.
    """

    def __init__(self, choose, fault, odd, control, number, timeout, port):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.fault = fault
        self.is_under_launcher = fault == RESTARTED
        self.is_odd = self.rank == odd
        self.odd = odd
        self.control = control
        self.number = number
        self.timeout = timeout
        self.port = port
        self.where = choose.choice(PLACES)
        length = choose.randrange(1, 7)
        #: The index of the call that has the fault, and the seconds until a signal.
        self.faulty = choose.randrange(length)
        self.moment = choose.random() ** 3 * 0.02
        self.calls = [
            (
                choose.choice(KINDS),
                choose.choice((0, 1, 100, 5000, 300_000)),
                choose.randrange(self.world),
            )
            for _ in range(length)
        ]
        self.waits = [choose.random() < 0.6 for _ in range(length)]
        self.description = (
            f"{fault} of rank {odd} at {self.faulty} of {self.calls} {self.waits} {self.where}, "
            f"world {self.world}"
        )
        self.errors = []
        self.slowest = 0.0
        self.stalls = Stalls()

    def start_group(self):
        emulate_hosts(self.where, self.rank)
        dispatch._models.clear()
        # By default, torch connects to the store of the environment, as under torchrun.
        options = {}
        if not self.is_under_launcher:
            options["store"] = connect(self.port, f"group {self.number}")
            options |= {"rank": self.rank, "world_size": self.world}
        dist.init_process_group("collectives", timeout=timedelta(seconds=30), **options)
        dist.group.WORLD.set_timeout(timedelta(seconds=self.timeout))
        # A rank that dies before another has created its group fails that creation. The faults of
        # this test are for the calls, so all ranks wait here until all groups are complete.
        self.control.set(f"ready/{self.number}/{self.rank}", "")
        self.control.wait([f"ready/{self.number}/{r}" for r in range(self.world)], PATIENCE)

    def attempt(self, function, index):
        """Return the function's value, or record its error with the call's number."""
        start = time.monotonic()
        try:
            return function()
        except (collectives.RankLost, collectives.Mismatch) as error:
            self.errors.append((index, type(error).__name__, error.ranks, str(error)))
        finally:
            seconds = time.monotonic() - start - self.stalls.since(start)
            self.slowest = max(self.slowest, seconds)
        return None

    def finish(self, call, work, index):
        before = len(self.errors)
        if work is not None:
            self.attempt(work.wait, index)
        # The deviating rank made another call.
        if len(self.errors) == before and not (self.is_odd and index == self.faulty):
            call.verify()

    def inject(self, call):
        """Inject the fault into a call; return False if this rank must not make the call."""
        if self.fault == "dies":
            os._exit(EXIT_CODES["dies"])
        if self.fault == "raises":
            end_with_uncaught_exception()
        if self.fault == "hangs":
            others = [f"finished/{self.number}/{r}" for r in range(self.world) if r != self.odd]
            self.control.wait(others, PATIENCE)
            return False
        if self.fault == "destroys":
            dist.destroy_process_group()
            return False
        if self.fault == "aborts":
            dist.group.WORLD.abort()
            return False
        if self.fault in SIGNALS:
            threading.Timer(self.moment, os.kill, (os.getpid(), SIGNALS[self.fault])).start()
        if self.fault in MISMATCHES:
            call.differ(self.fault)
        return True

    def run_calls(self):
        """Make the calls; return False if this rank hung or left instead."""
        pending = []
        for index, arguments in enumerate(self.calls):
            call = Call(*arguments, asynchronous=not self.waits[index])
            if index == self.faulty and self.is_odd and not self.inject(call):
                return False
            before = len(self.errors)
            work = self.attempt(call.start, index)
            if len(self.errors) > before:
                continue
            if self.waits[index]:
                self.finish(call, None, index)
            else:
                pending.append((call, work, index))
        for arguments in pending:
            self.finish(*arguments)
        return True

    def run(self):
        """Return the description, the fault, the errors and the longest wait for one."""
        self.start_group()
        if not self.run_calls():
            return self.description, self.fault, [], 0.0
        if self.is_odd and self.fault in SIGNALS:
            time.sleep(60)
        # A rank that completed the faulty call gets the error at its next call.
        last = Call("all_reduce", 10, 0, False)
        before = len(self.errors)
        self.attempt(last.start, len(self.calls))
        if len(self.errors) == before:
            last.verify()
        try:
            if self.fault in (*HANGS, *DEATHS):
                self.rebuild()
        except collectives.RankLost as error:
            self.errors.append((len(self.calls), "RankLost", error.ranks, str(error)))
        self.stalls.end()
        self.check_errors()
        return self.description, self.fault, [text for *_, text in self.errors], self.slowest

    def rebuild(self):
        """Continue with the survivors."""
        group, total = collectives.rebuild(timeout=PATIENCE), torch.ones(1000)
        dist.all_reduce(total, group=group)
        assert (total == self.world - 1).all(), self.description

    def check_errors(self):
        """Raise AssertionError unless the errors name the faulty rank, in time."""
        fault, errors = self.fault, self.errors
        subject = f"{self.description}: rank {self.rank}"
        remains_usable = fault == "none" or (fault in MISMATCHES and self.where == "together")
        if remains_usable and len(errors) > (fault != "none"):
            raise AssertionError(f"{subject}: the group must remain usable, but {errors}")
        if fault != "none" and not errors:
            raise AssertionError(f"{subject} got no error")
        for index, kind, ranks, text in errors:
            # If two ranks differ, either of them may be named.
            is_named = self.odd in ranks
            is_named |= fault in MISMATCHES and f"rank {self.odd} called" in text
            is_early = fault in MISMATCHES and index < self.faulty
            if not is_named or is_early:
                raise AssertionError(f"{subject} at call {index} got {kind}: {text}")
        if self.slowest > self.timeout + SLACK:
            raise AssertionError(f"{subject} waited for {self.slowest:.2f} s")


def check(seed, count, timeout):
    """Run `count` sequences; return the number of each fault and the longest wait for an error."""
    counts_by_fault = Counter()
    slowest = 0.0
    done = restarts = 0
    # The store of a launcher, which no fault damages: restarted ranks use the same store.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    while done < count:
        # Not from the numbers that draw the fault, which would determine the number of ranks.
        world = random.Random(f"{seed} {done} world").choice((2, 3, 4))
        subject = f"{seed} from {done}"
        how = timeout, store.port, restarts
        outcomes = try_ranks(
            run_sequences, world, seed, done, count - done, *how, backend="", timeout=900
        )
        check_outcomes(subject, outcomes)
        results = [outcome.value for outcome in outcomes if outcome.exit_code is None]
        assert len({len(result) for result in results}) == 1, (subject, results)
        for case in zip(*results, strict=True):
            counts_by_fault[case[0][1]] += 1
            slowest = max(slowest, *(seconds for *_, seconds in case))
        done += len(results[0])
        _, fault, odd = draw(seed, done - 1, world)
        exit_codes = {o.rank: o.exit_code for o in outcomes if o.exit_code is not None}
        expected = {odd: EXIT_CODES[fault]} if fault in EXIT_CODES else {}
        assert exit_codes == expected, (subject, exit_codes, results[0][-1])
        if fault == RESTARTED:
            restarts += 1
            how = seed, done - 1, timeout, store.port, restarts
            outcomes = try_ranks(run_restarted_sequence, world, *how, backend="", timeout=900)
            check_outcomes(f"{subject}, restarted", outcomes)
            assert not any(outcome.failed for outcome in outcomes), (subject, outcomes)
    return counts_by_fault, slowest


def check_outcomes(subject, outcomes):
    """Raise an error if a rank has raised one."""
    if errors := [outcome for outcome in outcomes if outcome.error is not None]:
        pytest.fail(f"{subject}:\n" + "\n".join(outcome.trace for outcome in errors))


# Seeds that draw these faults, on one host and on several.
SAMPLE = {3167: ("order", "raises"), 31: (RESTARTED,)}


def test_fault_in_a_random_sequence_is_reported_to_every_survivor():
    # The timeout leaves a busy machine enough time to publish its reports.
    counts = [len(faults) for faults in SAMPLE.values()]
    with ThreadPoolExecutor(len(SAMPLE)) as pool:
        results = list(pool.map(check, SAMPLE, counts, [5.0] * len(SAMPLE)))
    for (counts_by_fault, slowest), faults in zip(results, SAMPLE.values(), strict=True):
        assert counts_by_fault == Counter(faults)
        assert slowest < 5.0 + SLACK


@pytest.mark.exhaustive
@pytest.mark.parametrize("tenth", range(10))
def test_faults_in_ten_thousand_random_sequences_are_reported(tenth):
    # Ranks wait for a timeout most of the time, so several groups run at the same time.
    with ThreadPoolExecutor(10) as pool:
        seeds = [f"{tenth} {i}" for i in range(10)]
        counts = [counts for counts, _ in pool.map(check, seeds, [100] * 10, [5.0] * 10)]
    counts_by_fault = sum(counts, Counter())
    assert sum(counts_by_fault.values()) == 1000
    assert set(counts_by_fault) == set(FAULTS)
