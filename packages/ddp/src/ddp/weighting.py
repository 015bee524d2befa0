"""Sums and weighted means of gradients, for ranks that do not count equally."""

# Note [Weighted averages]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# If ranks have different numbers of tokens, the mean over ranks of means over tokens is not the
# mean over all tokens. With a weight w, the gradient g of each backward pass counts w times, and
# not at all if w is 0, even if it is NaN:
#
#     .grad = sum of w g over ranks and passes / sum of w over ranks and passes
#
# A synchronized pass leaves the same average in `.grad` of every rank. Before anything is added to
# it, each rank divides it by the factor that the next sum over ranks multiplies it by. The sum then
# contains the old average exactly once.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.consistency.failure_attribution import FailureAttribution
from ddp.process_group import ReduceGroup

#: "ranks", "sum", or a function that returns the weight of the current backward pass.
Average = str | Callable[[], float | Tensor]


class GradientWeighting:
    """Weights of gradients for every average except "ranks". See Note [Weighted averages]."""

    def __init__(
        self, average: Average, group: ReduceGroup, try_open_step: Callable[[], bool]
    ) -> None:
        self._weight_function = average if callable(average) else None
        self._group = group
        self._try_open_step = try_open_step
        #: Weight of the current backward pass, once it has been computed.
        self._pass_weight: float | None = None
        #: Sum of weights since the last synchronized step.
        self._accumulated_weight = 0.0
        #: Factor that each weighted gradient is multiplied by before the sum over ranks.
        self._scale = 1.0
        self._is_in_step = False
        self._nodes: list[Any] = []
        #: Parameters whose `.grad` is an average.
        self._averaged: set[nn.Parameter] = set()

    def register_hook(self, parameter: nn.Parameter) -> Any:
        """Weight the gradients of `parameter` before they are accumulated; return the handle.

        The hook is on the accumulation node, not on the parameter. A hook on the parameter would
        also run in `torch.autograd.grad`, which need not be called on every rank.
        """
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        # The parameter references its node only weakly.
        self._nodes.append(node)
        return node.register_prehook(lambda gradients: (self.weigh(parameter, *gradients),))

    def weigh(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Return the weighted gradient that is accumulated instead of `gradient`."""
        if not self._is_in_step:
            self._try_open_step()
        self.unscale_average(parameter)
        if not self._weight_function:
            return gradient
        weight = self._current_weight()
        # The gradient of a mean over no tokens is NaN, and 0 times NaN would be NaN on every rank.
        return gradient * weight if weight else torch.zeros_like(gradient)

    def unscale_average(self, parameter: nn.Parameter) -> None:
        """Divide an average in `.grad` by the factor that the next sum multiplies it by."""
        if parameter not in self._averaged:
            return
        self._averaged.discard(parameter)
        if parameter.grad is None:
            return
        if self._weight_function and not self._is_in_step:
            if bool(parameter.grad.any()):
                raise RuntimeError(
                    "cannot accumulate under no_sync() into averaged gradients: the weight of this "
                    "pass is not yet known; zero the gradients first"
                )
            return
        with torch.no_grad():
            parameter.grad.mul_(1 / (self._group.world_size * self._scale))

    def start_step(
        self, failures: FailureAttribution, device: torch.device, *, is_participating: bool
    ) -> float:
        """Open a step; return the factor for each gradient. This is a collective if weighted."""
        if not self._weight_function:
            self._is_in_step = True
            return 1.0
        if torch._C._current_graph_task_id() != -1:
            # Include the weight of the backward pass that opens the step.
            self._current_weight()
        weight = self._accumulated_weight if is_participating else 0.0
        total = torch.tensor([weight], device=device).double()
        description = "the sum of the weights"
        with failures.attribute(description):
            work = dist.all_reduce(total, group=self._group.process_group, async_op=True)
        failures.wait(work, description, poll=device.type == "cpu")
        if not 0 < float(total) < math.inf:
            raise ValueError(
                f"expected a positive sum of weights over all ranks, got {float(total)}; return a "
                "positive, finite weight from the function that was passed as average"
            )
        self._is_in_step = True
        self._accumulated_weight = 0.0
        self._scale = 1 / float(total)
        return self._scale

    def end_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Close a step after which the gradients of `parameters` are averages."""
        self._is_in_step = False
        self._averaged = {p for p in parameters if p.grad is not None}

    def end_pass(self) -> None:
        """Forget the weight of the backward pass that ended."""
        self._pass_weight = None

    def abandon_pass(self) -> None:
        """Remove the weight of a backward pass that raised an error."""
        self._accumulated_weight -= self._pass_weight or 0.0
        self._pass_weight = None

    def _current_weight(self) -> float:
        if self._pass_weight is None:
            assert self._weight_function is not None
            self._pass_weight = float(self._weight_function())
            self._accumulated_weight += self._pass_weight
        return self._pass_weight


def check_average(average: Average) -> None:
    """Raise `ValueError` if `average` is not supported."""
    if not callable(average) and average not in ("ranks", "sum"):
        raise ValueError(
            'expected average to be "ranks", "sum", or a function that returns the weight of a '
            f"backward pass on this rank, such as its number of tokens; got {average!r}"
        )
