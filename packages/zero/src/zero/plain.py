"""ZeRO's three stages in plain torch: shard, gather, step.

Data parallelism stores all parameters, gradients and optimizer state on each of n ranks, although
all ranks compute identical updates. Here, rank r updates only the r-th part of the elements. It
stores only this part of the optimizer state (stage 1), of the averaged gradients (stage 2) and,
between uses, of the parameters (stage 3). Source: Rajbhandari et al. 2020, ZeRO, section 5.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def flatten(tensors: list[Tensor], world_size: int) -> Tensor:
    """Return the concatenated tensors, padded with zeros so that they split into equal shards."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return nn.functional.pad(flat, (0, -len(flat) % world_size))  # [world_size * shard]


def unflatten(flat: Tensor, parameters: list[nn.Parameter]) -> None:
    """Copy the elements of a flat tensor into the parameters, in order."""
    start = 0
    for parameter in parameters:
        parameter.data.copy_(flat[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()


def reduce_scatter_gradients(gradients: Tensor, rank: int, world_size: int) -> Tensor:
    """Send part j of the gradients to rank j; return the average of the received parts."""
    parts = list(gradients.chunk(world_size))  # world_size x [shard]
    received = [torch.empty_like(parts[rank]) for _ in range(world_size)]
    for owner in range(world_size):
        dist.gather(parts[owner], received if owner == rank else None, dst=owner)
    # Adding in rank order gives the same bits in every run.
    return sum(received[1:], start=received[0]) / world_size


def all_gather_shards(shard: Tensor, world_size: int) -> Tensor:
    """Return the concatenation of the shards of all ranks."""
    parts = [torch.empty_like(shard) for _ in range(world_size)]
    dist.all_gather(parts, shard)
    return torch.cat(parts)


class PlainShardedOptimizer:
    """Stages 1 and 2: an optimizer that updates this rank's shard of the elements."""

    def __init__(
        self, module: nn.Module, optimizer_cls: Any, *, stage: int = 1, **options: Any
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.stage = stage
        self.parameters = list(module.parameters())
        flat = flatten(list(self.parameters), self.world_size)
        self.shard = nn.Parameter(flat.chunk(self.world_size)[self.rank].clone())
        # At stage 1, only the state of this optimizer is smaller: it covers 1/n of the elements.
        self.optimizer = optimizer_cls([self.shard], **options)

    def step(self) -> None:
        """Average this rank's shard of gradients, step it, gather all shards, and clear `.grad`."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        gradients = flatten(grads, self.world_size)
        if self.stage == 2:  # ShardedOptimizer frees each bucket of gradients when it is sent.
            for parameter in self.parameters:
                parameter.grad = None
        self.shard.grad = reduce_scatter_gradients(gradients, self.rank, self.world_size)
        self.optimizer.step()
        unflatten(all_gather_shards(self.shard.data, self.world_size), self.parameters)
        for parameter in self.parameters:
            parameter.grad = None


class PlainFSDP(nn.Module):
    """Stage 3: each layer's parameters are gathered before it runs and, for brevity, not freed."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # A plain list, so that `parameters()`, and thus an optimizer, contains only the shards.
        self.layers = [(layer, list(layer.parameters())) for layer in layers]
        self.shards = nn.ParameterList()
        for _, full in self.layers:
            flat = flatten(list(full), self.world_size) if full else torch.empty(0)
            self.shards.append(nn.Parameter(flat.chunk(self.world_size)[self.rank].clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Run layer by layer. The backward pass gathers each layer again and recomputes it."""
        for (layer, full), shard in zip(self.layers, self.shards, strict=True):
            x = _Layer.apply(x, shard, layer, full, self)  # [batch, features]
        return x


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, layer: Any, full: Any, fsdp: Any) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.layer = layer, full, fsdp
        unflatten(all_gather_shards(shard, fsdp.world_size) if full else shard, full)
        result: Tensor = layer(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        x, shard = ctx.saved_tensors
        layer, full, fsdp = ctx.layer
        unflatten(all_gather_shards(shard, fsdp.world_size) if full else shard, full)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            grad_input, *gradients = torch.autograd.grad(layer(x), [x, *full], grad_output)
        if not full:
            return grad_input, None, None, None, None
        flat = flatten(gradients, fsdp.world_size)
        average = reduce_scatter_gradients(flat, fsdp.rank, fsdp.world_size)
        return grad_input, average, None, None, None
