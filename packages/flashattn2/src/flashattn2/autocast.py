"""Support for `torch.autocast`: inputs are cast once, and operations inside are not cast again.

Autocast stays enabled while an operator runs.  Without `disabled`, it would round the float32
scores, probabilities and sums of the tiled backend to the lower precision.
"""

import torch
from torch import Tensor

from flashattn2.compilation import constant_in_graphs


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the autocast dtype, as SDPA casts them.

    Like torch, the function casts neither float64 nor integers nor complex numbers.
    """
    device = tensors[0].device.type
    if not is_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )


def disabled(x: Tensor) -> torch.autocast:
    """Return a context manager that disables autocast on the device of `x`."""
    return torch.autocast(x.device.type, enabled=False)


def is_enabled(device: str) -> bool:
    """Return True if autocast is enabled; False for devices without autocast, such as meta."""
    return bool(_is_available(device)) and torch.is_autocast_enabled(device)


@constant_in_graphs
def _is_available(device: str) -> bool:
    """Return True if torch has autocast for a type of device.

    The result is a constant in a compiled graph, because torch 2.11's Dynamo cannot trace this
    call.
    """
    return torch.amp.is_autocast_available(device)
