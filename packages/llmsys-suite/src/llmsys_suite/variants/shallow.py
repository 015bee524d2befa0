"""A training step of a model with few layers, which predicts the step of the full model.

Contention for caches and memory slows both models alike, but not a single matrix product.
Therefore their ratio is valid on a busy machine too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from flashattn2 import flash_attention
from torch import Tensor

from llmsys_suite.measure import reference_matmul
from llmsys_suite.model import Decoder

if TYPE_CHECKING:
    from llmsys_suite.ranks.rank import Run


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
