"""ZeRO: each rank stores a shard of the state that data parallelism replicates."""

from __future__ import annotations

import torch.distributed as dist
import zero
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from llmsys_suite.model import Block, Decoder
from llmsys_suite.variants.replicated import DataParallel


class ShardedState(DataParallel):
    """ZeRO stage 1: each rank stores a shard of the optimizer state."""

    shard_gradients = False

    def build(self) -> None:
        """Create AdamW with a sharded state."""
        self.optimizer = zero.ShardedOptimizer(
            self.model.parameters(),
            self.make_optimizer.func,  # type: ignore[arg-type]
            shard_gradients=self.shard_gradients,
            **self.make_optimizer.keywords,
        )

    def clip(self, max_norm: float) -> None:
        """Average the gradients and clip them. Without clipping, `update` averages them."""
        self.optimizer.clip_grad_norm_(max_norm)


class ShardedGradients(ShardedState):
    """ZeRO stage 2: gradients are sharded as well."""

    shard_gradients = True


class FullySharded(DataParallel):
    """ZeRO stage 3: parameters are sharded as well."""

    def build(self) -> None:
        """Wrap the model in zero.FSDP, with one unit per block and one for other parameters."""
        self.wrapped = zero.FSDP(self.model, shard=(Block, Decoder))
        self.model = self.wrapped
        self.optimizer = self.make_optimizer(self.model.parameters())

    def communicate(self) -> None:
        """Wait until this rank's shards of the gradients are averaged."""
        with self.phase("communication"):
            self.wrapped.finish_gradient_synchronization()

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the full parameters, gathered from all ranks."""
        return self.wrapped.gather_full_params()


class TorchFSDP(DataParallel):
    """torch's own fully_shard (FSDP2), with the same units as `FullySharded`."""

    def build(self) -> None:
        """Shard the blocks, then the root."""
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for block in self.decoder.list_blocks():
            fully_shard(block, mesh=mesh)
        fully_shard(self.decoder, mesh=mesh)
        super().build()

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the full parameters, gathered from all ranks."""
        parameters = super().gather_weights().items()
        return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in parameters}
