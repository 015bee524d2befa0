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


def roll_call(group: dist.ProcessGroup | None, what: str) -> tuple[list[int], dict[int, str]]:
    """After a failed collective: the global ranks that do not answer, and what the others did.

    Every surviving rank of the group calls it, because every one sees the failure.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    store = dist.distributed_c10d._get_default_store()
    absent = {rank: f"zero/alive/{rank}" for rank in ranks}
    answers: dict[int, str] = {}
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        store.set(absent[dist.get_rank()], what)
        while absent and time.monotonic() < deadline:
            for rank in [rank for rank, key in absent.items() if store.check([key])]:
                answers[rank] = store.get(absent.pop(rank)).decode()
            time.sleep(0.02)
    except RuntimeError:
        # Rank 0 hosts the store, and took it along.
        return [0], {}
    return sorted(absent), answers


def explain(error: Exception, group: dist.ProcessGroup | None, what: str) -> RuntimeError:
    """The error to raise for a collective that failed, with the ranks to blame."""
    absent, answers = roll_call(group, what)
    if not absent and len(set(answers.values())) > 1:
        calls = "; ".join(f"rank {rank}: {answers[rank]}" for rank in sorted(answers))
        return RuntimeError(
            f"ranks wait for different collectives ({calls}): run the same layers in the same "
            f"order on every rank ({error})"
        )
    if not absent:
        return RuntimeError(f"{what} failed although every rank is alive: {error}")
    who = "rank" if len(absent) == 1 else "ranks"
    return RuntimeError(
        f"{what} failed on rank {dist.get_rank()}: {who} {', '.join(map(str, absent))} died or "
        f"hangs; restart all ranks from the last checkpoint ({error})"
    )
