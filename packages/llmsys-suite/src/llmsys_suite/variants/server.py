"""A parameter server: workers pull the parameters and push their gradients, in lock step."""

from __future__ import annotations

import paramserver
import torch.distributed as dist
from torch import Tensor

from llmsys_suite.variants.single import Variant


class ParameterServer(Variant):
    """Workers that pull parameters from a server on rank 0 and push gradients."""

    alone = False

    def build(self) -> None:
        """Join as a worker; rank 0 serves too."""
        self.joined = paramserver.join(self.model, self.make, paramserver.BulkSynchronous())
        self.worker = self.joined.__enter__()

    def prepare(self) -> None:
        """Fetch what the server has made of the last gradients."""
        with self.phase("communication"):
            self.worker.pull()

    def communicate(self) -> None:
        """Hand the gradients over; the server averages them and updates."""
        with self.phase("communication"):
            self.worker.push()

    def update(self) -> None:
        """The server's work."""

    def gradients(self) -> None:
        """Averaged at the server."""

    def weights(self) -> dict[str, Tensor]:
        """As the server has them now."""
        self.worker.pull()
        return super().weights()

    def close(self) -> None:
        """Leave; the server stops when all have."""
        self.joined.__exit__(None, None, None)

    def planned_wire_bytes(self, gradient_bytes: int) -> tuple[float, float]:
        """Parameters; where the server is, the others' gradients, which may come after the step."""
        others = gradient_bytes * (dist.get_world_size() - 1)
        return (0, others) if dist.get_rank() == 0 else (gradient_bytes, gradient_bytes)
