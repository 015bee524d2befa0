"""Data parallelism: each rank has the whole model, and gradients are averaged."""

from __future__ import annotations

import collectives
import ddp
import paramserver
from torch import Tensor, nn

from llmsys_suite.variants.single import Variant


class Parallel(Variant):
    """Base of the data-parallel variants: each rank trains on its rows of the batch."""

    alone = False


class Naive(Parallel):
    """One all-reduce per parameter, after the backward pass."""

    def communicate(self) -> None:
        """Send the gradients one by one."""
        with self.phase("communication"):
            ddp.all_reduce_gradients(self.model, meter=self.meter)


class Flat(Naive):
    """One all-reduce for all gradients, after the backward pass."""

    def communicate(self) -> None:
        """Send all gradients as one message."""
        with self.phase("communication"):
            ddp.all_reduce_gradients_flat(self.model, meter=self.meter)


class Bucketed(Parallel):
    """Buckets of gradients that are sent during the backward pass."""

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
    """Each gradient is sent separately as soon as it is ready."""

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


class TorchDDP(Parallel):
    """torch's own DistributedDataParallel, with which the other variants are compared."""

    def build(self) -> None:
        """Wrap the model in torch's DDP, tuned as its documentation advises."""
        super().build()
        self.model = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)


class ParameterServer(Parallel):
    """Workers that pull parameters from a server on rank 0 and push gradients."""

    def build(self) -> None:
        """Join the job as a worker; rank 0 runs the server too."""
        self.joined = paramserver.join(self.model, self.make, paramserver.BulkSynchronous())
        self.worker = self.joined.__enter__()

    def prepare(self) -> None:
        """Pull the updated parameters."""
        with self.phase("communication"):
            self.worker.pull()

    def communicate(self) -> None:
        """Push the gradients; the server averages them and updates the parameters."""
        with self.phase("communication"):
            self.worker.push()

    def update(self) -> None:
        """Do nothing, because the server updates the parameters."""

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters that the server stores."""
        self.worker.pull()
        return super().weights()

    def close(self) -> None:
        """Leave the job; the server stops when all workers have left."""
        self.joined.__exit__(None, None, None)
