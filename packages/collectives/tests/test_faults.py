"""After any fault, every surviving rank gets an error in time that names the rank."""

import os
import pickle
import signal
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import collectives
import numpy as np
import pytest
import torch
import torch.distributed as dist
from collectives import failure_detection
from collectives.algorithms import gloo
from collectives.algorithms.gloo import GlooGroups
from collectives.algorithms.point_to_point import PointToPoint
from collectives.failure_detection import FailureDetector
from collectives.groups import get_communicator
from collectives.shared_memory import engine
from host_layout import emulate_hosts, prepare_rank  # noqa: F401
from worker_pool import run_on_shared_ranks, run_ranks, try_ranks

# Long enough for a busy machine to publish its reports in a tenth of it.
TIMEOUT = 8.0
# "apart" emulates one rank per host, so that ranks only have messages; "pairs" emulates two hosts.
PLACES = ("together", "apart")
LONG_TIMEOUT = 120.0


def end_together(store, survivors):
    """Wait for all survivors, because a rank that ended early would be blamed."""
    store.set(f"over {os.environ['RANK']}", "")
    wait_for_survivors(store, survivors)


def wait_for_survivors(store, survivors):
    store.wait([f"over {rank}" for rank in survivors], timedelta(seconds=120))


def fail(store, where, algorithm, how):
    emulate_hosts(where)
    rank, tensor = dist.get_rank(), torch.ones(50_000)
    survivors = set(range(dist.get_world_size())) - {1}
    collectives.all_reduce(tensor, algorithm=algorithm)
    if rank == 1:
        if how == "hangs":
            wait_for_survivors(store, survivors)
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(collectives.RankLost, match="rank 1") as caught:
        collectives.all_reduce(tensor, algorithm=algorithm)
    seconds = time.monotonic() - start
    with pytest.raises(collectives.RankLost, match="earlier call"):
        collectives.all_reduce(tensor)
    end_together(store, survivors)
    return caught.value.ranks, seconds


# In "pairs", rank 1 is not the leader of its host.
USUAL_DEATHS = [
    ("together", "auto"),
    ("apart", "ring"),
    ("apart", "gloo"),
    ("pairs", "hierarchical"),
]
DEATHS = [*USUAL_DEATHS, ("together", "ring"), ("apart", "tree"), ("pairs", "ring")]


@pytest.mark.parametrize(
    ("where", "algorithm"),
    [
        *USUAL_DEATHS,
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in DEATHS
            if case not in USUAL_DEATHS
        ),
    ],
)
def test_dead_rank_is_named_by_all_other_ranks(where, algorithm, outcomes):
    # A death is noticed long before the timeout.
    assert_rank_1_is_named(outcomes, LONG_TIMEOUT / 2)


def assert_rank_1_is_named(outcomes, max_seconds):
    for outcome in [outcomes[0], *outcomes[2:]]:
        assert not outcome.failed, outcome.trace
        ranks, seconds = outcome.value
        assert ranks == (1,)
        assert seconds < max_seconds


def fail_within(where, algorithm, how):
    if where == "apart" and how == "dies":
        notice_slowly()
    return fail(start(LONG_TIMEOUT if how == "dies" else TIMEOUT), where, algorithm, how)


def notice_slowly():
    """Let gloo notice the end of most connections a tenth of a second after the first one."""
    explain, notice = FailureDetector.explain, PointToPoint.find_disconnected_peers
    failures = []

    def explain_late(self, *args):
        failures.append(time.monotonic())
        return explain(self, *args)

    def notice_late(self):
        return notice(self) if time.monotonic() > failures[0] + 0.1 else []

    FailureDetector.explain = explain_late
    PointToPoint.find_disconnected_peers = notice_late


def let_a_rank_be_late(what):
    """Return the blamed ranks if rank 2 is lost and rank 1 is late."""
    store = start(TIMEOUT)
    emulate_hosts("apart")
    rank, tensor = dist.get_rank(), torch.ones(1000)
    collectives.all_reduce(tensor, algorithm="ring")
    if rank == 2:
        if what == "hangs":
            wait_for_survivors(store, (0, 1))
        if what != "only":
            os._exit(1)
    elif rank == 1:
        time.sleep(0.5 * TIMEOUT if what == "only" else 2 * failure_detection.REPORT_SECONDS)
    if what == "only":
        collectives.all_reduce(tensor, algorithm="ring")
        return tensor.sum().item()
    with pytest.raises(collectives.RankLost) as caught:
        collectives.broadcast(tensor, 2, algorithm="tree")
    end_together(store, (0, 1))
    return caught.value.ranks


