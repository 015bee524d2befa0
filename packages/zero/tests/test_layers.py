"""Layers that read or write their weights unusually, and buffers that differ between ranks."""

import copy
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from worker_pool import try_ranks

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import case_folder, run_on_shared_ranks
from zero import (
    FSDP,
    ShardedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from zero_training import assert_alike

DEADLINE = 300.0


class Cosine(nn.Embedding):
    def forward(self, tokens):
        return F.embedding(tokens, F.normalize(self.weight, dim=-1))


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * weight.square().mean().rsqrt()


def assign_forward(embedding):
    embedding.forward = lambda tokens: F.embedding(tokens, embedding.weight.tanh())
    return embedding


def add_forward_hook(embedding, *, late=False):
    def multiply(module, args, output):
        return output @ (module.weight.T @ module.weight)

    embedding.register_forward_hook(multiply)
    return embedding


def parametrize_embedding(embedding):
    parametrize.register_parametrization(embedding, "weight", Scaled())
    return embedding


EMBEDDINGS = {
    "plain": lambda: nn.Embedding(6, 4),
    "padded": lambda: nn.Embedding(6, 4, padding_idx=1, scale_grad_by_freq=True),
    "subclass": lambda: Cosine(6, 4),
    "assigned": lambda: assign_forward(nn.Embedding(6, 4)),
    "hooked": lambda: add_forward_hook(nn.Embedding(6, 4)),
    "parametrized": lambda: parametrize_embedding(nn.Embedding(6, 4)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Embedding(6, 4)),
}


def embed(kind):
    torch.manual_seed(0)
    layers = EMBEDDINGS[kind](), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).double()


def train_embeddings():
    """Train embeddings whose backward pass may read the weight; compare with one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for kind in EMBEDDINGS:
        for late in (False, True) if kind in ("assigned", "hooked") else (False,):
            model, twin = embed("plain" if late else kind), embed(kind)
            sharded = FSDP(model)
            if late:
                {"assigned": assign_forward, "hooked": add_forward_hook}[kind](model[0])
            if late and kind == "hooked":
                # This hook runs after FSDP's hook, which has freed the weight.
                with pytest.raises(RuntimeError, match="is read while its module does not run"):
                    sharded(torch.tensor([0]))
                continue
            ours = torch.optim.SGD(sharded.parameters(), lr=0.1)
            theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
            for step in range(2):
                for number in range(world):
                    tokens = torch.tensor([number, 2, 3 + step])
                    if number == rank:
                        sharded(tokens).square().mean().backward()
                    (twin(tokens).square().mean() / world).backward()
                for optimizer in (ours, theirs):
                    optimizer.step()
                    optimizer.zero_grad()
            assert_alike(sharded, twin)
    return True


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_embeddings_that_read_their_weight_in_backward_train_as_in_one_process(world):
    assert all(run_on_shared_ranks(train_embeddings, world))


class Clamped(nn.Linear):
    """A layer that writes to its weight in the forward pass."""

    def __init__(self, write):
        super().__init__(4, 4)
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self.weight)
        return super().forward(x)


class Parent(nn.Module):
    """A module that writes to another module's weight in the forward pass."""

    def __init__(self, write):
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self.child.weight)
        return self.child(x)


def clamp_data(weight):
    weight.data.clamp_(-0.1, 0.1)


def copy_rows(weight):
    weight.detach()[0].copy_(torch.zeros(4))


WRITES = {"clamp": lambda w: w.clamp_(-0.1, 0.1), "data": clamp_data, "rows": copy_rows}


def refuse_writes(name):
    build = {"Clamped": Clamped, "Parent": Parent}[name]
    for write in WRITES.values():
        for gradients in (True, False):
            torch.manual_seed(0)
            sharded = FSDP(nn.Sequential(nn.Linear(4, 4), build(write), nn.Linear(4, 4)))
            with (
                torch.set_grad_enabled(gradients),
                pytest.raises(RuntimeError, match="wrote to 1"),
            ):
                sharded(torch.ones(2, 4))
    return True


