"""Minimal implementation of training with a parameter server.

Workers pull a server's parameters and push gradients. In this file they alternate in one process.
- A worker's clock is the number of its pushes. A worker may pull while it is at most `bound` clocks
  ahead of the slowest worker (Ho et al. 2013). If `bound` is infinite, training is asynchronous.
- With bound 0, training is bulk-synchronous: the server applies the mean gradient of each clock, so
  the result equals training in one process. Otherwise it applies each gradient when it arrives.
- DiLoCo (Douillard et al. 2023) is bulk-synchronous. Its gradient is the change of local steps.
"""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Module

Factory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]  # parameters -> optimizer
Loss = Callable[[Module, int, int], Tensor]  # (model, worker, step) -> loss


class Server:
    """Parameters, the optimizer that updates them, and the clock of every worker."""

    def __init__(self, model: Module, optimizer: Factory, workers: int, bound: float = 0) -> None:
        self.parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.optimizer = optimizer(self.parameters)
        self.clocks = [0] * workers
        self.bound = bound
        self.pending_gradients: dict[int, list[Tensor]] = {}  # by worker, for the current clock

    def may_pull(self, worker: int) -> bool:
        """Return True if `worker` is at most `bound` clocks ahead of the slowest worker."""
        return self.clocks[worker] - min(self.clocks) <= self.bound

    def pull(self) -> list[Tensor]:
        """Return a copy of the current parameters."""
        return [p.detach().clone() for p in self.parameters]

    def push(self, worker: int, gradients: list[Tensor]) -> None:
        """Apply gradients; with a bound of 0, the mean over all workers once all have pushed."""
        self.clocks[worker] += 1
        if self.bound > 0:
            self._step(gradients)
            return
        self.pending_gradients[worker] = gradients
        if len(self.pending_gradients) == len(self.clocks):
            pushed = [self.pending_gradients[w] for w in range(len(self.clocks))]
            self._step([torch.stack(column).mean(0) for column in zip(*pushed, strict=True)])
            self.pending_gradients.clear()

    def _step(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()


class Worker:
    """A replica of the model that trains on this worker's data."""

    def __init__(self, number: int, model: Module, loss_of_step: Loss) -> None:
        self.number = number
        self.model = copy.deepcopy(model)
        self.loss_of_step = loss_of_step
        self.num_steps = 0

    def step(self, server: Server) -> None:
        """Pull, compute a gradient and push it; do nothing if this worker may not pull yet."""
        if not server.may_pull(self.number):
            return
        self._load(server.pull())
        self.model.zero_grad()
        self.loss_of_step(self.model, self.number, self.num_steps).backward()
        self.num_steps += 1
        parameters = self.model.parameters()
        # A missing gradient counts as zero.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        server.push(self.number, gradients)

    def take_local_steps(self, server: Server, inner: torch.optim.Optimizer, steps: int) -> None:
        """Take `steps` local steps, then push the change (DiLoCo, algorithm 1, lines 3 to 10)."""
        pulled = server.pull()
        self._load(pulled)
        for _ in range(steps):
            inner.zero_grad()
            self.loss_of_step(self.model, self.number, self.num_steps).backward()
            inner.step()
            self.num_steps += 1
        pairs = zip(pulled, self.model.parameters(), strict=True)
        server.push(self.number, [old - new.detach() for old, new in pairs])

    def _load(self, parameters: list[Tensor]) -> None:
        for parameter, pulled in zip(self.model.parameters(), parameters, strict=True):
            parameter.data.copy_(pulled)


def train(
    model: Module, optimizer: Factory, loss: Loss, *, workers: int, steps: int, bound: float = 0
) -> list[Tensor]:
    """Train until every worker has taken `steps` steps; return the server's parameters."""
    server = Server(model, optimizer, workers, bound)
    all_workers = [Worker(w, model, loss) for w in range(workers)]
    while any(worker.num_steps < steps for worker in all_workers):
        for worker in all_workers:
            if worker.num_steps < steps:
                worker.step(server)
    return server.pull()


def train_diloco(
    model: Module, inner: Factory, outer: Factory, loss: Loss, workers: int, steps: int, rounds: int
) -> list[Tensor]:
    """Train for `rounds` rounds of `steps` local steps per worker; return the parameters."""
    server = Server(model, outer, workers)
    all_workers = [Worker(w, model, loss) for w in range(workers)]
    optimizers = [inner(w.model.parameters()) for w in all_workers]  # their state is never reset
    for _ in range(rounds):
        for worker, optimizer in zip(all_workers, optimizers, strict=True):
            worker.take_local_steps(server, optimizer, steps)
    return server.pull()
