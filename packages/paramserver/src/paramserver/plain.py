"""Training against a parameter server, as plainly as it can be said.

Workers pull a server's parameters and push gradients. Here they take turns in one process:
- a worker's clock is how many gradients it has pushed. It may pull while it is at most `bound`
  ahead of the slowest (Ho et al. 2013): 0 is bulk-synchronous, infinity asynchronous;
- bulk-synchronous training applies the mean gradient of a clock, and so equals training in one
  process; otherwise every gradient is an update when it arrives;
- DiLoCo (Douillard et al. 2023) is bulk-synchronous; its "gradient" is what local steps changed.
"""

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Loss = Callable[[nn.Module, int, int], Tensor]  # of a model, for a worker, at a step


class Server:
    """Parameters, the optimizer that updates them, and the clock of every worker."""

    def __init__(
        self, model: nn.Module, optimizer: MakeOptimizer, workers: int, bound: float = 0
    ) -> None:
        self.parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.optimizer = optimizer(self.parameters)
        self.clocks = [0] * workers
        self.bound = bound
        self.waiting: dict[int, list[Tensor]] = {}  # gradients of a step that is not complete

    def may_pull(self, worker: int) -> bool:
        """Whether `worker` is close enough to the slowest."""
        return self.clocks[worker] - min(self.clocks) <= self.bound

    def pull(self) -> list[Tensor]:
        """The parameters as they are now."""
        return [p.detach().clone() for p in self.parameters]

    def push(self, worker: int, gradients: list[Tensor]) -> None:
        """Apply a gradient, or the mean of all workers' when the last one has come."""
        self.clocks[worker] += 1
        if self.bound > 0:
            self._step(gradients)
            return
        self.waiting[worker] = gradients
        if len(self.waiting) == len(self.clocks):
            together = zip(*(self.waiting[w] for w in sorted(self.waiting)), strict=True)
            self._step([torch.stack(each).mean(0) for each in together])
            self.waiting.clear()

    def _step(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()


class Worker:
    """A copy of the model, with data of its own."""

    def __init__(self, number: int, model: nn.Module, loss_of_step: Loss) -> None:
        self.number, self.model, self.loss_of_step = number, copy.deepcopy(model), loss_of_step
        self.clock = 0

    def turn(self, server: Server) -> None:
        """Pull, compute, push; or nothing, while the others are too far behind."""
        if not server.may_pull(self.number):
            return
        self._load(server.pull())
        self.model.zero_grad()
        self.loss_of_step(self.model, self.number, self.clock).backward()
        self.clock += 1
        server.push(self.number, [p.grad for p in self.model.parameters() if p.grad is not None])

    def local_turn(self, server: Server, inner: torch.optim.Optimizer, steps: int) -> None:
        """DiLoCo, algorithm 1, lines 3 to 10: `steps` steps alone, then push the change."""
        pulled = server.pull()
        self._load(pulled)
        for _ in range(steps):
            inner.zero_grad()
            self.loss_of_step(self.model, self.number, self.clock).backward()
            inner.step()
            self.clock += 1
        changed = [old - p.detach() for old, p in zip(pulled, self.model.parameters(), strict=True)]
        server.push(self.number, changed)

    def _load(self, parameters: list[Tensor]) -> None:
        for mine, pulled in zip(self.model.parameters(), parameters, strict=True):
            mine.data.copy_(pulled)


def train(
    model: nn.Module, optimizer: MakeOptimizer, loss: Loss, *, workers: int, steps: int,
    bound: float = 0, speeds: Sequence[int] = ()) -> list[Tensor]:  # fmt: skip
    """`steps` steps of every worker; of turns, worker w has every `speeds[w]`-th."""
    server = Server(model, optimizer, workers, bound)
    group = [Worker(w, model, loss) for w in range(workers)]
    now = 0
    while any(worker.clock < steps for worker in group):
        for worker, every in zip(group, speeds or [1] * workers, strict=True):
            if worker.clock < steps and now % every == 0:
                worker.turn(server)
        now += 1
    return server.pull()


def train_diloco(
    model: nn.Module, inner: MakeOptimizer, outer: MakeOptimizer, loss: Loss, *, workers: int,
    rounds: int, steps: int) -> list[Tensor]:  # fmt: skip
    """`rounds` rounds of `steps` local steps of every worker; `outer` steps on the servers."""
    server = Server(model, outer, workers)
    group = [Worker(w, model, loss) for w in range(workers)]
    inners = [inner(worker.model.parameters()) for worker in group]  # live on from round to round
    for _ in range(rounds):
        for worker, optimizer in zip(group, inners, strict=True):
            worker.local_turn(server, optimizer, steps)
    return server.pull()
