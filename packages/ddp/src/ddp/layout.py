"""Which bucket holds which gradient, and the order in which buckets are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn

from ddp.bucket import Allocate, Bucket, assign_buckets, make_bucket


@dataclass(eq=False)
class Layout:
    """The buckets of one model: `place[index]` is the bucket of a parameter, and its slot there.

    The order is a guess at first: parameters reversed, as the last layer's gradients come first.
    """

    parameters: Sequence[nn.Parameter]
    names: Sequence[str]
    group: dist.ProcessGroup
    bucket_bytes: float | Sequence[float]
    allocate: Allocate | None = None
    as_view: bool = True
    buckets: list[Bucket] = field(default_factory=list)
    place: dict[int, tuple[Bucket, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = list(reversed(range(len(self.parameters))))
        self._make(assign_buckets(self.parameters, self.order, self.bucket_bytes))

    def follow(self, order: Sequence[int]) -> None:
        """Assign the parameters anew, in the order in which their gradients become ready."""
        self.order = list(order)
        runs = assign_buckets(self.parameters, self.order, self.bucket_bytes)
        if runs == [bucket.indices for bucket in self.buckets]:
            return
        # The old buckets go before the new ones come, so that there is one set of gradients at any
        # time, unless some are kept from one step to the next.
        kept: dict[int, Tensor] = {}
        while self.buckets:
            bucket = self.buckets.pop()
            for slot, index in enumerate(bucket.indices):
                del self.place[index]
                if bucket.holds(slot):
                    kept[index] = bucket.views[slot].clone()
                    bucket.parameters[slot].grad = None
            del bucket
        self._make(runs)
        for index, gradient in kept.items():
            self.parameters[index].grad = gradient
            bucket, slot = self.place[index]
            bucket.adopt(slot)

    def release(self) -> None:
        """Let the buckets go: gradients that lie in them get memory of their own."""
        for bucket in self.buckets:
            bucket.release()

    def _make(self, runs: Sequence[Sequence[int]]) -> None:
        for number, run in enumerate(runs):
            bucket = make_bucket(
                run,
                self.parameters,
                self.allocate,
                self.group,
                names=self.names,
                as_view=self.as_view,
            )
            bucket.place, bucket.is_last = number, number == len(runs) - 1
            bucket.allocated = self.allocate is not None
            self.buckets.append(bucket)
            self.place |= {index: (bucket, slot) for slot, index in enumerate(run)}
