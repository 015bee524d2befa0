"""A new group of the ranks that survived a failure, in the same processes."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from collectives.groups import communicator


def rebuild(group: Any = None, *, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a new group of the ranks that were not reported as lost when `group` failed.

    Every surviving rank must call this function after its `RankLost`, as with
    `torch.distributed.new_group`. Ranks keep their global numbers, and the failed group remains
    unusable, even if it is the default group. The new group needs the store of the default group:
    it must not be served by a lost rank.

    Args:
        group: the failed group; the default group if None.
        timeout: the timeout of the new group; if None, the timeout of the failed group.
    """
    comm = communicator(group)
    group_error = comm.failures.group_error
    if group_error is None:
        raise RuntimeError(
            "expected a group that has failed, got one that works; to create a group of some of "
            "its ranks, use torch.distributed.new_group"
        )
    if comm.rank in group_error.ranks:
        raise RuntimeError(
            f"expected a surviving rank, but the failure named this rank, {comm.rank}; restart "
            f"this process: {group_error}"
        ) from group_error
    members = dist.get_process_group_ranks(group)
    survivors = [members[rank] for rank in range(comm.world) if rank not in group_error.ranks]
    rebuilt = dist.new_group(
        survivors,
        timeout=timeout or timedelta(seconds=comm.timeout),
        backend=dist.get_backend(group),
        # The lost ranks do not call this function.
        use_local_synchronization=True,
    )
    assert isinstance(rebuilt, dist.ProcessGroup)
    return rebuilt