def let_a_leader_hang():
    """Rank 2, the leader of ranks 2 and 3, hangs: ranks wait for it or for a rank that does."""
    store = start(TIMEOUT)
    emulate_hosts("pairs")
    tensor = torch.ones(1000)
    collectives.all_reduce(tensor, algorithm="hierarchical")
    if dist.get_rank() == 2:
        wait_for_survivors(store, (0, 1, 3))
        os._exit(1)
    with pytest.raises(collectives.RankLost) as caught:
        collectives.all_reduce(tensor, algorithm="hierarchical")
    end_together(store, (0, 1, 3))
    return caught.value.ranks


def report_late():
    """Rank 2 hangs; rank 1, whose wait times out first, publishes its report late."""
    store = start(TIMEOUT)
    emulate_hosts("apart")
    rank, tensor = dist.get_rank(), torch.ones(1000)
    collectives.all_reduce(tensor, algorithm="ring")
    if rank == 2:
        wait_for_survivors(store, (0, 1))
        os._exit(1)
    if rank == 0:
        time.sleep(0.3)
    publish = FailureDetector._publish_report

    def publish_late(self, operation, status, **fields):
        time.sleep(1.6 * failure_detection.REPORT_SECONDS if rank == 1 else 0)
        publish(self, operation, status, **fields)

    FailureDetector._publish_report = publish_late
    with pytest.raises(collectives.RankLost) as caught:
        collectives.all_reduce(tensor, algorithm="ring")
    end_together(store, (0, 1))
    return caught.value.ranks


def connect_late(seconds_late):
    """Rank 1 connects gloo's group after the other ranks have timed out."""
    store = start(TIMEOUT)
    emulate_hosts("apart")
    rank, tensor = dist.get_rank(), torch.ones(1000)
    collectives.all_reduce(tensor, algorithm="ring")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LATE_TIMEOUT), dist.group.WORLD)
    create_group = GlooGroups._create_group

    def late(self, call, limit):
        time.sleep(seconds_late)
        return create_group(self, call, limit)

    if rank == 1:
        GlooGroups._create_group = late
    begun, ranks = time.monotonic(), ()
    try:
        collectives.all_reduce(tensor, algorithm="gloo")
    except collectives.RankLost as error:
        ranks = error.ranks
    seconds = time.monotonic() - begun
    end_together(store, range(3))
    return ranks, seconds


LATE_TIMEOUT = 3.0


