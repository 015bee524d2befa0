"""Uneven inputs with torch's `Join`: ranks without remaining inputs take part in collectives.

An active rank, which has inputs left, announces each copy of buffers, backward pass, clipping and
step. A rank that has joined contributes zeros to the sum of gradients, and steps its shard with the
options of an active rank. As with torch's DDP by default, gradients are divided by the number of
all ranks. Each announcement lists the parameters whose gradients have not been cleared, because
clearing them is not a collective.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.join import Join, JoinHook


class UnevenInputs(JoinHook):
    """The hook of a ShardedOptimizer within `Join([optimizer])`."""

    def __init__(self, optimizer: Any, options: dict[str, Any]) -> None:
        if not options.get("divide_by_initial_world_size", True):
            raise ValueError(
                "expected divide_by_initial_world_size=True, got False: gradients are divided by "
                "the number of all ranks; scale the loss instead"
            )
        if optimizer.reducer.shares_group:
            raise ValueError(
                "expected one ShardedOptimizer per process group within Join, got several: put all "
                "parameters into one optimizer, or give every rank the same number of inputs"
            )
        self.optimizer = optimizer
        self.has_joined = False

    def announce(self, name: str, argument: Any = None) -> int:
        """Announce the next call of this rank to the ranks that have joined.

        Return the last active rank, or 0 outside of `Join` and on a rank that has joined.
        """
        if self.has_joined or not self.optimizer._join_config.enable:
            return 0
        work = Join.notify_join_context(self.optimizer)
        if work is None:
            raise ValueError(
                "expected Join([optimizer]), got another Joinable before optimizer: pass only the "
                "optimizer"
            )
        work.wait()
        self.optimizer.communicator.is_joining = True
        averaged = self.optimizer.reducer.list_averaged_indices()
        announced = self.optimizer.communicator.gather_objects((name, argument, averaged))
        return _find_last_active_rank(announced)

    def main_hook(self) -> None:
        """Take part in the next call that the active ranks announce."""
        self.has_joined = True
        optimizer = self.optimizer
        announced = optimizer.communicator.gather_objects(None)
        last = _find_last_active_rank(announced)
        name, argument, averaged = announced[last]
        optimizer.reducer.clear_other_gradients(averaged)
        if name == "backward":
            optimizer.reducer.join_backward()
        elif name == "buffers":
            optimizer.communicator.broadcast_buffers(optimizer.module, last)
        elif name == "clip":
            optimizer.clip_grad_norm_(*argument)
        else:
            # LR schedulers ran only on active ranks, so copy the options that they changed.
            for group, options in zip(optimizer.param_groups, argument, strict=True):
                group.update(options)
            optimizer.step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Clear the gradients that the last active ranks have cleared, and end the context."""
        reducer = self.optimizer.reducer
        averaged = None if self.has_joined else reducer.list_averaged_indices()
        averaged_of_ranks = self.optimizer.communicator.gather_objects(averaged)
        if self.has_joined:
            reducer.clear_other_gradients(next(a for a in averaged_of_ranks if a is not None))
        self.has_joined = True
        self.optimizer.communicator.is_joining = False


def _find_last_active_rank(announced: list[Any]) -> int:
    return max(rank for rank, call in enumerate(announced) if call is not None)
