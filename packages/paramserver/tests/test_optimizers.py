"""Schedules, groups, clipping and master weights train as in one process."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

sys.path.insert(0, str(Path(__file__).parent))

from paramserver import (
    BulkSynchronous,
    LocalSteps,
    OptimizerSpec,
    Server,
    Worker,
    partition,
)
from paramserver.journal.disk_journal import DiskJournal
from paramserver_training import assert_equal_parameters, build_model, draw_batch

ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.5)
SGD = torch.optim.SGD
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
WORKERS = 2


def disable_decay(name, shape):
    return {"weight_decay": 0.0} if len(shape) < 2 or name.endswith("bias") else {}


def compute_warmup(step):
    return min(1.0, (step + 1) / 4)


def build_sequential(optimizer):
    linear = lr_scheduler.LinearLR(optimizer, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    return lr_scheduler.SequentialLR(optimizer, [linear, cosine], [3])


SCHEDULERS = {
    "function": partial(lr_scheduler.LambdaLR, lr_lambda=compute_warmup),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=6),
    "steps": partial(lr_scheduler.MultiStepLR, milestones=[2, 5], gamma=0.3),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=20),
    "sequential": build_sequential,
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
}
FULL = OptimizerSpec(ADAMW, SCHEDULERS["sequential"], disable_decay, max_norm=0.3)


def compute_half_cosine(step):
    return np.float32(0.5) * (1 + np.cos(step / 8))


NUMPY = OptimizerSpec(
    partial(torch.optim.Adam, lr=np.float32(0.1), betas=tuple(np.array([0.8, 0.9]))),
    partial(lr_scheduler.LambdaLR, lr_lambda=compute_half_cosine),
)


def create_servers(module, spec, policy=None, servers=1, **options):
    parameters = dict(module.named_parameters())
    options = {"workers": WORKERS, "elastic": True} | options
    return [
        Server(parameters, spec, policy, shard=shard, **options)
        for shard in partition(parameters, servers)
    ]


def compute_loss(module, step, worker):
    inputs, targets = draw_batch(step, worker)
    dtype = next(module.parameters()).dtype
    return F.mse_loss(module(inputs.to(dtype)), targets.to(dtype))


def train(servers, steps, spec=None, first=0, modules=None):
    """Train the workers in rounds of one step, in one thread; return the first worker's module."""
    modules = modules or [build_model() for _ in range(WORKERS)]
    workers = [
        Worker(module, servers, rank=rank, optimizer=spec) for rank, module in enumerate(modules)
    ]
    for step in range(first, first + steps):
        for worker in workers:
            worker.pull()
            compute_loss(worker.module, step, worker.rank).backward()
        for worker in workers:
            worker.push()
    workers[0].pull()
    return dict(modules[0].named_parameters())


