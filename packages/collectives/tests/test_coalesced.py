"""Coalesced calls have one handle, which waits for all of them and raises the first error."""

import os
import warnings
from datetime import timedelta

import collectives
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from host_layout import emulate_hosts, prepare_rank  # noqa: F401
from worker_pool import run_on_shared_ranks

TENSORS = 3
CPU = torch.device("cpu")


def begin(where="together"):
    import collectives.backend  # noqa: F401

    # torch deprecates some of these functions, and they are still called.
    warnings.simplefilter("ignore")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    emulate_hosts(where)
    store = dist.FileStore(os.environ["STORE_FILE"], world)
    limit = timedelta(seconds=60)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=world, timeout=limit)
    return rank, world


def call_manager(call, outputs, inputs, *, device=None, async_ops=True):
    with dist._coalescing_manager(device=device, async_ops=async_ops) as work:
        for output, tensor in zip(outputs, inputs, strict=True):
            call(output, tensor)
    if async_ops:
        work.wait()


def reduce(output, tensor):
    output.copy_(tensor)
    dist.all_reduce(output)


def run_in_place(outputs, inputs):
    for output, tensor in zip(outputs, inputs, strict=True):
        output.copy_(tensor)
    return outputs


def wait(work):
    work.wait()


def wait_each(outputs, results):
    for output, result in zip(outputs, results, strict=True):
        output.copy_(functional.wait_tensor(result))


def get_world_group():
    return dist.group.WORLD


def gather_lists(outputs, inputs):
    """Return the outputs as all_gather_coalesced expects them: by rank, then by tensor."""
    parts = [output.chunk(dist.get_world_size()) for output in outputs]
    return [list(of_rank) for of_rank in zip(*parts, strict=True)]


def list_managed_calls(call):
    """Return the manager's variants of one collective."""
    return {
        "manager": lambda o, i: call_manager(call, o, i, async_ops=False),
        "asynchronous manager": lambda o, i: call_manager(call, o, i),
        "manager of a device": lambda o, i: call_manager(call, o, i, device=CPU, async_ops=False),
        "asynchronous manager of a device": lambda o, i: call_manager(call, o, i, device=CPU),
    }


# Each function takes a list of outputs and a list of inputs.
ALL_REDUCE = list_managed_calls(reduce) | {
    "all_reduce_coalesced": lambda o, i: dist.all_reduce_coalesced(run_in_place(o, i)),
    "asynchronous all_reduce_coalesced": lambda o, i: wait(
        dist.all_reduce_coalesced(run_in_place(o, i), async_op=True)
    ),
    "functional": lambda o, i: wait_each(
        o, functional.all_reduce_coalesced(list(i), "sum", get_world_group())
    ),
    "method": lambda o, i: wait(get_world_group().allreduce_coalesced(run_in_place(o, i))),
    "method with an operation": lambda o, i: wait(
        get_world_group().allreduce_coalesced(
            run_in_place(o, i), opts=dist.AllreduceCoalescedOptions()
        )
    ),
    "future": lambda o, i: wait(
        get_world_group().allreduce_coalesced(run_in_place(o, i)).get_future()
    ),
}
ALL_GATHER = list_managed_calls(dist.all_gather_into_tensor) | {
    "functional": lambda o, i: wait_each(
        o, functional.all_gather_into_tensor_coalesced(list(i), get_world_group())
    ),
    "method": lambda o, i: wait(get_world_group().allgather_into_tensor_coalesced(o, list(i))),
    "all_gather_coalesced": lambda o, i: dist.all_gather_coalesced(gather_lists(o, i), list(i)),
    "asynchronous all_gather_coalesced": lambda o, i: wait(
        dist.all_gather_coalesced(gather_lists(o, i), list(i), async_op=True)
    ),
}
REDUCE_SCATTER = list_managed_calls(dist.reduce_scatter_tensor) | {
    "functional": lambda o, i: wait_each(
        o,
        functional.reduce_scatter_tensor_coalesced(list(i), "sum", [0] * len(i), get_world_group()),
    ),
    "method": lambda o, i: wait(get_world_group().reduce_scatter_tensor_coalesced(o, list(i))),
}
KINDS = {"all_reduce": ALL_REDUCE, "all_gather": ALL_GATHER, "reduce_scatter": REDUCE_SCATTER}


