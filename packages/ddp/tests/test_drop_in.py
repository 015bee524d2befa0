"""Training loops for torch's DDP, and models that change after they were wrapped.

Every program runs with `DDP` on two ranks, and in one process with the batches of both ranks. The
gradients and weights of every rank must equal those of the one process.
"""

import copy
import io
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ddp import DDP, all_reduce_gradients, all_reduce_gradients_flat
from ddp.consistency import failure_attribution
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from worker_pool import run_on_shared_ranks, run_ranks, try_ranks

MIB = 2**20


def build_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))


class Both:
    """A wrapped model, and its twin that trains on the mean of the losses of all ranks."""

    def __init__(self, module: nn.Module, bucket_size_mb: float = 100 / MIB, **options) -> None:
        self.module = module.double()
        self.twin = copy.deepcopy(self.module)
        self.model = DDP(self.module, bucket_size_mb, **options)
        self.optimizers = [self.sgd(self.module), self.sgd(self.twin)]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.generator = torch.Generator().manual_seed(1)

    @staticmethod
    def sgd(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def batches(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.world, *shape, generator=self.generator, dtype=torch.float64)

    def step(self, loss=lambda model, x: model(x).square().mean()) -> None:
        self.zero_grad()
        self.backward(loss)
        self.check_gradients()
        self.update()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, loss=lambda model, x: model(x).square().mean()) -> None:
        x = self.batches(3, 5)
        loss(self.model, x[self.rank]).backward()
        (sum(loss(self.twin, batch) for batch in x) / self.world).backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.check_weights()

    def check_gradients(self) -> None:
        theirs = dict(self.twin.named_parameters())
        for name, ours in self.module.named_parameters():
            assert (ours.grad is None) == (theirs[name].grad is None), name
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs[name].grad, msg=name)

    def check_weights(self) -> None:
        theirs = dict(self.twin.named_parameters())
        for name, ours in self.module.named_parameters():
            torch.testing.assert_close(ours, theirs[name], msg=name)


# ----- parameters that change -----


def unfreezes() -> bool:
    module = build_net()
    module[0].requires_grad_(False)
    both = Both(module)
    both.step()
    for module in (both.module, both.twin):
        module[0].requires_grad_(True)
    for _ in range(3):
        both.step()
    for module in (both.module, both.twin):
        module[2].requires_grad_(False)
        module[2].zero_grad()
    for _ in range(2):
        both.step()
    for module in (both.module, both.twin):
        module[2].requires_grad_(True)
    both.step()
    return True


def assigns() -> bool:
    both = Both(build_net())
    both.step()
    for module in (both.module, both.twin):
        state = OrderedDict((k, 2 * v.detach()) for k, v in module.state_dict().items())
        module.load_state_dict(state, assign=True)
    both.optimizers = [both.sgd(both.module), both.sgd(both.twin)]
    for _ in range(3):
        both.step()
    return True


def adds_a_head() -> bool:
    both = Both(build_net())
    both.step()
    torch.manual_seed(dist.get_rank())
    head = nn.Linear(2, 3).double()
    both.module.append(head)
    with torch.no_grad():
        both.model(torch.ones(1, 5, dtype=torch.float64))
    # The next forward pass copies the new weights of rank 0.
    torch.manual_seed(0)
    both.twin.append(nn.Linear(2, 3).double())
    both.optimizers = [both.sgd(both.module), both.sgd(both.twin)]
    for _ in range(3):
        both.step()
    return True


def removes_a_layer() -> bool:
    both = Both(build_net())
    both.step()
    for module in (both.module, both.twin):
        del module[-1]
    both.optimizers = [both.sgd(both.module), both.sgd(both.twin)]
    for _ in range(3):
        both.step()
    return True


def adds_a_frozen_layer() -> bool:
    both = Both(build_net())
    both.step()
    for module in (both.module, both.twin):
        torch.manual_seed(0)
        module.append(nn.Linear(2, 2).double().requires_grad_(False))
        module.append(nn.BatchNorm1d(2, affine=False).double().eval())
        # The buffers are synchronized although the module had none when it was wrapped.
        if both.rank == 0 or module is both.twin:
            module[-1].running_mean.fill_(0.5)
    both.backward()
    assert both.module[-1].running_mean.tolist() == [0.5, 0.5]
    for module in (both.module, both.twin):
        module[-2].requires_grad_(True)
    both.optimizers = [both.sgd(both.module), both.sgd(both.twin)]
    for _ in range(2):
        both.step()
    return True


