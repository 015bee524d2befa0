"""Ranks that leave a group, restart, or use several groups do not block the other ranks."""

import inspect
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives.groups import _end_threads, get_communicator
from collectives.shared_memory import arena, engine
from host_layout import emulate_hosts, prepare_rank  # noqa: F401
from worker_pool import run_on_shared_ranks, run_ranks, try_ranks

TIMEOUT = 40.0
# The scenarios of `ends_of_processes.py` that run by default. In each, a process ends while a
# thread of the package is inside torch.
USUAL_SCENARIOS = (
    "calls are queued",
    "other rank makes no call",
    "callback runs",
    "exception is raised",
    "daemon thread makes calls",
    "store answers late",
)
SCENARIOS = (
    *USUAL_SCENARIOS,
    "group is kept",
    "group is destroyed",
    "other rank has ended",
    "daemon thread waits",
)
THIS_FILE = Path(__file__)


def begin(backend, where="together", seconds=TIMEOUT):
    import collectives.backend  # noqa: F401

    emulate_hosts(where)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE_FILE"], world)
    # A busy machine may start the ranks seconds apart, which would count towards the timeout.
    store.set(f"started {rank}", "")
    store.wait([f"started {other}" for other in range(world)], timedelta(seconds=120))
    limit = timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    return rank, store


def reduce(group, tensor, **options):
    """Reduce by torch's function on our backend, and by ours on gloo."""
    if dist.get_backend(group) == "collectives":
        return dist.all_reduce(tensor, group=group, **options)
    return collectives.all_reduce(tensor, group=group, algorithm="ring", **options)


def end_after_set_up():
    """Let rank 1 end before rank 0 has looked for its process; return the message of rank 0."""
    rank = dist.get_rank()
    if rank == 0:
        look_for = arena.PeerProcess

        def look_late(pid):
            deadline = time.monotonic() + TIMEOUT
            while not (peer := look_for(pid)).has_ended():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return peer

        arena.PeerProcess = look_late
    collectives.describe()
    if rank == 1:
        return ""
    with pytest.raises(collectives.RankLost) as lost:
        collectives.all_reduce(torch.ones(2))
    return str(lost.value)


def test_a_rank_may_end_as_soon_as_it_has_set_up_the_group():
    message = run_ranks(end_after_set_up, 2)[0]
    assert re.match(r"rank 1 \(process \d+\) died", message)


def leave(backend, where, part):
    """Destroy the group on rank 1, whose process continues with a reference to the group."""
    rank, store = begin(backend, where)
    world = dist.get_world_size()
    group = dist.new_group(list(range(world))) if part else dist.group.WORLD
    total = torch.ones(1000)
    work = reduce(group, total, async_op=True)
    if rank != 1:
        work.wait()
    if rank == 1:
        # The pending call is finished first.
        dist.destroy_process_group(group if part else None)
        store.wait([f"{other} is done" for other in range(world) if other != rank])
        work.wait()
        return total.unique().tolist(), (1,), 0.0
    assert total.unique().tolist() == [world]
    begun = time.monotonic()
    with pytest.raises(collectives.RankLost) as caught:
        reduce(group, total)
    seconds = time.monotonic() - begun
    # The first rank to report has found the cause; the others refer to that rank.
    store.set(f"{rank} is done", str(caught.value))
    store.wait([f"{other} is done" for other in range(world) if other != 1])
    texts = [store.get(f"{other} is done").decode() for other in range(world) if other != 1]
    assert any("called destroy_process_group" in text for text in texts), texts
    return [float(world)], caught.value.ranks, seconds


# The backend, the hosts, and whether a subgroup is destroyed.
USUAL_EXITS = [
    ("collectives", "together", True),
    ("collectives", "apart", False),
    ("gloo", "apart", True),
]
OTHER_EXITS = [
    case
    for case in itertools.product(
        ("collectives", "gloo"), ("together", "apart", "pairs"), (False, True)
    )
    if case not in USUAL_EXITS
]


