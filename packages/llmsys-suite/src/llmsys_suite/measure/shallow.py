"""A training step of a model of few layers, from which a deeper one's is foretold.

Notable: it slows down as the deeper one does where a neighbor fills caches and memory, which a lone
product of matrices does not; so what is said of their ratio holds on a busy machine too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from flashattn2 import flash_attention
from torch import Tensor

from llmsys_suite.measure import yardstick
from llmsys_suite.model import Decoder

if TYPE_CHECKING:
    from llmsys_suite.ranks.rank import Run


class Shallow:
    """The run's model with so many layers, and its optimizer."""

    def __init__(self, run: Run, layers: int) -> None:
        self.device, self.parts = run.device, run.config.parts
        self.model = Decoder(replace(run.model, num_layers=layers), flash_attention).to(run.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def seconds(self, tokens: Tensor, targets: Tensor) -> float:
        """One step on these rows, by the yardstick's clock."""
        begin = yardstick.clock(self.device)
        for some, theirs in zip(tokens.chunk(self.parts), targets.chunk(self.parts), strict=True):
            self.model.loss(some, theirs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return yardstick.clock(self.device) - begin
