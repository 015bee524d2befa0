"""Full tensors for optimizers that are not element-wise, during their step at stage 3.

Each parameter has one owner rank, which gets the full parameter and its gradient, steps it, and
broadcasts the result. All state of a parameter is on its owner.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zero.fsdp.shard import ShardedParameter, ShardingUnit, plain_shard
from zero.partition import by_parameter
from zero.process_groups import Communicator

#: A parameter of an optimizer, its unit, and its description in the unit.
Entry = tuple[nn.Parameter, ShardingUnit, ShardedParameter]


class FullTensorExchange:
    """Tensors of one dtype that are full on their owner rank while an optimizer steps.

    earlier_owners: the owners of parameters that have been stepped before.
    """

    def __init__(
        self,
        communicator: Communicator,
        entries: list[Entry],
        earlier_owners: Mapping[nn.Parameter, int],
    ) -> None:
        self.communicator = communicator
        self.entries = entries
        added = [parameter for parameter, _, _ in entries if parameter not in earlier_owners]
        numels = [sharded.shape.numel() for p, _, sharded in entries if p not in earlier_owners]
        partition = by_parameter(numels, communicator.world, 1 << 62)
        #: The rank that steps each parameter; parameters without elements belong to rank 0.
        self.owner = {parameter: earlier_owners.get(parameter, 0) for parameter, _, _ in entries}
        for rank in range(communicator.world):
            for piece in partition.shard_pieces(rank):
                self.owner[added[piece.index]] = rank
        #: The shard and gradient of each parameter that is being stepped.
        self._shards: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}

    @torch.no_grad()
    def gather_full_tensors(self) -> None:
        """Set `.data` and `.grad` to full tensors on the owner; remove `.grad` on other ranks."""
        # `check_gradients_alike` ensures that a parameter has a gradient on all ranks or on none.
        stepped = [entry for entry in self.entries if entry[0].grad is not None]
        self._shards = {p: (plain_shard(p), p.grad) for p, _, _ in stepped}
        full: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        for unit in dict.fromkeys(unit for _, unit, _ in stepped):
            values = unit.gather_full_parameters()
            gradients = unit.gather_full_gradients()
            for parameter, its_unit, sharded in stepped:
                # Names alone do not identify a parameter: the optimizer may step several models.
                if its_unit is unit and self.owner[parameter] == self.communicator.rank:
                    # Without the copies, the full tensors of the unit would stay alive.
                    full[parameter] = values[sharded.name].clone(), gradients[sharded.name].clone()
        for parameter, unit, _ in stepped:
            unit.holds_full_tensors = True
            parameter.grad = None
            if parameter in full:
                parameter.data, parameter.grad = full[parameter]

    @torch.no_grad()
    def scatter_full_tensors(self) -> list[nn.Parameter]:
        """Copy each rank's elements of the stepped tensors; return the stepped parameters."""
        for parameter, _, sharded in self.entries:
            if parameter not in self._shards:
                continue
            data, gradient = self._shards[parameter]
            owner = self.owner[parameter]
            is_owner = owner == self.communicator.rank
            stepped = plain_shard(parameter) if is_owner else data.new_empty(sharded.shape)
            full = stepped.contiguous()
            self.communicator.broadcast(full, owner).wait()
            parameter.grad = None
            parameter.data = data
            data.copy_(full.reshape(-1)[sharded.start : sharded.stop].view(data.shape))
            parameter.grad = gradient
        for _, unit, _ in self.entries:
            unit.holds_full_tensors = False
        parameters = list(self._shards)
        self._shards = {}
        return parameters
