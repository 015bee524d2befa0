"""Collectives with lists and with a root, and tensors with lazy conjugates and negatives."""

import os
from datetime import timedelta

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives.shared_memory import segment
from worker_pool import run_ranks

SHAPES = ((), (0,), (5,), (3, 4), (200_001,))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.int8)


def apart():
    segment.host_identity = lambda: f"host {os.environ['RANK']}"


def contribution(rank, shape, dtype, salt=0):
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    values = torch.randint(0, 5, shape, generator=generator)
    # Tensors of two dimensions are not contiguous.
    return values.to(dtype) if len(shape) < 2 else values.t().contiguous().t().to(dtype)


def everything(where, by=collectives):
    """Compare every collective with its definition, by our or by torch's names."""
    if where == "apart":
        apart()
    rank, world = dist.get_rank(), dist.get_world_size()
    for shape in SHAPES:
        for dtype in DTYPES:
            local, root = contribution(rank, shape, dtype), (len(shape) + 1) % world
            everyone = [contribution(r, shape, dtype) for r in range(world)]
            room = [torch.empty_like(local) for _ in range(world)]
            by.all_gather(room, local)
            assert all(map(torch.equal, room, everyone))

            room = [torch.empty_like(local) for _ in range(world)] if rank == root else None
            by.gather(local, room, dst=root)
            assert rank != root or all(map(torch.equal, room, everyone))

            parts = [contribution(r, shape, dtype, salt=root + 1) for r in range(world)]
            out = torch.empty_like(local)
            by.scatter(out, parts if rank == root else None, src=root)
            assert torch.equal(out, parts[rank])

            sends = [contribution(10 * rank + to, shape, dtype) for to in range(world)]
            room = [torch.empty_like(local) for _ in range(world)]
            by.all_to_all(room, sends)
            want = [contribution(10 * source + rank, shape, dtype) for source in range(world)]
            assert all(map(torch.equal, room, want))

            total = everyone[0].clone()
            for tensor in everyone[1:]:
                total = total + tensor
            mine = local.clone()
            by.reduce(mine, dst=root)
            assert torch.equal(mine, total if rank == root else local)

            sends = [contribution(10 * rank + to, shape, dtype) for to in range(world)]
            by.reduce_scatter(out, sends)
            want = [contribution(10 * source + rank, shape, dtype) for source in range(world)]
            assert torch.equal(out, sum(want[1:], want[0]))
    # Ours, unlike gloo's, accepts tensors of different lengths.
    room = [torch.empty(source + 1) for source in range(world)]
    works = by.all_to_all(room, [torch.full((rank + 1,), 1.0 * rank)] * world, async_op=True)
    works.wait()
    assert [tensor.tolist() for tensor in room] == [[1.0 * r] * (r + 1) for r in range(world)]


@pytest.mark.parametrize(("where", "world"), [("together", 3), ("apart", 3), ("together", 2)])
def test_collectives_with_lists_and_roots_match_their_definition(where, world):
    run_ranks(everything, world, where)