@pytest.mark.parametrize("name", ["Clamped", "Parent"])
def test_a_forward_that_writes_to_its_parameters_is_refused(name):
    assert all(run_on_shared_ranks(refuse_writes, 2, name))


def write_data_in_one_forward():
    """Write through `.data` in one of the first forward passes; return the passes that raise."""
    detected = []
    for number in range(1, 6):
        layer = Clamped(lambda weight: None)
        model = FSDP(nn.Sequential(layer, nn.Linear(4, 4)))
        before = model.gather_full_params()["0.weight"].clone()
        for forward in range(1, 6):
            layer.write = clamp_data if forward == number else lambda weight: None
            try:
                model(torch.ones(2, 4))
            except RuntimeError:
                detected.append(forward)
        assert torch.equal(model.gather_full_params()["0.weight"], before)
    return detected


def test_a_write_through_data_is_detected_in_forwards_1_2_4_and_lost_in_others():
    assert run_on_shared_ranks(write_data_in_one_forward, 2) == [[1, 2, 4]] * 2


def encode_padded():
    """Evaluate an encoder whose fast path would read parameters of a layer that does not run."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    twin = nn.TransformerEncoder(layer, 2).eval()
    model = FSDP(copy.deepcopy(twin))
    padding = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    inputs = torch.randn(2, 5, 8)
    for _ in range(2):
        with torch.no_grad():
            expected = twin(inputs, src_key_padding_mask=padding)[~padding]
            actual = model(inputs, src_key_padding_mask=padding)[~padding]
        torch.testing.assert_close(actual, expected)
        loss = model(inputs, src_key_padding_mask=padding)[~padding].square().sum()
        loss.backward()
    return True


def test_a_padded_transformer_encoder_is_evaluated_as_in_one_process():
    assert all(run_on_shared_ranks(encode_padded, 2))


class Storing(nn.Module):
    """A module that returns None, and on request writes to its weight or raises."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.mode, self.stored = "store", None

    def forward(self, x):
        if self.mode == "write":
            with torch.no_grad():
                self.weight.zero_()
        if self.mode == "raise":
            raise ArithmeticError("on purpose")
        self.stored = x * self.weight


def return_nothing():
    """Train a module without an output; writes and errors are reported, and training goes on."""
    sharded = FSDP(nn.Sequential(Storing()))
    for mode, error, message in (
        ("write", RuntimeError, "wrote to 0.weight"),
        ("raise", ArithmeticError, "on purpose"),
    ):
        sharded.module[0].mode = mode
        with pytest.raises(error, match=message):
            sharded(torch.ones(4))
        sharded.module[0].mode = "store"
        sharded(2 * torch.ones(4))
        assert torch.equal(sharded.module[0].stored, 2 * torch.ones(4))
        assert sharded._num_running == 0
    return True


def test_a_module_that_returns_none_is_checked_and_can_run_after_an_error():
    assert all(run_on_shared_ranks(return_nothing, 2))


def export_weight():
    """Read a full weight as a NumPy array in the forward pass, first from a copy, then directly."""
    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    first = model.module[0]
    arrays = []
    copies = first.register_forward_pre_hook(
        lambda m, _: arrays.append(m.weight.detach().clone().numpy())
    )
    model(torch.ones(4))
    copies.remove()
    first.register_forward_pre_hook(lambda m, _: arrays.append(m.weight.detach().numpy()))
    with pytest.raises(
        RuntimeError, match=r"exported their memory during the forward.*call clone\(\) first"
    ):
        model(torch.ones(4))
    return True


def test_a_weight_that_is_exported_in_forward_is_refused_with_the_remedy():
    assert all(run_on_shared_ranks(export_weight, 2))