@pytest.mark.parametrize(
    ("backend", "where", "part"),
    [
        *USUAL_EXITS,
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHER_EXITS),
    ],
)
def test_rank_that_destroys_its_group_is_named_at_once(backend, where, part, outcomes):
    for outcome in outcomes:
        assert not outcome.failed, outcome.trace
        total, ranks, seconds = outcome.value
        assert total == [len(outcomes)]
        assert ranks == (1,)
        # A busy machine may take seconds, but much less than the timeout.
        assert seconds < TIMEOUT / 2


def wait_for_a_message(how, where):
    """Wait for a message to or from rank 1, which takes no part; return the seconds of the wait."""
    rank, store = begin("collectives", where)
    group = dist.group.WORLD
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        store.wait(["rank 0 waits"])
        if how == "sender destroys":
            # The reference to the group keeps gloo's group alive.
            dist.destroy_process_group()
        elif how == "sender aborts":
            group.abort()
        store.wait(["rank 0 is done"])
        return 0.0
    if how in ("sender hangs", "receiver hangs"):
        group.set_timeout(timedelta(seconds=0.5))
    work = (dist.isend if how == "receiver hangs" else dist.irecv)(torch.ones(3), 1)
    store.set("rank 0 waits", "")
    if how == "receiver aborts":
        threading.Timer(0.1, group.abort).start()
    start_time = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Timed out|closed|closure"):
        work.wait()
    seconds = time.monotonic() - start_time
    store.set("rank 0 is done", "")
    return seconds


USUAL_WAITS = [
    ("sender hangs", "together"),
    ("receiver hangs", "together"),
    ("sender destroys", "together"),
    ("sender aborts", "together"),
    ("receiver aborts", "together"),
]
OTHER_WAITS = [(f"sender {event}", "apart") for event in ("hangs", "destroys", "aborts")]


@pytest.mark.parametrize(
    ("how", "where"),
    [
        *USUAL_WAITS,
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHER_WAITS),
    ],
)
def test_wait_for_a_message_ends_at_the_timeout_or_with_the_group(how, where, outcomes):
    assert not any(outcome.failed for outcome in outcomes), outcomes
    # A busy machine may take seconds, but much less than the timeout of the group.
    assert outcomes[0].value < TIMEOUT / 2


def receive_from_any_rank():
    """Return the ranks from which messages of any source were received, in order."""
    rank, _ = begin("collectives")
    if rank:
        dist.send(torch.full((1,), float(rank)), 0)
        return None
    received = torch.empty(1)
    sources = [(dist.recv(received), received.item()) for _ in range(2)]
    return sorted(sources)


def test_messages_of_any_source_name_their_sender():
    assert run_on_shared_ranks(receive_from_any_rank, 3, backend="")[0] == [(1, 1.0), (2, 2.0)]


def leave_in_order(backend, where, rounds):
    """Leave in different orders right after the last call; no rank gets an error."""
    for i in range(rounds):
        rank = int(os.environ["RANK"])
        if i == 0:
            begin(backend, where)
        group = dist.new_group()
        total = torch.ones(10 + 10_000 * (i % 2))
        for _ in range(3):
            reduce(group, total)
        work = reduce(group, total, async_op=True)
        if rank != i % dist.get_world_size():
            work.wait()
        dist.destroy_process_group(group)
        work.wait()
        assert total.unique().tolist() == [3.0**4]
        del group


@pytest.mark.parametrize(
    ("backend", "where", "rounds"),
    [
        ("collectives", "apart", 3),
        ("gloo", "together", 3),
        *(
            pytest.param(*case, 20, marks=pytest.mark.exhaustive)
            for case in itertools.product(("collectives", "gloo"), ("together", "apart"))
        ),
    ],
)
def test_leaving_after_the_last_call_is_not_a_fault(backend, where, rounds):
    run_on_shared_ranks(leave_in_order, 3, backend, where, rounds, backend="")


