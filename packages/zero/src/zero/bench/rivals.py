"""One model, and the six ways to train it that the bench compares: ours and torch's own.

Torch's own are set up as its documentation advises: DDP with gradients as views of its buckets,
ZeroRedundancyOptimizer with parameters as views of its own, FSDP2 on each block and on the whole.
`fsdp2_layers` shards the same modules as ours instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from zero.fsdp.fsdp import FSDP
from zero.optimizer.optimizer import ShardedOptimizer
from zero.wire import DryRun

Trained = tuple[nn.Module, torch.optim.Optimizer]

# vocabulary, width, layers, tokens a rank
SIZES = {"quick": (1024, 128, 2, 64), "full": (4096, 512, 6, 128)}
NAMES = ("ddp", "ddp_zero_redundancy", "stage1", "stage2", "fsdp2", "fsdp2_layers", "stage3")
# What bounds a step from below: all but communication; only torch's own collectives of its bytes.
FLOORS = ("no_communication", "bare_sums", "bare_sums_and_gathers")
# What each is held against: the stage of torch's own that shards as much.
RIVALS = {
    "stage1": ("ddp_zero_redundancy",),
    "stage2": ("ddp_zero_redundancy",),
    "stage3": ("fsdp2", "fsdp2_layers"),
}


class Block(nn.Module):
    """A norm and two linear layers around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus what the layers make of it."""
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


def make_model(size: str) -> nn.Sequential:
    """An embedding, blocks and a head: all the weight that a language model has."""
    vocabulary, width, layers, _ = SIZES[size]
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]
    head = nn.Linear(width, vocabulary, bias=False)
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, head)


def loss_of(model: nn.Module, size: str) -> Tensor:
    """The loss of one batch of zeros, on the default device: for counting bytes."""
    ids = torch.zeros(SIZES[size][3], dtype=torch.long)
    return F.cross_entropy(model(ids), ids)


def build(name: str, model: nn.Module) -> Trained:
    """`model` under one of NAMES, with AdamW."""
    if name == "no_communication":
        world = DryRun(dist.get_world_size(), dist.get_rank())
        return build_stage(1, model, world)
    if name in ("ddp", "ddp_zero_redundancy"):
        return _ddp(model, sharded=name == "ddp_zero_redundancy")
    if name in ("fsdp2", "fsdp2_layers"):
        return _fsdp2(model, (Block,) if name == "fsdp2" else (nn.Linear, nn.Embedding))
    # Of one group, several optimizers would send when backward ends.
    return build_stage(int(name[-1]), model, dist.new_group())


def bare(name: str, model: nn.Module) -> Callable[[], None]:
    """Only the collectives of a step: a sum of the gradients, and a gather of the parameters."""
    first = next(model.parameters())
    world = dist.get_world_size()
    numel = -(-sum(p.numel() for p in model.parameters()) // world) * world
    whole, shard = first.new_zeros(numel), first.new_zeros(numel // world)

    def call() -> None:
        dist.all_reduce(whole)
        if name == "bare_sums_and_gathers":
            dist.all_gather_into_tensor(whole, shard)

    return call


def build_stage(stage: int, model: nn.Module, group: Any = None) -> Trained:
    """`model` under our stage 0 (alone), 1, 2 or 3, with AdamW."""
    if stage == 3:
        model = FSDP(model, group=group)
    if stage in (0, 3):
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, group=group, shard_gradients=stage == 2, lr=1e-3
    )


def payload_of(trained: Trained) -> Callable[[], dict[str, int]] | None:
    """What tells the bytes handed to each collective, where it is ours."""
    for part in trained:
        if isinstance(part, FSDP | ShardedOptimizer):
            return part.wire.take
    return None


def _ddp(model: nn.Module, sharded: bool) -> Trained:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if not sharded:
        return wrapped, torch.optim.AdamW(model.parameters(), lr=1e-3)
    return wrapped, ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=1e-3,
    )


def _fsdp2(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> Trained:
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, classes):
            fully_shard(module)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
