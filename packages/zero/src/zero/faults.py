"""Says which rank is to blame: for a model that differs, for a collective that failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

# Survivors of one failure notice it within this time of each other.
GRACE_SECONDS = 5.0
REMEDY = "build the same model and the same groups on every rank"


def difference(everyone: Sequence[Sequence[Any]]) -> str:
    """Describe the first entry in which a rank's list differs from rank 0's; empty if none does."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if len(other) != len(first):
            return f"rank {rank} has {len(other)} parameters, rank 0 has {len(first)}: {REMEDY}"
        for index, (a, b) in enumerate(zip(first, other, strict=True)):
            if a != b:
                return f"parameter {index} is {b} on rank {rank} but {a} on rank 0: {REMEDY}"
    return ""


def absent_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """After a failed collective: the global ranks that do not answer a roll call in the store.

    Every surviving rank of the group calls it, because every one sees the failure.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    store = dist.distributed_c10d._get_default_store()
    keys = {rank: f"zero/alive/{rank}" for rank in ranks}
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        store.set(keys[dist.get_rank()], "yes")
        while keys and time.monotonic() < deadline:
            keys = {rank: key for rank, key in keys.items() if not store.check([key])}
            time.sleep(0.02)
    except RuntimeError:
        # Rank 0 hosts the store, and took it along.
        return [0]
    return sorted(keys)


def explain(error: Exception, group: dist.ProcessGroup | None, what: str) -> RuntimeError:
    """The error to raise for a collective that failed, with the ranks to blame."""
    absent = absent_ranks(group)
    if not absent:
        return RuntimeError(f"{what} failed although every rank is alive: {error}")
    who = "rank" if len(absent) == 1 else "ranks"
    return RuntimeError(
        f"{what} failed on rank {dist.get_rank()}: {who} {', '.join(map(str, absent))} died or "
        f"hangs; restart all ranks from the last checkpoint ({error})"
    )
