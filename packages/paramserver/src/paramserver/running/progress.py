"""How far a run is, in a line."""

import math
from dataclasses import dataclass

from paramserver.protocol.core import Core


@dataclass(frozen=True)
class Progress:
    """Of the first server, and of the workers as of their last push."""

    version: int
    members: dict[int, int]
    """The workers that take part, and the clock of each."""
    staleness: float
    """Versions by which a gradient was late, on average."""
    pushed_bytes: int
    """By all workers, to all servers."""
    loss: float
    """The mean of what they gave to `push`; NaN if none did."""
    lost: dict[int, str]
    """Why each worker that the others go on without was lost."""

    def __str__(self) -> str:
        members = " ".join(f"{worker}:{clock}" for worker, clock in sorted(self.members.items()))
        return (
            f"version {self.version} | workers {members or 'none'} | staleness "
            f"{self.staleness:.2f} | {self.pushed_bytes / 1e6:.1f} MB pushed | loss {self.loss:.4g}"
        )


def progress_of(core: Core) -> Progress:
    """Of a run whose first server has this core."""
    ages = core.replica.staleness
    losses = [loss for loss, _ in core.told.values() if not math.isnan(loss)]
    return Progress(
        core.replica.version,
        {worker: member.clock for worker, member in core.ledger.active.items()},
        sum(age * count for age, count in ages.items()) / max(1, sum(ages.values())),
        sum(nbytes for _, nbytes in core.told.values()),
        sum(losses) / len(losses) if losses else math.nan,
        dict(core.lost),
    )
