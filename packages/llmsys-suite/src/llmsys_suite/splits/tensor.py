"""Blocks that are split over ranks by heads and columns, with torch.distributed.tensor.

This is Megatron's split (Shoeybi et al. 2019, section 3): the first product is split by columns,
the second by rows, and an all-reduce follows each pair of products. With sequence parallelism, the
norms and residual sums are split over tokens. A reduce-scatter and an all-gather then replace the
all-reduce.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from llmsys_suite.model import Block


def split_blocks(blocks: list[Block], mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Split the matrices and the heads of each block over the ranks of a mesh."""
    for block in blocks:
        parallelize_module(block, mesh, block_plan(sequence=sequence))
        # Each rank computes only its part of the heads.
        block.attention.num_heads //= mesh.size()


def split_ends(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the tokens over ranks after the embedding, and gather them before the logits."""
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def block_plan(*, sequence: bool) -> dict[str, ParallelStyle]:
    """Return the tensor-parallel plan of a block: a `ParallelStyle` for each submodule."""
    whole = Replicate()
    #: Placement of activations between blocks: split by tokens, or replicated on each rank.
    between: Any = Shard(1) if sequence else whole
    plan: dict[str, ParallelStyle] = {
        # q, k and v (and gate and up) read one input, so that their input gradients are summed
        # before one reduction over the ranks.
        "attention": PrepareModuleInput(
            input_layouts=(between, None), desired_input_layouts=(whole, None)
        ),
        "ffn": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,)),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=between),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        plan |= {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
    return plan