def refuse_max_norm():
    for module in (nn.Embedding(6, 4, max_norm=0.1), nn.EmbeddingBag(6, 4, max_norm=0.1)):
        for shard in ((nn.Linear, type(module)), (nn.Linear,)):
            model = FSDP(nn.Sequential(copy.deepcopy(module), nn.Linear(4, 4)), shard=shard)
            with pytest.raises(RuntimeError, match=r"backward pass wrote to 0\.weight"):
                model(torch.ones(2, 3, dtype=torch.long))
    return True


def test_embeddings_with_max_norm_are_refused():
    assert all(run_on_shared_ranks(refuse_max_norm, 2))


def write_on_one_rank():
    """Write elements through `.data` on a rank, also elements that it does not store."""
    model = nn.Sequential(Clamped(clamp_data))
    if dist.get_rank() == 1:
        model[0].write = lambda weight: None
    FSDP(model)(torch.ones(2, 4))


def test_a_write_is_reported_on_the_rank_that_writes():
    outcomes = try_ranks(write_on_one_rank, 2, timeout=DEADLINE)
    assert "rank 0: a forward or backward pass wrote to 0" in str(outcomes[0].error)


def build_normalized(stage):
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(4, 4), nn.BatchNorm1d(4))]
    model = nn.Sequential(*layers)
    if stage == 3:
        model = FSDP(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)
    return model, ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)


class WithBuffers(nn.Module):
    """Layers with buffers of several dtypes that every forward pass changes by its batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.max().double()))
        return self.layers(x)


def synchronize_buffers():
    """Compare buffers with those of torch's DDP after every forward pass of a training program."""
    rank = dist.get_rank()
    theirs = nn.parallel.DistributedDataParallel(WithBuffers())
    sharded = FSDP(WithBuffers())
    stage_1 = WithBuffers()
    stage_1.largest.fill_(rank)
    optimizer = ShardedOptimizer(stage_1.parameters(), torch.optim.SGD, module=stage_1, lr=0.1)
    assert stage_1.largest == 0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (theirs, sharded)] + [optimizer]
    modes = ["train", "train", "accumulate", "train", "evaluate", "evaluate", "train", "twice"]
    for step, mode in enumerate(modes):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = (rank + 1) * torch.randn(8, 4, generator=generator)
        for model in (theirs, sharded, stage_1):
            model.train(mode != "evaluate")
            owner = optimizer if model is stage_1 else model
            with owner.no_sync() if mode == "accumulate" else nullcontext():
                if mode == "evaluate":
                    with torch.no_grad():
                        model(x)
                else:
                    # A graph stays valid if a later forward pass synchronizes buffers.
                    outputs = [model(x) for _ in range(2 if mode == "twice" else 1)]
                    if model is theirs:
                        # In torch 2.11 only the graph of the latest forward is valid.
                        outputs = outputs[-1:]
                    sum(output.square().mean() for output in outputs).backward()
        for name, expected in get_buffers(theirs).items():
            for model in (sharded, stage_1):
                torch.testing.assert_close(get_buffers(model)[name], expected)
        for their_optimizer in optimizers if mode != "accumulate" else ():
            their_optimizer.step()
            their_optimizer.zero_grad()
    # A copy belongs to no optimizer, so its forward on one rank copies no buffers.
    if rank == 0:
        pickle.loads(pickle.dumps(copy.deepcopy(stage_1)))(x)
    alone = FSDP(WithBuffers(), forward_sync_buffers=False)
    for _ in range(2):
        alone(x)
    return get_buffers(alone)["layers.1.running_mean"]


def test_buffers_are_synchronized_before_a_forward_as_by_torchs_ddp():
    # Without synchronization, each rank has its own buffers.
    assert not torch.equal(*run_on_shared_ranks(synchronize_buffers, 2))


def get_buffers(model):
    return {name.removeprefix("module."): b.clone() for name, b in model.named_buffers()}


