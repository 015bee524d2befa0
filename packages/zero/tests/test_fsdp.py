"""Stage 3 equals unsharded training."""

import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import run_on_shared_ranks
from zero import FSDP, ShardedOptimizer
from zero.fsdp.unit import UnitState

# The element-wise optimizers of torch.optim, which can step flat shards.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop",
    "ASGD",
)  # fmt: skip
DEADLINE = 300.0


def mark_exhaustive(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


class Tiny(nn.Module):
    """A model with a tied embedding, a norm, a residual, a parameter and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.position = nn.Parameter(torch.randn(3, 6))
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.down = nn.Linear(13, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        x = x + self.down(self.frozen(torch.tanh(self.up(self.norm(x)))))
        return self.head(x)


def make_model():
    torch.manual_seed(0)
    return Tiny()


def compute_loss(model, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(11, (4, 3), generator=generator)
    targets = torch.randint(11, (4, 3), generator=generator)
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def train_reference(world, steps, name):
    model = make_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, name)(trained, lr=0.01)
    for step in range(steps):
        parts = [torch.autograd.grad(compute_loss(model, step, r), trained) for r in range(world)]
        for parameter, *gradients in zip(trained, *parts, strict=True):
            total = gradients[0].clone()
            for gradient in gradients[1:]:
                total += gradient
            parameter.grad = total / world
        optimizer.step()
    return dict(model.named_parameters(remove_duplicate=False))


def sum_in_rank_order(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    tensor.copy_(parts[0])
    for part in parts[1:]:
        tensor += part


def train(steps):
    result = {}
    for name in ELEMENTWISE:
        model = FSDP(make_model(), all_reduce=sum_in_rank_order)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        for step in range(steps):
            optimizer.zero_grad()
            compute_loss(model, step, dist.get_rank()).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
        assert all(unit.unsharded_bytes == 0 for unit in model.units)
        result[name] = model.gather_full_params()
    return result


@cache
def get_trained(world):
    return run_on_shared_ranks(train, world, 2, timeout=DEADLINE)


@pytest.mark.parametrize("world", [mark_exhaustive(1), mark_exhaustive(2), 3, mark_exhaustive(4)])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_fsdp_is_bit_equal_to_unsharded_training(name, world):
    expected = train_reference(world, 2, name)
    for result in get_trained(world):
        assert list(result[name]) == list(expected)
        for key, value in result[name].items():
            assert torch.equal(value, expected[key]), key


class Checkpointed(Tiny):
    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        return self.head(x + checkpoint(self.mix, x, use_reentrant=False))

    def mix(self, x):
        return self.norm(self.down(self.frozen(torch.tanh(self.up(x)))))


class Plain(Checkpointed):
    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        return self.head(x + self.mix(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, compiled, num_blocks=2):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        blocks = [Block() for _ in range(num_blocks)]
        if compiled:
            blocks = [torch.compile(block, backend="aot_eager") for block in blocks]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(cls, *args):
    torch.manual_seed(0)
    return cls(*args)


def are_steps_equal(ours, theirs, tolerance, micro_batches=1):
    """Train two models for two steps on the same batches; return True if they are equal."""
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
        for m in (ours, theirs)
    ]
    rank, world = dist.get_rank(), dist.get_world_size()
    start = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
    for step in range(2):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with nullcontext() if last else ours.no_sync():
                compute_loss(ours, 10 * step + micro, rank).backward()
            for other in range(world):
                (compute_loss(theirs, 10 * step + micro, other) / world).backward()
        norm = nn.utils.clip_grad_norm_(ours.parameters(), 0.5)
        other = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert norm > 0.5
        torch.testing.assert_close(norm, other, rtol=tolerance, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.dtype == torch.float32 for p in ours.parameters())
    assert all(unit.unsharded_bytes == 0 for unit in ours.units)
    whole = ours.gather_full_params()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(whole[name], parameter.data, rtol=tolerance, atol=tolerance)
        # The steps are short compared with the weights, so the updates are compared too.
        error = (whole[name] - parameter.data).norm()
        assert error <= 5 * tolerance * (parameter.data - start[name]).norm(), name
    return True


def train_with_options():
    exact = 1e-5
    assert are_steps_equal(FSDP(make_model()), make_model(), exact, micro_batches=3)
    assert are_steps_equal(FSDP(build(Checkpointed)), build(Plain), exact)
    assert are_steps_equal(
        FSDP(build(Stack, False), shard=(Block, nn.Embedding)), build(Stack, False), exact
    )
    nested = FSDP(build(Stack, False), shard=(Block, nn.Linear))
    assert are_steps_equal(nested, build(Stack, False), exact)
    gradients = FSDP(make_model(), torch.bfloat16, gradient_dtype=torch.float32)
    assert are_steps_equal(gradients, make_model(), 0.02)
    for dtype in (torch.bfloat16, torch.float16):
        half = FSDP(make_model(), dtype)
        assert half(torch.zeros(4, 3, dtype=torch.long)).dtype == dtype
        assert are_steps_equal(half, make_model(), 0.02)
    return True


def test_accumulation_clipping_checkpointing_shard_classes_and_half_precision():
    assert all(run_on_shared_ranks(train_with_options, 2))


def train_compiled_blocks(has_inner_units):
    torch._dynamo.reset()
    shard = (Block, nn.Embedding, nn.Linear) if has_inner_units else (Block,)
    model = FSDP(build(Stack, True, 1), shard=shard)
    assert not any("_orig_mod" in name for name in model.gather_full_params())
    return are_steps_equal(model, build(Stack, False, 1), 1e-5)


@pytest.mark.parametrize(
    "has_inner_units", [pytest.param(True, marks=pytest.mark.exhaustive), False]
)
def test_compiled_blocks_train_equally_under_the_original_names(has_inner_units):
    assert all(run_on_shared_ranks(train_compiled_blocks, 2, has_inner_units))


def compile_with_buffers():
    """Return the buffers that forward passes of a compiled module use if each rank changes them."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False).eval())
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, module=model, lr=0.1)
    run = torch.compile(model, backend="eager")
    used = []
    for step in range(2):
        model[1].running_mean.fill_(10 * step + dist.get_rank())
        run(torch.ones(2, 4)).sum().backward()
        used.append(model[1].running_mean[0].item())
        optimizer.step()
    return used


