"""Every method of torch's ProcessGroup is implemented, forwarded or refused by the backend."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worker_pool import run_on_shared_ranks, run_ranks

README = Path(__file__).parent.parent / "README.md"


# Methods and properties of torch's base class that apply to this backend: names, ranks, registered
# backends and supported features. torch defines that backends without ephemeral timeouts ignore
# `_add_ephemeral_timeout`. `_set_sequence_number_for_group` of torch 2.11 starts gloo's counter.
INHERITED = frozenset(
    {
        "_add_ephemeral_timeout",
        "_backend_id",
        "_device_types",
        "_get_backend_name",
        "_has_hooks",
        "_id",
        "_register_backend",
        "_set_default_backend",
        "_set_group_desc",
        "_set_group_name",
        "_set_sequence_number_for_group",
        "bound_device_id",
        "boxed",
        "group_desc",
        "group_name",
        "name",
        "rank",
        "size",
        "supports_abort_hooks",
        "supports_completion_hooks",
        "supports_reconfigure",
        "supports_window",
        "unbox",
        "use_pg_for_symm_mem_rendezvous",
    }
)


def format_method_table(backend):
    """Return a Markdown table of torch's ProcessGroup methods by the code that implements them."""
    ours = vars(backend.CollectivesProcessGroup).keys() - {*backend.GLOO, *backend.REFUSED}
    groups = {
        "this package": [name for name in ours if not name.startswith("__")],
        "gloo": backend.GLOO,
        "refused with an error": backend.REFUSED,
        "torch's base class": INHERITED,
    }
    lines = ["| implemented by | methods |", "|---|---|"]
    for implementation, names in groups.items():
        lines.append(f"| {implementation} | {', '.join(f'`{name}`' for name in sorted(names))} |")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def backend():
    import collectives.backend

    return collectives.backend


def start_group():
    import collectives.backend  # noqa: F401

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE_FILE"], world)
    limit = timedelta(seconds=60)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=world, timeout=limit)
    return dist.group.WORLD, rank, world


def test_every_method_of_torch_is_decided(backend):
    constants = {"BackendType", *dist.ProcessGroup.BackendType.__members__}
    names = {name for name in dir(dist.ProcessGroup) if not name.startswith("__")}
    names -= {*constants, "_pybind11_conduit_v1_"}
    decided = vars(backend.CollectivesProcessGroup).keys() | INHERITED
    assert not names - decided, "decide these methods in backend.py or here"
    assert not vars(backend.CollectivesProcessGroup).keys() & INHERITED


def test_readme_contains_the_table_of_methods(backend):
    text = README.read_text()
    table = text.split("<!-- methods -->\n")[1].split("<!-- /methods -->")[0].strip()
    assert table == format_method_table(backend), "copy the result of method_table to the README"


def call_refused_methods():
    from collectives.backend import REFUSED

    group, *_ = start_group()
    messages = {}
    for name in REFUSED:
        with pytest.raises(NotImplementedError) as caught:
            getattr(group, name)()
        messages[name] = str(caught.value)
    return messages


def test_refused_methods_name_an_alternative(backend):
    messages = run_on_shared_ranks(call_refused_methods, 1, backend="")[0]
    for name, remedy in backend.REFUSED.items():
        assert f"does not support {name}; {remedy}" in messages[name]


def shrink():
    group, *_ = start_group()
    with pytest.raises(TypeError, match="does not support shrinking"):
        dist.shrink_group([1])
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    return tensor.tolist()


def test_groups_refuse_to_be_shrunk_and_remain_usable():
    assert run_on_shared_ranks(shrink, 2, backend="") == [[2.0, 2.0]] * 2


def pass_timeouts_of_zero():
    import collectives

    group, *_ = start_group()
    tensor = torch.ones(2)
    for timeout in (timedelta(), timedelta(seconds=-1)):
        for call in (
            lambda timeout=timeout: collectives.barrier(timeout=timeout),
            lambda timeout=timeout: group.barrier(timeout=timeout),
            lambda timeout=timeout: group.allreduce([tensor], timeout=timeout),
            lambda timeout=timeout: group.broadcast(tensor, 0, timeout),
            lambda timeout=timeout: group.set_timeout(timeout),
            lambda timeout=timeout: group.split_group([0], timeout=timeout),
            lambda timeout=timeout: dist.new_group([0], timeout=timeout),
            lambda timeout=timeout: collectives.rebuild(timeout=timeout),
        ):
            with pytest.raises(ValueError, match="expected a positive timeout, got"):
                call()
    options = dist.AllreduceOptions()
    # torch's mark of a timeout that is not set.
    assert options.timeout < timedelta()
    group.allreduce([tensor], options).wait()


def test_timeouts_that_are_not_positive_are_refused():
    assert run_on_shared_ranks(pass_timeouts_of_zero, 1, backend="") == [None]


def pass_several_tensors():
    """Pass several tensors, which other backends combine and this one must not ignore."""
    group, *_ = start_group()
    pair = [torch.ones(2), torch.ones(2)]
    for call in (
        lambda: group.allreduce(pair),
        lambda: group.broadcast(pair),
        lambda: group.reduce(pair),
        lambda: group.allgather([pair, pair], pair[:1]),
        lambda: group.reduce_scatter(pair[:1], [pair, pair]),
    ):
        with pytest.raises(ValueError, match="one CPU device, got 2"):
            call()
    assert [tensor.tolist() for tensor in pair] == [[1.0, 1.0]] * 2


def test_several_tensors_in_place_of_one_are_refused():
    assert run_on_shared_ranks(pass_several_tensors, 1, backend="") == [None]


def count_and_wait():
    group, _, world = start_group()
    before = group._get_sequence_number_for_group()
    tensors = [torch.full((50_000,), float(i)) for i in range(5)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    group._wait_for_pending_works()
    assert group._get_sequence_number_for_group() == before + len(tensors)
    return [tensor[0].item() / world for tensor in tensors]


def test_pending_works_are_waited_for_and_counted():
    assert run_on_shared_ranks(count_and_wait, 2, backend="") == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


def gather_single():
    group, rank, world = start_group()
    tensor = torch.full((2, 3), float(rank))
    for root in range(world):
        output = torch.full((2 * world, 3), -1.0)
        group.gather_single(output, tensor, root).wait()
        if rank == root:
            assert output.view(world, 6).unique(dim=1).flatten().tolist() == [0.0, 1.0, 2.0]
        else:
            assert (output == -1).all()
        # `tensor` on the other ranks is a placeholder, as in torch.distributed.gather_single.
        strided = torch.full((2 * world, 6), -1.0)[:, ::2]
        output = strided if rank == root else torch.empty(0)
        group.gather_into_tensor(output, tensor, root=root).wait()
        assert rank != root or output[::2, 0].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="elements"):
        group.gather_single(torch.empty(5), tensor, rank)


def test_gather_single_fills_the_roots_tensor_in_rank_order():
    run_ranks(gather_single, 3, backend="")