def queue_in_opposite_orders(backend, where, compiled, calls):
    """Queue many calls on one group before one on another, which the other rank makes first."""
    if not compiled:
        engine._load_engine.cache_clear()
        engine.shutil.which = lambda name: None
    rank, store = begin(backend, where)
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        reduce(group, torch.ones(1))
    tensors = [torch.full((5,), float(i)) for i in range(calls)]
    total_of_second_group = torch.ones(1)
    if rank == 0:
        works = [reduce(groups[0], tensor, async_op=True) for tensor in tensors]
        # Rank 1 has made no call yet, so no call may have waited for it.
        store.set("queued", "")
        reduce(groups[1], total_of_second_group)
    else:
        store.wait(["queued"])
        reduce(groups[1], total_of_second_group)
        works = [reduce(groups[0], tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return total_of_second_group.item(), all(
        tensor.unique().tolist() == [2.0 * i] for i, tensor in enumerate(tensors)
    )


@pytest.mark.parametrize(
    ("backend", "where", "compiled", "calls"),
    [
        # More calls than the queue of the engine has room for.
        ("collectives", "together", True, engine.ROOM + 100),
        pytest.param("collectives", "together", False, 700, marks=pytest.mark.exhaustive),
        pytest.param("gloo", "together", True, 700, marks=pytest.mark.exhaustive),
        ("gloo", "apart", True, 100),
    ],
)
def test_any_number_of_calls_is_queued_without_blocking_the_caller(backend, where, compiled, calls):
    results = run_ranks(queue_in_opposite_orders, 2, backend, where, compiled, calls, backend="")
    assert results == [(2.0, True)] * 2


def call_from_outside():
    """Call every collective on rank 1 with a group that contains rank 0 only."""
    group = dist.new_group([0])
    tensor = torch.ones(1)
    calls = [
        lambda: collectives.all_reduce(tensor, group=group),
        lambda: collectives.all_reduce(tensor, dist.ReduceOp.SUM, group, True),
        lambda: collectives.reduce_scatter_tensor(tensor, tensor, group=group),
        lambda: collectives.all_gather_into_tensor(tensor, tensor, group=group),
        lambda: collectives.broadcast(tensor, group=group, group_src=0),
        lambda: collectives.all_to_all_single(tensor, tensor, group=group),
        lambda: collectives.barrier(group),
        lambda: collectives.reduce(tensor, group=group, group_dst=0),
        lambda: collectives.gather(tensor, [tensor], group=group, group_dst=0),
        lambda: collectives.scatter(tensor, [tensor], group=group, group_src=0),
        lambda: collectives.all_gather([tensor], tensor, group=group),
        lambda: collectives.reduce_scatter(tensor, [tensor], group=group),
        lambda: collectives.all_to_all([tensor.clone()], [tensor], group=group),
    ]
    for call in calls:
        if dist.get_rank() == 1:
            with pytest.warns(UserWarning, match="global rank 1 which does not belong"):
                assert call() is None
        else:
            call()
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="expected a group that this rank is a member of"):
            collectives.shared_empty(3, group=group)
    assert tensor.item() == 1.0


def test_collectives_return_none_with_a_warning_outside_the_group():
    run_on_shared_ranks(call_from_outside, 2)


def split_many_times():
    rank, _ = begin("collectives")
    results = []
    for _ in range(3):
        group = dist.split_group(split_ranks=[[3, 1], [0, 2]], group_desc="half")
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=group)
        single = dist.split_group(group, split_ranks=[[1]])
        results.append((total.item(), dist.get_rank(group), dist.get_backend(group)))
        assert (single == dist.GroupMember.NON_GROUP_MEMBER) == (rank in (3, 0))
        assert group.group_desc == "half"
        dist.destroy_process_group(group)
    assert dist.split_group(split_ranks=[[0]]) != dist.GroupMember.NON_GROUP_MEMBER or rank
    with pytest.raises(ValueError, match="expected the cpu among the devices"):
        dist.group.WORLD.split_group([0], device_types=[torch.device("meta")])
    for ranks in ([0, 0], [0, 4]):
        with pytest.raises(ValueError, match="expected distinct ranks between 0 and 3"):
            dist.group.WORLD.split_group(ranks)
    assert set(results) == {results[0]}
    return results[0]


