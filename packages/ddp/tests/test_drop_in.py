"""Loops that were written for torch's DDP, and models that change after they were wrapped.

Every program runs on two ranks under `DDP` and, for comparison, in float64 in one process that sees
all batches; afterwards gradients and weights are those of the one process on every rank.
"""

import copy
import io
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from worker_pool import run_ranks, try_ranks

MIB = 2**20


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))


class Both:
    """A wrapped model on each rank and its twin, which takes the mean of all ranks' losses."""

    def __init__(self, module: nn.Module, **options) -> None:
        self.module = module.double()
        self.twin = copy.deepcopy(self.module)
        self.model = DDP(self.module, 100 / MIB, **options)
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
        (sum(loss(self.twin, one) for one in x) / self.world).backward()

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
    module = net()
    module[0].requires_grad_(False)
    both = Both(module)
    both.step()
    for one in (both.module, both.twin):
        one[0].requires_grad_(True)
    for _ in range(3):
        both.step()
    for one in (both.module, both.twin):
        one[2].requires_grad_(False)
        one[2].zero_grad()
    for _ in range(2):
        both.step()
    for one in (both.module, both.twin):
        one[2].requires_grad_(True)
    both.step()
    return True


def assigns() -> bool:
    both = Both(net())
    both.step()
    for module in (both.module, both.twin):
        state = OrderedDict((k, 2 * v.detach()) for k, v in module.state_dict().items())
        module.load_state_dict(state, assign=True)
    both.optimizers = [both.sgd(both.module), both.sgd(both.twin)]
    for _ in range(3):
        both.step()
    return True


def adds_a_head() -> bool:
    both = Both(net())
    both.step()
    torch.manual_seed(dist.get_rank())
    head = nn.Linear(2, 3).double()
    both.module.append(head)
    with torch.no_grad():
        both.model(torch.ones(1, 5, dtype=torch.float64))
    # The new weights are rank 0's from the next forward pass on.
    torch.manual_seed(0)
    both.twin.append(nn.Linear(2, 3).double())
    both.optimizers = [both.sgd(both.module), both.sgd(both.twin)]
    for _ in range(3):
        both.step()
    return True


def changes_dtype() -> bool:
    both = Both(net())
    both.step()
    # Each conversion puts other memory into `.grad` as well.
    both.module.float().double()
    both.twin.load_state_dict(both.module.state_dict())
    for _ in range(2):
        both.step()
    both.module.float()
    both.model(torch.full((1, 5), 1.0 + both.rank)).sum().backward()
    assert {p.grad.dtype for p in both.module.parameters()} == {torch.float32}
    mine = both.module[0].bias.grad.clone()
    dist.all_reduce(mine)
    torch.testing.assert_close(mine / 2, both.module[0].bias.grad)
    return True


def replaces_data() -> bool:
    both = Both(net())
    both.step()
    for p in [*both.module.parameters(), *both.twin.parameters()]:
        p.data = p.data.clone()
    for _ in range(2):
        both.step()
    return True


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "program", ["unfreezes", "assigns", "adds_a_head", "changes_dtype", "replaces_data"]
)
def test_parameters_that_change_after_wrapping_are_averaged(program: str) -> None:
    assert run_ranks(globals()[program], 2) == [True, True]


def unfreezes_on_one_rank(rank: int) -> None:
    module = net()
    module[0].requires_grad_(False)
    model = DDP(module)
    for step in range(3):
        if step == 1 and dist.get_rank() == rank:
            module[0].requires_grad_(True)
        model(torch.ones(1, 5)).sum().backward()


@pytest.mark.parametrize("rank", [0, 1])
def test_parameters_unfrozen_on_one_rank_only_are_refused_on_every_rank(rank: int) -> None:
    for outcome in try_ranks(unfreezes_on_one_rank, 2, rank, timeout=60):
        assert f"unfrozen, replaced or added on rank {rank}" in str(outcome.error)


# ----- loops that know only backward() and step() -----


def never_finishes() -> bool:
    both = Both(net())
    for _ in range(4):
        both.step()
    return True


def several_losses() -> bool:
    both = Both(net())
    for _ in range(3):
        both.zero_grad()
        for _ in range(3):
            both.backward()
        both.check_gradients()
        both.update()
    return True


def retains_the_graph() -> bool:
    both = Both(net())
    for _ in range(3):
        both.zero_grad()
        x = both.batches(3, 5)
        out = both.model(x[both.rank])
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
        outs = [both.twin(one) for one in x]
        (sum(o.sum() + o.square().sum() for o in outs) / both.world).backward()
        both.check_gradients()
        both.update()
    return True