def changes_buffers_in_join() -> list[float]:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False).eval())
    model = DDP(module)
    outputs = []
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            module[1].running_mean.fill_(2 * step + dist.get_rank())
            with model.no_sync():
                model(torch.ones(3, 2)).sum().backward()
            output = model(torch.ones(3, 2))
            # The step of a rank without inputs matches one forward pass.
            model(torch.ones(3, 2))
            output.sum().backward()
            outputs.append((module[0](torch.ones(3, 2)) - output).mean().round().item())
    return [*outputs, module[1].running_mean[0].item()]


def test_join_uses_the_buffers_of_the_last_rank_with_inputs() -> None:
    assert run_on_shared_ranks(changes_buffers_in_join, 2) == [[1, 3, 5, 9], [1, 3, 5, 7, 9, 9]]


def changes_dtype() -> bool:
    both = Both(build_net())
    both.step()
    # Each conversion also replaces the memory of `.grad`.
    both.module.float().double()
    both.twin.load_state_dict(both.module.state_dict())
    for _ in range(2):
        both.step()
    both.module.float()
    both.model(torch.full((1, 5), 1.0 + both.rank)).sum().backward()
    assert {p.grad.dtype for p in both.module.parameters()} == {torch.float32}
    summed = both.module[0].bias.grad.clone()
    dist.all_reduce(summed)
    torch.testing.assert_close(summed / 2, both.module[0].bias.grad)
    return True


def replaces_data() -> bool:
    both = Both(build_net())
    both.step()
    for p in [*both.module.parameters(), *both.twin.parameters()]:
        p.data = p.data.clone()
    for _ in range(2):
        both.step()
    return True


def calls_with_fast_weights() -> bool:
    both = Both(build_net())
    both.step()
    # The task differs between ranks, as in meta-learning.
    fast = {name: nn.Parameter(p.detach() + both.rank) for name, p in both.model.named_parameters()}
    expected = {name: p.detach().clone() for name, p in fast.items()}
    x = torch.ones(2, 5, dtype=torch.float64)
    torch.func.functional_call(both.model, fast, (x,)).square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in fast.items()}
    torch.testing.assert_close(
        {name: p.detach() for name, p in fast.items()}, expected, rtol=0, atol=0
    )
    copied = copy.deepcopy(both.module)
    copied.load_state_dict({name.removeprefix("module."): p for name, p in expected.items()})
    copied.zero_grad()
    copied(x).square().mean().backward()
    for name, parameter in copied.named_parameters():
        torch.testing.assert_close(gradients[f"module.{name}"], parameter.grad)
    both.step()
    return True


CHANGES = [
    "calls_with_fast_weights",
    "unfreezes",
    "assigns",
    "adds_a_head",
    "adds_a_frozen_layer",
    "removes_a_layer",
    "changes_dtype",
    "replaces_data",
]


@pytest.mark.parametrize("program", CHANGES)
def test_parameters_that_change_after_wrapping_are_averaged(program: str) -> None:
    assert run_on_shared_ranks(globals()[program], 2) == [True, True]


