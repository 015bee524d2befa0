"""The ways of training one model that a run compares: same weights, same tokens, same optimizer.

Each takes a rank's rows of the global batch and makes one step; what it does in that step is
labelled by phase, and what it hands to an all-reduce is counted on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import collectives
import ddp
import paramserver
import torch
import torch.distributed as dist
import zero
from flashattn2 import flash_attention
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from llmsys_suite.model import Block, Decoder, ModelConfig

if TYPE_CHECKING:
    from llmsys_suite.worker import Run


class CountedAllReduce:
    """An all-reduce that counts the bytes and the calls that pass through it."""

    def __init__(self, all_reduce: Callable[..., Any]) -> None:
        self._all_reduce = all_reduce
        self.bytes = 0
        self.calls = 0

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Count, then reduce."""
        self.bytes += tensor.numel() * tensor.element_size()
        self.calls += 1
        return self._all_reduce(tensor, *args, **kwargs)


class Variant:
    """One way of training; the base is one process on the whole batch."""

    #: Whether rank 0 trains alone, on all rows.
    alone = True

    def __init__(self, run: Run, config: ModelConfig) -> None:
        torch.manual_seed(run.config.seed)
        self.device = run.device
        self.phase = run.recorder.phase
        self.learning_rate = run.config.learning_rate
        self.model: nn.Module = Decoder(config, attention=flash_attention)
        self.model.to(run.device)
        self.reduced = CountedAllReduce(dist.all_reduce)
        self.build()

    def build(self) -> None:
        """Wrap the model, make the optimizer."""
        self.optimizer: Any = self.adamw()

    def adamw(self) -> torch.optim.Optimizer:
        """The optimizer of every variant."""
        return torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """One training step on this rank's rows; their mean loss before it."""
        loss = self.forward_backward(tokens, targets)
        self.communicate()
        with self.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Both passes, labelled."""
        with self.phase("forward"):
            logits = self.model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        with self.phase("backward"):
            loss.backward()
        return loss

    def communicate(self) -> None:
        """What is left to synchronise after the backward pass."""

    def gradient_bytes(self, steps: int) -> float | None:
        """Bytes of gradients handed to a collective a step; None where none is or nobody counts."""
        return None

    def close(self) -> None:
        """Let go of what outlives the last step."""


class Naive(Variant):
    """One all-reduce a parameter, after the backward pass."""

    alone = False

    def communicate(self) -> None:
        """Send the gradients one by one."""
        with self.phase("communication"):
            ddp.all_reduce_gradients(self.model, all_reduce=self.reduced)

    def gradient_bytes(self, steps: int) -> float:
        """As counted at the all-reduce."""
        return self.reduced.bytes / steps


class Flat(Naive):
    """One all-reduce for all gradients, after the backward pass."""

    def communicate(self) -> None:
        """Send the gradients as one."""
        with self.phase("communication"):
            ddp.all_reduce_gradients_flat(self.model, all_reduce=self.reduced)


class Bucketed(Variant):
    """Buckets that are sent while the backward pass goes on."""

    alone = False
    bucket_size_mb: float | None = 1.0

    def build(self) -> None:
        """Wrap in our DDP."""
        self.optimizer = self.adamw()
        self.wrapped = ddp.DDP(self.model, self.bucket_size_mb, all_reduce=self.reduced)
        self.model = self.wrapped

    def communicate(self) -> None:
        """Wait for what has not arrived."""
        with self.phase("communication"):
            self.wrapped.finish_gradient_synchronization()

    def gradient_bytes(self, steps: int) -> float:
        """As counted at the all-reduce, less what the meter says travels along."""
        return self.reduced.bytes / steps - self.wrapped.meter.last.extra_bytes


class Overlapped(Bucketed):
    """Each parameter sent by itself, as soon as its gradient is ready."""

    bucket_size_mb = None


class SharedMemory(Bucketed):
    """Buckets that lie in shared memory, where the ranks of one host reduce them in place."""

    def build(self) -> None:
        """Wrap in our DDP, on our collectives."""
        self.optimizer = self.adamw()
        self.reduced = CountedAllReduce(collectives.all_reduce)
        self.wrapped = ddp.DDP(
            self.model,
            self.bucket_size_mb,
            all_reduce=self.reduced,
            allocate=collectives.shared_empty,
        )
        self.model = self.wrapped


class TorchDDP(Variant):
    """torch's own DistributedDataParallel, the peer."""

    alone = False

    def build(self) -> None:
        """Wrap in torch's DDP, tuned as its documentation advises."""
        self.optimizer = self.adamw()
        self.model = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)


class ShardedState(Variant):
    """ZeRO stage 1: each rank keeps a share of the optimizer's state."""

    alone = False
    shard_gradients = False

    def build(self) -> None:
        """Shard AdamW."""
        self.optimizer = zero.ShardedOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            shard_gradients=self.shard_gradients,
            lr=self.learning_rate,
        )

    def gradient_bytes(self, steps: int) -> float:
        """As counted at the reduce-scatter."""
        return float(self.optimizer.wire.bytes["reduce_scatter"] / steps)


class ShardedGradients(ShardedState):
    """ZeRO stage 2: and a share of the gradients."""

    shard_gradients = True


class FullySharded(Variant):
    """ZeRO stage 3: and a share of the parameters."""

    alone = False

    def gradient_bytes(self, steps: int) -> float:
        """As counted at the reduce-scatter, and at the all-reduce of what is replicated."""
        handed = self.wrapped.wire.bytes
        return (handed["reduce_scatter"] + handed["all_reduce"]) / steps

    def build(self) -> None:
        """Wrap in our FSDP: each block a unit, and the rest."""
        self.wrapped = zero.FSDP(self.model, shard=(Block, Decoder))
        self.model = self.wrapped
        self.optimizer = self.adamw()

    def communicate(self) -> None:
        """Wait for the gradients' shards."""
        with self.phase("communication"):
            self.wrapped.finish_gradient_synchronization()


class TorchFSDP(Variant):
    """torch's own fully_shard (FSDP2), the other peer, with the same units."""

    alone = False

    def build(self) -> None:
        """Shard the blocks, then the root."""
        assert isinstance(self.model, Decoder)
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for block in self.model.layers():
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = self.adamw()


class ParameterServer(Variant):
    """Workers that pull parameters from a server on rank 0 and push gradients, in lock step."""

    alone = False

    def build(self) -> None:
        """Join as a worker; rank 0 serves too."""
        make = partial(torch.optim.AdamW, lr=self.learning_rate)
        self.joined = paramserver.join(self.model, make, paramserver.BulkSynchronous())
        self.worker = self.joined.__enter__()

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Pull, compute, push; the server averages and updates."""
        with self.phase("communication"):
            self.worker.pull()
        loss = self.forward_backward(tokens, targets)
        with self.phase("communication"):
            self.worker.push()
        return float(loss.detach())

    def close(self) -> None:
        """Leave; the server stops when all have."""
        self.joined.__exit__(None, None, None)
