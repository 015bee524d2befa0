"""The interface of the reducer's optional extensions.

The meter, the checks across ranks, failure attribution, compression and communication hooks
implement `Extension`. The algorithm in `reducer.py` can be read without them: it calls the five
methods below at fixed points. The results of a `Reducer` without extensions are bitwise equal to
those of `plain.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from ddp.bucket import Bucket
from ddp.communication import BucketReduction, Collective
from ddp.process_group import ReduceGroup


@dataclass
class Step:
    """The state of one step that extensions read and change."""

    parameters: Sequence[nn.Parameter]
    #: The buckets in the order of launches.
    buckets: Sequence[Bucket]
    #: Factor that each gradient is multiplied by before it is copied into its bucket.
    scale: float = 1.0
    #: True if the flags of a bucket are summed together with its gradients.
    reduces_flags: bool = True
    #: False on a rank that has run out of inputs and contributes zeros.
    is_participating: bool = True
    #: `time.perf_counter()` when the reducer started to wait for the remaining buckets.
    wait_start: float = 0.0
    #: Indices of parameters without a gradient on any rank, filled in by the agreement check.
    unused: set[int] = field(default_factory=set)


class Extension:
    """An optional extension of the reducer. By default, its methods change nothing."""

    def on_step_start(self, step: Step) -> None:
        """Handle the start of a step, before the first gradient is copied in."""

    def before_bucket_launch(self, step: Step, bucket: Bucket) -> None:
        """Handle a full bucket, before its reduction is launched."""

    def launch(self, bucket: Bucket, group: ReduceGroup) -> Collective | None:
        """Launch the first collective of a reduction that stores its result in `bucket.buffer`.

        Returns None to leave the bucket to the next extension. If every extension returns None, the
        reducer launches one all-reduce of the buffer.
        """
        return None

    def attribute_errors(
        self, description: str, work: dist.Work | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for launching or awaiting the collective that `description` names.

        The context may replace the error of a collective, for example with one that names the
        failed rank. If the block waits for a collective that can be polled, `work` is this one.
        """
        return nullcontext()

    def on_step_end(self, step: Step, reductions: Sequence[BucketReduction]) -> None:
        """Handle the end of a step, before the mean is stored in each `.grad` that is not a view.

        `reductions` has the reduction of each bucket in the order of launches. The method may raise
        an error if it does so on every rank.
        """