def unfreezes_part_of_a_large_model() -> int:
    sent = []
    broadcast = dist.broadcast

    def count(tensor: torch.Tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return broadcast(tensor, *args, **kwargs)

    module = build_net()
    module.append(nn.Linear(2, 2))
    module.requires_grad_(False)
    module[4].requires_grad_(True)
    model = DDP(module, sync_buffers=False)
    model(torch.ones(1, 5)).sum().backward()
    module[5].requires_grad_(True)
    dist.broadcast = count
    model(torch.ones(1, 5))
    dist.broadcast = broadcast
    return sum(sent)


def test_unfreezing_a_layer_sends_that_layer_only() -> None:
    assert run_on_shared_ranks(unfreezes_part_of_a_large_model, 2) == [4 * (2 * 2 + 2)] * 2


def unfreezes_on_one_rank(rank: int) -> None:
    failure_attribution.GRACE_SECONDS = 0.3
    module = build_net()
    module[0].requires_grad_(False)
    model = DDP(module)
    for step in range(3):
        if step == 1 and dist.get_rank() == rank:
            module[0].requires_grad_(True)
        model(torch.ones(1, 5)).sum().backward()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_parameters_unfrozen_on_one_rank_only_are_refused_on_every_rank(rank: int) -> None:
    for outcome in try_ranks(unfreezes_on_one_rank, 2, rank, timeout=60):
        assert f"unfrozen, replaced or added on rank {rank}" in str(outcome.error)


# ----- loops that call only backward() and step() -----


def never_finishes() -> bool:
    both = Both(build_net())
    for _ in range(4):
        both.step()
    return True


def several_losses() -> bool:
    both = Both(build_net())
    for _ in range(3):
        both.zero_grad()
        for _ in range(3):
            both.backward()
        both.check_gradients()
        both.update()
    return True


def retains_the_graph() -> bool:
    both = Both(build_net())
    for _ in range(3):
        both.zero_grad()
        x = both.batches(3, 5)
        out = both.model(x[both.rank])
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
        outs = [both.twin(batch) for batch in x]
        (sum(o.sum() + o.square().sum() for o in outs) / both.world).backward()
        both.check_gradients()
        both.update()
    return True


def accumulates() -> bool:
    both = Both(build_net())
    for set_to_none in (True, False, True):
        if set_to_none:
            both.zero_grad()
        else:
            for module in (both.module, both.twin):
                module.zero_grad(set_to_none=False)
        for _ in range(2):
            with both.model.no_sync():
                both.backward()
        both.backward()
        both.check_gradients()
        both.update()
        # Lightning sets the attribute instead.
        both.zero_grad()
        both.model.require_backward_grad_sync = False
        both.backward()
        both.model.require_backward_grad_sync = True
        both.backward()
        both.check_gradients()
        both.update()
    return True


def is_adversarial() -> bool:
    torch.manual_seed(0)
    generator = Both(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)))
    critic = Both(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
    for step in range(6):
        z = generator.batches(3, 5)
        real = generator.batches(3, 4)
        rank, world = generator.rank, generator.world

        critic.zero_grad()

        def critic_loss(g, c, z, real):
            return c(real).mean() - c(g(z).detach()).mean()

        critic_loss(generator.model, critic.model, z[rank], real[rank]).backward()
        total = 0
        for z_batch, real_batch in zip(z, real, strict=True):
            total = total + critic_loss(generator.twin, critic.twin, z_batch, real_batch)
        (total / world).backward()
        critic.check_gradients()
        critic.update()

        generator.zero_grad()
        if step % 2:
            for module in (critic.module, critic.twin):
                module.requires_grad_(False)
        critic.model(generator.model(z[rank])).mean().backward()
        (sum(critic.twin(generator.twin(batch)).mean() for batch in z) / world).backward()
        for module in (critic.module, critic.twin):
            module.requires_grad_(True)
        generator.check_gradients()
        generator.update()
    return True


def penalizes_gradients() -> bool:
    def loss(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return model(x).square().mean() + (slope.norm() - 1).square()

    both = Both(build_net())
    for _ in range(3):
        both.step(loss)
    return True


def keeps_graphs(gradient_as_bucket_view: bool) -> bool:
    both = Both(build_net(), gradient_as_bucket_view=gradient_as_bucket_view)
    for _ in range(3):
        x = both.batches(3, 5)
        with pytest.warns(UserWarning, match="has no graph"):
            both.model(x[both.rank]).square().mean().backward(create_graph=True)
        (sum(both.twin(batch).square().mean() for batch in x) / both.world).backward()
        both.check_gradients()
        assert not any(p.grad.requires_grad for p in both.module.parameters())
        both.update()
    both.module = copy.deepcopy(both.twin)
    for average in (all_reduce_gradients, all_reduce_gradients_flat):
        both.module.zero_grad()
        both.twin.zero_grad()
        x = both.batches(3, 5)
        both.module(x[both.rank]).square().mean().backward(create_graph=True)
        with pytest.warns(UserWarning, match="has no graph"):
            average(both.module)
        (sum(both.twin(batch).square().mean() for batch in x) / both.world).backward()
        both.check_gradients()
        assert not any(p.grad.requires_grad for p in both.module.parameters())
    return True


@pytest.mark.parametrize("gradient_as_bucket_view", [True, False])
def test_create_graph_averages_gradients_and_warns(gradient_as_bucket_view) -> None:
    assert run_on_shared_ranks(keeps_graphs, 2, gradient_as_bucket_view) == [True, True]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.body = build_net()
        self.reentrant = reentrant
        self.shared = shared
        self.first = nn.Linear(5, 5)
        self.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict:
        x = checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)
        for layer in self.more:
            x = checkpoint(self.more[0] if self.shared else layer, x, use_reentrant=self.reentrant)
        return {"out": [x.tanh()]}


def checkpoints(reentrant: bool, shared: bool) -> int:
    both = Both(Checkpointed(reentrant, shared), static_graph=shared)
    for _ in range(4):
        both.step(lambda model, x: model(x)["out"][0].square().mean())
    return len(both.model.meter.steps)


def checkpoints_calls_of_the_wrapper() -> bool:
    def loss(model, x):
        hidden = checkpoint(model, x, False, use_reentrant=False)
        # The gradient of the second layer opens the step before the first call is repeated.
        return checkpoint(model, hidden, True, use_reentrant=False).square().mean()

    both = Both(OptionalLayer(), None)
    for _ in range(3):
        both.step(loss)
    return True


def evaluates_between() -> bool:
    both = Both(build_net())
    for _ in range(3):
        both.step()
        with torch.no_grad():
            both.model(torch.ones(2, 5, dtype=torch.float64))
        if dist.get_rank() == 0:
            both.model(torch.ones(2, 5, dtype=torch.float64))
    return True


def registers_hooks_after_wrapping() -> bool:
    both = Both(build_net().append(nn.Linear(2, 9000)))

    def scale(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(1 + both.rank)

    for step in range(4):
        if step in (0, 2):
            for parameter in both.module.parameters():
                parameter.register_post_accumulate_grad_hook(scale)
        power = 1 if step < 2 else 2
        both.zero_grad()
        x = both.batches(3, 5)
        both.model(x[both.rank]).square().mean().backward()
        losses = [(1 + rank) ** power * both.twin(x[rank]).square().mean() for rank in range(2)]
        (sum(losses) / 2).backward()
        both.check_gradients()
        both.update()
    return True


def takes_layers_in_any_order() -> bool:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            for index in order:
                x = self.layers[index](x).tanh()
            return x

    both = Both(Shuffled())
    for _ in range(6):
        # The order differs between steps and ranks, so other gradients complete the buckets than in
        # the first step.
        orders = [torch.randperm(6, generator=both.generator).tolist() for _ in range(both.world)]
        x = both.batches(3, 5)
        both.zero_grad()
        both.model(x[both.rank], orders[both.rank]).square().mean().backward()
        pairs = zip(x, orders, strict=True)
        (sum(both.twin(*pair).square().mean() for pair in pairs) / both.world).backward()
        both.check_gradients()
        both.update()
    return True


def finishes_some_steps() -> bool:
    both = Both(build_net())
    for is_local in (False, True, True, False, True):
        both.zero_grad()
        with both.model.no_sync() if is_local else nullcontext():
            both.backward()
        if is_local:
            both.model.finish_gradient_synchronization()
        both.check_gradients()
        both.update()
    return True


def finishes_after_a_local_pass() -> bool:
    both = Both(build_net())
    x = both.batches(3, 5)
    losses = []
    for is_local in (False, True):
        with both.model.no_sync() if is_local else nullcontext():
            losses.append(both.model(x[both.rank]).square().mean())
    for loss in losses:
        loss.backward()
    both.model.finish_gradient_synchronization()
    (sum(2 * both.twin(batch).square().mean() for batch in x) / both.world).backward()
    both.check_gradients()
    return True


def reaches_no_parameter_on_one_rank() -> bool:
    both = Both(build_net(), find_unused_parameters=True)
    for step in range(4):
        both.zero_grad()
        x = both.batches(3, 5)
        loss = both.model(x[both.rank]).square().mean()
        is_skipped = step in (1, 3)
        if is_skipped and both.rank == 1:
            both.model.finish_gradient_synchronization()
        else:
            loss.backward()
        used = x[:1] if is_skipped else x
        (sum(both.twin(batch).square().mean() for batch in used) / both.world).backward()
        both.check_gradients()
        both.update()
    return True


LOOPS = [
    "finishes_some_steps",
    "finishes_after_a_local_pass",
    "reaches_no_parameter_on_one_rank",
    "registers_hooks_after_wrapping",
    "takes_layers_in_any_order",
    "never_finishes",
    "several_losses",
    "retains_the_graph",
    "accumulates",
    "is_adversarial",
    "penalizes_gradients",
    "checkpoints_calls_of_the_wrapper",
    "evaluates_between",
]


@pytest.mark.parametrize("program", LOOPS)
def test_torch_ddp_loop_trains_like_one_process(program: str) -> None:
    assert run_on_shared_ranks(globals()[program], 2) == [True, True]


#: Programs in which torch's DDP raises an error; torch's own tests expect it.
RAISED_BY_TORCH = ["checkpoints_with_unused_parameters", "changes_a_static_graph"]
CHECKPOINTS = [(False, True), (True, False), (True, True)]


@pytest.mark.parametrize(("reentrant", "shared"), CHECKPOINTS)
def test_checkpointed_layers_train_like_one_process(reentrant: bool, shared: bool) -> None:
    # A reentrant checkpoint runs an inner pass, but each step is synchronized once.
    assert run_on_shared_ranks(checkpoints, 2, reentrant, shared) == [4, 4]


def checkpoints_with_unused_parameters() -> bool:
    module = Checkpointed(reentrant=True, shared=False)
    module.unused = nn.Linear(2, 2)
    both = Both(module, find_unused_parameters=True)
    for _ in range(3):
        both.step(lambda model, x: model(x)["out"][0].square().mean())
    return True


class OptionalLayer(nn.Module):
    """A module that uses its second layer only if requested."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, has_second: bool) -> torch.Tensor:
        return self.second(self.first(x)) if has_second else self.first(x)


def changes_a_static_graph() -> bool:
    both = Both(OptionalLayer(), static_graph=True)
    for has_second in (False, True, False, True):
        both.step(lambda model, x, used=has_second: model(x, used).square().mean())
    return True


@pytest.mark.parametrize("program", RAISED_BY_TORCH)
def test_graph_that_torch_ddp_refuses_trains_like_one_process(program: str) -> None:
    assert run_on_shared_ranks(globals()[program], 2) == [True, True]


def repeats_a_checkpoint_later() -> str:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.repeated = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            x = self.first(x)
            for _ in range(times):
                x = checkpoint(self.repeated, x, use_reentrant=True)
            return x

    model = DDP(Repeated())
    for times in (1, 1, 1, 2):
        try:
            model(torch.ones(1, 5), times).sum().backward()
        except RuntimeError as error:
            return f"{times} times: {error}"
    return "not refused"


def test_gradient_in_several_parts_is_refused() -> None:
    for message in run_on_shared_ranks(repeats_a_checkpoint_later, 2):
        assert message.startswith("2 times: Expected to mark a variable ready only once")
        assert "static_graph=True" in message


# ----- kinds of parameters and buffers -----


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.real = nn.Linear(5, 4)
        self.odd = nn.Parameter(torch.randn(3))
        self.wave = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.narrow = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.real(x).to(torch.complex128) @ self.wave * self.narrow
        return (y.abs() * self.odd).sum() + y.imag.square().sum()


def trains_complex() -> bool:
    module = Complex()
    twin = copy.deepcopy(module)
    model = DDP(module, 50 / MIB)
    for step in range(3):
        x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        twin.zero_grad()
        model(x[dist.get_rank()]).backward()
        ((twin(x[0]) + twin(x[1])) / 2).backward()
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    return True


def test_complex_parameters_are_averaged() -> None:
    assert run_on_shared_ranks(trains_complex, 2) == [True, True]


def trains_sparse() -> bool:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)).double()
    twin = copy.deepcopy(module)
    model = DDP(module)
    for step in range(3):
        tokens = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        twin.zero_grad()
        with model.no_sync():
            model(tokens[dist.get_rank()]).square().sum().backward()
        model(tokens[dist.get_rank()]).square().sum().backward()
        sum(twin(batch).square().sum() for batch in tokens).backward()
        assert module[0].weight.grad.is_sparse
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense())
    return True


def test_sparse_gradients_are_averaged() -> None:
    assert run_on_shared_ranks(trains_sparse, 2) == [True, True]


def trains_batch_norm(broadcast: bool) -> list:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    module = module.to(memory_format=torch.channels_last)
    model = DDP(module, sync_buffers=broadcast)
    for step in range(4):
        x = torch.randn(
            4, 2, 6, 6, generator=torch.Generator().manual_seed(9 * step + dist.get_rank())
        )
        model.zero_grad()
        model(x.to(memory_format=torch.channels_last)).square().mean().backward()
        assert module[0].weight.grad.stride() == module[0].weight.stride()
    return [buffer.tolist() for buffer in module.buffers()]


def test_buffers_equal_those_of_rank_0_after_every_step() -> None:
    first, second = run_on_shared_ranks(trains_batch_norm, 2, True)
    alone, other = run_on_shared_ranks(trains_batch_norm, 2, False)
    assert first == second == alone != other
    assert first[-1] == 4


# ----- gradients that the caller references -----


REFERENCES = {
    "itself": lambda p: p.grad,
    "an alias": lambda p: p.grad.detach().view(-1),
    "none": lambda p: None,
}


class AlternatingBranches(nn.Module):
    """Alternating branches with large, small and complex gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [build_net(), nn.Sequential(nn.Linear(5, 99), nn.Linear(99, 99))]
        )
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor, step: int = 0) -> torch.Tensor:
        return self.branches[step % 2](x).square().sum(1, keepdim=True) * self.phase.abs()


