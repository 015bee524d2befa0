"""The base of models that are distributed over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llmsys_suite.config import UsageError
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.ranks.rank import Run

#: Steps of AdamW that each split trains, on the run's first batches.
TRAINED = 3


class Split:
    """A model that is split over the ranks; `part` is this rank's part.

    Raises UsageError if the model cannot be split.
    """

    part: nn.Module

    def __init__(self, run: Run, config: ModelConfig) -> None:
        if reason := self.why_not(run, config):
            raise UsageError(reason)
        self.run = run
        self.device = run.device

    @classmethod
    def why_not(cls, run: Run, config: ModelConfig) -> str:
        """Return the reason why the model cannot be split over the ranks, or an empty string."""
        raise NotImplementedError

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Run forward and backward on the whole batch; return its mean loss on every rank."""
        raise NotImplementedError

    def whole(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Combine the parts of all ranks and return them under the unsplit model's names.

        Every rank gets the complete result.
        """
        raise NotImplementedError

    def bubble(self) -> float:
        """Return the idle fraction of a step without communication time; 0 by default."""
        return 0.0

    def train(self, run: Run, steps: int | None = None) -> list[float]:
        """Train a few steps with AdamW and return the loss before each step."""
        # Torch's fused loops do not mix split parameters with whole ones.
        rate = run.config.learning_rate
        optimizer = torch.optim.AdamW(self.part.parameters(), lr=rate, foreach=False)
        losses = []
        for step in range(TRAINED if steps is None else steps):
            losses.append(self.step(*run.batch(step)))
            optimizer.step()
        return losses

    def gradients(self) -> dict[str, Tensor]:
        """Return the full gradient of every parameter, by name.

        A parameter without a gradient gets an empty tensor.
        """
        gradients_by_name = {name: p.grad for name, p in self.part.named_parameters()}
        return self.whole(
            {n: torch.zeros(0) if g is None else g for n, g in gradients_by_name.items()}
        )

    def weights(self) -> dict[str, Tensor]:
        """Return every parameter unsplit, by name."""
        return self.whole({name: p.detach() for name, p in self.part.named_parameters()})


def whole_model(run: Run, config: ModelConfig) -> Decoder:
    """Return the unsplit model with its initial weights, which are equal on all ranks."""
    torch.manual_seed(run.config.seed)
    return Decoder(config).to(run.device)