def start(seconds, backend="gloo"):
    """Create a process group and return its store."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE_FILE"], world)
    # A busy machine may start the ranks seconds apart, which would count towards the timeout.
    store.set(f"started {rank}", "")
    store.wait([f"started {other}" for other in range(world)], timedelta(seconds=120))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    return store


def disagree(where, algorithm):
    """Rank 1 deviates in one property after another; the group survives each."""
    emulate_hosts(where)
    odd = dist.get_rank() == 1
    tensor = torch.ones(1000)
    messages = {}
    go = {"algorithm": algorithm}
    all_reduce = collectives.all_reduce
    calls = {
        "shape": lambda: all_reduce(torch.ones(1001) if odd else tensor, **go),
        "layout": lambda: all_reduce(torch.ones(10, 100) if odd else tensor, **go),
        "dtype": lambda: all_reduce(tensor.int() if odd else tensor, **go),
        "op": lambda: all_reduce(tensor, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, **go),
        "order": lambda: (
            collectives.broadcast(tensor, 0, **go) if odd else all_reduce(tensor, **go)
        ),
        "root": lambda: collectives.broadcast(tensor, 2 if odd else 0, **go),
    }
    # On one host, calls are compared outside of `checked` too.
    with nullcontext() if where == "together" else collectives.checked():
        for what, call in calls.items():
            with pytest.raises(collectives.Mismatch) as caught:
                call()
            messages[what] = str(caught.value)
        all_reduce(tensor, **go)
    assert tensor.sum().item() == 3000, "no data may have moved"
    return messages


@pytest.mark.parametrize(
    ("where", "algorithm"),
    [
        ("together", "auto"),
        pytest.param("together", "ring", marks=pytest.mark.exhaustive),
        pytest.param("apart", "auto", marks=pytest.mark.exhaustive),
        ("apart", "ring"),
        pytest.param("apart", "tree", marks=pytest.mark.exhaustive),
        pytest.param("pairs", "auto", marks=pytest.mark.exhaustive),
        ("pairs", "hierarchical"),
    ],
)
def test_mismatch_is_raised_on_every_rank_and_names_the_deviating_one(where, algorithm):
    first, *others = run_on_shared_ranks(disagree, 3, where, algorithm)
    assert all(messages == first for messages in others)
    assert "rank 1 called all_reduce(shape (1001,), torch.float32, SUM" in first["shape"]
    assert "shape (10, 100)" in first["layout"]
    assert "rank 1 called all_reduce(shape (1000,), torch.int32" in first["dtype"]
    assert "rank 1 called all_reduce(shape (1000,), torch.float32, MAX" in first["op"]
    assert "rank 1 called broadcast(" in first["order"]
    assert "from rank 2" in first["root"]


def deviate_by_torchs_names(where):
    """Check the registered backend, called by torch's names."""
    import collectives.backend

    emulate_hosts(where)
    start(60, "collectives")
    odd, tensor = dist.get_rank() == 1, torch.ones(1000)
    calls = {
        r"shape \(1001,\)": lambda: dist.all_reduce(torch.ones(1001) if odd else tensor),
        "int32": lambda: dist.all_reduce(tensor.int() if odd else tensor),
        "MAX": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        "broadcast": lambda: dist.broadcast(tensor, 0) if odd else dist.all_reduce(tensor),
    }
    with collectives.checked():
        for difference, call in calls.items():
            with pytest.raises(collectives.Mismatch, match=f"rank 1 called .*{difference}"):
                call()
            waits = dist.all_reduce(torch.ones(5 if odd else 4), async_op=True)
            with pytest.raises(collectives.Mismatch, match="rank 1 called"):
                waits.wait()
        dist.all_reduce(tensor)
    assert tensor.sum().item() == 3000, "no data may have moved"


@pytest.mark.parametrize("where", PLACES)
def test_registered_backend_compares_calls(where):
    assert run_on_shared_ranks(deviate_by_torchs_names, 3, where, backend="") == [None] * 3


def pass_different_shapes(where):
    """Pass tensors of one size and different shapes, to calls that compare shapes or sizes."""
    import collectives.backend

    emulate_hosts(where)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE_FILE"], world)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=world)
    tensor = torch.ones((6,) if rank else (2, 3))
    with collectives.checked(), pytest.raises(collectives.Mismatch, match="shape"):
        dist.all_reduce(tensor)
    with collectives.checked(shapes=False):
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        collectives.all_reduce(tensor, algorithm="ring")
        dist.group.WORLD.allreduce_coalesced([tensor, tensor.t()]).wait()
        with pytest.raises(collectives.Mismatch, match="shape"):
            dist.all_reduce(torch.ones(6 + rank))
    return tensor.flatten().tolist()


@pytest.mark.parametrize("where", PLACES)
def test_sizes_can_be_compared_instead_of_shapes(where):
    assert run_on_shared_ranks(pass_different_shapes, 2, where, backend="") == [[8.0] * 6] * 2


def end(work, what, group):
    """Wait for a call; a rank that completed a broadcast gets the error at its next call."""
    work.wait()
    assert what == "root"
    collectives.all_reduce(torch.ones(1), group=group, algorithm="ring")


