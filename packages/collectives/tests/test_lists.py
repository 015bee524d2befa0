"""Collectives with lists and with a root, and tensors with lazy conjugates and negatives."""

import inspect
import mmap
import os
import warnings
from datetime import timedelta
from itertools import product

import collectives
import numpy as np
import pytest
import torch
import torch.distributed as dist
from collectives.algorithms.reduction import COMBINE
from collectives.arguments import may_overlap
from collectives.shared_memory.fingerprint import DTYPES as DTYPES_OF_TORCH
from host_layout import emulate_hosts, prepare_rank  # noqa: F401
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from worker_pool import run_on_shared_ranks, run_ranks

# The last one is longer than a slot of shared memory and, if complex, than a piece of a message.
SHAPES = ((), (0,), (5,), (3, 4), (70_001,))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.int8)
ALL_CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
SHAPES_OF_FLOATS = [(shape, torch.float32) for shape in SHAPES]
# Every dtype also in a tensor with gaps between its elements and in a long one.
USUAL_CASES = [*SHAPES_OF_FLOATS, *product(SHAPES[-2:], DTYPES[1:])]
CASES_APART = [*SHAPES_OF_FLOATS, *product(SHAPES[-1:], DTYPES[1:])]


class NoViews(TorchDispatchMode):
    """A dispatch mode that refuses `as_strided`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.as_strided.default:
            raise RuntimeError("no views here")
        return func(*args, **(kwargs or {}))


def draw_contribution(rank, shape, dtype, salt=0):
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    values = torch.randint(0, 5, shape, generator=generator)
    # Tensors of two dimensions are not contiguous.
    return values.to(dtype) if len(shape) < 2 else values.t().contiguous().t().to(dtype)


def run_everything(where, cases, by=collectives):
    """Compare every collective with its definition, by our or by torch's names."""
    if where == "apart":
        emulate_hosts("apart")
    rank, world = dist.get_rank(), dist.get_world_size()
    for shape, dtype in cases:
        local, root = draw_contribution(rank, shape, dtype), (len(shape) + 1) % world
        everyone = [draw_contribution(r, shape, dtype) for r in range(world)]
        room = [torch.empty_like(local) for _ in range(world)]
        by.all_gather(room, local)
        assert all(map(torch.equal, room, everyone))

        room = [torch.empty_like(local) for _ in range(world)] if rank == root else None
        by.gather(local, room, dst=root)
        assert rank != root or all(map(torch.equal, room, everyone))

        parts = [draw_contribution(r, shape, dtype, salt=root + 1) for r in range(world)]
        out = torch.empty_like(local)
        by.scatter(out, parts if rank == root else None, src=root)
        assert torch.equal(out, parts[rank])

        sends = [draw_contribution(10 * rank + to, shape, dtype) for to in range(world)]
        room = [torch.empty_like(local) for _ in range(world)]
        by.all_to_all(room, sends)
        want = [draw_contribution(10 * source + rank, shape, dtype) for source in range(world)]
        assert all(map(torch.equal, room, want))

        total = everyone[0].clone()
        for tensor in everyone[1:]:
            total = total + tensor
        mine = local.clone()
        by.reduce(mine, dst=root)
        assert torch.equal(mine, total if rank == root else local)

        sends = [draw_contribution(10 * rank + to, shape, dtype) for to in range(world)]
        by.reduce_scatter(out, sends)
        want = [draw_contribution(10 * source + rank, shape, dtype) for source in range(world)]
        assert torch.equal(out, sum(want[1:], want[0]))
    # Unlike gloo's, our all_to_all accepts tensors of different lengths.
    room = [torch.empty(source + 1) for source in range(world)]
    works = by.all_to_all(room, [torch.full((rank + 1,), 1.0 * rank)] * world, async_op=True)
    works.wait()
    assert [tensor.tolist() for tensor in room] == [[1.0 * r] * (r + 1) for r in range(world)]


