"""The progress of a run, as one line of text."""

import math
from dataclasses import dataclass

from paramserver.protocol.core import Core


@dataclass(frozen=True)
class Progress:
    """Progress of the first server, and of the workers as of their last push."""

    #: Number of updates applied so far.
    version: int
    #: Clock of each active worker.
    members: dict[int, int]
    #: Mean staleness of the applied gradients, in versions.
    staleness: float
    #: Bytes that all workers have pushed to all servers.
    pushed_bytes: int
    #: Mean of the losses that were passed to the last pushes; NaN if none was.
    loss: float
    #: Reason of each loss of a worker after which training continued.
    lost: dict[int, str]

    def __str__(self) -> str:
        members = " ".join(f"{worker}:{clock}" for worker, clock in sorted(self.members.items()))
        return (
            f"version {self.version} | workers {members or 'none'} | staleness "
            f"{self.staleness:.2f} | {self.pushed_bytes / 1e6:.1f} MB pushed | loss {self.loss:.4g}"
        )


def progress_of(core: Core) -> Progress:
    """Return the progress of a run, from the core of its first server."""
    staleness = core.replica.staleness
    losses = [loss for loss, _ in core.reports.values() if not math.isnan(loss)]
    return Progress(
        version=core.replica.version,
        members={worker: member.clock for worker, member in core.ledger.active.items()},
        staleness=sum(versions * count for versions, count in staleness.items())
        / max(1, sum(staleness.values())),
        pushed_bytes=sum(nbytes for _, nbytes in core.reports.values()),
        loss=sum(losses) / len(losses) if losses else math.nan,
        lost=dict(core.lost),
    )