def disagree_unchecked(where, cases):
    """Rank 1 deviates in one property on each of several groups, which the timeout ends."""
    emulate_hosts(where)
    world = dist.get_world_size()
    odd = dist.get_rank() == 1
    tensor = torch.ones(1000)

    def by_rank(usual, other):
        return lambda **go: (other if odd else usual)(**go)

    def reduce(tensor, op=dist.ReduceOp.SUM):
        return lambda **go: collectives.all_reduce(tensor.clone(), op, **go)

    def broadcast_from(source):
        return lambda **go: collectives.broadcast(tensor.clone(), source, **go)

    calls = {
        "longer": by_rank(reduce(tensor), reduce(torch.ones(1001))),
        "shorter": by_rank(reduce(tensor), reduce(torch.ones(999))),
        "layout": by_rank(reduce(tensor), reduce(torch.ones(10, 100))),
        "dtype": by_rank(reduce(tensor), reduce(tensor.int())),
        "op": by_rank(reduce(tensor), reduce(tensor, dist.ReduceOp.MAX)),
        "order": by_rank(reduce(tensor), broadcast_from(0)),
        "root": by_rank(broadcast_from(0), broadcast_from(2)),
    }
    # All groups fail at the same time, and must publish their reports within a fraction of this.
    seconds = timedelta(seconds=3 + 2 * len(cases))
    groups = {case: dist.new_group(list(range(world)), timeout=2 * seconds) for case in cases}
    for (algorithm, _), group in groups.items():
        collectives.all_reduce(torch.ones(8), group=group, algorithm=algorithm)
        dist.distributed_c10d._set_pg_timeout(seconds, group)
    dist.barrier()
    works = {
        (algorithm, what): calls[what](group=group, algorithm=algorithm, async_op=True)
        for (algorithm, what), group in groups.items()
    }
    messages = {}
    for case, work in works.items():
        with pytest.raises(collectives.Mismatch) as caught:
            end(work, case[1], groups[case])
        with pytest.raises(collectives.RankLost, match="earlier call"):
            collectives.all_reduce(tensor, group=groups[case])
        messages[case] = caught.value.ranks, str(caught.value)
    dist.barrier()
    return messages


DEVIATIONS = {
    "longer": "rank 1 called all_reduce(shape (1001,), torch.float32, SUM",
    "shorter": "rank 1 called all_reduce(shape (999,), torch.float32, SUM",
    "layout": "rank 1 called all_reduce(shape (10, 100), torch.float32, SUM",
    "dtype": "rank 1 called all_reduce(shape (1000,), torch.int32",
    "op": "MAX",
    "order": "rank 1 called broadcast(",
    "root": "from rank 2",
}
ALL_DEVIATIONS = {
    f"{where}-{algorithm}": (
        where,
        # MAX of floats is refused on "gloo" before any message.
        [(algorithm, w) for w in DEVIATIONS if (algorithm, w) != ("gloo", "op")],
    )
    for where, algorithm in (
        ("apart", "ring"),
        ("apart", "tree"),
        ("apart", "gloo"),
        ("pairs", "hierarchical"),
    )
}