def keeps(kind: str) -> bool:
    both = Both(AlternatingBranches(), find_unused_parameters=True)
    references: list[list] = [[], []]
    buckets = set()
    for step in range(8):
        both.zero_grad()
        x = both.batches(3, 5)
        alone = step % 4 < 2
        with both.model.no_sync() if alone else nullcontext():
            both.model(x[both.rank], step).mean().backward()
        ranks = [both.rank] if alone else range(both.world)
        (sum(both.twin(x[rank], step).mean() for rank in ranks) / len(ranks)).backward()
        for grads, module in zip(references, (both.module, both.twin), strict=True):
            grads += [REFERENCES[kind](p) for p in module.parameters() if p.grad is not None]
        if step > 3:
            reducer = both.model._replica.reducer
            buckets.add(tuple(bucket.buffer.data_ptr() for bucket in reducer.buckets))
    for ours, theirs in zip(*references, strict=True):
        assert ours is theirs is None or torch.allclose(ours, theirs, rtol=1e-9)
    return kind == "an alias" or len(buckets) == 1


def runs_out_of_inputs(has_custom_memory: bool) -> bool:
    both = Both(build_net(), allocate=allocate_zeros if has_custom_memory else None)
    references = []
    with both.model.join():
        for _ in range(2 + 2 * both.rank):
            both.zero_grad()
            both.model(both.batches(3, 5)[both.rank]).square().mean().backward()
            if has_custom_memory:
                weight = both.module[0].weight
                weight.grad = weight.grad.flatten().view_as(weight.t()).t()
            references += [(p.grad, p.grad.clone()) for p in both.module.parameters()]
    # A rank without inputs contributes zeros, and its gradients keep their values.
    parameters = list(both.module.parameters())
    values = [value for _, value in references[-len(parameters) :]]
    if has_custom_memory:
        references.clear()  # Aliases are not preserved.
    for parameter, value in zip(parameters, values, strict=True):
        references.append((parameter.grad, value))
    return all(torch.equal(*pair) for pair in references)