@pytest.mark.skipif(
    "backend" not in inspect.signature(dist.split_group).parameters,
    reason="torch.distributed.split_group of torch 2.11 takes groups of CUDA devices only",
)
@pytest.mark.filterwarnings("ignore")
def test_groups_can_be_split_repeatedly():
    assert run_on_shared_ranks(split_many_times, 4, backend="") == [
        (4.0, 0, "collectives"),
        (6.0, 1, "collectives"),
        (4.0, 1, "collectives"),
        (6.0, 0, "collectives"),
    ]


def create_many_subsets():
    rank, _ = begin("collectives")
    for ranks in ([0, 1], [1, 3], [2], [3, 2, 0]):
        group = dist.new_group(ranks)
        if rank in ranks:
            total = torch.tensor([rank + 1.0])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(ranks) + len(ranks)
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=dist.new_group(pair, use_local_synchronization=True))
    assert total.item() == sum(pair) + 2


@pytest.mark.filterwarnings("ignore")
def test_groups_of_subsets_can_be_created_repeatedly():
    run_on_shared_ranks(create_many_subsets, 4, backend="")


def fork():
    """Use and leave the group in a process that was forked from the rank."""
    collectives.barrier()
    comm = get_communicator()
    child = os.fork()
    if child == 0:
        with pytest.raises(RuntimeError, match="forked"):
            collectives.all_reduce(torch.ones(3))
        # The handlers at exit must not leave the group for the parent.
        _end_threads()
        comm.close()
        comm.abort()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    total = torch.ones(3)
    collectives.all_reduce(total)
    return total.tolist()


def test_forked_process_cannot_use_the_group_of_its_parent():
    assert run_ranks(fork, 2) == [[2.0] * 3] * 2


def pass_options_of_gloo():
    import collectives.backend  # noqa: F401

    with pytest.raises(TypeError, match="pass timeout="):
        dist.init_process_group(
            "collectives",
            rank=0,
            world_size=1,
            store=dist.HashStore(),
            pg_options=dist.ProcessGroupGloo._Options(),
        )


def test_gloo_options_are_refused():
    run_ranks(pass_options_of_gloo, 1, backend="")


def run_attempt(port, how):
    """Run one attempt of an elastic job on the launcher's store; its ranks may end early."""
    import collectives.backend

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", port, timeout=limit)
    if how == "all ranks end in the set-up":
        collectives.backend.connect_gloo = lambda *_: os._exit(1)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=world, timeout=limit)
    total = torch.full((5,), float(rank))
    for step in range(3):
        if how == "rank 1 is killed" and step == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total, dist.ReduceOp.AVG)
    group = dist.new_group(list(reversed(range(world))))
    dist.all_reduce(total, dist.ReduceOp.AVG, group=group)
    return total.tolist()


def test_restart_on_the_same_store_succeeds():
    # An elastic launcher keeps its store. If nodes join or leave, the number of ranks changes and
    # the restart count does not.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = try_ranks(run_attempt, 2, server.port, "rank 1 is killed", backend="")
    assert isinstance(outcomes[0].error, collectives.RankLost), outcomes
    for world in (3, 2):
        outcomes = try_ranks(
            run_attempt, world, server.port, "all ranks end in the set-up", backend=""
        )
        assert all(outcome.exit_code == 1 for outcome in outcomes), outcomes
    for world in (3, 2):
        averages = run_ranks(run_attempt, world, server.port, "", backend="")
        assert averages == [[(world - 1) / 2] * 5] * world


