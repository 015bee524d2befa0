"""The process group of a model, and the all-reduce function that is used on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

#: Called as `all_reduce(tensor, op=ReduceOp.SUM, group=group, async_op=True)`. The result has a
#: `wait()` method, or is None if the reduction has completed.
AllReduce = Callable[..., Any]


@dataclass(frozen=True)
class ReduceGroup:
    """A process group and the all-reduce that averages gradients over it."""

    process_group: dist.ProcessGroup
    #: Rank of this process in the group.
    rank: int
    world_size: int
    #: All-reduce that the caller passed; None selects `torch.distributed.all_reduce`.
    custom_all_reduce: AllReduce | None = None

    def all_reduce(self, tensor: Tensor, *, async_op: bool) -> Any:
        """Sum `tensor` over the ranks in place."""
        function = self.custom_all_reduce or dist.all_reduce
        return function(tensor, op=dist.ReduceOp.SUM, group=self.process_group, async_op=async_op)


def resolve_group(group: dist.ProcessGroup | None, all_reduce: AllReduce | None) -> ReduceGroup:
    """Return `group`, or all ranks if `group` is None, with the `all_reduce` to use on it.

    Raises `RuntimeError` if no process group is initialized, and `ValueError` if this rank is not
    part of `group`.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "expected an initialized process group, got none; call "
            "torch.distributed.init_process_group first (torchrun sets its environment variables)"
        )
    group = group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"expected a process group that contains this rank, got {group!r}; wrap the model only "
            "on the ranks of the group"
        )
    return ReduceGroup(group, dist.get_rank(group), dist.get_world_size(group), all_reduce)
