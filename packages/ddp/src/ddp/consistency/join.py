"""What a rank that has run out of inputs does while others have some: it shadows their steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from ddp.consistency.agreement import broadcast_state


class Shadow(JoinHook):
    """In each step of the others the same calls, with zeros; at the end, the last one's weights."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp

    @torch.no_grad()
    def main_hook(self) -> None:
        """Shadow one step."""
        self._ddp._open(taking_part=False)
        self._ddp._finish(taking_part=False)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the weights and buffers of a rank that took all steps."""
        ddp = self._ddp
        source = ddp._authoritative_rank = common_rank(ddp, candidate=is_last_joiner)
        broadcast_state(ddp.module, ddp._link.group, source, ignored=ddp._ignored)
        ddp._reducer.exchange.forget_versions()
        # Join leaves this on: steps after the context need nobody's company.
        ddp._join_config = ddp._join_config._replace(enable=False)


def common_rank(ddp: Any, *, candidate: bool) -> int:
    """The highest rank that is a candidate, the same on every rank."""
    rank = torch.tensor([ddp._link.rank if candidate else -1], device=ddp.join_device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=ddp._link.group)
    return int(rank)
