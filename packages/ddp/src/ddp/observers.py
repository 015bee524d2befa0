"""The interface of the reducer's optional collaborators.

The checks across ranks and the meter implement `Observer`. The algorithm in `reducer.py` can be
read without them: it calls the four methods below at fixed points. If every rank has all gradients,
a `Reducer` without observers gives the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from ddp.bucket import Bucket

if TYPE_CHECKING:
    from ddp.communication import BucketReduction


@dataclass
class FinishedStep:
    """A step whose buckets are all reduced."""

    buckets: Sequence[Bucket]
    #: False on a rank that has run out of inputs and contributes zeros.
    is_participating: bool
    #: `time.perf_counter()` when the reducer started to wait for the remaining buckets.
    wait_start: float
    #: Indices of parameters without a gradient on any rank, filled in by the agreement check.
    unused: set[int] = field(default_factory=set)


class Observer:
    """A collaborator of the reducer. Every method does nothing by default."""

    def on_step_start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Handle the start of a step, before the first gradient is copied in."""

    def before_bucket_launch(self, bucket: Bucket, *, is_participating: bool) -> None:
        """Handle a full bucket, before its reduction is launched."""

    def on_bucket_reduced(self, reduction: BucketReduction) -> None:
        """Handle a reduced bucket; called in the order of launches."""

    def on_step_end(self, step: FinishedStep) -> None:
        """Handle the end of a step, before `.grad` is set. May raise on every rank."""
