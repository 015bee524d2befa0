"""The 2-norm of a gradient that lies in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def square_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total += gradient.double().square().sum().to(device)
    return total


def scale_to(max_norm: float, norm: Tensor, gradients: Sequence[Tensor]) -> None:
    """Scale gradients whose norm is `norm` so that it is `max_norm` at the most."""
    scale = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for gradient in gradients:
        gradient *= scale
