"""Pipeline parallelism: consecutive layers per rank, and microbatches in three schedules.

Implemented with torch.distributed.pipelining, which sends activations and gradients between stages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from llmsys_suite.config import UsageError
from llmsys_suite.model import Block, Decoder, ModelConfig, run_block
from llmsys_suite.ranks.rank import Run
from llmsys_suite.splits.split import Split, whole_model


class PipelineModel(Split):
    """Consecutive blocks on each rank; microbatches flow through them (Huang et al. 2019)."""

    schedule_class: Any = ScheduleGPipe
    #: Number of stages per rank; the stages of a rank are `world` stages apart.
    stages_per_rank = 1

    def __init__(self, run: Run, config: ModelConfig, microbatches: int | None = None) -> None:
        super().__init__(run, config)
        half = max(1, run.config.rows // 2)
        # Microbatches of two rows, or of one row if there would be fewer microbatches than ranks.
        self.microbatches = microbatches or (half if half >= run.world else run.config.rows)
        if run.config.rows % self.microbatches:
            raise UsageError(
                f"{run.config.rows} rows do not split into {self.microbatches} microbatches"
            )
        self.last = run.rank == run.world - 1
        self.first = run.rank == 0
        count = run.world * self.stages_per_rank
        model, mine = whole_model(run, config), range(run.rank, count, run.world)
        parts = [LayerRange(model, stage, count, run.autocast) for stage in mine]
        self.stages = [
            PipelineStage(part, stage, count, run.device)
            for part, stage in zip(parts, mine, strict=True)
        ]
        self.part = nn.ModuleList(parts)
        self.schedule = self.schedule_class(
            self.stages if self.stages_per_rank > 1 else self.stages[0],
            self.microbatches,
            loss_fn=cross_entropy,
        )

    @classmethod
    def why_not(cls, run: Run, config: ModelConfig) -> str:
        """Return an error message if there are fewer layers than stages, otherwise ""."""
        count = run.world * cls.stages_per_rank
        if config.num_layers < count:
            return f"{config.num_layers} layers do not make {count} stages"
        return ""

    def bubble(self) -> float:
        """Return (p - 1) / (m s + p - 1) for p ranks with s stages each and m microbatches.

        Narayanan et al. 2021, section 2.2.
        """
        waits = self.run.world - 1
        return waits / (self.microbatches * self.stages_per_rank + waits)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Run forward and backward of all microbatches; return their mean loss on every rank."""
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
        """Return the layers of all ranks."""
        gathered: dict[str, Tensor] = {}
        # Remove the index of the stage within its rank from the names.
        named = {name.partition(".")[2]: tensor.cpu() for name, tensor in mine.items()}
        for part in self.run.gather(named):
            gathered |= part
        return {name: tensor.to(self.device) for name, tensor in gathered.items()}


class OneForwardOneBackward(PipelineModel):
    """Backward passes start as early as possible, so fewer activations are saved (PipeDream)."""

    schedule_class = Schedule1F1B


class Interleaved(PipelineModel):
    """Two shorter stages per rank: half the bubble, twice the bytes (Narayanan et al. 2021)."""

    schedule_class = ScheduleInterleaved1F1B
    stages_per_rank = 2


class LayerRange(nn.Module):
    """One pipeline stage: its blocks, and the embedding or head if it is the first or last."""

    rope: Tensor

    def __init__(
        self,
        model: Decoder,
        stage: int,
        stages: int,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        # Entered in each forward pass, because schedules run forward and backward passes together
        # and a backward pass must not run under autocast.
        self.autocast = autocast
        self.checkpoint = model.config.checkpoint
        first, last = (len(model.blocks) * s // stages for s in (stage, stage + 1))
        self.embedding = model.embedding if stage == 0 else None
        # Named by their index in the whole model.
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})
        self.norm = model.norm if stage == stages - 1 else None
        self.head = model.head if stage == stages - 1 else None
        self.register_buffer("rope", model.rope, persistent=False)

    def layers(self) -> list[Block]:
        """Return the blocks in their order."""
        return [block for block in self.blocks.values() if isinstance(block, Block)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream, or logits in the last stage.

        The input is tokens in the first stage and the residual stream in the others.
        """
        with self.autocast():
            if self.embedding is not None:
                x = self.embedding(x)
            rope = self.rope[:, : x.shape[1]]
            for block in self.blocks.values():
                x = run_block(block, x, rope, checkpointed=self.checkpoint)
            if self.head is not None and self.norm is not None:
                x = self.head(self.norm(x))
        return x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return nats per token, in float32."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
