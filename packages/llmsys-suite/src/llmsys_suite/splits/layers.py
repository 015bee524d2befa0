"""Layers split over ranks: heads and columns, tokens between blocks, rows over pairs of ranks.

Implemented with torch.distributed.tensor: Megatron's column and row split, its sequence
parallelism, and, with at least four ranks, tensor parallelism within data parallelism.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from llmsys_suite.model import Block, ModelConfig
from llmsys_suite.ranks.rank import Run
from llmsys_suite.splits.split import Split, whole_model


def block_plan(between: Any) -> dict[str, ParallelStyle]:
    """Return the plan of a block: matrices split by columns, by rows, and their layouts.

    `between` is the placement of activations between blocks.
    """
    whole = Replicate()
    return {
        # One input for q, k and v (gate and up): their gradients are summed here before they
        # are reduced over the ranks, so that one reduction serves all of them.
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


def split_blocks(
    blocks: list[Block], mesh: DeviceMesh, plan: dict[str, ParallelStyle] | None = None
) -> None:
    """Split the matrices and the heads of each block over the ranks of a mesh."""
    for block in blocks:
        parallelize_module(block, mesh, plan or block_plan(Replicate()))
        # Each rank has a part of the heads.
        block.attention.num_heads //= mesh.size()


class TensorModel(Split):
    """Heads and feed-forward columns on each rank, an all-reduce after each pair of products.

    Shoeybi et al. 2019, section 3: first product split by columns, second by rows.
    """

    #: Placement of activations between blocks: replicated on each rank.
    between: Any = Replicate()

    def __init__(self, run: Run, config: ModelConfig) -> None:
        super().__init__(run, config)
        self.model_config = config
        self.mesh = self.ranks()
        self.model = self.part = whole_model(run, config)
        split_blocks(self.model.layers(), self.mesh, self.block_plan())

    @classmethod
    def why_not(cls, run: Run, config: ModelConfig) -> str:
        """Return an error message if heads or columns do not divide evenly, otherwise ""."""
        for name in ("num_heads", "d_ff"):
            if (value := getattr(config, name)) % run.world:
                return f"{name} {value} does not split over {run.world} ranks"
        return ""

    def ranks(self) -> DeviceMesh:
        """Return the mesh of ranks over which a layer is split."""
        return init_device_mesh(self.run.device.type, (self.run.world,))

    def block_plan(self) -> dict[str, ParallelStyle]:
        """Return the plan of a block."""
        return block_plan(self.between)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Run forward and backward of the whole batch on every rank; return the loss."""
        self.model.zero_grad()
        with self.run.autocast():
            loss = self.model.loss(tokens, targets)
        loss.backward()
        return float(loss.detach())

    def whole(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors: sharded ones are gathered, replicated ones are this rank's."""
        named = mine.items()
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in named}


class SequenceModel(TensorModel):
    """Tensor parallelism whose norms and sums between blocks are split over tokens.

    Korthikanti et al. 2022, section 4.2: an all-reduce becomes a reduce-scatter and an all-gather.
    """

    between = Shard(1)

    def __init__(self, run: Run, config: ModelConfig) -> None:
        super().__init__(run, config)
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(self.model, self.mesh, ends)

    @classmethod
    def why_not(cls, run: Run, config: ModelConfig) -> str:
        """Return an error message if tokens, bytes, heads or columns do not divide evenly."""
        for name in ("context", "vocabulary"):
            if (value := getattr(config, name)) % run.world:
                return f"{name} {value} does not split over {run.world} ranks"
        return super().why_not(run, config)

    def block_plan(self) -> dict[str, ParallelStyle]:
        """Return the plan of a block whose norms are split over tokens."""
        norms = {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
        return super().block_plan() | norms


class DataTensorModel(TensorModel):
    """Two dimensions: layers split over the ranks of a group, rows over the groups.

    A group is as large as the heads and columns of the model allow, so that twelve heads train on
    eight ranks in two groups of four.
    """

    def ranks(self) -> DeviceMesh:
        """Return this rank's group, and store the group of ranks with the same shard."""
        size = self.group_size(self.run, self.model_config)
        mesh = init_device_mesh(
            self.run.device.type, (self.run.world // size, size), mesh_dim_names=("data", "tensor")
        )
        self.replicas = mesh["data"]
        return mesh["tensor"]

    @staticmethod
    def group_size(run: Run, config: ModelConfig) -> int:
        """Return the largest proper divisor of the ranks that divides heads and columns."""
        divisors = [size for size in range(1, run.world) if run.world % size == 0]
        fits = math.gcd(config.num_heads, config.d_ff)
        return max(size for size in (1, *divisors) if fits % size == 0)

    @classmethod
    def why_not(cls, run: Run, config: ModelConfig) -> str:
        """Return an error message unless there are two or more groups with equal rows."""
        size = cls.group_size(run, config)
        if size < 2:
            return f"{run.world} ranks do not make groups that split {config.num_heads} heads"
        if run.config.rows % (run.world // size):
            return f"{run.config.rows} rows do not split over {run.world // size} groups"
        return ""

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Run forward and backward of this group's rows, and average over the groups."""
        groups, mine = self.replicas.size(), self.replicas.get_local_rank()
        loss = super().step(tokens.chunk(groups)[mine], targets.chunk(groups)[mine])
        means = [torch.tensor(loss, device=self.device)]
        for parameter in self.part.parameters():
            assert parameter.grad is not None
            grad = parameter.grad
            means.append(grad.to_local() if isinstance(grad, DTensor) else grad)
        for tensor in means:
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.replicas.get_group())
            tensor /= groups
        return float(means[0])