def save_buffers():
    folder = case_folder()
    rank = dist.get_rank()
    for stage in (1, 3):
        model, optimizer = build_normalized(stage)
        torch.manual_seed(1 + rank)
        for _ in range(3):
            with torch.no_grad():
                model((rank + 1) * 3 * torch.randn(8, 4) + 5 * rank)
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, get_buffers(model))
        assert not torch.equal(every[0]["1.running_mean"], every[1]["1.running_mean"])
        save_checkpoint(f"{folder}/checkpoint{stage}", model, optimizer)
        other, resumed = build_normalized(stage)
        load_checkpoint(f"{folder}/checkpoint{stage}", other, resumed)
        for name, buffer in get_buffers(other).items():
            assert torch.equal(buffer, every[0][name]), name
        save_unsynchronized_parameters(stage, f"{folder}/apart{stage}")
    return True


def save_unsynchronized_parameters(stage, path):
    """Save parameters that differ between ranks, with optimizer state that differs, too."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    apart = list(model[1:].parameters())
    for parameter in apart:
        parameter.data.fill_(dist.get_rank())
    optimizer = torch.optim.SGD(apart, lr=0.1, momentum=0.9)
    if stage == 3:
        model = FSDP(model, ignored_params=apart)
        sum(p.sum() * (1 + dist.get_rank()) for p in apart).backward()
        optimizer.step()
        save_checkpoint(path, model, optimizer)
    else:
        save_checkpoint(path, model, ShardedOptimizer(model[0].parameters(), torch.optim.SGD))
    saved = [apart[0].detach()[0, 0].clone()]
    dist.broadcast(saved[0], 0)
    load_checkpoint(path, model, optimizer if stage == 3 else None)
    saved *= len(apart)
    assert all((p == value).all() for p, value in zip(apart, saved, strict=True))
    if stage == 3:
        assert all((optimizer.state[p]["momentum_buffer"] == 1).all() for p in apart)


def test_all_buffers_are_saved_from_rank_0():
    assert all(run_on_shared_ranks(save_buffers, 2))


def write_in_forward(stage):
    """Renormalize and edit rows, with equal or different values on all ranks."""
    for same in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4, max_norm=1.0), nn.Linear(4, 1)).double()
        twin = copy.deepcopy(model)
        ours = ShardedOptimizer(
            model.parameters(), torch.optim.SGD, shard_gradients=stage == 2, lr=0.1
        )
        theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
        for _ in range(3):
            tokens = torch.tensor([0, 1, 2]) + (0 if same else 3 * dist.get_rank())
            model(tokens).square().mean().backward()
            twin(tokens).square().mean().backward()
            if not same:
                with pytest.raises(RuntimeError, match=r"of shape \(6, 4\) was written"):
                    ours.step()
                break
            for module, optimizer in ((model, ours), (twin, theirs)):
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    module[1].weight.clamp_(-0.3, 0.3)
            assert_alike(model, twin)
    return True


def write_data(stage, assign, first_step):
    """Write different values through `.data` on rank 0 only, as a load of a checkpoint may."""
    model = nn.Linear(4, 3)
    ours = ShardedOptimizer(model.parameters(), torch.optim.SGD, shard_gradients=stage == 2, lr=0.1)
    for number in range(first_step + 1):
        if number == first_step and dist.get_rank() == 0:
            if assign:
                model.weight.data = torch.ones(3, 4)
            else:
                model.weight.data.copy_(torch.ones(3, 4))
        model(torch.ones(2, 4)).sum().backward()
        if number == first_step:
            with pytest.raises(RuntimeError, match=r"of shape \(3, 4\) was written"):
                ours.step()
        else:
            ours.step()
        ours.zero_grad()
    return True


# Replaced data is noticed at every step, data written in place at steps 1, 2, 4, and so on.
@pytest.mark.parametrize(("assign", "first_step"), [(True, 2), (False, 3)])
@pytest.mark.parametrize("stage", [1, 2])
def test_data_that_one_rank_writes_is_refused(stage, assign, first_step):
    assert all(run_on_shared_ranks(write_data, 2, stage, assign, first_step))


@pytest.mark.parametrize("stage", [1, 2])
def test_values_that_ranks_write_differently_in_forward_are_refused(stage):
    assert all(run_on_shared_ranks(write_in_forward, 2, stage))
