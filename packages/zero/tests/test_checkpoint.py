"""Any stage at any world size resumes exactly from any other's checkpoint."""

from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from worker_pool import run_ranks
from zero import FSDP, ShardedOptimizer, load_checkpoint, save_checkpoint
from zero.planner import boxes

DEADLINE = 300.0


class Tiny(nn.Module):
    """Odd shapes, a tied weight, a buffer and a 0-dimensional parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.conv = nn.Conv1d(5, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.norm(self.conv(self.embed(tokens).mT)).mT
        return self.head(x * self.scale)


def build(stage, seed, name):
    torch.manual_seed(seed)
    model = Tiny()
    if stage == 3:
        model = FSDP(model, shard=(nn.Linear, nn.Embedding, nn.Conv1d))
    optimizer_cls = getattr(torch.optim, name)
    decay = [p for n, p in model.named_parameters() if "norm" not in n]
    rest = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    if stage in (1, 2):
        options = {"lr": 0.01, "shard_gradients": stage == 2, "bucket_size_mb": 64 / 2**20}
        return model, ShardedOptimizer(groups, optimizer_cls, **options)
    return model, optimizer_cls(groups, lr=0.01)


def train(model, optimizer, steps):
    # Every rank has the whole batch, so that the world size does not change the average.
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens, targets = (torch.randint(11, (4, 6), generator=generator) for _ in range(2))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()


def whole(model):
    inner = model.module if isinstance(model, FSDP) else model
    state = {n: b.clone() for n, b in inner.named_buffers()}
    if isinstance(model, FSDP):
        return state | model.gather_full_params()
    return state | {
        n: p.detach().clone() for n, p in inner.named_parameters(remove_duplicate=False)
    }


def save_at(path, stage, name, async_op):
    model, optimizer = build(stage, 0, name)
    train(model, optimizer, range(3))
    saving = save_checkpoint(path, model, optimizer, extra={"step": 3}, async_op=async_op)
    saved = whole(model)
    train(model, optimizer, range(3, 5))
    if saving:
        saving.wait()
    return saved, whole(model)


def load_at(path, stage, name):
    model, optimizer = build(stage, 1, name)
    extra = load_checkpoint(path, model, optimizer)
    loaded = whole(model)
    train(model, optimizer, range(extra["step"], 5))
    return loaded, whole(model)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ((1, 4), (1, 3), "AdamW"),
        ((2, 3), (3, 4), "NAdam"),
        ((3, 4), (2, 2), "AdamW"),
        ((3, 2), (0, 1), "SGD"),
        ((0, 1), (3, 3), "Adam"),
        ((1, 2), (2, 3), "Adafactor"),
    ],
)
def test_resuming_equals_never_having_stopped(tmp_path, before, after, name):
    path = str(tmp_path / "checkpoint")
    options = before[0], name, before[1] == 4
    saved, finished = run_ranks(save_at, before[1], path, *options, timeout=DEADLINE)[0]
    for loaded, resumed in run_ranks(load_at, after[1], path, after[0], name, timeout=DEADLINE):
        for key, value in saved.items():
            assert torch.equal(loaded[key], value), key
        for key, value in finished.items():
            torch.testing.assert_close(resumed[key], value, rtol=1e-6, atol=1e-6)


def part_of_the_loss(model, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens, targets = (torch.randint(11, (2, 6), generator=generator) for _ in range(2))
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build_plain(stage, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 11))
    if stage == 3:
        model = FSDP(model)
    if stage in (0, 3):
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"lr": 0.01, "shard_gradients": stage == 2, "bucket_size_mb": 64 / 2**20}
    return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)


def never_stopped():
    """Unsharded: three steps on the sum of four parts, then three on the sum of three."""
    model, optimizer = build_plain(0, 0)
    for step in range(6):
        world = 4 if step < 3 else 3
        parameters = list(model.parameters())
        parts = [
            torch.autograd.grad(part_of_the_loss(model, step, r), parameters) for r in range(world)
        ]
        for parameter, *gradients in zip(parameters, *parts, strict=True):
            total = gradients[0].clone()
            for gradient in gradients[1:]:
                total += gradient
            parameter.grad = total / world
        optimizer.step()
    return whole(model)


def some_steps(path, stage, resumed):
    model, optimizer = build_plain(stage, int(resumed))
    first = load_checkpoint(path, model, optimizer)["step"] if resumed else 0
    for step in range(first, first + 3):
        optimizer.zero_grad()
        part_of_the_loss(model, step, dist.get_rank()).backward()
        optimizer.step()
    save_checkpoint(path, model, optimizer, extra={"step": first + 3})
    return whole(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_four_ranks_then_three_are_bit_equal_to_never_having_stopped(tmp_path, stage):
    path = str(tmp_path / "checkpoint")
    run_ranks(some_steps, 4, path, stage, False, timeout=DEADLINE)
    for resumed in run_ranks(some_steps, 3, path, stage, True, timeout=DEADLINE):
        for name, value in never_stopped().items():
            assert torch.equal(resumed[name], value), name


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_cover_a_run_of_elements_exactly_and_in_order(shape, data):
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    elements = torch.arange(numel).view(shape)
    covered = []
    for offsets, sizes in boxes(shape, start, stop):
        index = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        covered += elements[index].flatten().tolist()
    assert covered == list(range(start, stop))
    assert len(list(boxes(shape, start, stop))) <= max(1, 2 * len(shape) - 1)