class SlowStore:
    """A store that takes a fifth of a second for every query."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        time.sleep(0.2)
        return getattr(self._store, name)


def disagree_over_a_slow_store():
    emulate_hosts("apart")
    failure_detection.clone_store = SlowStore
    group = dist.new_group(timeout=timedelta(seconds=4))
    collectives.all_reduce(torch.ones(8), group=group, algorithm="ring")
    with pytest.raises(collectives.Mismatch) as caught:
        collectives.all_reduce(
            torch.ones(1000 + dist.get_rank() % 2), group=group, algorithm="ring"
        )
    dist.barrier()
    return caught.value.ranks


def connect_gloo_without_a_new_store_connection():
    emulate_hosts("apart")
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    tensor = torch.ones(8)
    collectives.all_reduce(tensor, group=group, algorithm="ring")
    # The server of a store accepts nobody while it looks up a host name.
    gloo.clone_store = lambda store: time.sleep(60)
    collectives.all_reduce(tensor, group=group, algorithm="gloo")
    collectives.broadcast(tensor, 0, group=group, algorithm="gloo")
    return tensor.tolist()


def fail_asynchronously():
    """Wait for a call that fails; the error is raised on the thread that waits."""
    collectives.all_reduce(torch.ones(10))
    if dist.get_rank() == 1:
        os._exit(0)
    work = collectives.all_reduce(torch.ones(10), async_op=True)
    with pytest.raises(collectives.RankLost, match="rank 1"):
        work.wait()
    with pytest.raises(RuntimeError, match="rank 1"):
        work.get_future().wait()
    return work.is_completed(), work.is_success()


def test_asynchronous_failure_is_raised_by_wait():
    assert try_ranks(fail_asynchronously, 2)[0].value == (True, False)


def never_join(how):
    store = start(LONG_TIMEOUT if how == "dies" else TIMEOUT / 2)
    if dist.get_rank() == 1:
        if how == "hangs":
            wait_for_survivors(store, (0, 2))
        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(collectives.RankLost) as caught:
        collectives.all_reduce(torch.ones(10))
    seconds = time.monotonic() - begin
    end_together(store, (0, 2))
    return caught.value.ranks, seconds, str(caught.value)


def stop_while_gloo_connects(how):
    """Rank 1 hangs or ends while the other ranks wait until gloo has connected all ranks."""
    import collectives.backend

    store = dist.FileStore(os.environ["STORE_FILE"], 3)

    def stop(*_):
        if how == "hangs":
            wait_for_survivors(store, (0, 2))
        os._exit(1)

    if int(os.environ["RANK"]) == 1:
        collectives.backend.connect_gloo = stop
    begin = time.monotonic()
    with pytest.raises(collectives.RankLost) as caught:
        start(TIMEOUT / 2, "collectives")
    seconds = time.monotonic() - begin
    end_together(store, (0, 2))
    return caught.value.ranks, seconds


def join_slowly(backend):
    """Rank 1 is late at every step of the set-up; the delays sum to three times the timeout."""
    import collectives.backend
    from collectives import store as group_store

    rank = int(os.environ["RANK"])
    store = dist.FileStore(os.environ["STORE_FILE"], 2)
    fetch = group_store.fetch

    def late_fetch(*args):
        time.sleep(0.6 * TIMEOUT / 2 if rank == 1 else 0)
        return fetch(*args)

    for module in (group_store, collectives.choice.topology):
        module.fetch = late_fetch
    begin = time.monotonic()
    try:
        start(TIMEOUT / 2, backend)
        collectives.all_reduce(torch.ones(10))
    except collectives.RankLost as error:
        seconds = time.monotonic() - begin
        if rank == 0:
            store.set("over", "")
        store.wait(["over"])
        return error.ranks, seconds
    return (), 0.0


def interrupt(compiled):
    """Raise KeyboardInterrupt on rank 0 while it waits for rank 1 in a call."""
    if not compiled:
        engine.get_name = lambda: ""
    store = dist.distributed_c10d._get_default_store()
    collectives.all_reduce(torch.ones(3))
    if dist.get_rank() == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            collectives.all_reduce(torch.ones(3))
        store.set("rank 0 was interrupted", "")
    store.wait(["rank 0 was interrupted"])
    with pytest.raises(collectives.RankLost, match="rank 0") as caught:
        collectives.all_reduce(torch.ones(3))
    return caught.value.ranks


@pytest.mark.parametrize("compiled", [True, False])
def test_interrupted_rank_is_named_by_the_other_ranks(compiled):
    assert run_ranks(interrupt, 2, compiled) == [(0,)] * 2


def test_pickled_error_keeps_its_ranks():
    for error in (collectives.RankLost([2, 3], "reason"), collectives.Mismatch("reason", [2, 3])):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), copy.ranks, str(copy)) == (type(error), (2, 3), "reason")


def pass_bad_arguments():
    t = torch.ones(4)
    raises = pytest.raises
    with raises(ValueError, match="reduce op PREMUL_SUM is not supported"):
        collectives.all_reduce(t, dist._make_nccl_premul_sum(2.0))
    with raises(ValueError, match="cannot run by 'rinf'.*use one of.*\"auto\""):
        collectives.all_reduce(t, algorithm="rinf")
    with raises(ValueError, match="all_to_all cannot run by 'tree'"):
        collectives.all_to_all_single(t, t, algorithm="tree")
    with raises(TypeError, match=r"AVG of torch\.int64.*use SUM"):
        collectives.all_reduce(t.long(), dist.ReduceOp.AVG)
    with raises(TypeError, match=r"MAX of torch\.complex64"):
        collectives.all_reduce(t.cfloat(), dist.ReduceOp.MAX)
    with raises(TypeError, match="BAND of"):
        collectives.all_reduce(t, dist.ReduceOp.BAND)
    for call in (collectives.all_reduce, collectives.broadcast):
        with raises(TypeError, match=rf"{call.__name__} expected a tensor, got list"):
            call([t])
    with raises(ValueError, match="6 elements in input, 3 as in output for each of 2 .* got 4"):
        collectives.reduce_scatter_tensor(torch.ones(3), t)
    with raises(TypeError, match="expected one dtype for .*cast one of them"):
        collectives.all_gather_into_tensor(torch.ones(8), t.double())
    with raises(ValueError, match="as either src"):
        collectives.broadcast(t)
    with raises(ValueError, match="expected a root between 0 and 1.*got 7"):
        collectives.broadcast(t, 7)
    with raises(ValueError, match="rows of input to be a multiple of 2 ranks, got 3"):
        collectives.all_to_all_single(t, torch.ones(3))
    with raises(
        ValueError,
        match=r"input_split_sizes of 2 nonnegative numbers that sum to 4 rows, got \[1, 2\]",
    ):
        collectives.all_to_all_single(t, t, None, [1, 2])
    destroyed = dist.new_group()
    dist.destroy_process_group(destroyed)
    with raises(ValueError, match="has been destroyed"):
        collectives.all_reduce(t, group=destroyed)
    with raises(RuntimeError, match="negative dimension -1"):
        collectives.shared_empty(-1)
    assert collectives.shared_empty(np.int64(3)).shape == (3,)
    # The shape is longer than the part of a packed call for dimensions.
    shape = [1] * 7 + [[2, 3], [3, 2]][dist.get_rank()]
    with raises(collectives.Mismatch, match="digest"):
        collectives.all_reduce(torch.ones(shape))
    # The group is still usable.
    collectives.all_reduce(t)
    return get_communicator().topology.hosts, t.tolist()


def test_bad_arguments_are_refused_before_data_move():
    assert run_on_shared_ranks(pass_bad_arguments, 2) == [([[0, 1]], [2.0] * 4)] * 2


def test_call_without_process_group_is_refused():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        collectives.all_reduce(torch.ones(1))


def pass_inconsistent_splits(where, algorithm, checked, surpluses=(1, -1, 700_000)):
    """Rank 0 sends rows that rank 1 does not expect, in several cases; no data arrive."""
    emulate_hosts(where)
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {}
    for case, (surplus, group) in enumerate(
        (surplus, dist.new_group(list(range(world)), timeout=timedelta(seconds=TIMEOUT)))
        for surplus in surpluses
    ):
        sends, receives = [2] * world, [2] * world
        if rank == 0:
            sends[1] += surplus
        source, result = torch.ones(sum(sends), 3), torch.full((2 * world, 3), -1.0)
        go = partial(collectives.all_to_all_single, result, source, receives, sends, group=group)
        try:
            with collectives.checked(group) if checked else nullcontext():
                go(algorithm=algorithm)
        except collectives.Mismatch as error:
            results[case] = str(error), error.ranks, bool((result == -1).all())
        except RuntimeError as error:
            results[case] = str(error), getattr(error, "ranks", ()), bool((result == -1).all())
    dist.barrier()
    return results


@pytest.mark.parametrize(
    ("where", "algorithm", "checked"),
    [
        ("together", "auto", False),
        ("together", "ring", False),
        ("apart", "ring", True),
    ],
)
def test_inconsistent_splits_are_raised_on_every_rank(where, algorithm, checked):
    for errors in run_on_shared_ranks(pass_inconsistent_splits, 3, where, algorithm, checked):
        assert len(errors) == 3
        for case, surplus in enumerate((1, -1, 700_000)):
            message, ranks, untouched = errors[case]
            sent = 3 * (2 + surplus)
            assert f"rank 0 sends {sent} elements to rank 1, which expects 6" in message
            assert ranks == (0, 1)
            assert untouched


# ----- tests whose scenarios wait for a timeout, in the background -----


def pass_inconsistent_split_to_itself(where):
    """Rank 1 sends one row to itself and expects three; return the errors' ranks and the rows."""
    emulate_hosts(where)
    rank = dist.get_rank()
    sends, receives = ([1, 1], [1, 3]) if rank == 1 else ([1, 1], [1, 1])
    output = torch.zeros(sum(receives))
    with pytest.raises(collectives.Mismatch, match="sends 1 elements to rank 1, which expects 3"):
        collectives.all_to_all_single(output, torch.ones(2), receives, sends)
    return output[receives[0] :].tolist() if rank == 1 else []