@pytest.mark.parametrize(
    ("where", "world", "cases"),
    [
        ("together", 3, USUAL_CASES),
        ("apart", 3, CASES_APART),
        *(
            pytest.param(where, world, ALL_CASES, marks=pytest.mark.exhaustive)
            for where, world in (("together", 2), ("together", 3), ("apart", 3))
        ),
    ],
    ids=lambda value: f"{len(value)}-cases" if isinstance(value, list) else None,
)
def test_collectives_with_lists_and_roots_match_their_definition(where, world, cases):
    run_on_shared_ranks(run_everything, world, where, cases)


def call_by_names_of_torch(where):
    import collectives.backend  # noqa: F401

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE_FILE"], world)
    limit = timedelta(seconds=30)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=world, timeout=limit)
    run_everything(where, SHAPES_OF_FLOATS, dist)
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
    contributions = [float(world), *range(2, world + 1)]
    gathered = [torch.empty(3) for _ in range(world)]
    group.allgather(gathered, tensor).wait()
    assert [part[0].item() for part in gathered] == contributions
    gathered = [torch.empty(3) for _ in range(world)] if rank == 1 else []
    group.gather(gathered, tensor, root=1).wait()
    assert [part[0].item() for part in gathered] == (contributions if rank == 1 else [])
    parts = [torch.full((3,), 10.0 + i) for i in range(world)]
    group.scatter(tensor, parts if rank == 0 else [], root=0).wait()
    assert tensor.tolist() == [10.0 + rank] * 3
    group.reduce_scatter(tensor, parts).wait()
    assert tensor.tolist() == [world * (10.0 + rank)] * 3


@pytest.mark.parametrize("where", ["together", pytest.param("apart", marks=pytest.mark.exhaustive)])
def test_list_collectives_run_on_the_registered_backend(where):
    run_on_shared_ranks(call_by_names_of_torch, 3, where, backend="")


def exchange_uneven_tensors(where):
    """Gather and scatter tensors whose sizes differ between ranks."""
    if where == "apart":
        emulate_hosts("apart")
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [(3, 2), (0,), (7,)][:world]
    for dtype in (torch.float32, torch.bfloat16):
        everyone = [draw_contribution(r, size, dtype) for r, size in enumerate(sizes)]
        room = [torch.full(size, 99).to(dtype) for size in sizes]
        collectives.all_gather(room, everyone[rank])
        assert all(map(torch.equal, room, everyone))
        # Rank r contributes r + 1 times the tensor of each rank.
        total = sum(r + 1 for r in range(world))
        out = torch.full(sizes[rank], 99).to(dtype)
        collectives.reduce_scatter(out, [(rank + 1) * tensor for tensor in everyone])
        assert torch.equal(out, total * everyone[rank])
    room = [torch.empty(size) for size in (5, 6, 8 if rank == 1 else 7)]
    with collectives.checked(), pytest.raises(collectives.Mismatch, match="rank 1 called"):
        collectives.all_gather(room, torch.ones(5 + rank))


@pytest.mark.parametrize("where", ["together", "apart"])
def test_lists_of_different_sizes_match_their_definition(where):
    assert run_on_shared_ranks(exchange_uneven_tensors, 3, where) == [None] * 3


