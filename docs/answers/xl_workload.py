"""The xl model in float32 with two sequences of 128 tokens, as a workload of `ddp.bench`.

PYTHONPATH=docs/answers python -m ddp.bench --device cuda --model xl_workload:xl --designs naive
"""

from __future__ import annotations

import torch
from torch import nn


def xl(device: torch.device):
    """Return the model, 8 GB of weights, and its loss as a function of a wrapped model."""
    from llmsys_suite.model import Decoder, ModelConfig

    torch.manual_seed(0)
    with device:
        model = Decoder(ModelConfig.from_size("xl", vocabulary=10_000, context=128))
    tokens = torch.randint(10_000, (2, 129), device=device)

    def loss(wrapped: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(
            wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )

    return model, loss
