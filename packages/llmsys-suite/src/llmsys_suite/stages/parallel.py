"""The same model split two other ways, on torch's own tools: by layers and inside layers.

Pipeline parallel is GPipe through torch.distributed.pipelining, tensor parallel is Megatron's
column and row split through torch.distributed.tensor. Both must give the loss of one process, and
train the same weights.
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
#: Steps of AdamW that each split trains besides, on the run's first batches.
TRAINED = 3


def run(run: Run) -> dict[str, Any]:
    """Ten iterations of each, timed, with the loss of each beside one process's; a few trained."""
    if run.world < 2:
        return {"skipped": "splitting a model needs at least two ranks"}
    if reason := why_not(run.model, run.world):
        return {"skipped": reason}
    tokens, targets = batch(run, 0)
    reference = float(_model(run, run.model).loss(tokens, targets).detach())
    rows = []
    for name, make in SPLITS.items():
        split = make(run, run.model)
        row = _timed(name, split, tokens, targets) | {"single_loss": reference}
        rows.append(row | {"trained_loss": split.train(run)[-1]})
    return {"rows": rows}


def why_not(config: ModelConfig, world: int) -> str:
    """What of the model does not split over so many ranks; empty where all does."""
    if config.num_layers < world:
        return f"{config.num_layers} layers do not make {world} stages"
    for name in ("num_heads", "d_ff"):
        if (value := getattr(config, name)) % world:
            return f"{name} {value} does not split over {world} ranks"
    return ""


def batch(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step, on every rank."""
    tokens, targets = run.corpus.batch(
        rows=run.config.rows, context=run.config.context, seed=run.config.seed, step=step
    )
    return tokens.to(run.device), targets.to(run.device)


class Split:
    """A model of which each rank has a part; `part` is this rank's."""

    part: nn.Module

    def __init__(self, run: Run, config: ModelConfig) -> None:
        if reason := why_not(config, run.world):
            raise UsageError(reason)
        self.run, self.device = run, run.device

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward of the whole batch; its mean loss, on every rank."""
        raise NotImplementedError

    def whole(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """All ranks' parts put together, on every rank, under the whole model's names."""
        raise NotImplementedError

    def train(self, run: Run) -> list[float]:
        """A few steps of AdamW; the losses before each."""
        # Torch's fused loops do not mix split parameters with whole ones.
        rate = run.config.learning_rate
        optimizer = torch.optim.AdamW(self.part.parameters(), lr=rate, foreach=False)
        losses = []
        for step in range(TRAINED):
            losses.append(self.step(*batch(run, step)))
            optimizer.step()
        return losses

    def gradients(self) -> dict[str, Tensor]:
        """Every parameter's, whole; an empty one where there is none."""
        found = {name: p.grad for name, p in self.part.named_parameters()}
        return self.whole({n: torch.zeros(0) if g is None else g for n, g in found.items()})

    def weights(self) -> dict[str, Tensor]:
        """Every parameter, whole."""
        return self.whole({name: p.detach() for name, p in self.part.named_parameters()})


class PipelineModel(Split):
    """Consecutive blocks on each rank; microbatches flow through them (Huang et al. 2019)."""

    def __init__(self, run: Run, config: ModelConfig, microbatches: int | None = None) -> None:
        super().__init__(run, config)
        self.microbatches = microbatches or max(1, run.config.rows // 2)
        if run.config.rows % self.microbatches:
            raise UsageError(
                f"{run.config.rows} rows do not split into {self.microbatches} microbatches"
            )
        self.last = run.rank == run.world - 1
        self.first = run.rank == 0
        self.part = LayerRange(_model(run, config), run.rank, run.world)
        self.stage = PipelineStage(self.part, run.rank, run.world, run.device)
        self.schedule = ScheduleGPipe(self.stage, self.microbatches, loss_fn=_cross_entropy)

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

    def whole(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every rank's layers."""
        found: dict[str, Tensor] = {}
        for share in self.run.gather({name: tensor.cpu() for name, tensor in mine.items()}):
            found |= share
        return {name: tensor.to(self.device) for name, tensor in found.items()}


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


class TensorModel(Split):
    """Heads and feed-forward columns on each rank, an all-reduce after each pair of products.

    Shoeybi et al. 2019, section 3: first product split by columns, second by rows.
    """

    def __init__(self, run: Run, config: ModelConfig) -> None:
        super().__init__(run, config)
        mesh = init_device_mesh(run.device.type, (run.world,))
        self.model = self.part = _model(run, config)
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

    def whole(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gathered; what is not split is this rank's own."""
        found = mine.items()
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found}


SPLITS: dict[str, Callable[[Run, ModelConfig], Split]] = {
    "pipeline (GPipe)": PipelineModel,
    "tensor (Megatron)": TensorModel,
}


def _model(run: Run, config: ModelConfig) -> Decoder:
    torch.manual_seed(run.config.seed)
    return Decoder(config).to(run.device)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _timed(name: str, model: Split, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
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
