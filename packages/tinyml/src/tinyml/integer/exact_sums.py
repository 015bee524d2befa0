"""Exact sums of products of int8 codes, computed by the float convolutions of torch.

A sum is exact in float32 while no partial sum exceeds 2^24 (Note [Exact products]); 128 times the
sum of |w| over a filter bounds every partial sum. Otherwise, and on a GPU, whose convolutions may
transform their inputs, float64 is used. Its 53 bits are exact for every sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyml.conversion import without_autocast
from tinyml.integer.steps import Geometry
from tinyml.quantization.products import EXACT_IN_FLOAT32


def exact_sums(codes: Tensor, weight: Tensor, geometry: Geometry | None = None) -> Tensor:
    """Return the sums of a linear layer, or of a convolution of padded images, as floats."""
    largest = 128 * int(weight.long().abs().flatten(1).sum(1).max())
    is_exact = codes.device.type == "cpu" and largest <= EXACT_IN_FLOAT32
    dtype = torch.float32 if is_exact else torch.float64
    with without_autocast(codes.device):  # which rounds the codes to 16 bits
        if (g := geometry) is None:
            return F.linear(codes.to(dtype), weight.to(dtype))
        # In the channels-last format, sums of one channel may be wrong (pytorch issue 82060).
        layout = torch.channels_last if codes.shape[1] > 1 else torch.contiguous_format
        images = codes.to(dtype, memory_format=layout)
        filters = weight.to(dtype, memory_format=layout)
        return F.conv2d(images, filters, None, g.stride, 0, g.dilation, g.groups)


def pad(codes: Tensor, geometry: Geometry, fill: int) -> Tensor:
    """Return images padded with the code `fill`."""
    rows, columns = geometry.padding
    return F.pad(codes, (columns, columns, rows, rows), value=fill)
