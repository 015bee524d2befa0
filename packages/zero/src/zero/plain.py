"""ZeRO's three stages in plain torch: shard, gather, step. Everything else here makes them faster.

Data parallelism keeps all parameters, gradients and optimizer state on each of n ranks, though
every element is stepped alike on all of them. So let rank r step only the r-th part of the
elements, and keep only the state for it (stage 1), the averaged gradients of it (stage 2), and
between uses the parameters of it (stage 3). Source: Rajbhandari et al. 2020, ZeRO, section 5.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def flatten(tensors: list[Tensor], world: int) -> Tensor:
    """Lay tensors end to end and pad, so that the result is `world` shards of one size."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return nn.functional.pad(flat, (0, -len(flat) % world))  # [world * shard]


def unflatten(flat: Tensor, parameters: list[nn.Parameter]) -> None:
    """Copy a flat tensor back into the parameters that it was made of."""
    at = 0
    for parameter in parameters:
        parameter.data.copy_(flat[at : at + parameter.numel()].view_as(parameter))
        at += parameter.numel()


def average_of_shard(gradients: Tensor, rank: int, world: int) -> Tensor:
    """Reduce-scatter: send part j of our gradients to rank j, average the parts that reach us."""
    parts = list(gradients.chunk(world))  # world x [shard]
    received = [torch.empty_like(parts[rank]) for _ in range(world)]
    for owner in range(world):
        dist.gather(parts[owner], received if owner == rank else None, dst=owner)
    # In rank order, so that every run gives the same bits.
    total = received[0]
    for part in received[1:]:
        total = total + part
    return total / world


def gather(shard: Tensor, world: int) -> Tensor:
    """All-gather: every rank's shard, end to end."""
    parts = [torch.empty_like(shard) for _ in range(world)]
    dist.all_gather(parts, shard)
    return torch.cat(parts)


class PlainShardedOptimizer:
    """Stages 1 and 2: `optimizer_cls` on this rank's shard of the elements."""

    def __init__(
        self, module: nn.Module, optimizer_cls: Any, *, stage: int = 1, **options: Any
    ) -> None:
        self.rank, self.world, self.stage = dist.get_rank(), dist.get_world_size(), stage
        self.parameters = list(module.parameters())
        flat = flatten(list(self.parameters), self.world)
        self.shard = nn.Parameter(flat.chunk(self.world)[self.rank].clone())
        # The state for 1/n of the elements: this is stage 1's whole gain.
        self.optimizer = optimizer_cls([self.shard], **options)

    def step(self) -> None:
        """Average this shard's gradient, step it, collect everybody's."""
        gradients = flatten([p.grad for p in self.parameters if p.grad is not None], self.world)
        if self.stage == 2:  # The real thing frees each gradient as soon as it is sent.
            for parameter in self.parameters:
                parameter.grad = None
        self.shard.grad = average_of_shard(gradients, self.rank, self.world)
        self.optimizer.step()
        unflatten(gather(self.shard.data, self.world), self.parameters)
        for parameter in self.parameters:
            parameter.grad = None


class PlainFSDP(nn.Module):
    """Stage 3: each child of `layers` is whole while it runs, and otherwise a shard."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # Kept from `parameters()`: what an optimizer sees are the shards.
        self.layers = [(layer, list(layer.parameters())) for layer in layers]
        whole = [flatten(list(held), self.world) if held else None for _, held in self.layers]
        chunks = (None if flat is None else flat.chunk(self.world)[self.rank] for flat in whole)
        self.shards = nn.ParameterList(
            nn.Parameter(torch.empty(0) if chunk is None else chunk.clone()) for chunk in chunks
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run layer by layer; backward gathers each layer again, and runs it from its input."""
        for (layer, held), shard in zip(self.layers, self.shards, strict=True):
            x = _Layer.apply(x, shard, layer, held, self)  # [batch, features]
        return x


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, layer: Any, held: Any, fsdp: Any) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.rest = layer, held, fsdp
        unflatten(gather(shard, fsdp.world) if held else shard, held)
        result: Tensor = layer(x)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        (x, shard), (layer, held, fsdp) = ctx.saved_tensors, ctx.rest
        unflatten(gather(shard, fsdp.world) if held else shard, held)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            downstream, *gradients = torch.autograd.grad(layer(x), [x, *held], upstream)
        if not held:
            return downstream, None, None, None, None
        average = average_of_shard(flatten(gradients, fsdp.world), fsdp.rank, fsdp.world)
        return downstream, average, None, None, None
