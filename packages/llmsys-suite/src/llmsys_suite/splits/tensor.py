"""Blocks that are split over ranks by heads and columns, with torch.distributed.tensor.

This is Megatron's split (Shoeybi et al. 2019, section 3): the first product is split by columns,
the second by rows, and an all-reduce follows each pair of products.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from llmsys_suite.model import Block


def split_blocks(blocks: list[Block], mesh: DeviceMesh) -> None:
    """Split the matrices and the heads of each block over the ranks of a mesh."""
    whole = Replicate()
    for block in blocks:
        plan: dict[str, ParallelStyle] = {
            # q, k and v share one replicated input, and so do gate and up. The gradients of this
            # input are therefore summed on each rank before a single reduction over the ranks.
            "attention": PrepareModuleInput(
                input_layouts=(whole, None), desired_input_layouts=(whole, None)
            ),
            "ffn": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "ffn.gate": ColwiseParallel(),
            "ffn.up": ColwiseParallel(),
            "ffn.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
        # Each rank computes only its part of the heads.
        block.attention.num_heads //= mesh.size()
