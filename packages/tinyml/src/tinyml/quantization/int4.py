"""A linear layer of 4-bit weights that may be faster than float for a few tokens.

A single token reads every weight once, so memory reads limit its time, and 4 bits are an eighth of
float32. The kernel is torch's own for CPUs. It takes inputs and scales in bfloat16, groups of 32,
64, 128 or 256 inputs, and multiples of 16 outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from tinyml.quantization.fastest_linear import FastestLinear
from tinyml.quantization.grid_weight import GridWeight


class Int4Linear(FastestLinear):
    """A layer y = x w^T + bias with 4-bit w = S (q - Z).

    The kernel computes the layer if it is clearly faster than float. `grid` is the stored weight.
    The kernel needs a copy of about the same size as `grid`, and float needs a dense weight.
    """

    def __init__(self, grid: GridWeight, bias: Tensor | None) -> None:
        super().__init__(bias)
        self.grid = grid
        shape = grid.shape[::-1] if grid.transposed else grid.shape
        self.out_features, self.in_features = shape
        self.group_size = grid.rows[1]
        self.dtype = grid.scale.dtype

    @property
    def weight(self) -> Tensor:
        """Return the dense weight that the codes represent."""
        dense = self.grid(self.grid.scale)
        return dense.t() if self.grid.transposed else dense

    def stored(self) -> tuple[Any, Any]:
        """Return the codes and their scales."""
        stored = cast(GridWeight, self._modules["grid"])._buffers
        return stored["codes"], stored["scale"]

    def _compute_weights_alone(self, inputs: Tensor) -> Tensor:
        packed, scales = self.get_prepared("weights alone", self._pack_weights)
        tokens = inputs.reshape(-1, self.in_features).bfloat16()
        sums = torch._weight_int4pack_mm_for_cpu(tokens, packed, self.group_size, scales)
        return self.add_bias_and_cast(sums.float(), inputs)

    def _pack_weights(self) -> tuple[Tensor, Tensor]:
        grid = self.grid
        codes = grid.unpack_signed_codes().view(self.out_features, self.in_features)
        # The kernel's codes are 0 to 15 and represent scale (code - 8) + offset.
        packed = torch._convert_weight_to_int4pack_for_cpu((codes - grid.low).int(), 1)
        zero = torch.zeros_like(grid.scale) if grid.zero is None else grid.zero
        offset = grid.scale * (grid.low + 8 - zero)
        pairs = torch.stack([grid.scale, offset], -1).bfloat16()
        return packed, pairs.view(self.out_features, -1, 2).transpose(0, 1).contiguous()

    kernel: ClassVar[str] = "weights alone"
    implementations: ClassVar[dict[str, Callable[[Any, Tensor], Tensor]]] = {
        "weights alone": _compute_weights_alone,
        "float": FastestLinear.compute_in_float,
    }