def accumulates() -> bool:
    both = Both(net())
    for kept in (True, False, True):
        if kept:
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

        def judged(g, c, z, real):
            return c(real).mean() - c(g(z).detach()).mean()

        judged(generator.model, critic.model, z[rank], real[rank]).backward()
        total = sum(judged(generator.twin, critic.twin, *one) for one in zip(z, real, strict=True))
        (total / world).backward()
        critic.check_gradients()
        critic.update()

        generator.zero_grad()
        if step % 2:
            for module in (critic.module, critic.twin):
                module.requires_grad_(False)
        critic.model(generator.model(z[rank])).mean().backward()
        (sum(critic.twin(generator.twin(one)).mean() for one in z) / world).backward()
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

    both = Both(net())
    for _ in range(3):
        both.step(loss)
    return True


def keeps_graphs() -> bool:
    both = Both(net())
    for _ in range(3):
        x = both.batches(3, 5)
        with pytest.warns(UserWarning, match="has no graph"):
            both.model(x[both.rank]).square().mean().backward(create_graph=True)
        (sum(both.twin(one).square().mean() for one in x) / both.world).backward()
        both.check_gradients()
        assert not any(p.grad.requires_grad for p in both.module.parameters())
        both.update()
    return True


@pytest.mark.filterwarnings("default")
def test_means_of_gradients_with_a_graph_are_right_and_have_none() -> None:
    assert run_ranks(keeps_graphs, 2) == [True, True]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.body, self.reentrant, self.shared = net(), reentrant, shared
        self.first, self.more = nn.Linear(5, 5), nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

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


def evaluates_between() -> bool:
    both = Both(net())
    for _ in range(3):
        both.step()
        with torch.no_grad():
            both.model(torch.ones(2, 5, dtype=torch.float64))
        if dist.get_rank() == 0:
            both.model(torch.ones(2, 5, dtype=torch.float64))
    return True


def takes_layers_in_any_order() -> bool:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            for place in order:
                x = self.layers[place](x).tanh()
            return x

    both = Both(Shuffled())
    for _ in range(6):
        # Another order in each step, and on each rank: no bucket is completed by the gradient that
        # completed it in the first step.
        orders = [torch.randperm(6, generator=both.generator).tolist() for _ in range(both.world)]
        x = both.batches(3, 5)
        both.zero_grad()
        both.model(x[both.rank], orders[both.rank]).square().mean().backward()
        pairs = zip(x, orders, strict=True)
        (sum(both.twin(*pair).square().mean() for pair in pairs) / both.world).backward()
        both.check_gradients()
        both.update()
    return True


LOOPS = [
    "takes_layers_in_any_order",
    "never_finishes",
    "several_losses",
    "retains_the_graph",
    "accumulates",
    "is_adversarial",
    "penalizes_gradients",
    "evaluates_between",
]


@pytest.mark.parametrize("program", LOOPS)
def test_a_loop_that_knows_only_torchs_ddp_trains_like_one_process(program: str) -> None:
    assert run_ranks(globals()[program], 2) == [True, True]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("reentrant", "shared"), [(False, True), (True, False), (True, True)])
def test_checkpointed_layers_train_like_one_process(reentrant: bool, shared: bool) -> None:
    # One synchronization a step, although a reentrant checkpoint runs a pass within the pass.
    assert run_ranks(checkpoints, 2, reentrant, shared) == [4, 4]


def repeats_a_checkpoint_later() -> str:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            x = self.first(x)
            for _ in range(times):
                x = checkpoint(self.again, x, use_reentrant=True)
            return x

    model = DDP(Repeated())
    for times in (1, 1, 1, 2):
        try:
            model(torch.ones(1, 5), times).sum().backward()
        except RuntimeError as error:
            return f"{times} times: {error}"
    return "not refused"


def test_a_gradient_in_parts_is_refused_in_a_later_step_too() -> None:
    for said in run_ranks(repeats_a_checkpoint_later, 2, timeout=60):
        assert said.startswith("2 times: Expected to mark a variable ready only once")
        assert "static_graph=True" in said


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
    assert run_ranks(trains_complex, 2) == [True, True]


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
        sum(twin(one).square().sum() for one in tokens).backward()
        assert module[0].weight.grad.is_sparse
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense())
    return True


