"""One model, and the implementations of data parallelism that the benchmark compares.

torch's implementations are set up as its documentation advises. DDP's gradients and
ZeroRedundancyOptimizer's parameters are views of buckets, and FSDP2 shards each block and the root.
`fsdp2_layers` shards the same modules as this package instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from zero.fsdp.fsdp import FSDP
from zero.optimizer.sharded_optimizer import ShardedOptimizer

Trained = tuple[nn.Module, torch.optim.Optimizer]

#: Vocabulary size, width, number of layers, and tokens per rank.
SIZES = {"quick": (1024, 128, 2, 64), "full": (4096, 512, 6, 128)}
NAMES = ("ddp", "ddp_zero_redundancy", "stage1", "stage2", "fsdp2", "fsdp2_layers", "stage3")
#: The implementations in torch that are closest to each stage.
RIVALS = {
    "stage1": ("ddp_zero_redundancy",),
    "stage2": ("ddp_zero_redundancy",),
    "stage3": ("fsdp2", "fsdp2_layers"),
}


class Block(nn.Module):
    """A norm and two linear layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the output of the layers."""
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


def make_model(size: str) -> nn.Sequential:
    """Return an embedding, blocks and a head, as in a language model without attention."""
    vocabulary, width, layers, _ = SIZES[size]
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]
    head = nn.Linear(width, vocabulary, bias=False)
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, head)


def loss_of(model: nn.Module, size: str) -> Tensor:
    """Return the loss of a batch of zeros on the default device."""
    ids = torch.zeros(SIZES[size][3], dtype=torch.long)
    return F.cross_entropy(model(ids), ids)


def build(name: str, model: nn.Module) -> Trained:
    """Return `model`, wrapped by the implementation called `name`, and its AdamW optimizer."""
    if name in ("ddp", "ddp_zero_redundancy"):
        return _ddp(model, sharded=name == "ddp_zero_redundancy")
    if name in ("fsdp2", "fsdp2_layers"):
        return _fsdp2(model, (Block,) if name == "fsdp2" else (nn.Linear, nn.Embedding))
    # If several optimizers shared a group, their reducers would wait for the end of backward.
    return build_stage(int(name[-1]), model, dist.new_group())


def build_stage(stage: int, model: nn.Module, group: Any = None) -> Trained:
    """Return `model` and AdamW at stage 0 (not sharded), 1, 2 or 3."""
    if stage == 3:
        model = FSDP(model, group=group, shard=(nn.Linear, nn.Embedding))
    if stage in (0, 3):
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, group=group, shard_gradients=stage == 2, lr=1e-3
    )


def payload_of(trained: Trained) -> Callable[[], dict[str, int]] | None:
    """Return a function that reports payload bytes; None for torch's implementations."""
    for part in trained:
        if isinstance(part, FSDP | ShardedOptimizer):
            return part.communicator.pop_bytes
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
