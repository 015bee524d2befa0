"""The suite's decoder in two sizes, as workloads that `ddp.bench` can load by name.

python -m ddp.bench --model suite_workloads:xl --designs "25 MB" --rounds 1
"""

from __future__ import annotations

import torch
from torch import nn


def small(device: torch.device):
    return _build_decoder("small", device, torch.float32, tokens=16)


def xl(device: torch.device):
    """Return a model of two billion bfloat16 parameters: 4 GB per rank, and 4 GB of gradients."""
    return _build_decoder("xl", device, torch.bfloat16, tokens=4)


def _build_decoder(size: str, device: torch.device, dtype: torch.dtype, *, tokens: int):
    from llmsys_suite.model import Decoder, ModelConfig

    torch.manual_seed(0)
    # Parameters are created on their device in their dtype, so that no second copy exists.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: nn.Module = Decoder(ModelConfig.from_size(size, context=tokens))
    finally:
        torch.set_default_dtype(before)
    batch = torch.randint(256, (1, tokens + 1), device=device)

    def loss(wrapped: nn.Module) -> torch.Tensor:
        logits = wrapped(batch[:, :-1]).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    return model, loss
