"""Full tensors for optimizers that are not element-wise, during their step at stage 3.

All ranks gather the parameters and gradients of one unit at a time. Each parameter has one owner
rank, which keeps the full parameter and its gradient, steps it, and broadcasts the result. All
state of a parameter is on its owner.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zero.fsdp.shard import ShardedParameter, as_plain_shard
from zero.partition import partition_by_parameter
from zero.process_groups import Communicator, as_bytes


class FullTensorExchange:
    """Tensors of one dtype that are full on their owner rank while an optimizer steps.

    earlier_owners: the owners that earlier exchanges have assigned to shards.
    """

    def __init__(
        self,
        communicator: Communicator,
        parameters: list[ShardedParameter],
        earlier_owners: Mapping[nn.Parameter, int],
    ) -> None:
        self.communicator = communicator
        self.parameters = parameters
        added = [p for p in parameters if p.shard not in earlier_owners]
        numels = [p.shape.numel() for p in added]
        partition = partition_by_parameter(numels, communicator.world, 1 << 62)
        #: The rank that steps each shard's parameter; rank 0 for parameters without elements.
        self.owner = {p.shard: earlier_owners.get(p.shard, 0) for p in parameters}
        for rank in range(communicator.world):
            for piece in partition.list_shard_pieces(rank):
                self.owner[added[piece.index].shard] = rank
        #: The elements and the gradient of each shard that is being stepped.
        self._shards: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}
        #: Copies of the trainable shards without a gradient, which a step should not change.
        self._without_gradient: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def gather_full_tensors(self) -> None:
        """Set `.data` and `.grad` of each shard with a gradient to full tensors on the owner.

        On other ranks, `.data` becomes a placeholder of one element, and `.grad` becomes None.
        """
        # `check_gradients_match` ensures that a parameter has a gradient on all ranks or on none.
        stepped = [p for p in self.parameters if p.shard.grad is not None]
        self._shards = {p.shard: (as_plain_shard(p.shard), p.shard.grad) for p in stepped}
        full: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        for unit in dict.fromkeys(p.unit for p in stepped):
            values = unit.gather_full_parameters()
            gradients = unit.gather_full_gradients()
            for p in stepped:
                # Names alone do not identify a parameter: the optimizer may step several models.
                if p.unit is unit and self.owner[p.shard] == self.communicator.rank:
                    # Without the copies, the full tensors of the unit would stay alive.
                    full[p.shard] = values[p.name].clone(), gradients[p.name].clone()
        for p in stepped:
            p.unit.holds_full_tensors = True
            p.shard.grad = None
            if p.shard in full:
                p.shard.data, p.shard.grad = full[p.shard]
            else:
                # An optimizer may also read parameters without a gradient. Most functions of whole
                # tensors fail on a tensor without elements, and this rank may have no elements.
                elements, _ = self._shards[p.shard]
                p.shard.data = elements.new_ones((1,) * elements.dim())
        self._without_gradient = {
            p.shard: as_plain_shard(p.shard).clone()
            for p in self.parameters
            if p.shard not in self._shards and p.shard.requires_grad
        }

    @torch.no_grad()
    def scatter_full_tensors(self) -> list[nn.Parameter]:
        """Broadcast the stepped tensors, and copy this rank's elements of them into the shards.

        Return the stepped shards. Every rank must call this method. Raise RuntimeError if the
        optimizer has changed any other shard, of which it only had this rank's elements.
        """
        for shard, before in self._without_gradient.items():
            if not torch.equal(as_bytes(as_plain_shard(shard)), as_bytes(before)):
                raise RuntimeError(
                    f"rank {self.communicator.rank}: the optimizer has changed a parameter that "
                    "has no gradient and is not whole: compute gradients of all parameters, "
                    "freeze it, or use ShardedOptimizer (stages 1 and 2)"
                )
        self._without_gradient = {}
        for parameter in self.parameters:
            shard = parameter.shard
            if shard not in self._shards:
                continue
            data, gradient = self._shards[shard]
            owner = self.owner[shard]
            is_owner = owner == self.communicator.rank
            stepped = as_plain_shard(shard) if is_owner else data.new_empty(parameter.shape)
            full = stepped.contiguous()
            self.communicator.broadcast(full, owner).wait()
            shard.grad = None
            shard.data = data
            data.copy_(full.reshape(-1)[parameter.start : parameter.stop].view(data.shape))
            shard.grad = gradient
        for parameter in self.parameters:
            parameter.unit.holds_full_tensors = False
        stepped_shards = list(self._shards)
        self._shards = {}
        return stepped_shards