def make_tensors(kind, sizes):
    """Return outputs full of -1 and inputs that differ by rank and by position."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [torch.arange(float(size)) + 10 * i + rank for i, size in enumerate(sizes)]
    if kind == "reduce_scatter":
        inputs = [torch.cat([tensor] * world) for tensor in inputs]
    longer = world if kind == "all_gather" else 1
    return [torch.full((size * longer,), -1.0) for size in sizes], inputs


def compute_expected_outputs(kind, sizes):
    """Return the outputs of a collective, computed without communication."""
    world, results = dist.get_world_size(), []
    for i, size in enumerate(sizes):
        parts = [torch.arange(float(size)) + 10 * i + rank for rank in range(world)]
        results.append(torch.cat(parts) if kind == "all_gather" else sum(parts))
    return results


def check_values(where):
    begin(where)
    sizes = [3, 5, 4]
    for kind, functions in KINDS.items():
        for name, function in functions.items():
            outputs, inputs = make_tensors(kind, sizes)
            function(outputs, inputs)
            for output, want in zip(outputs, compute_expected_outputs(kind, sizes), strict=True):
                assert torch.equal(output, want), (kind, name, output, want)


@pytest.mark.parametrize("where", ["together", "apart"])
def test_every_coalesced_call_gives_all_results(where):
    assert run_on_shared_ranks(check_values, 2, where, backend="") == [None, None]


def get_error(function, outputs, inputs):
    # torch's futures preserve the text of an error, but not its type.
    try:
        function(outputs, inputs)
    except RuntimeError as error:
        return str(error)
    return "no error"


def pass_mismatches(where):
    """Pass a tensor that is longer on rank 1, in each position."""
    rank, _ = begin(where)
    with collectives.checked():
        for kind, functions in KINDS.items():
            for name, function in functions.items():
                for odd in range(TENSORS):
                    sizes = [3, 3, 3]
                    sizes[odd] += 2 * (rank == 1)
                    outputs, inputs = make_tensors(kind, sizes)
                    text = get_error(function, outputs, inputs)
                    assert "ranks disagree: rank 1 called" in text, (kind, name, odd, text)
    dist.barrier()


@pytest.mark.parametrize("where", ["together", "apart"])
def test_mismatch_in_any_coalesced_tensor_is_raised(where):
    assert run_on_shared_ranks(pass_mismatches, 3, where, backend="") == [None] * 3


def coalesce_mixed_tensors():
    """Coalesce tensors of several dtypes, sizes and layouts, one of which appears twice."""
    rank, world = begin()
    factor = sum(r + 1 for r in range(world))
    values = [
        torch.ones(2),
        torch.arange(600_001.0),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(5),
        torch.empty(0, 3),
        torch.tensor(4.0, dtype=torch.float64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.int8),
    ]
    batch = [(rank + 1) * value for value in values]
    # A tensor that appears twice is reduced once, as on gloo.
    calls = get_world_group().communicator.operation.number
    work = get_world_group().allreduce_coalesced([*batch, batch[0]])
    assert work.wait(timedelta(seconds=30))
    assert get_world_group().communicator.operation.number == calls + 1
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    for tensor, value in zip(batch, values, strict=True):
        assert torch.equal(tensor, factor * value)
    results = [*work.result()], work.get_future().wait()
    for result in results:
        assert [a is b for a, b in zip(result, [*batch, batch[0]], strict=True)] == [True] * 9

    gathered = [torch.empty(world, value.numel(), dtype=value.dtype) for value in values]
    inputs = [(rank + 1) * value for value in values]
    get_world_group().allgather_into_tensor_coalesced(gathered, inputs).wait()
    assert get_world_group().communicator.operation.number == calls + 2
    for output, value in zip(gathered, values, strict=True):
        for r in range(world):
            assert torch.equal(output[r], (r + 1) * value.reshape(-1))

    # Each rank passes a different row to each rank.
    scattered = [torch.empty_like(value) for value in values]
    inputs = [torch.stack([(rank + 1) * (r + 1) * value for r in range(world)]) for value in values]
    get_world_group().reduce_scatter_tensor_coalesced(scattered, inputs).wait()
    assert get_world_group().communicator.operation.number == calls + 3
    for output, value in zip(scattered, values, strict=True):
        assert torch.equal(output, factor * (rank + 1) * value)


def test_coalesced_tensors_of_any_dtype_size_and_layout_are_one_call():
    assert run_on_shared_ranks(coalesce_mixed_tensors, 3, backend="") == [None] * 3


def count_ticks():
    """Return the ticks of a call with one tensor and of a call with forty."""
    begin()
    arena, counts = get_world_group().communicator.topology.arena, []
    for count in (1, 40):
        start = arena.tick
        dist.all_reduce_coalesced([torch.ones(10) for _ in range(count)])
        counts.append(arena.tick - start)
    return counts


def test_coalesced_tensors_share_one_tick():
    assert run_on_shared_ranks(count_ticks, 2, backend="") == [[1, 1]] * 2


def fail_in_second_tensor():
    """Fail a call with two dtypes in the tensor of the second one."""
    rank, world = begin()
    batch = [torch.ones(2), torch.ones(3, dtype=[torch.int32, torch.int64][rank])]
    work = get_world_group().allreduce_coalesced(batch)
    with pytest.raises(collectives.Mismatch, match="shapes with digest") as caught:
        work.wait()
    with pytest.raises(RuntimeError, match="shapes with digest"):
        work.get_future().wait()
    assert work.exception() is caught.value
    assert work.is_completed()
    assert not work.is_success()
    assert [tensor.sum().item() for tensor in batch] == [2, 3]
    # A handle of several calls has the first error, too.
    with dist._coalescing_manager(device=CPU, async_ops=True) as manager:
        for size in (2, 3 + rank):
            get_world_group().all_gather_single(torch.empty(world * size), torch.empty(size))
    with pytest.raises(collectives.Mismatch) as caught:
        manager.wait()
    (work,) = manager.works
    assert work.exception() is caught.value
    assert not work.is_success()
    # The ranks are still synchronized.
    dist.all_reduce(batch[0])
    assert batch[0].tolist() == [world, world]


def test_coalesced_handle_raises_the_error_before_any_data_move():
    assert run_on_shared_ranks(fail_in_second_tensor, 2, backend="") == [None, None]


def coalesce_different_counts():
    """Coalesce one more tensor on rank 1; no tensor may be combined with another one."""
    rank, _ = begin()
    for count in (1, 2, 3, 40):
        batch = [torch.ones(400) for _ in range(count + rank)]
        work = get_world_group().allreduce_coalesced(batch)
        with pytest.raises(collectives.Mismatch, match=f"{count + 1} coalesced tensors"):
            work.wait()
        # The ranks are still synchronized.
        total = torch.full((400,), rank + 1.0)
        dist.all_reduce(total)
        assert total[0] == 3
        assert all(tensor.sum() == 400 for tensor in batch)
    with pytest.raises(ValueError, match="got 2 inputs and 1 outputs"):
        get_world_group().allgather_into_tensor_coalesced([torch.ones(8)], [torch.ones(4)] * 2)
    with pytest.raises(ValueError, match=r"outputs of 8 elements .* got 7"):
        get_world_group().allgather_into_tensor_coalesced([torch.ones(7)], [torch.ones(4)])
    with pytest.raises(ValueError, match=r"outputs of 4 elements .* got 3"):
        get_world_group().allgather_coalesced([[torch.ones(3)], [torch.ones(5)]], [torch.ones(4)])
    with pytest.raises(ValueError, match=r"of torch\.float64 .*got 8 elements of torch\.float32"):
        get_world_group().allgather_into_tensor_coalesced([torch.ones(8)], [torch.ones(4).double()])

    with pytest.raises(ValueError, match=r"input 1 .* a multiple of 2 ranks, got 7"):
        get_world_group().reduce_scatter_tensor_coalesced(
            [torch.ones(4), torch.ones(3)], [torch.ones(8), torch.ones(7)]
        )


def test_coalescing_different_numbers_of_tensors_is_an_error():
    assert run_on_shared_ranks(coalesce_different_counts, 2, backend="") == [None, None]


def send_messages():
    """Run sends and receives in a batch, and other collectives inside a manager."""
    rank, world = begin()
    after, before = (rank + 1) % world, (rank - 1) % world
    for managed in (False, True):
        sent, room = torch.full((4,), float(rank)), torch.full((4,), -1.0)
        if managed:
            with dist._coalescing_manager(device=CPU, async_ops=True) as work:
                dist.isend(sent, after)
                dist.irecv(room, before)
            work.wait()
        else:
            operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, room, before)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        assert room.tolist() == [before] * 4
    broadcasts = [torch.full((3,), float(rank + i)) for i in range(2)]
    with dist._coalescing_manager(device=CPU, async_ops=True) as work:
        for i, tensor in enumerate(broadcasts):
            dist.broadcast(tensor, src=i, async_op=True)
    work.wait()
    assert [tensor.tolist() for tensor in broadcasts] == [[0.0] * 3, [2.0] * 3]


def test_sends_and_receives_are_coalesced():
    assert run_on_shared_ranks(send_messages, 2, backend="") == [None, None]
