"""The suite's own decoder as workloads of the bench, by the names of its sizes.

python -m ddp.bench --model suite_workloads:xl --designs "25 MB" --rounds 1
"""

from __future__ import annotations

import torch
from torch import nn


def small(device: torch.device):
    return _decoder("small", device, torch.float32, tokens=16)


def xl(device: torch.device):
    """Two billion parameters in bfloat16: 4 GB of them a rank, and as much of gradients."""
    return _decoder("xl", device, torch.bfloat16, tokens=4)


def _decoder(size: str, device: torch.device, dtype: torch.dtype, *, tokens: int):
    from llmsys_suite.model import Decoder, ModelConfig

    torch.manual_seed(0)
    # Drawn where it lies and in the dtype that it has: nothing is held twice.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: nn.Module = Decoder(ModelConfig.named(size, context=tokens))
    finally:
        torch.set_default_dtype(before)
    batch = torch.randint(256, (1, tokens + 1), device=device)

    def loss(wrapped: nn.Module) -> torch.Tensor:
        logits = wrapped(batch[:, :-1]).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    return model, loss
