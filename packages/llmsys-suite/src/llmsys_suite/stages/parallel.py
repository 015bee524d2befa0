"""The same model split two other ways, on torch's own tools: by layers and inside layers.

Pipeline parallel is GPipe through torch.distributed.pipelining, tensor parallel is Megatron's
column and row split through torch.distributed.tensor. Both must give the loss of one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from llmsys_suite.config import UsageError
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.run import Run

ITERATIONS = 10


def run(run: Run) -> dict[str, Any]:
    """Ten iterations of each, timed, with the loss of each beside one process's."""
    if run.world < 2:
        return {"skipped": "splitting a model needs at least two ranks"}
    config = run.model
    if config.num_heads % run.world or config.num_layers < run.world:
        return {
            "skipped": f"{config.num_heads} heads and {config.num_layers} layers "
            f"do not split over {run.world} ranks"
        }
    batch = run.corpus.batch(
        rows=run.config.rows, context=config.context, seed=run.config.seed, step=0
    )
    tokens, targets = (t.to(run.device) for t in batch)
    rows = [_timed(name, make(run, config), tokens, targets) for name, make in SPLITS.items()]
    reference = float(_model(run, config).loss(tokens, targets).detach())
    return {"rows": [row | {"single_loss": reference} for row in rows]}


class PipelineModel:
    """Consecutive blocks on each rank; microbatches flow through them (Huang et al. 2019)."""

    def __init__(self, run: Run, config: ModelConfig, microbatches: int | None = None) -> None:
        self.microbatches = microbatches or run.config.rows // 2
        if run.config.rows % self.microbatches:
            raise UsageError(
                f"{run.config.rows} rows do not split into {self.microbatches} microbatches"
            )
        self.last = run.rank == run.world - 1
        self.first = run.rank == 0
        self.part = LayerRange(_model(run, config), run.rank, run.world)
        self.run = run
        self.stage = PipelineStage(self.part, run.rank, run.world, run.device)
        self.schedule = ScheduleGPipe(self.stage, self.microbatches, loss_fn=_cross_entropy)
        self.device = run.device

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward over all microbatches; the mean loss, on every rank."""
        self.part.zero_grad()
        losses: list[Tensor] = []
        if self.first:
            self.schedule.step(tokens, target=targets if self.last else None, losses=losses)
        elif self.last:
            self.schedule.step(target=targets, losses=losses)
        else:
            self.schedule.step()
        mean = (
            torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self.device)
        )
        dist.all_reduce(mean)
        return float(mean)

    def gradients(self) -> dict[str, Tensor]:
        """Every rank's share, under the whole model's names, on every rank."""
        whole: dict[str, Tensor] = {}
        for share in self.run.gather({n: g.cpu() for n, g in _gradients(self.part).items()}):
            whole |= share
        return {name: gradient.to(self.device) for name, gradient in whole.items()}


class LayerRange(nn.Module):
    """One pipeline stage: its share of the blocks, and the model's ends where it holds them."""

    rope: Tensor

    def __init__(self, model: Decoder, stage: int, stages: int) -> None:
        super().__init__()
        first, last = (len(model.blocks) * s // stages for s in (stage, stage + 1))
        self.embedding = model.embedding if stage == 0 else None
        # By the numbers that they have in the whole model.
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})
        self.norm = model.norm if stage == stages - 1 else None
        self.head = model.head if stage == stages - 1 else None
        self.register_buffer("rope", model.rope, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or the residual stream in; the residual stream or logits out."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, self.rope[:, : x.shape[1]])
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x


class TensorModel:
    """Heads and feed-forward columns on each rank, an all-reduce after each pair of products.

    Shoeybi et al. 2019, section 3: first product split by columns, second by rows.
    """

    def __init__(self, run: Run, config: ModelConfig) -> None:
        mesh = init_device_mesh(run.device.type, (run.world,))
        self.model = _model(run, config)
        for block in self.model.layers():
            parallelize_module(
                block,
                mesh,
                {
                    # One input for q, k and v (gate and up): their gradients are summed here before
                    # they are reduced over the ranks, once for all and not once for each.
                    "attention": PrepareModuleInput(
                        input_layouts=(Replicate(), None),
                        desired_input_layouts=(Replicate(), None),
                    ),
                    "ffn": PrepareModuleInput(
                        input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
                    ),
                    "attention.q": ColwiseParallel(),
                    "attention.k": ColwiseParallel(),
                    "attention.v": ColwiseParallel(),
                    "attention.out": RowwiseParallel(),
                    "ffn.gate": ColwiseParallel(),
                    "ffn.up": ColwiseParallel(),
                    "ffn.down": RowwiseParallel(),
                },
            )
            # Each rank holds whole heads, fewer of them.
            block.attention.num_heads //= run.world

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward of the whole batch on every rank; the loss."""
        self.model.zero_grad()
        loss = self.model.loss(tokens, targets)
        loss.backward()
        return float(loss.detach())

    def gradients(self) -> dict[str, Tensor]:
        """Gathered, on every rank."""
        found = _gradients(self.model).items()
        return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found}


SPLITS: dict[str, Callable[[Run, ModelConfig], PipelineModel | TensorModel]] = {
    "pipeline (GPipe)": PipelineModel,
    "tensor (Megatron)": TensorModel,
}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros(0) if p.grad is None else p.grad for name, p in model.named_parameters()
    }


def _model(run: Run, config: ModelConfig) -> Decoder:
    torch.manual_seed(run.config.seed)
    return Decoder(config).to(run.device)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _timed(
    name: str, model: PipelineModel | TensorModel, tokens: Tensor, targets: Tensor
) -> dict[str, Any]:
    loss = model.step(tokens, targets)
    seconds = []
    clocked_ns = time.time_ns()
    for _ in range(ITERATIONS):
        dist.barrier()
        begin = time.perf_counter()
        loss = model.step(tokens, targets)
        if tokens.device.type == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - begin, device=tokens.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(float(slowest))
    clocked = (time.time_ns() - clocked_ns) / 1e9
    return {
        "split": name,
        "iterations": ITERATIONS,
        "total_s": sum(seconds),
        "iteration_ms": statistics.median(seconds) * 1e3,
        "loss": loss,
        "clocked_s": clocked,
    }