def pass_overlapping_tensors(where, numel):
    """Pass inputs that overlap the outputs, in place and shifted by one element.

    They are views of one tensor, or separate tensors on one NumPy array.
    """
    if where == "apart":
        emulate_hosts("apart")
    rank, world = dist.get_rank(), dist.get_world_size()

    def whole(r):
        return torch.arange(1.0 * world * numel) + 1000 * r

    total = sum(whole(r) for r in range(world))
    for shift, is_numpy in ((0, False), (1, False), (1, True)):
        # The input is this rank's slice of the output, or the reverse, moved by `shift`.
        buffer = torch.zeros(world * numel + 1)
        moved = torch.from_numpy(buffer.numpy()[shift:]) if is_numpy else buffer[shift:]
        longer, shorter = buffer[:-1], moved[rank * numel :][:numel]
        shorter.copy_(whole(rank)[:numel])
        collectives.all_gather_into_tensor(longer, shorter)
        expected = torch.cat([whole(r)[:numel] for r in range(world)])
        assert torch.equal(longer, expected), shift

        for algorithm in ("auto", "ring"):
            longer.copy_(whole(rank))
            collectives.reduce_scatter_tensor(shorter, longer, algorithm=algorithm)
            assert torch.equal(shorter, total.view(world, -1)[rank]), (shift, algorithm)

        sent, received = buffer[:-1], moved[: world * numel]
        sent.copy_(whole(rank))
        collectives.all_to_all_single(received, sent)
        expected = torch.cat([whole(r).view(world, -1)[rank] for r in range(world)])
        assert torch.equal(received, expected), shift

        sent.copy_(whole(rank))
        collectives.all_to_all_single(received, sent, algorithm="ring")
        assert torch.equal(received, expected), shift

        sent.copy_(whole(rank))
        parts = list(sent.chunk(world))
        collectives.all_to_all(list(received.chunk(world)), parts)
        assert torch.equal(received, expected), shift

        sent.copy_(whole(rank))
        output = parts[1] if rank == 0 else torch.empty(numel)
        collectives.scatter(output, parts if rank == 0 else None, src=0)
        assert torch.equal(output, whole(0).view(world, -1)[rank]), shift


@pytest.mark.parametrize("where", ["together", "apart"])
def test_inputs_that_overlap_outputs_are_read_before_they_are_overwritten(where):
    # With three ranks, a sum on its way through a ring is stored once before it is complete.
    assert run_on_shared_ranks(pass_overlapping_tensors, 3, where, 70_001) == [None] * 3


def deviate_on_rank_1(where):
    """Deviate on rank 1 and check that every rank names it before data move."""
    if where == "apart":
        emulate_hosts("apart")
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
    results = run_on_shared_ranks(deviate_on_rank_1, 3, where)
    messages = results[0]
    assert results == [messages] * 3
    assert "to rank 2" in messages[1]
    assert "scatter(shape (5,), torch.float32, from rank 0)" in messages[3]


def pass_lazy_tensors(where):
    """Pass lazy conjugates and negatives, on one rank or on all."""
    if where == "apart":
        emulate_hosts("apart")
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
    # A clone would not be lazy.
    received = numbers[0].conj() if rank == 0 else torch.zeros(4, dtype=torch.complex64)
    assert received.is_conj() == (rank == 0)
    collectives.broadcast(received, 0)
    assert torch.equal(received.resolve_conj(), numbers[0].conj().resolve_conj())
    collectives.all_reduce(mine)
    assert torch.equal(mine.resolve_conj(), want)
    negative = torch.complex(torch.zeros(4), torch.ones(4)).conj().imag
    assert negative.is_neg()
    collectives.all_gather_into_tensor(out := torch.empty(4 * world), negative)
    assert (out == -1).all()


@pytest.mark.parametrize("where", ["together", "apart"])
def test_lazy_conjugates_and_negatives_are_resolved(where):
    assert run_on_shared_ranks(pass_lazy_tensors, 2, where) == [None, None]


