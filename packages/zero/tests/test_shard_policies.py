"""Classes, names, predicates and "blocks" select the modules that stage 3 shards."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worker_pool import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

import transformers_families
from allocator import measure_peak_bytes
from worker_pool import run_on_shared_ranks
from zero import FSDP, ShardedOptimizer, memory_report
from zero_training import build_pair, compute_mean_square, train

DEADLINE = 300.0


class Conv1D(nn.Module):
    """A linear layer with a transposed weight, as in GPT-2."""

    def __init__(self, width, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return x @ self.weight + self.bias


class Experts(nn.Module):
    """Experts with one 3-D weight, as in Mixtral."""

    def __init__(self, width, count):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width, width) / width**0.5)
        self.router = nn.Linear(width, count)

    def forward(self, x):
        outputs = torch.einsum("bi,eio->beo", x, self.weight)
        return (self.router(x).softmax(-1).unsqueeze(-1) * outputs).sum(1)


class Residual(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.layer = layer

    def forward(self, x):
        return x + torch.tanh(self.layer(self.norm(x)))


class Blocks(nn.Module):
    """Blocks in a list, with parameters of the root, and a head that is tied to the input."""

    def __init__(self, make_layer):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.blocks = nn.ModuleList(Residual(make_layer()) for _ in range(3))
        self.embed = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    """A transformer whose attention reads its output projection's weight."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 5))
        layer = nn.TransformerEncoderLayer(5, 1, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        tokens = torch.cat([self.token.expand(len(x), 1, 5), x.unsqueeze(1)], 1)
        return self.encoder(tokens)[:, 0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        outputs, _ = self.lstm(x.unsqueeze(1).expand(-1, 3, -1))
        return self.head(outputs[:, -1])


MODELS = {
    "gpt2": lambda: Blocks(lambda: Conv1D(5, 5)),
    "mixtral": lambda: Blocks(lambda: Experts(5, 3)),
    "vit": Encoder,
    "lstm": Recurrent,
}


def build(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def assert_all_sharded(model, twin):
    """Assert that this rank stores 1/n of the parameters of `twin`."""
    total = sum(p.numel() for p in twin.parameters())
    stored = sum(p.shape.numel() for p in model.parameters())
    # Each unit is padded to a multiple of the world size.
    assert abs(stored - total / dist.get_world_size()) <= len(model.units)


def train_with_everything_sharded(name):
    """Train with all parameters sharded; every rank stores 1/n of them."""
    model, ours, twin, theirs = build_pair(3, "SGD", build=lambda: build(name))
    assert_all_sharded(model, twin)
    train(model, ours, twin, theirs, compute_mean_square, clip=0.5)
    assert all(unit.unsharded_bytes == 0 for unit in model.units)
    return len(model.units)


@pytest.mark.parametrize(("name", "units"), [("gpt2", 4), ("mixtral", 4), ("vit", 3), ("lstm", 1)])
def test_blocks_and_the_root_shard_all_parameters_of_a_model(name, units):
    assert run_on_shared_ranks(train_with_everything_sharded, 3, name) == [units] * 3


def select():
    """Select modules by class and name, and by a predicate."""
    blocks = [f"blocks.{number}" for number in range(3)]
    layers = [f"{block}.layer" for block in blocks]
    chosen = ["blocks.1", "head", "embed"]
    policies = [
        ((Conv1D, "head"), [*layers, "head"]),
        ([Conv1D, "head"], [*layers, "head"]),
        (Residual, blocks),
        (lambda name, module: name in chosen, chosen),
    ]
    for policy, expected in policies:
        model, ours, twin, theirs = build_pair(3, "SGD", build=lambda: build("gpt2"), shard=policy)
        names = {module: name for name, module in model.module.named_modules()}
        # The unit of the root, whose name is empty, has the parameter `scale`.
        assert {names[m] for m, units in model.units_of.items() if units} == {"", *expected}
        train(model, ours, twin, theirs, compute_mean_square)
    for policy in (("block.1",), "layers", [nn.Linear, nn.Linear(2, 2)]):
        with pytest.raises(ValueError, match=r"a predicate or \"blocks\" as shard=, got "):
            FSDP(build("gpt2"), shard=policy)
    return True


def test_names_and_predicates_select_the_sharded_modules():
    assert all(run_on_shared_ranks(select, 3))


def train_published(stage, name):
    """Train a model of transformers as one process does; return its memory by kind and peak."""
    torch.set_default_dtype(torch.float64)
    model, ours, twin, theirs = build_pair(
        stage, "SGD", build=lambda: transformers_families.build(name)
    )
    if stage == 3:
        assert_all_sharded(model, twin)
        assert len(model.units) >= 3
    train(model, ours, twin, theirs, transformers_families.build_loss(name), clip=0.5)

    def build(group):
        model = transformers_families.build(name)
        if stage == 3:
            model = FSDP(model, group=group)
            return model, torch.optim.AdamW(model.parameters())
        options = {"group": group, "shard_gradients": stage == 2}
        return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)

    def loss(model):
        return transformers_families.build_loss(name)(model, torch.ones(4, 5, dtype=torch.float64))

    report = memory_report(build, loss)
    for moment, measured in zip(report.predicted, report.measured, strict=True):
        for kind in ("parameters", "gradients", "optimizer"):
            planned, counted = getattr(moment, kind), getattr(measured, kind)
            assert counted == pytest.approx(planned, rel=0.03), (moment.name, kind)
    assert report.measured_peak == pytest.approx(report.predicted_peak, rel=0.03)
    # The count does not include memory that an operator frees before it returns, which is 3.2 %
    # of a small Mamba.
    tolerance = 0.04 if name == "mamba" else 0.03
    assert measure_peak_bytes(*build(None), loss) == pytest.approx(
        report.predicted_peak, rel=tolerance
    )
    return True


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", transformers_families.FAMILIES)
def test_families_of_transformers_equal_one_process_and_need_the_planned_memory(name, stage):
    pytest.importorskip("transformers", reason="models of transformers")
    assert all(run_ranks(train_published, 2, stage, name, timeout=DEADLINE))