@pytest.mark.parametrize("kind", REFERENCES)
def test_referenced_gradients_keep_their_values(kind: str) -> None:
    assert run_on_shared_ranks(keeps, 2, kind) == [True, True]


@pytest.mark.parametrize("has_custom_memory", [False, True])
def test_referenced_gradients_keep_their_values_in_join(has_custom_memory) -> None:
    assert run_on_shared_ranks(runs_out_of_inputs, 2, has_custom_memory) == [True, True]


def allocate_zeros(numel: int, *, dtype: torch.dtype, group: dist.ProcessGroup) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


CHANGES = {"itself": lambda g: g, "an alias": torch.Tensor.detach, "a transpose": torch.Tensor.t}


def exchanges_gradients(kind: str, bucket_size_mb: float, has_custom_memory: bool) -> bool:
    layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    both = Both(layers, bucket_size_mb, allocate=allocate_zeros if has_custom_memory else None)
    for step in range(4):
        both.backward()
        for module in (both.module, both.twin):
            first, second = module[0].weight, module[1].weight
            if kind == "memory":
                first.grad.data, second.grad.data = second.grad.data, first.grad.data
            else:
                change = CHANGES[kind]
                first.grad, second.grad = change(second.grad), change(first.grad)
        if step % 2:
            with both.model.no_sync():
                both.backward()
            both.model.finish_gradient_synchronization()
        else:
            both.backward()
        both.check_gradients()
    return True


