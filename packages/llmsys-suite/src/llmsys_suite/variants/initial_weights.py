"""The initial weights, which are the same in every variant."""

from __future__ import annotations

import torch
from torch import Tensor

from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.ranks.rank import Run


def seeded(run: Run, config: ModelConfig, seed: int | None = None) -> Decoder:
    """Return a model with initial weights drawn from `seed`, which is the run's by default."""
    torch.manual_seed(run.config.seed if seed is None else seed)
    return Decoder(config).to(run.device)


def initial_weights(run: Run) -> dict[str, Tensor]:
    """Return the initial weights of every variant."""
    return {name: p.detach() for name, p in seeded(run, run.model).named_parameters()}
