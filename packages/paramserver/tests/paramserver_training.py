"""A small training problem that test processes import."""

import ast
import os
import sys
import threading
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def build_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def draw_batch(step, worker, size=4):
    generator = torch.Generator().manual_seed(1000 * step + worker)
    return (
        torch.randn(size, 5, generator=generator, dtype=torch.float64),
        torch.randn(size, 3, generator=generator, dtype=torch.float64),
    )


def train(worker, steps):
    """Train `steps` steps on this worker's batches and return the versions that it pulled."""
    versions = []
    for step in range(steps):
        versions.append(worker.pull())
        inputs, targets = draw_batch(step, worker.rank)
        F.mse_loss(worker.module(inputs), targets).backward()
        worker.push()
    return versions


def wait_until_started(folder, worker, count):
    """Return when `count` workers have called this function.

    A process may take seconds to start on a busy machine. Workers that start together are never
    silent for long, so a short timeout suffices.
    """
    (folder / f"started-{worker.rank}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob("started-*"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def train_alone(steps, workers, optimizer):
    """Return the parameters after the same steps in one process, on the batches of all workers."""
    module = build_model()
    opt = optimizer(module.parameters())
    for step in range(steps):
        batches = [draw_batch(step, worker) for worker in range(workers)]
        inputs = torch.cat([x for x, _ in batches])
        targets = torch.cat([y for _, y in batches])
        opt.zero_grad()
        F.mse_loss(module(inputs), targets).backward()
        opt.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def train_to_the_end(worker, steps):
    """Train `steps` steps and finish."""
    with worker:
        train(worker, steps)


def run_in_threads(*calls):
    """Call functions in threads, and raise the first error."""
    errors = []

    def call_and_store_error(call):
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call_and_store_error, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def fail(worker, rank, how):
    """Train, but worker `rank` fails after two steps."""
    train(worker, 2)
    if worker.rank == rank:
        if how == "raise":
            raise ZeroDivisionError("seven")
        if how == "die":
            os._exit(3)
        if how.startswith("exit"):
            sys.exit(ast.literal_eval(how[5:]))
        time.sleep(30)
    return train(worker, 3)


def assert_equal_parameters(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-13)