def train_elastically():
    """Run under torchrun; rank 1 of the first attempt is killed between two calls."""
    import collectives.backend  # noqa: F401

    dist.init_process_group("collectives", timeout=timedelta(seconds=20))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    total = torch.full((5,), float(dist.get_rank()))
    for step in range(6):
        if attempt == 0 and step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total, dist.ReduceOp.AVG)
    group = dist.new_group([1, 0])
    dist.all_reduce(total, dist.ReduceOp.AVG, group=group)
    # One write per line: the ranks share the launcher's output.
    line = f"rank {dist.get_rank()} attempt {attempt} {total[0].item()}\n"
    os.write(1, line.encode())
    dist.destroy_process_group()


@pytest.mark.exhaustive
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_restart_under_torchrun_succeeds(rendezvous, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--max-restarts=1", f"--rdzv-backend={rendezvous}", "--monitor-interval=0.1"]
    if rendezvous == "c10d":
        command.append("--rdzv-endpoint=localhost:0")
    else:
        command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    path = [str(THIS_FILE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "GLOO_SOCKET_IFNAME": "lo"}
    script = tmp_path / "train.py"
    lines = THIS_FILE.read_text().split("def train_elastically():")[1].split("\n\n\n")[0]
    script.write_text(
        "import os, signal\nfrom datetime import timedelta\nimport torch\n"
        f"import torch.distributed as dist\n\ndef train():{lines}\n\ntrain()\n"
    )
    done = subprocess.run(
        [*command, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} attempt 1 0.5" for rank in range(2)]


def lose_two_ranks(backend, where, how):
    """Lose rank 1 and then rank 2 of four; the survivors rebuild their group each time."""
    rank, store = begin(backend, where, seconds=6)
    with pytest.raises(RuntimeError, match="expected a group that has failed"):
        collectives.rebuild()
    group = dist.group.WORLD
    sums = []
    for lost, survivors in ((1, [0, 2, 3]), (2, [0, 3])):
        reduce(group, torch.ones(10))
        if rank == lost:
            if how == "dies":
                os._exit(1)
            # A rank that is only slow learns that the others continued without it.
            store.wait([f"{survivor} continues without {lost}" for survivor in survivors])
            with pytest.raises(collectives.RankLost):
                reduce(group, torch.ones(10))
            with pytest.raises(RuntimeError, match="named this rank"):
                collectives.rebuild(None if lost == 1 else group)
            store.set(f"{lost} is done", "")
            os._exit(1)
        with pytest.raises(collectives.RankLost):
            reduce(group, torch.ones(10))
        group = collectives.rebuild(group, timeout=timedelta(seconds=6 if lost == 1 else TIMEOUT))
        store.set(f"{rank} continues without {lost}", "")
        assert dist.get_process_group_ranks(group) == survivors
        total = torch.full((1000,), rank + 1.0)
        for work in [reduce(group, total, async_op=True) for _ in range(2)]:
            work.wait()
        sums.append(total.unique().tolist())
        if how == "hangs":
            store.wait([f"{lost} is done"])
    return sums


USUAL_LOSSES = [("collectives", "together", "dies"), ("collectives", "apart", "dies")]
OTHER_LOSSES = [
    ("collectives", "pairs", "dies"),
    ("collectives", "together", "hangs"),
    ("collectives", "apart", "hangs"),
    ("gloo", "apart", "dies"),
]


@pytest.mark.parametrize(
    ("backend", "where", "how"),
    [
        *USUAL_LOSSES,
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHER_LOSSES),
    ],
)
def test_survivors_of_lost_ranks_rebuild_their_group(backend, where, how, outcomes):
    for rank in (0, 3):
        # Each call multiplies the sum 1 + 3 + 4, and then 1 + 4, by the number of ranks.
        assert outcomes[rank].value == [[8.0 * 3], [5.0 * 2]], outcomes


def lose_a_rank_while_rebuilding():
    """Lose rank 1, and then rank 2 before it rebuilds the group."""
    rank, store = begin("collectives", seconds=6)
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        os._exit(1)
    with pytest.raises(collectives.RankLost):
        dist.all_reduce(torch.ones(10))
    store.set(f"{rank} knows", "")
    store.wait([f"{other} knows" for other in (0, 2, 3)])
    if rank == 2:
        os._exit(1)
    with pytest.raises(collectives.RankLost) as caught:
        collectives.rebuild(timeout=timedelta(seconds=2))
    group = collectives.rebuild(timeout=timedelta(seconds=TIMEOUT))
    total = torch.ones(10)
    dist.all_reduce(total, group=group)
    return caught.value.ranks, dist.get_process_group_ranks(group), total.unique().tolist()


def test_group_can_be_rebuilt_after_a_failed_attempt(outcomes):
    for rank in (0, 3):
        assert outcomes[rank].value == ((1, 2), [0, 3], [2.0]), outcomes


def lose_a_rank_of_a_reversed_group():
    """Lose global rank 1 of the group [3, 2, 1, 0], and then global rank 3 while rebuilding it."""
    rank, store = begin("collectives", seconds=6)
    group = dist.split_group(split_ranks=[[3, 2, 1, 0]])
    dist.all_reduce(torch.ones(10), group=group)
    if rank == 1:
        os._exit(1)
    with pytest.raises(collectives.RankLost):
        dist.all_reduce(torch.ones(10), group=group)
    store.set(f"{rank} knows", "")
    store.wait([f"{other} knows" for other in (0, 2, 3)])
    if rank == 3:
        os._exit(1)
    with pytest.raises(collectives.RankLost) as caught:
        collectives.rebuild(group, timeout=timedelta(seconds=2))
    rebuilt = collectives.rebuild(group, timeout=timedelta(seconds=TIMEOUT))
    return caught.value.ranks, dist.get_process_group_ranks(rebuilt)


@pytest.mark.skipif(
    "backend" not in inspect.signature(dist.split_group).parameters,
    reason="torch.distributed.split_group of torch 2.11 takes groups of CUDA devices only",
)
def test_failed_attempt_to_rebuild_names_ranks_of_the_old_group(outcomes):
    for rank in (0, 2):
        # Global ranks 3 and 1 have the numbers 0 and 2 in the old group.
        assert outcomes[rank].value == ((0, 2), [0, 2]), outcomes


def lose_the_store(port):
    """Lose rank 0, which serves the store: a new group is impossible."""
    import collectives.backend

    rank = int(os.environ["RANK"])
    limit = timedelta(seconds=8)
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=rank == 0, timeout=limit)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=3, timeout=limit)
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        os._exit(1)
    with pytest.raises(collectives.RankLost) as caught:
        dist.all_reduce(torch.ones(3))
    assert caught.value.ranks == (0,)
    with pytest.raises(collectives.RankLost, match="the group's store does not answer"):
        collectives.rebuild()
    return True


