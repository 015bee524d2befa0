"""Keeps optimizers that look at whole tensors away from shards, where they would go wrong."""

from __future__ import annotations

import inspect
import weakref
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero.gradients import ShardGradient
from zero.optimizer.elementwise import how_to_split

_known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@cache
def install() -> None:
    """Look at each optimizer of this process once, when it steps shards for the first time."""
    register_optimizer_step_pre_hook(_look)


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _known:
        return
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    if any(gradient is not None for gradient in gradients):
        if any(isinstance(gradient, ShardGradient) for gradient in gradients):
            _refuse_if_whole(optimizer)
        _known.add(optimizer)


def _refuse_if_whole(optimizer: torch.optim.Optimizer) -> None:
    cls = type(optimizer)
    taken = inspect.signature(cls.__init__).parameters
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k in taken and k != "params"}
        try:
            split = how_to_split(cls, options)
        except ValueError:
            # One that cannot be tried, or that takes norms of all gradients, which are the whole's.
            continue
        if split == "parameters":
            raise RuntimeError(
                f"{cls.__name__} looks at whole tensors, and FSDP's parameters are shards of them: "
                "use ShardedOptimizer(model.parameters(), "
                f"{cls.__name__}, shard_gradients=True) instead of FSDP"
            )
