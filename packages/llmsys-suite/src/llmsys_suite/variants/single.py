"""The base class of all variants, which trains in one process on the whole batch.

A step consists of `prepare`, `forward_backward`, `communicate`, `clip` and `update`. The work of
these methods is recorded in the phases of `measure.samples.PHASES`.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import ddp.metering.meter
import torch
from flashattn2 import flash_attention
from torch import Tensor, nn

from llmsys_suite.model import Block, ModelConfig, cross_entropy
from llmsys_suite.variants.initial_weights import build_seeded_model

if TYPE_CHECKING:
    from llmsys_suite.ranks.rank import Run


class Variant:
    """A training strategy. The base class trains in one process on the whole batch."""

    #: True if only rank 0 trains, on all rows of a batch.
    alone = True

    def __init__(
        self, run: Run, config: ModelConfig, optimizer: partial[Any] | None = None
    ) -> None:
        self.device = run.device
        self.phase = run.recorder.phase
        self.autocast = run.autocast
        #: Index of this rank's part of the rows, and the number of parts.
        self.data_rank = run.rank
        self.data_world = run.world
        #: True if this rank records the digests of its rows; one rank per part does so.
        self.reports_rows = True
        self.make_optimizer = optimizer or partial(
            torch.optim.AdamW, lr=run.config.learning_rate, fused=True
        )
        #: Norm to which the gradient is clipped, or None to disable clipping.
        self.max_norm: float | None = None
        #: Number of sequential parts into which a rank splits its rows.
        self.parts = run.config.parts if self.alone else 1
        self.decoder = build_seeded_model(run, config, attention=flash_attention)
        self.model: nn.Module = self.decoder
        self.meter = ddp.metering.meter.Meter()
        self.build()

    def build(self) -> None:
        """Wrap the model and create the optimizer."""
        self.optimizer: Any = self.make_optimizer(self.model.parameters())

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Take one training step on this rank's rows; return their mean loss before the step."""
        self.prepare()
        loss = self.forward_backward(tokens, targets)
        self.communicate()
        if self.max_norm is not None:
            with self.phase("optimizer"):
                self.clip(self.max_norm)
        self.update()
        return loss

    def prepare(self) -> None:
        """Prepare the forward pass; the base class does nothing."""

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> float:
        """Run the forward and backward passes; return the mean loss of the rows."""
        mean_loss = 0.0
        parts = zip(tokens.chunk(self.parts), targets.chunk(self.parts), strict=True)
        for part, part_targets in parts:
            with self.phase("forward"), self.autocast():
                loss = cross_entropy(self.model(part), part_targets) * (len(part) / len(tokens))
            with self.phase("backward"):
                loss.backward()
            mean_loss += float(loss.detach())
        return mean_loss

    def communicate(self) -> None:
        """Finish the communication of gradients; the base class does nothing."""

    def clip(self, max_norm: float) -> None:
        """Scale the averaged gradients so that their total norm is at most `max_norm`."""
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def update(self) -> None:
        """Take the optimizer's step and clear the gradients."""
        with self.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the full, unsharded parameters by name; every rank that trains must call this."""
        return {name: p.detach() for name, p in self.decoder.named_parameters()}

    def compute_communication_times(self, num_steps: int) -> dict[str, float]:
        """Return the median hidden and exposed communication times in ms, from ddp's meter.

        The medians are over the last `num_steps` steps. The result is {} if the variant does not
        use the meter.
        """
        steps = list(self.meter.steps)[-num_steps:]
        if not steps:
            return {}
        return {
            "hidden_ms": 1e3 * statistics.median(step.hidden_seconds for step in steps),
            "exposed_ms": 1e3 * statistics.median(step.exposed_seconds for step in steps),
        }

    def list_blocks(self) -> list[Block]:
        """Return the blocks that this rank trains."""
        return self.decoder.list_blocks()

    def get_evaluated_model(self) -> nn.Module:
        """Return the model that computes held-out losses."""
        return self.model

    def get_checkpoint_objects(self) -> tuple[nn.Module, Any]:
        """Return the model and the optimizer that a checkpoint stores and loads."""
        return self.model, self.optimizer

    def restore(self, model: nn.Module, optimizer: Any) -> None:
        """Copy the state from the results of `get_checkpoint_objects`, if they are copies."""

    def close(self) -> None:
        """Release resources that outlive the last step."""