def test_buffers_of_a_compiled_module_are_synchronized():
    assert run_on_shared_ranks(compile_with_buffers, 2) == [[0, 10]] * 2


class Outer(nn.Module):
    """A module that initializes its submodule."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def reset_parameters(self):
        nn.init.ones_(self.inner.weight)


def shard_on_the_meta_device():
    with torch.device("meta"):
        model = Stack(False)
    torch.manual_seed(0)
    ours = FSDP(model, device="cpu").gather_full_params()
    expected = build(Stack, False).state_dict()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
    with torch.device("meta"):
        free = Tiny()
    with pytest.raises(ValueError, match="Tiny is on the meta device and has no reset_parameters"):
        FSDP(free)
    with torch.device("meta"):
        outer = Outer()
    with pytest.raises(ValueError, match=r"Outer\.reset_parameters\(\) also initializes sub"):
        FSDP(outer)
    with torch.device("meta"):
        free = Tiny()
    ones = FSDP(
        free,
        initialize=lambda m: [nn.init.ones_(p) for p in m._parameters.values() if p is not None],
    )
    return all((value == 1).all() for value in ones.gather_full_params().values())


def test_modules_on_the_meta_device_are_initialized_as_if_unsharded():
    assert all(run_on_shared_ranks(shard_on_the_meta_device, 2))


def evaluate_between_steps():
    """Run a forward pass alone between steps, which must not leave stale weights."""
    model, twin = FSDP(build(Stack, False)), build(Stack, False)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    for step in range(3):
        compute_loss(model, step, 0).backward()
        compute_loss(twin, step, 0).backward()
        compute_loss(model, 50, 0)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(compute_loss(model, 99, 0), compute_loss(twin, 99, 0))
    return True


def test_a_forward_alone_leaves_no_stale_weights():
    assert all(run_on_shared_ranks(evaluate_between_steps, 2))


def list_gathers_in_flight():
    """Return, for each layer in forward and backward, if another layer was being gathered."""
    model = FSDP(build(Stack, False), shard=(nn.Linear, nn.Embedding))
    seen = {"forward": [], "backward": []}

    def is_gathering():
        return any(unit.state is UnitState.UNSHARDING for unit in model.units)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_: seen["forward"].append(is_gathering()))
    for unit in model.units:
        for parameter in unit.parameters:
            if isinstance(parameter.owners[0][0], nn.LayerNorm):
                continue
            parameter.full.register_hook(lambda _: seen["backward"].append(is_gathering()))
    for _ in range(2):
        for record in seen.values():
            record.clear()
        compute_loss(model, 0, 0).backward()
    return seen, model.communicator.pop_bytes()


def test_the_next_layer_is_gathered_while_one_runs():
    for seen, _ in run_on_shared_ranks(list_gathers_in_flight, 2):
        # Layer 4 of 0 to 4 has no next layer in the forward pass, and layer 0 none in the backward.
        assert seen["forward"] == [True] * 4 + [False]
        assert seen["backward"].count(True) == 2 * 4
