"""Training steps of models with few layers, which predict the step of the full model.

Contention for caches and memory slows shallow and full models alike, but not a single matrix
product. Therefore the ratio of their times is valid on a busy machine too.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from flashattn2 import flash_attention
from torch import Tensor

from llmsys_suite.measure import reference_matmul
from llmsys_suite.model import Decoder

if TYPE_CHECKING:
    from llmsys_suite.ranks.rank import Run

#: Timed steps of the models with one and three layers.
STEPS_TIMED = 5


class Shallow:
    """The model of the run with `layers` layers, and its optimizer."""

    def __init__(self, run: Run, layers: int) -> None:
        self.device = run.device
        self.autocast = run.autocast
        self.parts = run.config.parts
        self.model = Decoder(replace(run.model, num_layers=layers), flash_attention).to(run.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def seconds(self, tokens: Tensor, targets: Tensor) -> float:
        """Return the time of one training step on these rows, by the reference matmul's clock."""
        begin = reference_matmul.clock(self.device)
        for some, theirs in zip(tokens.chunk(self.parts), targets.chunk(self.parts), strict=True):
            with self.autocast():
                loss = self.model.loss(some, theirs)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return reference_matmul.clock(self.device) - begin


def layer_matmuls(run: Run) -> list[float]:
    """Return the time of a one-layer step and of a further layer, in units of the reference matmul.

    Both are medians; the time of a further layer is half of the time that two more layers add.
    """
    tokens, targets = run.batch(0)
    models = Shallow(run, 1), Shallow(run, 3)
    cores: list[float] = []
    ones: list[float] = []
    further: list[float] = []
    for turn in range(1 + STEPS_TIMED):
        core = reference_matmul.core_seconds(run.device)
        first, three = (model.seconds(tokens, targets) for model in models)
        # The first round creates the optimizer state.
        if turn:
            cores.append(core)
            ones.append(first)
            further.append((three - first) / 2)
    return [statistics.median(times) / statistics.median(cores) for times in (ones, further)]


def step_matmuls(first: float, further: float, layers: int) -> float:
    """Return the time of a step of `layers` layers, extrapolated from a one-layer step."""
    return first + (layers - 1) * further
