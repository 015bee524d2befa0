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
from torch.distributed.tensor import DTensor

from llmsys_suite.model import Block, Decoder, ModelConfig
from llmsys_suite.samples import VARIANT_NAMES

if TYPE_CHECKING:
    from llmsys_suite.run import Run


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

    def __init__(
        self, run: Run, config: ModelConfig, optimizer: partial[Any] | None = None
    ) -> None:
        torch.manual_seed(run.config.seed)
        self.device = run.device
        self.phase = run.recorder.phase
        self.make = optimizer or partial(torch.optim.AdamW, lr=run.config.learning_rate)
        #: In how many parts a rank's rows go through.
        self.parts = run.config.parts if self.alone else 1
        self.decoder = Decoder(config, attention=flash_attention).to(run.device)
        self.model: nn.Module = self.decoder
        self.reduced = CountedAllReduce(dist.all_reduce)
        self.build()

    def build(self) -> None:
        """Wrap the model, make the optimizer."""
        self.optimizer: Any = self.make(self.model.parameters())

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """One training step on this rank's rows; their mean loss before it."""
        self.prepare()
        loss = self.forward_backward(tokens, targets)
        self.communicate()
        self.update()
        return loss

    def prepare(self) -> None:
        """What comes before the forward pass."""

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> float:
        """Both passes, labelled; the mean loss."""
        mean = 0.0
        for some, theirs in zip(tokens.chunk(self.parts), targets.chunk(self.parts), strict=True):
            with self.phase("forward"):
                logits = self.model(some)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), theirs.flatten())
                loss = loss * (len(some) / len(tokens))
            with self.phase("backward"):
                loss.backward()
            mean += float(loss.detach())
        return mean

    def communicate(self) -> None:
        """What is left to synchronise after the backward pass."""

    def update(self) -> None:
        """The optimizer's step."""
        with self.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor] | None:
        """What the optimizer is about to read, on this rank; None where no rank has it whole."""
        found = {name: p.grad for name, p in self.decoder.named_parameters()}
        return {name: torch.zeros(0) if g is None else g for name, g in found.items()}

    def weights(self) -> dict[str, Tensor]:
        """All parameters whole, on every rank."""
        return {name: p.detach() for name, p in self.decoder.named_parameters()}

    def gradient_bytes(self, steps: int) -> float | None:
        """Bytes of gradients handed to a collective a step; None where none is or nobody counts."""
        return None

    def planned_wire_bytes(self, gradient_bytes: int) -> tuple[float, float]:
        """What this rank should receive in a step: the least and the most."""
        return 0.0, 0.0

    def close(self) -> None:
        """Let go of what outlives the last step."""


def share_of(gradient_bytes: int) -> float:
    """(n - 1) / n: what a rank receives in a reduce-scatter, and again in an all-gather."""
    world = dist.get_world_size()
    return gradient_bytes * (world - 1) / world


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

    def planned_wire_bytes(self, gradient_bytes: int) -> tuple[float, float]:
        """A reduce-scatter and an all-gather."""
        return 2 * share_of(gradient_bytes), 2 * share_of(gradient_bytes)


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
        self.optimizer = self.make(self.model.parameters())
        self.wrapped = ddp.DDP(self.model, self.bucket_size_mb, all_reduce=self.reduced)
        self.model = self.wrapped

    def communicate(self) -> None:
        """Wait for what has not arrived."""
        with self.phase("communication"):
            self.wrapped.finish_gradient_synchronization()

    def gradient_bytes(self, steps: int) -> float:
        """As counted at the all-reduce, less what the meter says travels along."""
        return self.reduced.bytes / steps - self.wrapped.meter.last.extra_bytes

    def planned_wire_bytes(self, gradient_bytes: int) -> tuple[float, float]:
        """A reduce-scatter and an all-gather."""
        return 2 * share_of(gradient_bytes), 2 * share_of(gradient_bytes)


class Overlapped(Bucketed):
    """Each parameter sent by itself, as soon as its gradient is ready."""

    bucket_size_mb = None