@pytest.mark.parametrize("where", PLACES)
def test_inconsistent_split_of_a_rank_to_itself_is_raised_on_every_rank(where):
    # Without the error, the one row would be repeated three times.
    assert run_on_shared_ranks(pass_inconsistent_split_to_itself, 2, where) == [[], [0.0] * 3]


def build_scenario(function, world, *args, backend=""):
    """Return the arguments of `try_ranks`."""
    return (function, world, *args), {"backend": backend, "timeout": 120}


HANGS = {
    "together-auto": ("together", "auto"),
    "apart-ring": ("apart", "ring"),
    "apart-gloo": ("apart", "gloo"),
    "apart-tree": ("apart", "tree"),
    "pairs-hierarchical": ("pairs", "hierarchical"),
}
WAITING = {
    "test_connections_closed_by_a_timeout_are_not_blamed": build_scenario(report_late, 3),
    "test_rank_that_waits_for_its_leader_is_not_blamed": build_scenario(let_a_leader_hang, 4),
    "test_inconsistent_splits_between_hosts_are_raised_at_the_timeout": build_scenario(
        pass_inconsistent_splits, 2, "apart", "ring", False, (1,), backend="gloo"
    ),
    **{
        f"test_hanging_rank_is_named_by_all_other_ranks[{case}]": build_scenario(
            fail_within, 4 if where == "pairs" else 3, where, algorithm, "hangs"
        )
        for case, (where, algorithm) in HANGS.items()
    },
    **{
        f"test_dead_rank_is_named_by_all_other_ranks[{where}-{algorithm}]": build_scenario(
            fail_within, 4 if where == "pairs" else 3, where, algorithm, "dies"
        )
        for where, algorithm in DEATHS
    },
    **{
        f"test_mismatch_without_comparison_is_raised_at_the_timeout[{case}]": build_scenario(
            disagree_unchecked, 4 if where == "pairs" else 3, where, cases, backend="gloo"
        )
        for case, (where, cases) in {
            "apart": ("apart", [("ring", "longer"), ("gloo", "order")]),
            **ALL_DEVIATIONS,
        }.items()
    },
    **{
        f"test_all_steps_of_a_group_creation_share_one_timeout[{backend}]": build_scenario(
            join_slowly, 2, backend
        )
        for backend in ("collectives", "gloo")
    },
    "test_slow_store_is_not_mistaken_for_a_lost_one": build_scenario(
        disagree_over_a_slow_store, 3, backend="gloo"
    ),
    "test_call_needs_no_new_connection_to_the_store": build_scenario(
        connect_gloo_without_a_new_store_connection, 2, backend="gloo"
    ),
    **{
        f"test_late_gloo_connection_does_not_abort_the_process[{part}]": build_scenario(
            connect_late, 3, part * LATE_TIMEOUT
        )
        for part in (0.975, 2)
    },
    **{
        f"test_rank_that_stops_while_gloo_connects_is_named[{how}]": build_scenario(
            stop_while_gloo_connects, 3, how
        )
        for how in ("hangs", "dies")
    },
    **{
        f"test_rank_that_never_joins_is_named[{how}]": build_scenario(never_join, 3, how)
        for how in ("hangs", "dies")
    },
    "test_late_rank_is_not_a_fault_before_the_timeout": build_scenario(
        let_a_rank_be_late, 3, "only"
    ),
    **{
        f"test_late_rank_is_not_blamed_for_a_lost_one[{what}]": build_scenario(
            let_a_rank_be_late, 3, what
        )
        for what in ("dies", "hangs")
    },
}


