"""Combinations of features that users rely on, at all stages, against training in one process."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worker_pool import case_folder, run_on_shared_ranks

sys.path.insert(0, str(Path(__file__).parent))

from zero import FSDP, ShardedOptimizer, load_checkpoint, save_checkpoint
from zero_training import assert_alike, draw_batch

STAGES = [1, 2, 3]


class Experts(nn.Module):
    """A layer of experts, of which each call uses some; the convolution has 3-D weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(1, 3, 2)
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.head = nn.Linear(12, 2)
        self.double()

    def forward(self, inputs, used):
        hidden = self.convolution(inputs[:, None]).flatten(1)
        for index in used:
            hidden = hidden + self.experts[index](hidden).tanh()
        return self.head(hidden)


def shard_models(stage, models, cls=torch.optim.AdamW, prefetch=1):
    """Return the models at a stage, and one optimizer of all trainable parameters."""
    if stage == 3:
        models = [FSDP(model, prefetch=prefetch) for model in models]
    parameters = [p for model in models for p in model.parameters() if p.requires_grad]
    if stage == 3:
        return models, cls(parameters, lr=0.05)
    return models, ShardedOptimizer(parameters, cls, shard_gradients=stage == 2, lr=0.05)


def run_both(run, model, twin, step):
    """Run this rank's backward passes on `model`, and all ranks' passes on `twin`."""
    world = dist.get_world_size()
    run(model, step, draw_batch(step, dist.get_rank()), 1.0)
    for rank in range(world):
        run(twin, step, draw_batch(step, rank), 1 / world)


def run_two_losses(model, step, inputs, factor):
    """Run two backward passes through different experts, after passes of evaluation."""
    first = model(inputs, [step % 4]).square().mean()
    second = model(inputs + 1, [(step + 1) % 4, (step + 2) % 4]).abs().mean()
    model.eval()
    with torch.no_grad():
        expected = model(inputs, [3, 0])
    with torch.inference_mode():
        assert torch.equal(model(inputs, [3, 0]), expected)
    model.train()
    (first * factor).backward()
    (second * factor).backward()


def train_experts(stage, prefetch):
    twin = Experts()
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.05)
    [model], ours = shard_models(stage, [Experts()], prefetch=prefetch)
    for step in range(5):
        run_both(run_two_losses, model, twin, step)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return assert_alike(model, twin)


@pytest.mark.parametrize(("stage", "prefetch"), [(1, 1), (2, 1), (3, 0), (3, 3)])
def test_two_losses_of_some_experts_with_evaluation_before_the_backward_pass(stage, prefetch):
    assert all(run_on_shared_ranks(train_experts, 2, stage, prefetch))


def build_partly_frozen(cls):
    model = Experts()
    model.experts[1].requires_grad_(False)
    for parameter in model.parameters():
        if cls is torch.optim.Muon and parameter.dim() != 2:
            parameter.requires_grad_(False)
    return model


def run_all_experts(model, step, inputs, factor):
    (model(inputs, [0, 1, 2, 3]).square().mean() * factor).backward()


def resume_at_another_stage(cls, first, second):
    twin = build_partly_frozen(cls)
    theirs = cls([p for p in twin.parameters() if p.requires_grad], lr=0.05)
    folder = case_folder()
    for stage, is_resumed in ((first, False), (second, True)):
        [model], ours = shard_models(stage, [build_partly_frozen(cls)], cls)
        if is_resumed:
            load_checkpoint(f"{folder}/saved", model, ours)
        for step in range(2):
            run_both(run_all_experts, model, twin, step)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_alike(model, twin)
        save_checkpoint(f"{folder}/saved", model, ours)
        del ours
    return True


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 2)])
def test_a_partly_frozen_model_resumes_at_another_stage(cls, first, second):
    assert all(run_on_shared_ranks(resume_at_another_stage, 2, cls, first, second))


def scale_losses(stage):
    """Train two models with one optimizer and a GradScaler; one rank's loss overflows once."""
    twins = [Experts(), Experts()]
    models, ours = shard_models(stage, [Experts(), Experts()])
    theirs = torch.optim.AdamW([p for twin in twins for p in twin.parameters()], lr=0.05)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    world = dist.get_world_size()

    def run(some, scaler, step, rank):
        inputs = draw_batch(step, rank)
        loss = sum(model(inputs, [(step + i) % 4]).square().mean() for i, model in enumerate(some))
        factor = float("inf") if step == 2 and rank == world - 1 else 1.0
        return scaler.scale(loss * factor)

    for step in range(5):
        run(models, scalers[0], step, dist.get_rank()).backward()
        for rank in range(world):
            (run(twins, scalers[1], step, rank) / world).backward()
        pairs = zip((models, twins), (ours, theirs), scalers, strict=True)
        for some, optimizer, scaler in pairs:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p for model in some for p in model.parameters()], 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    return all(assert_alike(*pair) for pair in zip(models, twins, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_several_models_under_one_optimizer_skip_the_same_steps(stage):
    assert all(run_on_shared_ranks(scale_losses, 2, stage))
