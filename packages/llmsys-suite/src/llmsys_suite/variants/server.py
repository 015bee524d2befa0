"""Parameter servers: synchronous gradients, or the changes of local steps for slow links."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import paramserver
import torch
import torch.distributed as dist
from torch import Tensor

from llmsys_suite.model import ModelConfig
from llmsys_suite.variants.single import Variant

if TYPE_CHECKING:
    from llmsys_suite.ranks.rank import Run


class ParameterServer(Variant):
    """Workers that pull parameters from a server on rank 0 and push gradients."""

    alone = False
    policy: Any = paramserver.BulkSynchronous()

    def build(self) -> None:
        """Join the job as a worker; rank 0 runs the server too."""
        self.joined = paramserver.join(self.model, self.make, self.policy)
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
        """Run the server until the training ends."""

    def gradients(self) -> None:
        """Return None, because the server averages the gradients."""

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters that the server stores."""
        self.worker.pull()
        return super().weights()

    def close(self) -> None:
        """Leave the job; the server stops when all workers have left."""
        self.joined.__exit__(None, None, None)

    def planned_wire_bytes(self, gradient_bytes: int) -> tuple[float, float]:
        """Return the bytes of the parameters, or on the rank of the server of all gradients."""
        senders = dist.get_world_size() - 1 if dist.get_rank() == 0 else 1
        return senders * gradient_bytes, senders * gradient_bytes


class DiLoCo(ParameterServer):
    """Ranks take local steps; every fifth step a tenth of the changes is averaged (streamed).

    With the optimizer of the probe, each step is a round, and the outer optimizer applies the mean
    unchanged. This is bulk-synchronous training, which is compared with one process.
    """

    policy = paramserver.LocalSteps(50, compression=paramserver.Integers(4), fragments=10)

    def __init__(
        self,
        run: Run,
        config: ModelConfig,
        optimizer: partial[Any] | None = None,
        policy: paramserver.LocalSteps | None = None,
    ) -> None:
        if optimizer is not None:
            policy = paramserver.LocalSteps(1, partial(torch.optim.SGD, lr=1.0))
        self.policy = policy or self.policy
        self.taken = 0
        super().__init__(run, config, optimizer)

    def communicate(self) -> None:
        """Take a local step, and exchange the change at the end of an interval."""
        self.taken += 1
        sends = self.taken % self.policy.interval == 0
        with self.phase("communication" if sends else "optimizer"):
            self.worker.push()

    def gradient_bytes(self, steps: int) -> float:
        """Return the bytes that the worker has sent to the server."""
        return self.worker.bytes_pushed / steps

    def planned_wire_bytes(self, gradient_bytes: int) -> tuple[float, float]:
        """Return the least and most bytes that a rank receives in a step."""
        return 0, gradient_bytes * max(1, dist.get_world_size() - 1)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights on which all workers agree, after ending the training if necessary."""
        if self.policy.steps > 1:
            self.worker.finish()
        else:
            self.worker.pull()
        return Variant.weights(self)