@pytest.mark.parametrize(
    "case",
    [
        "together-auto",
        *(pytest.param(case, marks=pytest.mark.exhaustive) for case in list(HANGS)[1:]),
    ],
)
def test_hanging_rank_is_named_by_all_other_ranks(case, outcomes):
    # A rank waits from its call on; a busy machine may start the ranks seconds apart.
    assert_rank_1_is_named(outcomes, 2 * TIMEOUT)


@pytest.mark.parametrize("what", ["dies", pytest.param("hangs", marks=pytest.mark.exhaustive)])
def test_late_rank_is_not_blamed_for_a_lost_one(what, outcomes):
    assert [outcome.value for outcome in outcomes[:2]] == [(2,), (2,)], outcomes


def test_late_rank_is_not_a_fault_before_the_timeout(outcomes):
    assert [outcome.value for outcome in outcomes] == [9000.0] * 3, outcomes


def test_rank_that_waits_for_its_leader_is_not_blamed(outcomes):
    assert [outcomes[rank].value for rank in (0, 1, 3)] == [(2,)] * 3, outcomes


def test_connections_closed_by_a_timeout_are_not_blamed(outcomes):
    assert [outcomes[rank].value for rank in (0, 1)] == [(2,)] * 2, outcomes


# As a fraction of the group's timeout: shortly before it, connections start and may not finish.
@pytest.mark.parametrize("part", [pytest.param(0.975, marks=pytest.mark.exhaustive), 2])
def test_late_gloo_connection_does_not_abort_the_process(part, outcomes):
    assert not any(outcome.failed for outcome in outcomes), outcomes
    for rank in (0, 2):
        ranks, seconds = outcomes[rank].value
        assert ranks in (((1,),) if part > 1 else ((1,), ()))
        # The group's timeout and two seconds, with a margin for a busy machine.
        assert seconds < TIMEOUT


