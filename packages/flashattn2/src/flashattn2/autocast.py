"""Support for `torch.autocast`: inputs are cast once, and operations inside are not cast again.

Autocast stays enabled while an operator runs.  `map_sequences` and `attend_sequences` disable it,
because it would round the scores, probabilities and sums of the tiled backend.
"""

import torch
from torch import Tensor

from flashattn2.compilation import constant_in_graphs


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the autocast dtype, as SDPA casts them, if autocast is enabled.

    As in torch, float64, integer and complex tensors are not cast.
    """
    device = tensors[0].device.type
    if not is_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )


def is_enabled(device: str) -> bool:
    """Return True if the device type has autocast, unlike meta, and autocast is enabled for it."""
    return bool(_is_available(device)) and torch.is_autocast_enabled(device)


@constant_in_graphs
def _is_available(device: str) -> bool:
    """Return True if torch has autocast for a device type.

    The result is a constant in a compiled graph, because Dynamo of torch 2.11 cannot trace the call
    of `is_autocast_available`.
    """
    return torch.amp.is_autocast_available(device)