def by_torchs_names(where):
    import collectives.backend  # noqa: F401

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE_FILE"], world)
    limit = timedelta(seconds=30)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=world, timeout=limit)
    everything(where, dist)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "padding": "x" * 1000 * rank})
    assert [entry["rank"] for entry in objects] == list(range(world))
    text = [{"a": 1}, 3] if rank == 0 else [None, None]
    dist.broadcast_object_list(text, 0)
    assert text == [{"a": 1}, 3]
    room = [None] * world if rank == 1 else None
    dist.gather_object(rank, room, dst=1)
    assert room in (None, list(range(world)))
    mine = [None]
    dist.scatter_object_list(mine, list("abcd"[:world]) if rank == 0 else None, src=0)
    assert mine == ["abcd"[rank]]
    right, left = (rank + 1) % world, (rank - 1) % world
    arrived = torch.empty(3)
    operations = [
        dist.P2POp(dist.isend, torch.full((3,), 1.0 * rank), right),
        dist.P2POp(dist.irecv, arrived, left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert arrived.tolist() == [1.0 * left] * 3
    group = dist.group.WORLD
    # Before 2.12 torch calls this function on a backend named gloo only.
    group.monitored_barrier(limit)
    # The group's methods.
    tensor = torch.full((3,), rank + 1.0)
    group.reduce(tensor, 0, dist.ReduceOp.MAX).wait()
    assert tensor[0] == (world if rank == 0 else rank + 1)
    group.allgather([torch.empty(3) for _ in range(world)], tensor).wait()
    group.gather([torch.empty(3) for _ in range(world)] if rank == 1 else [], tensor, root=1).wait()
    group.scatter(tensor, [torch.ones(3) for _ in range(world)] if rank == 0 else [], root=0).wait()
    group.reduce_scatter(tensor, [torch.ones(3) for _ in range(world)]).wait()
    assert tensor.tolist() == [1.0 * world] * 3


@pytest.mark.parametrize("where", ["together", "apart"])
def test_list_collectives_run_on_the_registered_backend(where):
    run_ranks(by_torchs_names, 3, where, backend="")


def differing(where):
    """Deviate on rank 1 and check that every rank names it before data move."""
    if where == "apart":
        apart()
    rank, world = dist.get_rank(), dist.get_world_size()
    messages = []
    ones, longer = torch.ones(3), torch.ones(5 if rank == 1 else 3)
    lists = [torch.zeros(3) for _ in range(world)]
    calls = (
        lambda: collectives.reduce(longer, 0),
        lambda: collectives.reduce(ones, 2 if rank == 1 else 0),
        lambda: collectives.gather(longer, lists if rank == 0 else None, 0),
        lambda: collectives.scatter(longer, lists if rank == 0 else None, 0),
        lambda: collectives.all_gather([longer.clone() for _ in lists], longer),
        lambda: collectives.gather(ones) if rank == 1 else collectives.reduce(ones, 0),
    )
    with collectives.checked():
        for call in calls:
            with pytest.raises(collectives.Mismatch, match="rank 1") as caught:
                call()
            messages.append(str(caught.value))
        collectives.all_reduce(ones)
    assert ones.tolist() == [3.0] * 3
    return messages


@pytest.mark.parametrize("where", ["together", "apart"])
def test_difference_between_lists_is_raised_on_every_rank(where):
    messages = run_ranks(differing, 3, where)
    assert messages[0] == messages[1] == messages[2]
    assert "to rank 2" in messages[0][1]
    assert "scatter(shape (5,), torch.float32, from rank 0)" in messages[0][3]


def lazy(where):
    """Pass lazy conjugates and negatives, on one rank or on all."""
    if where == "apart":
        apart()
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = [
        torch.complex(torch.arange(4.0) + r, torch.full((4,), r + 1.0)) for r in range(world)
    ]
    mine = numbers[rank].conj() if rank == 0 else numbers[rank].clone()
    want = numbers[0].conj().resolve_conj() + sum(numbers[1:])
    room = [torch.empty(4, dtype=torch.complex64) for _ in range(world)]
    collectives.all_gather(room, mine)
    assert torch.equal(room[0], numbers[0].conj().resolve_conj())
    gathered = torch.empty(4 * world, dtype=torch.complex64)
    collectives.all_gather_into_tensor(gathered, mine)
    assert torch.equal(gathered[:4], numbers[0].conj().resolve_conj())
    received = torch.zeros(4, dtype=torch.complex64)
    collectives.broadcast(mine.clone() if rank == 0 else received, 0)
    collectives.all_reduce(mine)
    assert torch.equal(mine.resolve_conj(), want)
    negative = torch.complex(torch.zeros(4), torch.ones(4)).conj().imag
    assert negative.is_neg()
    collectives.all_gather_into_tensor(out := torch.empty(4 * world), negative)
    assert (out == -1).all()


@pytest.mark.parametrize("where", ["together", "apart"])
def test_lazy_conjugates_and_negatives_are_resolved(where):
    run_ranks(lazy, 2, where)


def refused():
    ones = torch.ones(4)
    world = dist.get_world_size()
    raises = pytest.raises
    with raises(ValueError, match="tensor_list needs a tensor for each of 2 ranks, but has 1"):
        collectives.all_gather([ones], ones)
    with raises(ValueError, match=r"tensor_list\[1\] has 5 elements"):
        collectives.all_gather([ones, torch.ones(5)], ones)
    with raises(TypeError, match="one dtype"):
        collectives.all_to_all([ones] * world, [ones.double()] * world)
    if dist.get_rank() == 1:
        with raises(ValueError, match="rank 0 is the root"):
            collectives.scatter(ones, [ones, ones], src=0)
    for unsigned in (torch.uint16, torch.uint32, torch.uint64):
        with raises(TypeError, match="wider signed"):
            collectives.all_reduce(ones.to(unsigned))
        collectives.broadcast(ones.to(unsigned), 0)
    with raises(ValueError, match="pass a clone"):
        collectives.all_reduce(torch.ones(1).expand(5))
    with raises(ValueError, match="none negative"):
        collectives.all_to_all_single(ones, ones, [5, -1], [5, -1])
    with raises(TypeError, match="to_dense"):
        collectives.all_reduce(torch.eye(3).to_sparse())
    # The group is still usable.
    collectives.all_reduce(ones)
    return ones.tolist()


def test_unsupported_tensors_are_refused_before_data_move():
    assert run_ranks(refused, 2) == [[2.0] * 4] * 2