def test_rebuild_without_the_store_is_refused():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outcomes = try_ranks(lose_the_store, 3, port, backend="")
    assert [outcome.value for outcome in outcomes[1:]] == [True, True], outcomes


def hang_the_store():
    """Stop the process that serves the store; then lose rank 2 of the other three processes."""
    import collectives.backend

    emulate_hosts("apart")
    rank = int(os.environ["RANK"])
    rendezvous = dist.FileStore(os.environ["STORE_FILE"], -1)
    limit = timedelta(seconds=2)
    if rank == 3:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rendezvous.set("server", json.dumps([server.port, os.getpid()]))
        time.sleep(60)
    port, pid = json.loads(rendezvous.get("server"))
    store = dist.TCPStore("127.0.0.1", port, timeout=limit)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=3, timeout=limit)
    total = torch.ones(3)
    dist.all_reduce(total)
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
    dist.all_reduce(total)
    start_time = time.monotonic()
    with pytest.raises(collectives.RankLost, match="the group's store does not answer") as caught:
        dist.new_group(timeout=limit)
    assert time.monotonic() - start_time < limit.total_seconds() + 2
    assert caught.value.ranks == ()
    dist.all_reduce(total)
    if rank == 2:
        os._exit(1)
    with pytest.raises(collectives.RankLost, match="the group's store does not answer") as caught:
        dist.all_reduce(total)
    # Without the store, rank 1 cannot know why rank 0 closes its connections.
    assert caught.value.ranks == ()
    rendezvous.set(f"{rank} is done", "")
    if rank == 1:
        rendezvous.wait(["0 is done"])
        os.kill(pid, signal.SIGKILL)
    return True