@pytest.mark.parametrize(
    "case",
    ["apart", *(pytest.param(case, marks=pytest.mark.exhaustive) for case in ALL_DEVIATIONS)],
)
def test_mismatch_without_comparison_is_raised_at_the_timeout(case, outcomes):
    for outcome in outcomes:
        assert not outcome.failed, outcome.trace
        for (algorithm, what), (ranks, message) in outcome.value.items():
            # In a tree one of three ranks may have completed its call; the others then disagree.
            blamed = {(0,), (1,)} if (algorithm, what) == ("tree", "root") else {(1,)}
            assert ranks in blamed, (algorithm, what, message)
            assert DEVIATIONS[what] in message


def test_slow_store_is_not_mistaken_for_a_lost_one(outcomes):
    assert [outcome.value for outcome in outcomes] == [(1,)] * 3, outcomes


def test_call_needs_no_new_connection_to_the_store(outcomes):
    assert [outcome.value for outcome in outcomes] == [[4.0] * 8] * 2, outcomes


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_rank_that_never_joins_is_named(how, outcomes):
    for outcome in outcomes[::2]:
        ranks, seconds, message = outcome.value
        assert ranks == (1,)
        assert ("ended before writing" if how == "dies" else "did not write") in message
        assert seconds < (LONG_TIMEOUT / 2 if how == "dies" else TIMEOUT)


@pytest.mark.parametrize("how", ["hangs", pytest.param("dies", marks=pytest.mark.exhaustive)])
def test_rank_that_stops_while_gloo_connects_is_named(how, outcomes):
    for ranks, seconds in (outcome.value for outcome in outcomes[::2]):
        assert ranks == (1,)
        # The timeout and two seconds, with a margin for a busy machine.
        assert seconds < TIMEOUT


def test_store_that_hangs_while_a_group_is_created_is_named(monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(failure_detection, "clone_store", lambda store: hangs.wait(60))
    on_two_hosts = SimpleNamespace(arena=None, is_single_host=False)
    begin = time.monotonic()
    with pytest.raises(collectives.RankLost, match="the group's store does not answer"):
        FailureDetector(dist.HashStore(), 0, 2, on_two_hosts, None, None, deadline=begin)
    hangs.set()
    assert time.monotonic() - begin < TIMEOUT


@pytest.mark.parametrize(
    "backend", ["collectives", pytest.param("gloo", marks=pytest.mark.exhaustive)]
)
def test_all_steps_of_a_group_creation_share_one_timeout(backend, outcomes):
    ranks, seconds = outcomes[0].value
    assert ranks == (1,)
    # The delays sum to three timeouts. The bound leaves a margin for a busy machine.
    assert seconds < TIMEOUT


def test_inconsistent_splits_between_hosts_are_raised_at_the_timeout(outcomes):
    for outcome in outcomes:
        assert [ranks for _, ranks, _ in outcome.value.values()] == [(0, 1)], outcome