def test_sparse_gradients_are_averaged() -> None:
    assert run_ranks(trains_sparse, 2) == [True, True]


def trains_batch_norm(broadcast: bool) -> list:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    module = module.to(memory_format=torch.channels_last)
    model = DDP(module, forward_sync_buffers=broadcast)
    for step in range(4):
        x = torch.randn(
            4, 2, 6, 6, generator=torch.Generator().manual_seed(9 * step + dist.get_rank())
        )
        model.zero_grad()
        model(x.to(memory_format=torch.channels_last)).square().mean().backward()
        assert module[0].weight.grad.stride() == module[0].weight.stride()
    return [buffer.tolist() for buffer in module.buffers()]


def test_buffers_are_rank_0s_after_every_step() -> None:
    first, second = run_ranks(trains_batch_norm, 2, True)
    alone, other = run_ranks(trains_batch_norm, 2, False)
    assert first == second == alone != other
    assert first[-1] == 4


# ----- gradients that are kept -----


KEEP = {
    "itself": lambda p: p.grad,
    "an alias": lambda p: p.grad.detach().view(-1),
    "none": lambda p: None,
}


class Held(nn.Module):
    """Branches that take turns, large and small gradients, complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([net(), nn.Sequential(nn.Linear(5, 99), nn.Linear(99, 99))])
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor, turn: int = 0) -> torch.Tensor:
        return self.branches[turn % 2](x).square().sum(1, keepdim=True) * self.phase.abs()


def keeps(kind: str) -> bool:
    both = Both(Held(), find_unused_parameters=True)
    kept: list[list] = [[], []]
    buckets = set()
    for turn in range(8):
        both.zero_grad()
        x = both.batches(3, 5)
        alone = turn % 4 < 2
        with both.model.no_sync() if alone else nullcontext():
            both.model(x[both.rank], turn).mean().backward()
        ranks = [both.rank] if alone else range(both.world)
        (sum(both.twin(x[rank], turn).mean() for rank in ranks) / len(ranks)).backward()
        for grads, module in zip(kept, (both.module, both.twin), strict=True):
            grads += [KEEP[kind](p) for p in module.parameters() if p.grad is not None]
        if turn > 3:
            layout = both.model._replica.reducer.layout
            buckets.add(tuple(bucket.buffer.data_ptr() for bucket in layout.buckets))
    for ours, theirs in zip(*kept, strict=True):
        assert ours is theirs is None or torch.allclose(ours, theirs, rtol=1e-9)
    return kind == "an alias" or len(buckets) == 1


def runs_out_of_inputs() -> bool:
    both = Both(net())
    kept = []
    with both.model.join():
        for _ in range(2 + 2 * both.rank):
            both.zero_grad()
            both.model(both.batches(3, 5)[both.rank]).square().mean().backward()
            kept += [(p.grad, p.grad.clone()) for p in both.module.parameters()]
    return all(torch.equal(*pair) for pair in kept)


@pytest.mark.parametrize("kind", KEEP)
def test_gradients_that_are_kept_keep_their_value(kind: str) -> None:
    assert run_ranks(keeps, 2, kind) == [True, True]


def test_gradients_that_are_kept_outlive_the_inputs() -> None:
    assert run_ranks(runs_out_of_inputs, 2) == [True, True]


def exchanges_gradients() -> bool:
    both = Both(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)))
    for _ in range(3):
        both.backward()
        for module in (both.module, both.twin):
            first, second = module[0].weight, module[1].weight
            first.grad, second.grad = second.grad, first.grad
        both.backward()
        both.check_gradients()
    return True


def test_parameters_may_exchange_their_gradients() -> None:
    assert run_ranks(exchanges_gradients, 2) == [True, True]


# ----- copies -----


def copies(kind: str) -> bool:
    both = Both(net())
    both.step()
    if kind == "deepcopy":
        copied = copy.deepcopy(both.model)
    elif kind == "average":
        copied = AveragedModel(both.model)
        copied.update_parameters(both.model)
        copied.module.require_backward_grad_sync = True
    else:
        file = io.BytesIO()
        torch.save(both.model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    if dist.get_rank() == 0:
        # Meets nobody: a copy may be evaluated on one rank.
        copied.eval()(torch.ones(1, 5, dtype=torch.float64))
    other = Both(net())
    other.module = copied.module.module if kind == "average" else copied.module
    other.model, other.twin = copied, copy.deepcopy(both.twin)
    other.optimizers = [other.sgd(other.module), other.sgd(other.twin)]
    for _ in range(3):
        other.step()
        both.step()
    return True


@pytest.mark.parametrize("kind", ["deepcopy", "average", "pickle"])
def test_a_copy_trains_on_its_own(kind: str) -> None:
    assert run_ranks(copies, 2, kind) == [True, True]


def copies_then_replaces(how: str) -> bool:
    both = Both(net())
    both.model = copy.deepcopy(both.model)
    both.module = both.model.module
    for module in (both.module, both.twin):
        if how == "assign":
            module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
        else:
            module[0] = nn.Linear(5, 7).double()
            nn.init.constant_(module[0].weight, 0.1)
            nn.init.zeros_(module[0].bias)
    both.optimizers = [both.sgd(both.module), both.sgd(both.twin)]
    for _ in range(3):
        both.step()
    return True


@pytest.mark.parametrize("how", ["assign", "layer"])
def test_a_copy_whose_parameters_are_replaced_before_its_first_gradient(how: str) -> None:
    assert run_ranks(copies_then_replaces, 2, how) == [True, True]


def first_step_of_a_copy(way: str) -> float:
    copied = copy.deepcopy(DDP(nn.Linear(5, 1, bias=False)))
    with torch.no_grad():
        copied.module.weight.fill_(1.0)
    steps = dist.get_rank() + 1 if way == "join" else 1
    with copied.join() if way == "join" else nullcontext():
        for _ in range(steps):
            with copied.no_sync() if way == "finish" else nullcontext():
                copied(torch.ones(1, 5)).sum().backward()
            if way == "finish":
                copied.finish_gradient_synchronization()
            with torch.no_grad():
                copied.module.weight -= copied.module.weight.grad
            copied.module.weight.grad = None
    return float(copied.module.weight.sum().detach())


@pytest.mark.parametrize("way", ["backward", "finish", "join"])
def test_a_copy_meets_the_others_once_however_it_begins(way: str) -> None:
    # Five weights of 1, a gradient of 1 each; in a rank's absence half of it.
    assert run_ranks(first_step_of_a_copy, 2, way, timeout=60) == [-2.5 if way == "join" else 0] * 2


def copies_that_differ() -> None:
    model = DDP(net())
    copied = copy.deepcopy(model)
    if dist.get_rank() == 1:
        with torch.no_grad():
            copied.module[2].bias += 1
    copied(torch.ones(1, 5)).sum().backward()


def test_copies_whose_weights_differ_are_refused() -> None:
    for outcome in try_ranks(copies_that_differ, 2, timeout=60):
        assert "rank 1 has '2.bias' with checksum" in str(outcome.error)


# ----- one more on one rank -----


def one_more(what: str) -> None:
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.ones(1, 5)).sum().backward()
        if what == "backward" and step == 1 and dist.get_rank() == 1:
            model(torch.ones(1, 5)).sum().backward()
        if what == "step" and step == 1 and dist.get_rank() == 1:
            continue
        optimizer.step()


@pytest.mark.parametrize("what", ["backward", "step"])
def test_one_backward_pass_or_step_more_on_one_rank_is_an_error_on_every_rank(what: str) -> None:
    for outcome in try_ranks(one_more, 2, what, timeout=60):
        assert "on ranks [0], but not on ranks [1]" in str(outcome.error)


def looks_at_other_weights() -> bool:
    model = DDP(net())
    for _ in range(3):
        model(torch.ones(1, 5)).sum().backward()
        if dist.get_rank() == 0:
            # As with an average of weights: in for an evaluation, and out again.
            kept = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict({k: 0.9 * v for k, v in kept.items()})
            model.module.load_state_dict(kept)
    return True


def test_weights_that_one_rank_changed_and_changed_back_are_no_step() -> None:
    assert run_ranks(looks_at_other_weights, 2) == [True] * 2


def fails_in_backward() -> list[str]:
    model, said = DDP(net()), []
    x = torch.ones(1, 5)
    for step in range(2):
        out = model(x)
        if step == 0 and dist.get_rank() == 1:
            out.register_hook(lambda _: 1 / 0)
            model.module[0].weight.register_hook(lambda _: 1 / 0)
        try:
            out.sum().backward()
        except (RuntimeError, ZeroDivisionError) as error:
            said.append(str(error))
    return said


def test_an_error_within_a_backward_pass_is_told() -> None:
    outcomes = try_ranks(fails_in_backward, 2, timeout=60)
    assert all(outcome.failed or outcome.value for outcome in outcomes)
