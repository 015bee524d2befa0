"""What trainers, pipelines, checkpoints and profilers ask of torch's DDP, they may ask of ours."""

import copy

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from worker_pool import run_ranks

MIB = 2**20


class Branches(nn.Module):
    """Uses `left` alone, or `right` too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        self.seen += len(x)
        return self.right(self.left(x)) if right else self.left(x)


def unused(announced: bool) -> list[str]:
    model, said = DDP(Branches(), find_unused_parameters=announced), []
    model.module.right.requires_grad_(False)
    for _ in range(2):  # what is frozen is not missed
        model(torch.ones(1, 3), False).sum().backward()
    model.module.right.requires_grad_(True)
    for right in (True, False, False, True):
        model.zero_grad()
        try:
            model(torch.ones(1, 3), right).sum().backward()
            said.append(str(model.reducer._get_local_used_map().tolist()))
        except RuntimeError as error:
            said.append(str(error))
    return [*said, str(model.reducer._ddp_graph_static())]


def test_parameters_that_no_rank_used_are_an_error_in_the_next_forward_pass() -> None:
    for rank, (first, second, third, fourth, static) in enumerate(run_ranks(unused, 2, False)):
        assert (first, second) == ("[2, 2]", "[2, 0]")
        for said in (third, fourth):
            assert "Expected to have finished reduction in the prior iteration" in said
            assert f"Parameters which did not receive grad for rank {rank}: right.weight" in said
            assert "`find_unused_parameters=True`" in said
        assert static == "False"


def test_parameters_that_no_rank_used_may_be_announced() -> None:
    expected = ["[2, 2]", "[2, 0]", "[2, 0]", "[2, 2]", "False"]
    assert run_ranks(unused, 2, True) == [expected] * 2


def members() -> dict:
    module = Branches()
    model = DDP(module, 50 / MIB, forward_sync_buffers=False)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    # Checkpoints have the names of the module that is not wrapped, and load into any wrapper.
    state = get_model_state_dict(model)
    assert state.keys() == module.state_dict().keys()
    set_model_state_dict(model, {name: 2 * value for name, value in state.items()})
    plain = nn.parallel.DistributedDataParallel(copy.deepcopy(module))
    plain.load_state_dict(model.state_dict())

    model._set_static_graph()
    outputs = model(torch.ones(2, 3), True)
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([outputs])
    outputs.sum().backward()
    with pytest.raises(RuntimeError, match="before training loop starts"):
        model._set_static_graph()
    for _ in range(2):
        model(torch.ones(2, 3), True).sum().backward()
    parameters, sparse = model._build_params_for_reducer()
    assert [id(one) for one in parameters] == [id(one) for one in module.parameters()]
    assert sparse == [False, False]
    names = model._build_debug_param_to_name_mapping(parameters)
    assert names == {0: "left.weight", 1: "right.weight"}
    model._remove_autograd_hooks()
    model.zero_grad()
    model(dist.get_rank() * torch.ones(1, 3), True).sum().backward()
    assert bool(module.left.weight.grad.any()) == (dist.get_rank() > 0)
    return model._get_ddp_logging_data()


def test_what_others_read_of_torchs_members_is_there(backend: str) -> None:
    for rank, log in enumerate(run_ranks(members, 2)):
        expected = {
            "world_size": 2,
            "rank": rank,
            "module_name": "Branches",
            "backend_name": backend,
            "static_graph": 1,
            "broadcast_buffers": 0,
            "bucket_cap_bytes": 50,
            "iteration": 2,
            "num_parameter_tensors": 2,
            "total_parameter_size_bytes": 72,
            "bucket_sizes": "36, 36",
            "dtypes": "float",
            "unused_parameter_size": 0,
        }
        assert log.items() >= expected.items()
        assert log["avg_backward_comm_time"] > 0
        assert log["backward_comm_time_start"] < log["backward_comm_time_end"]


def counts_in_a_hook(when: str, futures: bool) -> list[float]:
    model, seen = DDP(Branches()), []

    def total(group, buffers):
        works = [dist.all_reduce(one, group=group, async_op=True) for one in buffers.values()]
        if futures:
            return [work.get_future() for work in works]
        for work in works:
            work.wait()

    location = nn.parallel.distributed._BufferCommHookLocation[when]
    model._register_buffer_comm_hook(dist.group.WORLD, total, location)
    for _ in range(2):
        model(torch.ones(1 + dist.get_rank(), 3), True).sum().backward()
        seen.append(float(model.module.seen))
    return seen


@pytest.mark.parametrize(
    ("when", "futures", "seen"),
    [
        ("POST_FORWARD", True, [[3, 9], [3, 9]]),
        ("POST_FORWARD", False, [[3, 9], [3, 9]]),
        ("PRE_FORWARD", False, [[1, 4], [2, 5]]),
    ],
)
def test_a_hook_makes_buffers_equal_in_its_own_way(when, futures, seen) -> None:
    assert run_ranks(counts_in_a_hook, 2, when, futures) == seen
