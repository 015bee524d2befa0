"""Several ranks are one worker: DDP or FSDP inside a site, DiLoCo between sites."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from worker_pool import run_ranks, try_ranks

sys.path.insert(0, str(Path(__file__).parent))

from paramserver import Asynchronous, BulkSynchronous, LocalSteps, join
from paramserver_training import assert_equal_parameters, batch, model, train_alone

INNER = partial(torch.optim.AdamW, lr=0.01)
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def sites_of_two(rank):
    """Return the group of this rank's site and the group of the first ranks of both sites."""
    sites = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return sites[rank // 2], dist.new_group([0, 2])


def train_in_sites(policy, steps):
    rank = dist.get_rank()
    site, firsts = sites_of_two(rank)
    module = model()
    inside = nn.parallel.DistributedDataParallel(module, process_group=site)
    seen = []
    with join(module, INNER, policy, group=firsts, site=site) as worker:
        for step in range(steps):
            worker.pull()
            inputs, targets = batch(
                step, worker.rank
            )  # the batch of the site, half of which is for each rank
            half = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
            F.mse_loss(inside(inputs[half]), targets[half]).backward()
            worker.push()
        seen = [worker.rank, worker.position]
    return {name: p.detach() for name, p in module.named_parameters()}, seen


@pytest.mark.parametrize(
    "policy",
    [
        LocalSteps(4, OUTER),
        LocalSteps(4, OUTER, fragments=2, overlap=1),
    ],
    ids=["diloco", "streaming"],
)
def test_a_site_of_ddp_is_one_worker(policy):
    from test_local_steps import StreamingDiloco

    expected = StreamingDiloco(2, policy, 1).train(8)
    for rank, (parameters, seen) in enumerate(run_ranks(train_in_sites, 4, policy, 8)):
        assert_equal_parameters(parameters, expected)
        assert seen[0] == rank // 2
        assert seen[1] in (
            (8 - policy.interval, 8) if policy.overlap else (8,)
        )  # one exchange is in flight


def test_bulk_synchronous_sites_equal_one_process():
    expected = train_alone(3, 2, INNER)
    for parameters, _ in run_ranks(train_in_sites, 4, BulkSynchronous(), 3):
        assert_equal_parameters(parameters, expected)


def train_in_shards(policy, steps):
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    module.load_state_dict(even_model().state_dict())
    fully_shard(module, mesh=mesh["shard"])
    # The ranks with the same shard in both sites.
    with join(module, INNER, policy, group=mesh["site"].get_group()) as worker:
        for step in range(steps):
            worker.pull()
            half = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
            inputs, targets = even_batch(step, worker.rank)
            F.mse_loss(module(inputs[half]), targets[half]).backward()
            worker.push()
    return {name: p.full_tensor().detach() for name, p in module.named_parameters()}


def even_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def even_batch(step, worker):
    generator = torch.Generator().manual_seed(1000 * step + worker)
    return (
        torch.randn(4, 6, generator=generator, dtype=torch.float64),
        torch.randn(4, 4, generator=generator, dtype=torch.float64),
    )


def test_sites_of_fsdp_exchange_shard_by_shard(monkeypatch):
    import test_local_steps

    def loss_of_step(module, worker, step):
        inputs, targets = even_batch(step, worker)
        return F.mse_loss(module(inputs), targets)

    monkeypatch.setattr(test_local_steps, "model", even_model)
    monkeypatch.setattr(test_local_steps, "loss_of_step", loss_of_step)
    policy = LocalSteps(4, OUTER)
    expected = test_local_steps.StreamingDiloco(2, policy, 1).train(8)
    for parameters in run_ranks(train_in_shards, 4, policy, 8):
        assert_equal_parameters(parameters, expected)


def fail_in_a_site():
    rank = dist.get_rank()
    site, firsts = sites_of_two(rank)
    module = model()
    with join(module, INNER, LocalSteps(2), group=firsts, site=site, timeout=5.0) as worker:
        for _ in range(4):
            worker.pull()
            module[0].weight.grad = torch.full_like(module[0].weight, 1.0)
            if rank == 2 and worker.clock == 1:
                raise ZeroDivisionError("seven")
            worker.push()


def test_failure_of_the_first_rank_of_a_site_is_raised_on_every_rank():
    outcomes = try_ranks(fail_in_a_site, 4, timeout=60)
    assert isinstance(outcomes[2].error, ZeroDivisionError)
    for rank in (0, 1):
        assert "worker 1 is gone" in str(outcomes[rank].error), outcomes[rank]


def push_from_a_site_with_one_bad_rank():
    rank = dist.get_rank()
    site, firsts = sites_of_two(rank)
    module = model()
    sgd = partial(torch.optim.SGD, lr=0.1)
    with join(module, sgd, Asynchronous(), group=firsts, site=site, timeout=5.0) as worker:
        worker.pull()
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        if rank == 1:
            module[0].bias.requires_grad_(False)
        refusal = ""
        try:
            worker.push()
        except (ValueError, RuntimeError) as error:
            refusal = f"{type(error).__name__}: {error}"
        return refusal, worker.pushes


def test_a_site_pushes_only_if_every_rank_may():
    outcomes = run_ranks(push_from_a_site_with_one_bad_rank, 4)
    assert "RuntimeError: rank 1 of the site: ValueError" in outcomes[0][0]
    assert outcomes[1][0].startswith("ValueError: expected parameters that require a gradient")
    assert [pushes for _, pushes in outcomes] == [0, 0, 1, 1]
