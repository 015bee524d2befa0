"""Attribution of failures to ranks: models that differ, and collectives that failed."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

#: Seconds to wait for reports: all surviving ranks detect the same failure within this time.
GRACE_SECONDS = 5.0
#: Maps each report to the time at which this process first read it. A report that was first read
#: longer ago than `GRACE_SECONDS` belongs to an earlier failure.
_first_read: dict[bytes, float] = {}
#: The unresponsive ranks and the calls of each group's latest failure, with the time at which they
#: were determined. Collectives that were launched before a failure fail too.
_latest: weakref.WeakKeyDictionary[
    dist.ProcessGroup, tuple[float, tuple[list[int], dict[int, str]]]
] = weakref.WeakKeyDictionary()
#: Seconds within which the store responds if its host is alive.
STORE_SECONDS = 5.0
REMEDY = "build the same model and the same groups on every rank"


def check_descriptions_match(descriptions: Sequence[Sequence[Any]]) -> None:
    """Raise ValueError if a rank's list of parameter descriptions differs from that of rank 0."""
    reference = descriptions[0]
    for rank, described in enumerate(descriptions):
        if len(described) != len(reference):
            sizes = f"rank {rank} has {len(described)} parameters, rank 0 has {len(reference)}"
            raise ValueError(f"{sizes}: {REMEDY}")
        for index, (expected, actual) in enumerate(zip(reference, described, strict=True)):
            if expected != actual:
                raise ValueError(
                    f"parameter {index} is {actual} on rank {rank} but {expected} on rank 0: "
                    f"{REMEDY}"
                )


def _find_unresponsive_ranks(
    group: dist.ProcessGroup | None, description: str
) -> tuple[list[int], dict[int, str]]:
    """Return the global ranks that do not respond, and the failed call of each responding rank.

    Every surviving rank of the group calls this function, because every rank detects the failure.
    If the store hangs or fails, return only rank 0, which hosts the store unless torchrun does.
    """
    group = group or dist.group.WORLD
    assert group is not None
    latest_time, latest = _latest.get(group, (0.0, ([], {})))
    if latest[0] and time.monotonic() - latest_time < GRACE_SECONDS:
        return latest
    answers: list[tuple[list[int], dict[int, str]]] = []
    ranks = dist.get_process_group_ranks(group)
    # The store may hang, because its host has failed.
    thread = threading.Thread(
        target=lambda: answers.append(_poll_store(ranks, group.group_name, description)),
        daemon=True,
    )
    thread.start()
    thread.join(GRACE_SECONDS + STORE_SECONDS)
    latest = answers[0] if answers else ([0], {})
    _latest[group] = time.monotonic(), latest
    return latest


def _poll_store(
    ranks: list[int], group_name: str, description: str
) -> tuple[list[int], dict[int, str]]:
    """Return the global ranks that do not respond, and the failed call of each responding rank.

    Report this rank's failed call in the store, and poll for the reports of the other ranks of the
    group. They call this function too, because every rank detects the failure. If the store fails,
    return only rank 0, which hosts the store unless torchrun does. A rank that reported an earlier
    failure of the group may be dead. Its report is not accepted later than `GRACE_SECONDS` after
    this rank first read it.
    """
    store = dist.distributed_c10d._get_default_store()
    missing = {rank: f"zero/alive/{group_name}/{rank}" for rank in ranks}
    answers: dict[int, str] = {}
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        # The number makes each report of a rank different from its earlier ones.
        store.set(missing[dist.get_rank()], f"{secrets.token_hex(8)} {description}")
        while missing and (now := time.monotonic()) < deadline:
            for rank in [rank for rank, key in missing.items() if store.check([key])]:
                report = store.get(missing[rank])
                if now - _first_read.setdefault(report, now) < GRACE_SECONDS:
                    answers[rank] = report.decode().partition(" ")[2]
                    del missing[rank]
            time.sleep(0.02)
    except RuntimeError:
        return [0], {}
    return sorted(missing), answers


def explain(error: Exception, group: dist.ProcessGroup | None, description: str) -> RuntimeError:
    """Return an error that names the unresponsive ranks, or the failed calls if all respond."""
    unresponsive, answers = _find_unresponsive_ranks(group, description)
    if not unresponsive and len(set(answers.values())) > 1:
        calls = "; ".join(f"rank {rank}: {answers[rank]}" for rank in sorted(answers))
        return RuntimeError(
            f"ranks wait for different collectives ({calls}): run the same layers in the same "
            f"order on every rank ({error})"
        )
    if not unresponsive:
        return RuntimeError(f"{description} failed although every rank is alive: {error}")
    noun = "rank" if len(unresponsive) == 1 else "ranks"
    named = ", ".join(map(str, unresponsive))
    return RuntimeError(
        f"{description} failed on rank {dist.get_rank()}: {noun} {named} ended (for example "
        "because of fewer inputs), hangs, or raised an error, which only its own output shows; "
        f"restart all ranks from the last checkpoint ({error})"
    )