def list_versions():
    """Return the version counters after each call, by kind."""
    rank, world = dist.get_rank(), dist.get_world_size()
    outputs = {}

    def room(name, count=1):
        outputs.setdefault(name, []).extend(torch.ones(2) for _ in range(count))
        return outputs[name][-count:]

    parts = [torch.ones(2) for _ in range(world)]
    whole = torch.ones(2 * world)
    collectives.all_reduce(*room("all_reduce"))
    collectives.all_reduce(*room("all_reduce"), async_op=True).wait()
    collectives.all_reduce(*room("all_reduce"), algorithm="ring")
    collectives.reduce(*room("reduce"), 1)
    collectives.broadcast(*room("broadcast"), 1)
    collectives.reduce_scatter_tensor(*room("reduce_scatter"), whole)
    collectives.reduce_scatter(*room("reduce_scatter"), parts)
    collectives.scatter(*room("scatter"), parts if rank == 0 else None, src=0)
    collectives.all_gather(room("all_gather", world), torch.ones(2))
    collectives.gather(torch.ones(2), room("gather", world) if rank == 0 else None, dst=0)
    collectives.all_to_all(room("all_to_all", world), parts)
    outputs["single"] = [torch.ones(2 * world) for _ in range(2)]
    collectives.all_gather_into_tensor(outputs["single"][0], torch.ones(2))
    collectives.all_to_all_single(outputs["single"][1], whole)
    assert all(tensor._version == 0 for tensor in (*parts, whole))
    with torch.inference_mode():
        collectives.all_reduce(torch.ones(2))
    # A saved tensor that is overwritten is an error of the backward pass, not a wrong gradient.
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        collectives.all_reduce(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    return {name: {tensor._version > 0 for tensor in tensors} for name, tensors in outputs.items()}


def test_autograd_notices_every_tensor_that_is_overwritten():
    for rank, are_changed_by_name in enumerate(run_on_shared_ranks(list_versions, 2)):
        unchanged = {"reduce": rank != 1, "broadcast": rank == 1, "gather": rank != 0}
        for name, are_changed in are_changed_by_name.items():
            assert are_changed <= {not unchanged.get(name, False)}, (rank, name)


def read_unwritable_tensors(where):
    """Broadcast from tensors that cannot be written to, and reduce one of another rank."""
    if where == "apart":
        emulate_hosts("apart")
    is_root = dist.get_rank() == 0
    tensor = torch.ones(1).expand(5) if is_root else torch.zeros(5)
    for async_op in (False, True):
        work = collectives.broadcast(tensor, 0, async_op=async_op)
        if work is not None:
            work.wait()
        assert tensor.tolist() == [1.0] * 5
    total = torch.ones(5) if is_root else torch.ones(1).expand(5)
    collectives.reduce(total, 0)
    read_only = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ)
    zeros = torch.frombuffer(read_only, dtype=torch.float32)[::2][:5] if is_root else tensor
    collectives.broadcast(zeros, 0)
    with pytest.raises(ValueError, match="pass a clone"):
        collectives.all_reduce(torch.ones(1).expand(5))
    return zeros.tolist(), total.tolist()


@pytest.mark.parametrize("where", ["together", "apart"])
def test_tensors_that_are_only_read_may_be_expanded_or_read_only(where):
    assert run_on_shared_ranks(read_unwritable_tensors, 2, where) == [
        ([0.0] * 5, [total] * 5) for total in (2.0, 1.0)
    ]


def run_in_inference_mode(where):
    """Write to tensors that were created in inference mode, inside and outside of that mode."""
    if where == "apart":
        emulate_hosts("apart")
    world = dist.get_world_size()
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
    for dtype in (torch.int8, torch.float32):
        with torch.inference_mode():
            # The first call sets up the group.
            tensor = torch.ones(4, dtype=dtype)
            collectives.all_reduce(tensor)
            strided = torch.zeros(2 * world, 2, dtype=dtype)[:, 0]
            room = [torch.zeros(4, dtype=dtype) for _ in range(world)]
        for op in ops:
            for mode in (False, True):
                with torch.inference_mode(mode):
                    collectives.all_reduce(tensor.fill_(1) if mode else tensor, op)
                    collectives.all_reduce(tensor, op, async_op=True).wait()
        collectives.all_gather_into_tensor(strided, torch.ones(2, dtype=dtype))
        collectives.all_gather(room, torch.ones(4, dtype=dtype))
        collectives.broadcast(room[0], 0, async_op=True).wait()
        collectives.reduce(room[1], 0)
        assert strided.tolist() == [1] * 2 * world
        assert tensor.tolist() == [1] * 4
        assert room[0].tolist() == [1] * 4
    if where == "apart":
        with torch.inference_mode():
            averages = [torch.ones(4) for _ in range(2)]
        for average in averages:
            collectives.all_reduce(average, dist.ReduceOp.AVG, algorithm="gloo")
            assert average.tolist() == [1.0] * 4
    # Other tensors can be written to afterwards.
    tensor = torch.ones(4, dtype=torch.int8)
    collectives.all_reduce(tensor)
    return tensor.tolist()


