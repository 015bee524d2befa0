"""Members of torch's DDP that trainers, pipelines and checkpoints read are available on `DDP`."""

import copy

import torch
from ddp import DDP
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from worker_pool import run_ranks

MIB = 2**20


class Branches(nn.Module):
    """A module that uses `left`, and `right` only if requested."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Linear(3, 3, bias=False)
        self.right = nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        return self.right(self.left(x)) if right else self.left(x)


def train_with_unused_parameters(find_unused_parameters: bool) -> list[str]:
    model = DDP(Branches(), find_unused_parameters=find_unused_parameters)
    model.module.right.requires_grad_(False)
    for _ in range(2):  # frozen parameters do not count as unused
        model(torch.ones(1, 3), False).sum().backward()
    model.module.right.requires_grad_(True)
    outcomes = []
    for right in (True, False, False, True):
        model.zero_grad()
        try:
            model(torch.ones(1, 3), right).sum().backward()
            has_right = model.module.right.weight.grad is not None
            outcomes.append("both" if has_right else "left")
        except RuntimeError as error:
            outcomes.append(str(error))
    return outcomes


def test_parameters_that_no_rank_used_are_an_error_in_the_next_forward_pass() -> None:
    ranks = run_ranks(train_with_unused_parameters, 2, False)
    for rank, (first, second, third, fourth) in enumerate(ranks):
        assert (first, second) == ("both", "left")
        for message in (third, fourth):
            assert "Expected to have finished reduction in the prior iteration" in message
            assert f"Parameters which did not receive grad for rank {rank}: right.weight" in message
            assert "`find_unused_parameters=True`" in message


def test_find_unused_parameters_allows_parameters_that_no_rank_used() -> None:
    expected = ["both", "left", "left", "both"]
    assert run_ranks(train_with_unused_parameters, 2, True) == [expected] * 2


def read_members() -> dict:
    module = Branches()
    model = DDP(module, 50 / MIB, forward_sync_buffers=False, static_graph=True)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    # Checkpoints have the names of the unwrapped module, and load into any wrapper.
    state = get_model_state_dict(model)
    assert state.keys() == module.state_dict().keys()
    set_model_state_dict(model, {name: 2 * value for name, value in state.items()})
    other = nn.parallel.DistributedDataParallel(copy.deepcopy(module))
    other.load_state_dict(model.state_dict())

    outputs = model(torch.ones(2, 3), True)
    # The calls of Lightning's `prepare_for_backward`.
    assert model.require_backward_grad_sync
    assert model.static_graph
    assert not model.find_unused_parameters
    model.require_forward_param_sync = True
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([outputs])
    outputs.sum().backward()
    for _ in range(2):
        model(torch.ones(2, 3), True).sum().backward()
    return model._get_ddp_logging_data()


def test_members_that_trainers_and_checkpoints_read_are_available(backend: str) -> None:
    for rank, data in enumerate(run_ranks(read_members, 2)):
        expected = {
            "world_size": 2,
            "rank": rank,
            "module_name": "Branches",
            "backend_name": backend,
            "static_graph": 1,
            "can_set_static_graph": False,
            "broadcast_buffers": 0,
            "bucket_cap_bytes": 50,
            "iteration": 2,
            "num_parameter_tensors": 2,
            "total_parameter_size_bytes": 72,
            "bucket_sizes": "36, 36",
            "dtypes": "float",
            "unused_parameter_size": 0,
        }
        assert data.items() >= expected.items()
        assert data["avg_backward_comm_time"] > 0
        assert data["backward_comm_time_start"] < data["backward_comm_time_end"]


def ignore_a_parameter() -> tuple[list, list]:
    rank = float(torch.distributed.get_rank())
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.bias.fill_(rank)
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    model = DDP(module)
    model(torch.full((1, 2), rank)).sum().backward()
    return module.bias.tolist(), module.weight.grad.tolist()


def test_ignored_parameters_are_neither_broadcast_nor_averaged() -> None:
    ranks = run_ranks(ignore_a_parameter, 2)
    assert [bias for bias, _ in ranks] == [[0.0], [1.0]]
    assert [gradient for _, gradient in ranks] == [[[0.5, 0.5]]] * 2