@pytest.mark.parametrize(
    ("bucket_size_mb", "has_custom_memory"),
    [
        (100 / MIB, False),
        (25.0, True),
        pytest.param(100 / MIB, True, marks=pytest.mark.exhaustive),
        pytest.param(25.0, False, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("kind", [*CHANGES, "memory"])
def test_parameters_may_exchange_gradients(kind, bucket_size_mb, has_custom_memory) -> None:
    ranks = run_on_shared_ranks(exchanges_gradients, 2, kind, bucket_size_mb, has_custom_memory)
    assert ranks == [True, True]


REPLACEMENTS = {
    "0.weight": torch.Tensor.t,
    "1.bias": torch.Tensor.clone,
    "2.weight": torch.Tensor.t,
    "phase": torch.Tensor.conj,
}


def replace_gradient(name: str, parameter: nn.Parameter) -> None:
    parameter.grad = REPLACEMENTS[name](parameter.grad)


def replace_in_hooks(module: nn.Module) -> None:
    for name in REPLACEMENTS:
        parameter = module.get_parameter(name)
        parameter.register_post_accumulate_grad_hook(partial(replace_gradient, name))


def replaces_gradients_by_views(in_hooks: bool) -> bool:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        phase = getattr(model, "module", model).phase
        return model(x).square().mean() * (phase * (1 + 3j)).imag.square().sum()

    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 130), nn.Linear(130, 130))
    module.register_parameter("phase", nn.Parameter(torch.tensor([1.0 + 2.0j])))
    module.double()
    if in_hooks:
        replace_in_hooks(module)
    both = Both(module, 25.0)
    if in_hooks:
        replace_in_hooks(both.twin)
    for step in range(4):
        both.backward(loss)
        for name in () if in_hooks else REPLACEMENTS:
            replace_gradient(name, both.module.get_parameter(name))
            replace_gradient(name, both.twin.get_parameter(name))
        if step % 2:
            with both.model.no_sync():
                both.backward(loss)
            both.model.finish_gradient_synchronization()
        else:
            both.backward(loss)
        both.check_gradients()
    return True


@pytest.mark.parametrize("in_hooks", [False, True])
def test_gradients_may_be_replaced_by_their_transposes_and_conjugates(in_hooks) -> None:
    assert run_on_shared_ranks(replaces_gradients_by_views, 2, in_hooks) == [True, True]


# ----- copies -----


def copies(kind: str) -> bool:
    both = Both(build_net())
    both.step()
    if kind == "deepcopy":
        copied = copy.deepcopy(both.model)
    elif kind == "average":
        averaged = AveragedModel(both.model)
        averaged.update_parameters(both.model)
        copied = averaged.module
    else:
        file = io.BytesIO()
        torch.save(both.model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    x = torch.ones(1, 5, dtype=torch.float64)
    if dist.get_rank() == 0:
        # The evaluation of a copy is not a collective.
        with torch.no_grad():
            assert copied(x).equal(both.module(x))
        # `join_hook` needs the other ranks.
        for call in (copied, copied.finish_gradient_synchronization, copied.join_hook):
            with pytest.raises(RuntimeError, match=r"a copy of a DDP .*; wrap the \.module of"):
                call(*([x] if call is copied else []))
        with pytest.raises(RuntimeError, match="a copy of a DDP does not average gradients"):
            copied.module(x).sum().backward()
        # A frozen copy is evaluated with gradients too, as the teacher of a distillation is.
        copied.requires_grad_(False)
        x.requires_grad_()
        output = copied(x)
        assert output.equal(both.module(x))
        output.sum().backward()
        assert x.grad is not None
        copied.requires_grad_()
    # The copy can be wrapped, and the original trains on.
    other = Both(copied.module)
    for _ in range(3):
        other.step()
        both.step()
    return True


@pytest.mark.parametrize("kind", ["deepcopy", "average", "pickle"])
def test_copies_are_evaluated_and_refused_in_training(kind: str) -> None:
    assert run_on_shared_ranks(copies, 2, kind) == [True, True]


def test_shallow_copies_are_refused() -> None:
    with pytest.raises(TypeError, match=r"call copy\.deepcopy\(\)"):
        copy.copy(DDP.__new__(DDP))


# ----- an extra pass or a skipped step on one rank -----


def train_unevenly(what: str) -> None:
    model = DDP(build_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.ones(1, 5)).sum().backward()
        if what == "backward" and step == 1 and dist.get_rank() == 1:
            model(torch.ones(1, 5)).sum().backward()
        if what == "step" and step == 1 and dist.get_rank() == 1:
            continue
        optimizer.step()


@pytest.mark.parametrize("what", ["backward", "step"])
def test_extra_backward_pass_or_skipped_step_on_one_rank_fails_on_every_rank(what: str) -> None:
    for outcome in try_ranks(train_unevenly, 2, what, timeout=60):
        assert "on ranks [0], but not on ranks [1]" in str(outcome.error)


def change_weights_temporarily() -> bool:
    model = DDP(build_net())
    for _ in range(3):
        model(torch.ones(1, 5)).sum().backward()
        if dist.get_rank() == 0:
            # As in an evaluation of averaged weights: replace the weights and restore them.
            saved = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict({k: 0.9 * v for k, v in saved.items()})
            model.module.load_state_dict(saved)
    return True


def test_temporary_weight_change_on_one_rank_is_allowed() -> None:
    assert run_on_shared_ranks(change_weights_temporarily, 2) == [True] * 2


def fails_in_backward() -> list[str]:
    failure_attribution.GRACE_SECONDS = 0.3
    model = DDP(build_net())
    errors = []
    x = torch.ones(1, 5)
    for step in range(2):
        out = model(x)
        if step == 0 and dist.get_rank() == 1:
            out.register_hook(lambda _: 1 / 0)
            model.module[0].weight.register_hook(lambda _: 1 / 0)
        try:
            out.sum().backward()
        except (RuntimeError, ZeroDivisionError) as error:
            errors.append(str(error))
    return errors


def test_error_in_backward_pass_is_reported_on_every_rank() -> None:
    first, second = try_ranks(fails_in_backward, 2, timeout=60)
    assert "rank 1" in str(first.error)
    assert second.value == ["division by zero"] * 2


def differentiate_on_one_rank() -> list[float]:
    model = DDP(nn.Linear(2, 1))
    if dist.get_rank() == 0:
        # This adds nothing to `.grad`, so no other rank needs to take part.
        torch.autograd.grad(model(torch.ones(1, 2)).sum(), list(model.parameters()))
    model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    return model.module.weight.grad.flatten().tolist()


def test_autograd_grad_on_one_rank_opens_no_step() -> None:
    assert run_on_shared_ranks(differentiate_on_one_rank, 2) == [[1.5, 1.5]] * 2


def train_on_uneven_tokens() -> None:
    """Follow the README for ranks with different numbers of tokens, with two passes per step."""
    torch.manual_seed(0)
    module = nn.Linear(3, 5)
    alone = copy.deepcopy(module)
    model = DDP(module)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [[torch.randn(1 + 2 * r + part, 3) for part in range(2)] for r in range(world_size)]
    total_tokens = torch.tensor(sum(len(batch) for batch in batches[rank]))
    dist.all_reduce(total_tokens)
    for number, batch in enumerate(batches[rank]):
        model.require_backward_grad_sync = number == 1
        losses = model(batch).logsumexp(-1)
        (losses.sum() * world_size / total_tokens).backward()
    alone(torch.cat([batch for rank_batches in batches for batch in rank_batches])).logsumexp(
        -1
    ).mean().backward()
    for ours, expected in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_uneven_tokens_give_the_gradient_of_the_mean_over_all_tokens() -> None:
    run_ranks(train_on_uneven_tokens, 3)
