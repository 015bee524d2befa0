"""Consecutive blocks of a model as stages of a pipeline (Huang et al. 2019).

torch.distributed.pipelining sends activations and gradients between stages, in two schedules: GPipe
and 1F1B. The backward passes of 1F1B start as early as possible, so that fewer activations are
saved (Narayanan et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from llmsys_suite.model import Block, Decoder, run_block

#: The class of each schedule of a `Layout`.
SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class LayerRange(nn.Module):
    """One pipeline stage: its blocks, and the embedding or head if it is the first or last."""

    rope: Tensor

    def __init__(
        self,
        model: Decoder,
        stage: int,
        stages: int,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        # Autocast is entered in each forward pass: schedules mix forward and backward passes, and a
        # backward pass must not run under autocast.
        self.autocast = autocast
        self.checkpoint = model.config.checkpoint
        first, last = (len(model.blocks) * s // stages for s in (stage, stage + 1))
        self.embedding = model.embedding if stage == 0 else None
        # Blocks are named by their index in the whole model.
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})
        self.norm = model.norm if stage == stages - 1 else None
        self.head = model.head if stage == stages - 1 else None
        self.register_buffer("rope", model.rope, persistent=False)

    def list_blocks(self) -> list[Block]:
        """Return the blocks in order."""
        return [block for block in self.blocks.values() if isinstance(block, Block)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream, or logits in the last stage.

        The input is tokens in the first stage, and the residual stream in the other stages.
        """
        with self.autocast():
            rope = self.rope[:, : x.shape[1]]
            if self.embedding is not None:
                x = self.embedding(x)
            for block in self.blocks.values():
                x = run_block(block, x, rope, checkpointed=self.checkpoint)
            if self.head is not None and self.norm is not None:
                x = self.head(self.norm(x))
        return x
