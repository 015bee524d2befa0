"""A new group of the ranks that survived a failure, in the same processes."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from collectives.errors import RankLost
from collectives.execution.timeouts import check_timeout
from collectives.groups import get_communicator
from collectives.shared_memory.fingerprint import format_ranks


def rebuild(group: Any = None, *, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a new group of the ranks that were not blamed when `group` failed.

    Every surviving rank must call this function after its error. Ranks keep their global ranks, and
    the new group numbers them in the order of their global ranks. The failed group remains
    unusable, even if it is the default group. The ranks rendezvous in the store of the default
    group, so no lost rank may serve it. Raise RuntimeError if `group` has not failed, or if this
    rank was blamed.

    If further ranks are lost, every survivor of a group of the registered backend gets
    `RankLost` after the timeout. The error's `ranks` are all lost ranks of `group`. The next call
    excludes all of them. On other backends, torch's own error is raised.

    Args:
        group: the failed group; the default group if None.
        timeout: the timeout of the new group; if None, the timeout of the failed group.
    """
    if timeout is not None:
        check_timeout(timeout)
    comm = get_communicator(group)
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
    # `new_group` numbers its ranks in the order of their global ranks. The ranks of a group from
    # `split_group` can have another order.
    survivors = sorted(
        (rank for rank in range(comm.world_size) if rank not in group_error.ranks),
        key=lambda rank: members[rank],
    )
    try:
        rebuilt = dist.new_group(
            [members[rank] for rank in survivors],
            timeout=timedelta(seconds=comm.group_timeout) if timeout is None else timeout,
            backend=dist.get_backend(group),
            # The lost ranks do not call this function.
            use_local_synchronization=True,
        )
    except RankLost as error:
        if not error.ranks:
            raise
        lost = sorted({*group_error.ranks, *(survivors[rank] for rank in error.ranks)})
        message = f"{format_ranks(lost)} lost; this attempt to rebuild the group failed: {error}"
        comm.failures.group_error = RankLost(lost, message)
        raise comm.failures.group_error from error
    assert isinstance(rebuilt, dist.ProcessGroup)
    return rebuilt
