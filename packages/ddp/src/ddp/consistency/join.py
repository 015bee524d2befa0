"""What a rank that has run out of inputs does while others have some: it shadows their steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from ddp.consistency.agreement import broadcast_state


class Shadow(JoinHook):
    """In each step of the others the same calls, with zeros; at the end, the last one's weights."""

    def __init__(self, ddp: Any, replica: Any) -> None:
        self._ddp, self._replica = ddp, replica

    @torch.no_grad()
    def main_hook(self) -> None:
        """Shadow one step."""
        self._replica.open(taking_part=False)
        self._replica.finish(taking_part=False)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the weights and buffers of a rank that took all steps."""
        ddp, replica = self._ddp, self._replica
        source = ddp._authoritative_rank = common_rank(replica, candidate=is_last_joiner)
        broadcast_state(replica.module, replica.link.group, source, ignored=replica.ignored)
        replica.exchange.forget_versions()
        # Join leaves this on: steps after the context are taken by all ranks again.
        ddp._join_config = ddp._join_config._replace(enable=False)


def common_rank(replica: Any, *, candidate: bool) -> int:
    """The highest rank that is a candidate, the same on every rank."""
    rank = torch.tensor([replica.link.rank if candidate else -1], device=replica.device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=replica.link.group)
    return int(rank)
