"""What `torch.autocast` means here: inputs are lowered once, and nothing inside is lowered again.

Notable: an operator's own code runs with autocast still on.  Left on, it would take the float32
scores, probabilities and sums of the tiled version for inputs of a matrix product and round them.
"""

import torch
from torch import Tensor


def lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast does for SDPA: everything but float64 to the lower precision."""
    device = tensors[0].device.type
    if not is_on(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def off(x: Tensor) -> torch.autocast:
    """A region in which products stay in the dtype that they are asked for in."""
    return torch.autocast(x.device.type, enabled=False)


def is_on(device: str) -> bool:
    """False too for devices that have none, such as meta."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
