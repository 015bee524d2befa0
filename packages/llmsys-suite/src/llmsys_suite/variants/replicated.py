"""Data parallelism: each rank trains a whole model, and the ranks average their gradients."""

from __future__ import annotations

import collectives
import ddp
from torch import nn

from llmsys_suite.variants.single import Variant


class DataParallel(Variant):
    """The base class of the variants in which each rank trains on its rows of the batch."""

    alone = False


class Naive(DataParallel):
    """One all-reduce per parameter, after the backward pass."""

    def communicate(self) -> None:
        """Average the gradients one by one."""
        with self.phase("communication"):
            ddp.all_reduce_gradients(self.model, meter=self.meter)


class Flat(Naive):
    """One all-reduce for all gradients, after the backward pass."""

    def communicate(self) -> None:
        """Average all gradients in one message."""
        with self.phase("communication"):
            ddp.all_reduce_gradients_flat(self.model, meter=self.meter)


class Bucketed(DataParallel):
    """Buckets of gradients that are averaged during the backward pass."""

    #: Capacity of a bucket in MiB, or None for a separate message per parameter.
    bucket_size_mb: float | None = 1.0

    def build(self) -> None:
        """Wrap the model in ddp.DDP."""
        super().build()
        self.wrapped = ddp.DDP(self.model, self.bucket_size_mb)
        self.model, self.meter = self.wrapped, self.wrapped.meter

    def communicate(self) -> None:
        """Wait for the reductions that have not finished."""
        with self.phase("communication"):
            self.wrapped.finish_gradient_synchronization()


class Overlapped(Bucketed):
    """A separate all-reduce for each gradient, as soon as it is ready."""

    bucket_size_mb = None


class SharedMemory(Bucketed):
    """Buckets in shared memory, where the ranks of one host reduce them in place."""

    def build(self) -> None:
        """Wrap the model in ddp.DDP, with the collectives and the buffers of `collectives`."""
        Variant.build(self)
        self.wrapped = ddp.DDP(
            self.model,
            self.bucket_size_mb,
            all_reduce=collectives.all_reduce,
            allocate=collectives.shared_empty,
        )
        self.model, self.meter = self.wrapped, self.wrapped.meter


class TorchDDP(DataParallel):
    """torch's own DistributedDataParallel, with which the other variants are compared."""

    def build(self) -> None:
        """Wrap the model in torch's DDP, whose buckets also store the gradients to save a copy."""
        super().build()
        self.model = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
