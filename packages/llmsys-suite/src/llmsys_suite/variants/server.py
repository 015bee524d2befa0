"""Training with a parameter server, in bulk-synchronous steps."""

from __future__ import annotations

import paramserver
from torch import Tensor

from llmsys_suite.variants.single import Variant


class ParameterServer(Variant):
    """Workers that pull parameters from a server on rank 0 and push gradients."""

    alone = False

    def build(self) -> None:
        """Join the job as a worker; rank 0 also runs the server."""
        synchronization = paramserver.BulkSynchronous()
        self.joined = paramserver.join(self.model, self.make_optimizer, synchronization)
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

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the parameters that the server stores."""
        self.worker.pull()
        return super().gather_weights()

    def close(self) -> None:
        """Leave the job; the server stops when all workers have left."""
        self.joined.__exit__(None, None, None)
