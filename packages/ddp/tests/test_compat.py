"""`DDP` behaves like torch's DDP in torch's checkpoints and pipelines.

`test_trainers` runs the other readers of the members in `ddp.compat`.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from ddp.compat import collect_graph_nodes
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from worker_pool import run_on_shared_ranks


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
    ranks = run_on_shared_ranks(train_with_unused_parameters, 2, False)
    for rank, (first, second, third, fourth) in enumerate(ranks):
        assert (first, second) == ("both", "left")
        for message in (third, fourth):
            assert "Expected to have finished reduction in the prior iteration" in message
            assert f"Parameters which did not receive grad for rank {rank}: right.weight" in message
            assert "`find_unused_parameters=True`" in message


def test_find_unused_parameters_allows_parameters_that_no_rank_used() -> None:
    expected = ["both", "left", "left", "both"]
    assert run_on_shared_ranks(train_with_unused_parameters, 2, True) == [expected] * 2


def freeze_or_remove_unused_parameters() -> str:
    """Follow the error for unused parameters: freeze or remove them; return the error."""
    model = DDP(Branches())
    model(torch.ones(1, 3), False).sum().backward()
    with pytest.raises(RuntimeError, match="freeze parameters that are not trained") as error:
        model(torch.ones(1, 3), False)
    model.module.right.requires_grad_(False)
    for _ in range(2):
        model(torch.ones(1, 3), False).sum().backward()
    model.module.right.requires_grad_(True)
    model(torch.ones(1, 3), False).sum().backward()
    del model.module.right
    model(torch.ones(1, 3), False).sum().backward()
    return str(error.value)


def test_unused_parameters_may_be_frozen_after_the_error() -> None:
    for error in run_on_shared_ranks(freeze_or_remove_unused_parameters, 2):
        assert "right.weight" in error


def load_checkpoints() -> bool:
    module = Branches()
    model = DDP(module)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    # Checkpoints have the names of the unwrapped module, and load into any wrapper.
    state = copy.deepcopy(get_model_state_dict(model))
    assert state.keys() == module.state_dict().keys()
    set_model_state_dict(model, {name: 2 * value for name, value in state.items()})
    other = nn.parallel.DistributedDataParallel(copy.deepcopy(module))
    other.load_state_dict(model.state_dict())
    return all(torch.equal(other.module.state_dict()[name], 2 * state[name]) for name in state)


def test_checkpoints_have_the_names_of_the_module() -> None:
    assert run_on_shared_ranks(load_checkpoints, 2) == [True, True]


def train_pipeline(use_torch: bool) -> list[list[float]]:
    """Train a pipeline of one stage, which is wrapped, on two micro-batches per step."""
    rank = dist.get_rank()
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model = (nn.parallel.DistributedDataParallel if use_torch else DDP)(module)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=groups[rank])
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 3, generator=generator)
        schedule.step(x, target=torch.randn(4, 2, generator=generator))
        optimizer.step()
    return [p.tolist() for p in module.parameters()]


def test_pipeline_stage_trains_as_with_torch_ddp() -> None:
    ours = run_on_shared_ranks(train_pipeline, 2, False)
    assert ours[0] == ours[1]
    torch.testing.assert_close(ours, run_on_shared_ranks(train_pipeline, 2, True))


def list_members_of_torch_ddp() -> tuple[set[str], set[str]]:
    """Return the private members of our wrapper that torch's DDP has, and those of the reducer."""
    module = nn.Linear(1, 1)
    ours, theirs = DDP(module), nn.parallel.distributed.DistributedDataParallel(module)
    shared = set(dir(ours)) & set(dir(theirs)) - set(dir(nn.Module())) - set(dir(Joinable))
    private = {name for name in shared if name.startswith("_") and not name.startswith("__")}
    of_reducer = {name for name in dir(ours.reducer) if hasattr(theirs.reducer, name)}
    return private, {name for name in of_reducer if not name.startswith("__")}


@pytest.mark.filterwarnings("default")
def test_only_private_members_with_a_reader_exist() -> None:
    # `ddp.compat` names the reader of each. Joinable's constructor sets the other attributes.
    for private, of_reducer in run_on_shared_ranks(list_members_of_torch_ddp, 2):
        assert private == {"_get_ddp_logging_data", "_join_config"}
        assert of_reducer == {"_delay_all_reduce", "_rebuild_buckets", "prepare_for_backward"}


def ignore_a_parameter(how: str) -> tuple[list, list]:
    rank = float(dist.get_rank())
    module = nn.Linear(2, 1)
    module.late = nn.Parameter(torch.zeros(1), requires_grad=False)
    with torch.no_grad():
        module.bias.fill_(rank)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["bias"]
    )
    model = DDP(module, find_unused_parameters=True)
    if how == "another parameter is unfrozen":
        module.late.requires_grad_(True)
    model(torch.full((1, 2), rank)).sum().backward()
    assert module.bias.grad.tolist() == [1.0]
    return module.bias.tolist(), module.weight.grad.tolist()


@pytest.mark.parametrize("how", ["wrapped", "another parameter is unfrozen"])
def test_ignored_parameters_are_neither_broadcast_nor_averaged(how: str) -> None:
    ranks = run_on_shared_ranks(ignore_a_parameter, 2, how)
    assert [bias for bias, _ in ranks] == [[0.0], [1.0]]
    assert [gradient for _, gradient in ranks] == [[[0.5, 0.5]]] * 2


@dataclass
class Output:
    value: torch.Tensor


def test_outputs_may_contain_dataclasses_and_their_types() -> None:
    value = torch.ones(1, requires_grad=True) * 2
    assert collect_graph_nodes({"type": Output, "output": Output(value)}) == {value.grad_fn}
