"""What this package asks of a collective: torch.distributed's own signature, nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Called as all_reduce(tensor, op=ReduceOp.SUM, group=group, async_op=True); what it returns is
# waited for with .wait(). None means that it is done already.
AllReduce = Callable[..., Any]


@dataclass(frozen=True)
class Link:
    """The group to average over, this rank's place in it, and the caller's own all-reduce."""

    group: dist.ProcessGroup
    rank: int
    world: int
    given: AllReduce | None = None

    def all_reduce(self, tensor: Tensor, *, async_op: bool) -> Any:
        """Sum `tensor` over the ranks in place."""
        function = self.given or dist.all_reduce
        return function(tensor, op=dist.ReduceOp.SUM, group=self.group, async_op=async_op)


def link(group: dist.ProcessGroup | None, all_reduce: AllReduce | None) -> Link:
    """A link over `group`, or over the whole world; RuntimeError if there is none yet."""
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group to average over; call "
            "torch.distributed.init_process_group first (torchrun sets what it needs)"
        )
    group = group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group is {group!r}: this rank is not in it; make the model on its ranks only"
        )
    return Link(group, dist.get_rank(group), dist.get_world_size(group), all_reduce)