@pytest.mark.parametrize("where", ["together", "apart"])
def test_tensors_of_inference_mode_can_be_written_to_outside_of_it(where):
    assert run_on_shared_ranks(run_in_inference_mode, 2, where) == [[2] * 4] * 2


def reduce_or_refuse(dtype, op):
    """Reduce a tensor; return True if it is refused because torch does not support the dtype."""
    try:
        collectives.all_reduce(torch.zeros(3, dtype=dtype), op)
    except TypeError as error:
        return "torch has no" in str(error)
    return False


def pass_refused_tensors():
    warnings.simplefilter("ignore")
    ones = torch.ones(4)
    world = dist.get_world_size()
    raises = pytest.raises
    with raises(ValueError, match="tensor_list to have one tensor for each of 2 ranks, got 1"):
        collectives.all_gather([ones], ones)
    with raises(ValueError, match=r"list\[0\] to have 4 elements, .* got 5"):
        collectives.gather(ones, [torch.ones(5), ones], dst=dist.get_rank())
    with raises(ValueError, match=r"list\[0\] to have the dtype torch\.float32 .* torch\.float64"):
        # On rank 1, the size of this tensor may differ from that of rank 1's tensor.
        collectives.all_gather([torch.ones(3).double(), ones], ones)
    with raises(TypeError, match="one dtype"):
        collectives.all_to_all([ones] * world, [ones.double()] * world)
    if dist.get_rank() == 1:
        with raises(ValueError, match="on the root, rank 0, only, got a list on rank 1"):
            collectives.scatter(ones, [ones, ones], src=0)
    for unsigned in (torch.uint16, torch.uint32, torch.uint64):
        with raises(TypeError, match="wider signed"):
            collectives.all_reduce(ones.to(unsigned))
        collectives.broadcast(ones.to(unsigned), 0)
    for shared in (torch.ones(1).expand(5), torch.ones(4).unfold(0, 3, 1)):
        with raises(ValueError, match="pass a clone"):
            collectives.all_reduce(shared)
    for gaps in (torch.ones(6, 4)[::2, 1:].t(), torch.ones(7).unfold(0, 2, 3)):
        collectives.all_reduce(gaps)
        assert (gaps == world).all()
    with raises(ValueError, match="nonnegative"):
        collectives.all_to_all_single(ones, ones, [5, -1], [5, -1])
    wrapped = AsyncCollectiveTensor(ones)
    with FakeTensorMode():
        fake = torch.ones(4)
    for bad, message in (
        (torch.eye(2).to_sparse(), "to_dense"),
        (torch.nested.nested_tensor([ones, ones[:3]]), "unbind"),
        (torch.quantize_per_tensor(ones, 0.5, 0, torch.quint8), "int_repr"),
        (wrapped, "AsyncCollectiveTensor"),
        (fake, "FakeTensor"),
    ):
        for call in (
            lambda bad=bad: collectives.broadcast(bad, 0),
            lambda bad=bad: collectives.all_to_all([ones, bad], [ones, ones]),
            lambda bad=bad: collectives.all_to_all([ones.clone(), ones.clone()], [ones, bad]),
            lambda bad=bad: collectives.reduce_scatter(ones, [ones, bad]),
        ):
            with raises(TypeError, match=message):
                call()
    with FakeTensorMode(), raises(RuntimeError, match="inside FakeTensorMode"):
        collectives.all_reduce(ones)
    # An error of a dispatch mode within the call would end the group.
    with NoViews(), raises(RuntimeError, match="no views"):
        collectives.all_reduce(torch.ones(2, 2))
    with raises(TypeError, match=r"torch\.func"):
        torch.func.vmap(collectives.all_reduce)(torch.ones(3, 2))
    # torch cannot create a quantized tensor without its scale.
    for dtype in (dtype for dtype in DTYPES_OF_TORCH if "torch.q" not in str(dtype)):
        for op in COMBINE:
            assert not (reduce_or_refuse(dtype, op) and dtype in DTYPES)
    # No method may read from the address of a tensor without memory.
    meta = torch.empty(4, device="meta")
    for call in (
        lambda: collectives.all_gather_into_tensor(ones, meta[:2]),
        lambda: collectives.reduce_scatter_tensor(ones[:2], meta),
        lambda: collectives.all_to_all_single(ones, meta),
        lambda: collectives.all_gather([ones[:2], meta[:2]], ones[:2]),
        lambda: collectives.reduce_scatter(ones[:2], [ones[2:], meta[:2]]),
        lambda: collectives.all_to_all([ones[:2], meta[:2]], [ones[:2], ones[2:]]),
        lambda: collectives.all_to_all([ones[:2], ones[2:]], [ones[:2], meta[2:]]),
        lambda: collectives.reduce(meta, 0),
        lambda: collectives.all_reduce(meta, algorithm="ring"),
    ):
        with raises(TypeError, match="expected (tensors on one device|a tensor on the CPU)"):
            call()
    # The group is still usable.
    collectives.all_reduce(ones)
    return ones.tolist()