def test_store_that_hangs_is_named_and_no_rank_is_blamed_for_it(outcomes):
    assert [outcome.value for outcome in outcomes[:2]] == [True, True], outcomes


def end_processes(where, scenarios):
    """Return the exit codes of `ends_of_processes.py`."""
    import ends_of_processes

    folder = os.path.dirname(os.environ["STORE_FILE"])
    return ends_of_processes.end_processes(folder, where, scenarios)


ENDS = {
    "usual": ("apart", USUAL_SCENARIOS),
    "apart": ("apart", SCENARIOS),
    "together": ("together", SCENARIOS),
}


@pytest.mark.parametrize(
    "ends",
    [
        "usual",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("apart", "together")),
    ],
)
def test_process_can_end_while_threads_are_inside_torch(ends, outcomes):
    # Such a thread aborted the process ("terminate called without an active exception").
    codes = outcomes[0].value
    assert len(codes) == 2 * len(ENDS[ends][1])
    for name, code in codes.items():
        assert code == ("exception is raised" in name), name


# Scenarios that wait, which run beside the other tests: see `conftest.py`.
WAITING = {
    "test_store_that_hangs_is_named_and_no_rank_is_blamed_for_it": (
        (hang_the_store, 4),
        {"backend": ""},
    ),
    "test_group_can_be_rebuilt_after_a_failed_attempt": (
        (lose_a_rank_while_rebuilding, 4),
        {"backend": ""},
    ),
    "test_failed_attempt_to_rebuild_names_ranks_of_the_old_group": (
        (lose_a_rank_of_a_reversed_group, 4),
        {"backend": ""},
    ),
    **{
        f"test_process_can_end_while_threads_are_inside_torch[{name}]": (
            (end_processes, 1, *arguments),
            {"backend": "", "timeout": 300},
        )
        for name, arguments in ENDS.items()
    },
    **{
        f"test_survivors_of_lost_ranks_rebuild_their_group[{'-'.join(case)}]": (
            (lose_two_ranks, 4, *case),
            {"backend": ""},
        )
        for case in USUAL_LOSSES + OTHER_LOSSES
    },
    **{
        f"test_rank_that_destroys_its_group_is_named_at_once[{'-'.join(map(str, case))}]": (
            (leave, 4 if "pairs" in case else 3, *case),
            {"backend": ""},
        )
        for case in USUAL_EXITS + OTHER_EXITS
    },
    **{
        f"test_wait_for_a_message_ends_at_the_timeout_or_with_the_group[{'-'.join(case)}]": (
            (wait_for_a_message, 2, *case),
            {"backend": ""},
        )
        for case in USUAL_WAITS + OTHER_WAITS
    },
}


def call_destroyed_group(where):
    begin("collectives", where)
    group = dist.new_group()
    reduce(group, torch.ones(3))
    dist.destroy_process_group(group)
    for async_op in (False, True):
        # In some cases, torch itself refuses the call.
        with pytest.raises(ValueError, match=r"has been destroyed|is not initialized"):
            dist.all_reduce(torch.ones(3), group=group, async_op=async_op)


@pytest.mark.parametrize("where", ["together", "apart"])
def test_call_on_a_destroyed_group_is_refused(where):
    # The thread of asynchronous calls has ended, so the handle of such a call would never complete.
    run_on_shared_ranks(call_destroyed_group, 2, where, backend="")