def train_alone(spec, steps, module=None):
    """Train in one process with torch only, on the mean gradient of the workers."""
    module = module or build_model()
    groups = [{"params": [p], **disable_decay(n, p.shape)} for n, p in module.named_parameters()]
    optimizer = spec.optimizer(groups if spec.groups else module.parameters())
    scheduler = spec.scheduler(optimizer) if spec.scheduler else None
    for step in range(steps):
        optimizer.zero_grad()
        for worker in range(WORKERS):
            (compute_loss(module, step, worker) / WORKERS).backward()
        if spec.max_norm:
            nn.utils.clip_grad_norm_(module.parameters(), spec.max_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return dict(module.named_parameters())


@pytest.mark.parametrize(
    ("name", "servers"),
    [
        *((name, 3) for name in ("function", "steps", "one cycle", "sequential")),
        ("sequential", 1),
        pytest.param("cosine", 3, marks=pytest.mark.exhaustive),
        pytest.param("restarts", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_a_schedule_on_the_servers_equals_one_process(name, servers):
    spec = OptimizerSpec(MOMENTUM, SCHEDULERS[name])
    trained = train(create_servers(build_model(), spec, servers=servers), 8)
    assert_equal_parameters(trained, train_alone(spec, 8))


def test_servers_of_one_process_do_not_share_a_learning_rate_that_is_a_tensor():
    lr = torch.tensor(0.05, dtype=torch.float64)
    schedule = partial(lr_scheduler.ExponentialLR, gamma=0.5)
    spec = OptimizerSpec(partial(torch.optim.Adam, lr=lr), schedule)
    trained = train(create_servers(build_model(), spec, servers=3), 8)
    assert lr.item() == 0.05
    assert_equal_parameters(trained, train_alone(spec, 8))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_groups_by_name_equal_one_process_wherever_tensors_are_split(servers):
    spec = OptimizerSpec(ADAMW, groups=disable_decay)
    trained = train(create_servers(build_model(), spec, servers=servers), 5)
    assert_equal_parameters(trained, train_alone(spec, 5))
    decayed = train_alone(OptimizerSpec(ADAMW), 5)
    assert (trained["0.bias"] - decayed["0.bias"]).abs().max() > 1e-3


def test_rates_that_differ_in_the_last_digits_belong_to_different_groups():
    def rates(name, _):
        return {"lr": torch.tensor(0.01) if name.endswith("bias") else torch.tensor(0.0100001)}

    (server,) = create_servers(build_model(), OptimizerSpec(ADAMW, groups=rates))
    groups = server.core.replica._updater.optimizer.param_groups
    assert sorted(group["lr"].item() for group in groups) == pytest.approx([0.01, 0.0100001], 1e-6)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_clipping_by_the_global_norm_equals_one_process(servers):
    trained = train(create_servers(build_model(), FULL, servers=servers), 8)
    assert_equal_parameters(trained, train_alone(FULL, 8))
    unclipped = train_alone(replace(FULL, max_norm=None), 8)
    assert (trained["0.weight"] - unclipped["0.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("policy", [BulkSynchronous(), LocalSteps(1, partial(SGD, lr=1.0))])
@pytest.mark.parametrize(
    ("dtype", "gradient"), [(torch.float32, 1e25), (torch.bfloat16, 1e25), (torch.float16, 6e4)]
)
def test_gradients_whose_squares_overflow_are_clipped(policy, dtype, gradient):
    """The server would otherwise stop at an accepted push, and again at each restart."""
    module = nn.Linear(4, 1, bias=False, dtype=dtype)
    nn.init.zeros_(module.weight)
    spec = OptimizerSpec(partial(SGD, lr=1.0), max_norm=1.0)
    (server,) = create_servers(module, spec, policy, workers=1)
    worker = Worker(module, server, optimizer=spec if isinstance(policy, LocalSteps) else None)
    for _ in range(2):
        worker.pull()
        module.weight.grad = torch.full_like(module.weight, gradient)
        worker.push()
    worker.finish()
    # Each update has norm 1.
    torch.testing.assert_close(module.weight.detach(), torch.full((1, 4), -1.0, dtype=dtype))


def test_sparse_gradients_of_local_steps_are_clipped():
    module = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(module.weight)
    spec = OptimizerSpec(partial(SGD, lr=1.0), max_norm=1.0)
    (server,) = create_servers(module, SGD, LocalSteps(2), workers=1)
    worker = Worker(module, server, optimizer=spec)
    worker.pull()
    (1e25 * module(torch.tensor([1, 1, 2]))).sum().backward()
    worker.push()
    rows = torch.tensor([0.0, -2.0, -1.0, 0.0]) / 10**0.5
    torch.testing.assert_close(module.weight.detach(), rows[:, None].expand(4, 2))


@pytest.mark.parametrize(
    ("spec", "snapshot"),
    [
        (FULL, True),
        (OptimizerSpec(MOMENTUM, SCHEDULERS["function"]), False),
        (NUMPY, True),
        *(pytest.param(spec, False, marks=pytest.mark.exhaustive) for spec in (FULL, NUMPY)),
    ],
)
def test_a_schedule_is_resumed_exactly_from_a_journal(tmp_path, spec, snapshot):
    def opened():
        (server,) = create_servers(build_model(), spec)
        journal = DiskJournal(tmp_path)
        journal.load(server.core)
        return server, journal

    server, journal = opened()
    train([server], 5)
    if snapshot:
        journal.snapshot(server.core)
    journal.close()
    server, journal = opened()
    resumed = train([server], 6, first=5)
    journal.close()
    undisturbed = train(create_servers(build_model(), spec), 11)
    for name, parameter in resumed.items():
        assert torch.equal(parameter, undisturbed[name])


def test_a_journal_of_another_schedule_or_group_is_refused(tmp_path):
    cosine = SCHEDULERS["cosine"]
    (server,) = create_servers(build_model(), OptimizerSpec(ADAMW, cosine, disable_decay, 0.3))
    DiskJournal.start(tmp_path, server.core).close()
    longer = partial(lr_scheduler.CosineAnnealingLR, T_max=7)
    others = {
        "scheduler CosineAnnealingLR": OptimizerSpec(ADAMW, longer, disable_decay, 0.3),
        "options of 0.bias": OptimizerSpec(ADAMW, cosine, max_norm=0.3),
        "max_norm 0.2": OptimizerSpec(ADAMW, cosine, disable_decay, max_norm=0.2),
        "options of 0.weight": OptimizerSpec(
            partial(torch.optim.AdamW, lr=np.float64(0.06), weight_decay=0.5),
            cosine,
            disable_decay,
            0.3,
        ),
    }
    for difference, other in others.items():
        with pytest.raises(ValueError, match=f"expected a journal with {difference}"):
            DiskJournal(tmp_path).load(create_servers(build_model(), other)[0].core)


def test_workers_of_local_steps_use_schedule_groups_and_clipping():
    outer = partial(torch.optim.SGD, lr=1.0)  # with one worker, training is local training
    module = build_model()
    (server,) = create_servers(module, FULL, LocalSteps(4, outer), workers=1)
    with Worker(module, server, optimizer=FULL) as worker:
        for step in range(8):
            worker.pull()
            sum(compute_loss(module, step, w) / WORKERS for w in range(WORKERS)).backward()
            worker.push()
    assert_equal_parameters(dict(module.named_parameters()), train_alone(FULL, 8))


@pytest.mark.parametrize(
    ("dtype", "servers"),
    [
        *((torch.float32, 1), (torch.bfloat16, 2)),
        pytest.param(torch.float32, 2, marks=pytest.mark.exhaustive),
        pytest.param(torch.bfloat16, 1, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_master_weights_equal_one_process_with_master_weights(dtype, servers):
    spec = OptimizerSpec(ADAMW, SCHEDULERS["cosine"], disable_decay, master_dtype=torch.float64)
    modules = [build_model(dtype) for _ in range(WORKERS)]
    trained = train(create_servers(modules[0], spec, servers=servers), 20, modules=modules)
    module = build_model(dtype)
    masters = [nn.Parameter(p.detach().double()) for p in module.parameters()]
    names = [name for name, _ in module.named_parameters()]
    optimizer = ADAMW(
        [{"params": [p], **disable_decay(n, p.shape)} for n, p in zip(names, masters, strict=True)]
    )
    scheduler = spec.scheduler(optimizer)
    for step in range(20):
        gradients = [
            torch.autograd.grad(compute_loss(module, step, w), module.parameters())
            for w in range(WORKERS)
        ]
        for master, *parts in zip(masters, *gradients, strict=True):
            master.grad = sum(part.double() for part in parts) / WORKERS
        optimizer.step()
        scheduler.step()
        for parameter, master in zip(module.parameters(), masters, strict=True):
            parameter.data.copy_(master)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-7, atol=1e-7)


def test_autocast_equals_one_process():
    def loss(module, step, worker):
        with torch.autocast("cpu", torch.bfloat16):
            return compute_loss(module, step, worker)

    (server,) = create_servers(build_model(torch.float32), MOMENTUM, BulkSynchronous())
    workers = [Worker(build_model(torch.float32), server, rank=rank) for rank in range(WORKERS)]
    alone = build_model(torch.float32)
    optimizer = MOMENTUM(alone.parameters())
    for step in range(5):
        for worker in workers:
            worker.pull()
            loss(worker.module, step, worker.rank).backward()
        for worker in workers:
            worker.push()
        optimizer.zero_grad()
        (sum(loss(alone, step, w) for w in range(WORKERS)) / WORKERS).backward()
        optimizer.step()
    workers[0].pull()
    for ours, expected in zip(workers[0].module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def build_groups_by_dimension(parameters):
    by_dimension = {}
    for parameter in parameters:
        by_dimension.setdefault(parameter.dim(), []).append(parameter)
    return ADAMW([{"params": group} for group in by_dimension.values()])


@pytest.mark.parametrize(
    ("spec", "options", "error"),
    [
        (build_groups_by_dimension, {"servers": 3}, r"one parameter group.*OptimizerSpec\(groups="),
        (
            OptimizerSpec(ADAMW, groups=lambda *_: {"weight_decy": 0.0}),
            {},
            "options of AdamW, which are lr, .*got weight_decy",
        ),
        (
            OptimizerSpec(ADAMW, groups=lambda name, _: {"lr": 0} if "ln" in name else {}),
            {},
            r"expected `groups` to return options for some parameter, got none for any of 0\.wei",
        ),
        (
            OptimizerSpec(MOMENTUM, lambda _: lr_scheduler.StepLR(MOMENTUM([torch.ones(1)]), 1)),
            {},
            "expected the factory to pass its argument to the scheduler",
        ),
        (
            lambda _: SGD(build_model().parameters()),
            {},
            "pass exactly its argument to the optimizer",
        ),
        (lambda p: SGD(list(p)[1:]), {}, "pass exactly its argument to the optimizer"),
        (
            MOMENTUM,
            {"policy": LocalSteps(4, OptimizerSpec(MOMENTUM, max_norm=1.0), fragments=2)},
            "updates of all parameters with max_norm.*2 fragments.*clip_grad_norm_ on each worker",
        ),
    ],
)
def test_rules_that_would_be_applied_to_parts_or_ignored_are_refused(spec, options, error):
    with pytest.raises(ValueError, match=error):
        create_servers(spec=spec, **{"module": build_model()} | options)


def test_a_worker_of_local_steps_refuses_master_weights():
    (server,) = create_servers(build_model(), MOMENTUM, LocalSteps(4))
    with pytest.raises(ValueError, match=r"without master_dtype.*torch\.autocast"):
        Worker(build_model(), server, optimizer=OptimizerSpec(ADAMW, master_dtype=torch.float64))
    with pytest.raises(ValueError, match="expected max_norm > 0, or None, got 0"):
        OptimizerSpec(ADAMW, max_norm=0)
    with pytest.raises(ValueError, match="expected a floating-point master_dtype, or None, got"):
        OptimizerSpec(ADAMW, master_dtype=torch.int32)
