"""Ranks with different numbers of inputs: a rank that has run out contributes zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from ddp.consistency.model_agreement import broadcast_tensors, named_state
from ddp.memory.aliased_gradients import copy_misplaced_grads


class ZeroContribution(JoinHook):
    """Join hook that takes part in the steps of the remaining ranks with zero gradients."""

    def __init__(self, ddp: Any, replica: Any) -> None:
        self._ddp = ddp
        self._replica = replica

    @torch.no_grad()
    def main_hook(self) -> None:
        """Contribute zeros to one step."""
        self._replica.copy_buffers(is_participating=False)
        copy_misplaced_grads(self._replica.reducer.buckets)
        self._replica.reducer.start()
        self._replica.finish_step(is_participating=False)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the weights of a rank that took all steps, and its buffers if these are copied."""
        ddp = self._ddp
        replica = self._replica
        candidates = replica.gather_participating_ranks(is_participating=is_last_joiner)
        state = named_state(replica.module, replica.ignored, buffers=replica.options.sync_buffers)
        broadcast_tensors(
            list(state.values()),
            replica.group.process_group,
            replica.failures,
            "the broadcast of the final weights",
            source=candidates[-1],
        )
        replica.agreement.forget_versions()
        # `Join` leaves the flag set, but after the context all ranks take every step again.
        ddp._join_config = ddp._join_config._replace(enable=False)