class SharedMemory(Bucketed):
    """Buckets that lie in shared memory, where the ranks of one host reduce them in place."""

    def build(self) -> None:
        """Wrap in our DDP, on our collectives."""
        self.optimizer = self.make(self.model.parameters())
        self.reduced = CountedAllReduce(collectives.all_reduce)
        self.wrapped = ddp.DDP(
            self.model,
            self.bucket_size_mb,
            all_reduce=self.reduced,
            allocate=collectives.shared_empty,
        )
        self.model = self.wrapped

    def planned_wire_bytes(self, gradient_bytes: int) -> tuple[float, float]:
        """Nothing leaves memory, where all ranks share it."""
        return 0.0, 0.0


class TorchDDP(Variant):
    """torch's own DistributedDataParallel, the peer."""

    alone = False

    def build(self) -> None:
        """Wrap in torch's DDP, tuned as its documentation advises."""
        self.optimizer = self.make(self.model.parameters())
        self.model = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def planned_wire_bytes(self, gradient_bytes: int) -> tuple[float, float]:
        """A reduce-scatter and an all-gather."""
        return 2 * share_of(gradient_bytes), 2 * share_of(gradient_bytes)


class ShardedState(Variant):
    """ZeRO stage 1: each rank keeps a share of the optimizer's state."""

    alone = False
    shard_gradients = False

    def build(self) -> None:
        """Shard AdamW."""
        self.optimizer = zero.ShardedOptimizer(
            self.model.parameters(),
            self.make.func,  # type: ignore[arg-type]
            shard_gradients=self.shard_gradients,
            **self.make.keywords,
        )

    def gradients(self) -> None:
        """Averaged inside the optimizer's step."""

    def gradient_bytes(self, steps: int) -> float:
        """As counted at the reduce-scatter."""
        return float(self.optimizer.wire.bytes["reduce_scatter"] / steps)

    def planned_wire_bytes(self, gradient_bytes: int) -> tuple[float, float]:
        """A reduce-scatter and an all-gather."""
        return 2 * share_of(gradient_bytes), 2 * share_of(gradient_bytes)


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
        self.optimizer = self.make(self.model.parameters())

    def communicate(self) -> None:
        """Wait for the gradients' shards."""
        with self.phase("communication"):
            self.wrapped.finish_gradient_synchronization()

    def gradients(self) -> None:
        """Each rank has its shards."""

    def weights(self) -> dict[str, Tensor]:
        """Gathered."""
        return self.wrapped.gather_full_params()

    def planned_wire_bytes(self, gradient_bytes: int) -> tuple[float, float]:
        """Parameters twice, of which the last unit's may stay, and gradients once."""
        return 2 * share_of(gradient_bytes), 3 * share_of(gradient_bytes)


class TorchFSDP(Variant):
    """torch's own fully_shard (FSDP2), the other peer, with the same units."""

    alone = False

    def build(self) -> None:
        """Shard the blocks, then the root."""
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for block in self.decoder.layers():
            fully_shard(block, mesh=mesh)
        fully_shard(self.decoder, mesh=mesh)
        self.optimizer = self.make(self.model.parameters())

    def gradients(self) -> None:
        """Each rank has its shards."""

    def weights(self) -> dict[str, Tensor]:
        """Gathered."""
        whole = ((name, p.detach()) for name, p in self.decoder.named_parameters())
        return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in whole}

    def planned_wire_bytes(self, gradient_bytes: int) -> tuple[float, float]:
        """Parameters twice, the root's once, and gradients: on gloo by a whole all-reduce."""
        blocks = 4 * sum(p.numel() for p in self.decoder.blocks.parameters())
        once, again = share_of(gradient_bytes), share_of(blocks)
        return 2 * once + again, 3 * once + again


class ParameterServer(Variant):
    """Workers that pull parameters from a server on rank 0 and push gradients, in lock step."""

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


VARIANTS: dict[str, type[Variant]] = dict(
    zip(
        VARIANT_NAMES,
        (
            Variant,
            TorchDDP,
            Naive,
            Flat,
            Overlapped,
            Bucketed,
            SharedMemory,
            ShardedState,
            ShardedGradients,
            FullySharded,
            TorchFSDP,
            ParameterServer,
        ),
        strict=True,
    )
)


def variants_here(device: torch.device) -> list[str]:
    """Those that this kind of device can run, in the order of their turns."""
    return [name for name in VARIANTS if device.type == "cpu" or VARIANTS[name] is not SharedMemory]
