"""A site: the ranks of a process group that act as one worker."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Site:
    """The ranks of `group`, or this process alone if `group` is None.

    The first rank, the communicator, exchanges messages with the servers for all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_communicator = group is None or dist.get_rank(group) == 0

    def run(self, function: Callable[[], T], check: Callable[[], None]) -> T:
        """Call `check` on every rank, then `function` on the first rank; return its value.

        All ranks raise an exception if one of these calls does. `function` is not called before
        every rank has passed its check.
        """
        if self.group is None:
            check()
            return function()
        self._check(check, self.group)
        outcome: list[Any] = [None]
        if self.is_communicator:
            try:
                outcome = [function()]
            except Exception as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, group_src=0, group=self.group)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        value: T = outcome[0]
        return value

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of the first rank to every rank."""
        if self.group is not None:
            for tensor in tensors:
                dist.broadcast(tensor, group_src=0, group=self.group)

    def _check(self, check: Callable[[], None], group: dist.ProcessGroup) -> None:
        """Call `check` on every rank; all ranks raise an exception if one does."""
        error = None
        try:
            check()
        except Exception as raised:
            error = raised
        failures: list[str | None] = [None] * dist.get_world_size(group)
        failure = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(failures, failure, group=group)
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise RuntimeError(f"rank {rank} of the site: {failure}")
