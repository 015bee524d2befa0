"""Ranks with different numbers of inputs: a rank that has run out contributes zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from ddp.aliased_gradients import copy_misplaced_grads
from ddp.consistency.buffers import copy_buffers, gather_participating_ranks
from ddp.consistency.model_agreement import broadcast_tensors, collect_state


class ZeroContribution(JoinHook):
    """Join hook that takes part in the steps of the remaining ranks with zero gradients."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    @torch.no_grad()
    def main_hook(self) -> None:
        """Contribute zeros to one step."""
        replica = self._replica
        copy_buffers(replica, is_participating=False)
        copy_misplaced_grads(replica.reducer.buckets)
        replica.reducer.start()
        replica.finish_step(is_participating=False)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the weights of a rank that took all steps, and its buffers if steps copy buffers."""
        replica = self._replica
        candidates = gather_participating_ranks(replica, is_participating=is_last_joiner)
        state = collect_state(replica.module, replica.ignored, buffers=replica.options.sync_buffers)
        broadcast_tensors(
            list(state.values()),
            replica.group.process_group,
            replica.failures,
            "the broadcast of the final weights",
            source=candidates[-1],
        )
        replica.agreement.reset_versions()
        # `Join` leaves the flag set, but after the context all ranks take every step again.
        replica.ddp._join_config = replica.ddp._join_config._replace(enable=False)


def compute_join_scale(replica: Any, *, is_participating: bool) -> float:
    """Return the factor that turns a mean over all ranks into the mean that `join()` needs.

    This is a collective if the mean is over the ranks that still have inputs.
    """
    if replica.agreement.divide_by_initial_world_size:
        return 1.0
    active = gather_participating_ranks(replica, is_participating=is_participating)
    return float(replica.group.world_size / len(active))
