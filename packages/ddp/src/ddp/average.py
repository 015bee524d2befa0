"""Averages that are right where ranks do not count alike: sums, and means by weight.

A mean over ranks of means over tokens is not the mean over tokens, if ranks have different numbers
of them. With a weight, the gradient g of each backward pass counts w times:

    .grad = sum of w g over ranks and passes / sum of w over ranks and passes

What a synchronized pass left in `.grad` is the same on every rank. It is kept as it is: before
something is added to it, it becomes the share that, summed over the ranks, is itself again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.collective import Link
from ddp.consistency.blame import Blame

# "ranks", "sum", or a function that is called in each backward pass: how much does it count?
Average = str | Callable[[], float | Tensor]


class Weighing:
    """What goes before each gradient's accumulation, for any average but that over the ranks."""

    def __init__(self, average: Average, link: Link, opens: Callable[[], bool]) -> None:
        self._weight = average if callable(average) else None
        self._link, self._opens = link, opens
        self._now: float | None = None
        self._since_last_step = 0.0
        self._share = 1.0
        self._in_step = False
        self._nodes: list[Any] = []
        # Parameters whose `.grad` came from a synchronized pass.
        self._synchronized: set[nn.Parameter] = set()

    def hook(self, parameter: nn.Parameter) -> Any:
        """Have its gradients weighed before they are added to `.grad`; returns what ends that.

        A hook on the node that adds, not on the parameter: that would also run for
        `torch.autograd.grad`, which adds nothing and need not be called on every rank.
        """
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        # The parameter forgets its node unless somebody else remembers it.
        self._nodes.append(node)
        return node.register_prehook(lambda gradients: (self.weigh(parameter, *gradients),))

    def weigh(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """What goes before the accumulation of `gradient`: what is added to `.grad` instead."""
        if not self._in_step:
            self._opens()
        self.make_room(parameter)
        return gradient * self._weight_now() if self._weight else gradient

    def make_room(self, parameter: nn.Parameter) -> None:
        """Turn an average that lies in `.grad` into this rank's share of it."""
        if parameter not in self._synchronized:
            return
        self._synchronized.discard(parameter)
        if parameter.grad is None:
            return
        if self._weight and not self._in_step:
            if bool(parameter.grad.any()):
                raise RuntimeError(
                    "a pass in no_sync() adds to gradients that are averaged already, but what it "
                    "counts for is not known yet; zero the gradients first"
                )
            return
        with torch.no_grad():
            parameter.grad.mul_(1 / (self._link.world * self._share))

    def begin(self, blame: Blame, device: torch.device, *, taking_part: bool) -> float:
        """Open a step; return what each gradient is multiplied by before the sum."""
        self._in_step = True
        if not self._weight:
            return 1.0
        if torch._C._current_graph_task_id() != -1:
            # The backward pass that opens the step counts, too.
            self._weight_now()
        total = torch.tensor([self._since_last_step if taking_part else 0.0], device=device)
        total = total.double()
        self._since_last_step = 0.0
        doing = "the sum of the weights"
        with blame.naming(doing):
            handle = dist.all_reduce(total, group=self._link.group, async_op=True)
        blame.wait(handle, doing, poll=device.type == "cpu")
        if not float(total) > 0:
            raise ValueError(
                f"the weights of all ranks add up to {float(total)}; use positive ones"
            )
        self._share = 1 / float(total)
        return self._share

    def end(self, parameters: Any) -> None:
        """Close a step after which the gradients of `parameters` are averages."""
        self._in_step = False
        self._synchronized = {p for p in parameters if p.grad is not None}

    def pass_ended(self) -> None:
        """The next backward pass has a weight of its own."""
        self._now = None

    def _weight_now(self) -> float:
        if self._now is None:
            assert self._weight is not None
            self._now = float(self._weight())
            self._since_last_step += self._now
        return self._now


def check_average(average: Average) -> None:
    """Raise ValueError for what is no average."""
    if not callable(average) and average not in ("ranks", "sum"):
        raise ValueError(
            f'average is {average!r}; it must be "ranks", "sum", or a function that returns what '
            "a backward pass of this rank counts for, such as its number of tokens"
        )