def test_unsupported_tensors_are_refused_before_data_move():
    assert run_on_shared_ranks(pass_refused_tensors, 2) == [[2.0] * 4] * 2


def gather_overlapping_in_order():
    """Gather a tensor that overlaps the output while an earlier call still writes to it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results = []
    for async_op in (True, False):
        output = torch.full((4 * world,), rank + 1.0)
        local = output[:4]
        # The long call delays the others.
        collectives.all_reduce(torch.ones(1 << 20), async_op=True)
        collectives.all_reduce(local, async_op=True)
        work = collectives.all_gather_into_tensor(output, local, async_op=async_op)
        if async_op:
            work.wait()
        results.append(output.unique().tolist())
    return results


def test_overlapping_input_is_read_after_earlier_calls():
    assert run_on_shared_ranks(gather_overlapping_in_order, 2) == [[[3.0], [3.0]]] * 2


def test_overlap_is_that_of_bytes_not_of_storages():
    array = np.zeros(12, dtype=np.float32)
    flat = torch.from_numpy(array)
    assert not may_overlap(flat[:4], [flat[4:8], flat[8:]])
    assert may_overlap(flat[:5], [flat[8:], flat[4:8]])
    # The storages of NumPy arrays differ even if they share memory.
    assert may_overlap(flat[:4], [torch.from_numpy(array[3:])])
    assert not may_overlap(flat[:4], [torch.from_numpy(array[4:])])
    # A tensor with gaps counts as a whole.
    assert may_overlap(flat[1:2], [flat[::2]])
    assert may_overlap(flat[:1].expand(4), [flat])
    assert not may_overlap(flat[4:4], [flat])


def run_with_default_device():
    """Run every collective while new tensors have no memory and another dtype by default."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    emulate_hosts("apart")
    world = dist.get_world_size()
    local = torch.ones(4, device="cpu", dtype=torch.float16)
    output = local.repeat(world)
    collectives.barrier()
    collectives.all_gather_into_tensor(output, local)
    collectives.all_to_all_single(output, output.clone(), [4] * world, [4] * world)
    collectives.reduce_scatter_tensor(local, output)
    shared = collectives.shared_empty(3, dtype=torch.float32)
    with collectives.checked():
        collectives.all_reduce(local)
        collectives.all_reduce(shared.fill_(1.0), algorithm="ring")
    return local.tolist() + shared.tolist()


def test_default_device_and_dtype_do_not_matter():
    assert run_ranks(run_with_default_device, 2) == [[4.0] * 4 + [2.0] * 3] * 2


FUNCTIONS_OF_TORCH = {name for name in collectives.__all__ if hasattr(dist, name)} - {"ReduceOp"}


@pytest.mark.parametrize("name", sorted(FUNCTIONS_OF_TORCH))
def test_arguments_have_the_names_and_the_order_of_torch(name):
    ours = list(inspect.signature(getattr(collectives, name)).parameters)
    theirs = list(inspect.signature(getattr(dist, name)).parameters)
    assert ours[: len(theirs)] == theirs
    # The timeout of a barrier is missing from some versions of torch.
    assert set(ours[len(theirs) :]) <= {"algorithm", "timeout"}
