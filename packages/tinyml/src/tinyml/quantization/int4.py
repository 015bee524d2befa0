"""A linear layer of 4-bit weights that is faster than float for few tokens, where it is.

Notable: one token reads every weight once, so the time is that of the memory, and a fourth or an
eighth of the bytes can be read in less of it. The kernel is torch's own for processors; it takes
inputs and scales in bfloat16, groups of 32 to 256 inputs and multiples of 16 outputs. Whether it is
faster here is measured, and a layer for which it never is keeps its packed weight in float.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyml.layers import compressed_weight, is_of, with_modules
from tinyml.quantization.grid_weight import GridWeight
from tinyml.quantization.int8 import SHOWN_TOKENS, FastestLinear, listed


class Int4Linear(FastestLinear):
    """y = x w^T + bias with w = S (q - Z) of 4 bits, by the kernel or by a dense weight made anew.

    `grid` is the stored weight; what the kernel reads is made of it at first use and takes as many
    bytes again, never in a state dict.
    """

    def __init__(self, grid: GridWeight, bias: Tensor | None) -> None:
        super().__init__(bias)
        self.grid, self.transposed = grid, grid.transposed
        shape = grid.shape[::-1] if grid.transposed else grid.shape
        self.out_features, self.in_features = shape
        self.group_size, self.dtype = grid.rows[1], grid.scale.dtype

    @property
    def weight(self) -> Tensor:
        """The dense weight that the codes stand for."""
        dense = self.grid(self.grid.scale)
        return dense.t() if self.transposed else dense

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        alone = input.numel() and self._way(input) == _ALONE
        return self._weights_alone(input) if alone else self._anew(input)

    def ways(self, inputs: Tensor) -> dict[str, Callable[[], Tensor]]:
        """The kernel, a dense weight made anew, and one that is kept, which is only compared."""
        dense = self.weight.to(inputs.dtype)
        return {
            _ALONE: lambda: self._weights_alone(inputs),
            _ANEW: lambda: self._anew(inputs),
            "float": lambda: F.linear(inputs, dense, self.bias),
        }

    def explain(self, tokens: Sequence[int] = SHOWN_TOKENS) -> list[str]:
        """For so many tokens on this machine: what is computed, and the times that say so."""
        examples = [self.example(count) for count in tokens]
        return [
            f"{len(x)} tokens: computed by {self._way(x)} ({listed(self.times(x))})"
            for x in examples
        ]

    def _way(self, inputs: Tensor) -> str:
        times = self.times(inputs)
        return _ALONE if times.get(_ALONE, torch.inf) < times[_ANEW] else _ANEW

    def _anew(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.to(inputs.dtype), self.bias)

    def _weights_alone(self, inputs: Tensor) -> Tensor:
        packed, scales = self._weights()
        divided = inputs if self.grid.divide is None else inputs / self.grid.divide
        tokens = divided.reshape(-1, self.in_features).bfloat16()
        sums = torch._weight_int4pack_mm_for_cpu(tokens, packed, self.group_size, scales)
        return self.finished(sums.float(), inputs)

    def _weights(self) -> tuple[Tensor, Tensor]:
        grid = self.grid
        key = grid.codes.data_ptr(), grid.codes._version, grid.scale.data_ptr(), grid.scale._version
        if self._prepared is None or self._prepared[0] != key:
            codes = grid.whole_numbers().view(self.out_features, self.in_features)
            # The kernel's codes are from 0 to 15 and stand for scale (code - 8) + offset.
            packed = torch._convert_weight_to_int4pack_for_cpu((codes - grid.low).int(), 1)
            zero = torch.zeros_like(grid.scale) if grid.zero is None else grid.zero
            offset = grid.scale * (grid.low + 8 - zero)
            pairs = torch.stack([grid.scale, offset], -1).bfloat16()
            pairs = pairs.view(self.out_features, -1, 2).transpose(0, 1).contiguous()
            self._prepared = key, packed, pairs
        return self._prepared[1], self._prepared[2]


_ALONE, _ANEW = "weights alone", "a dense weight made anew"


def with_int4_linears(model: nn.Module) -> nn.Module:
    """Replace, in place, the linear layers of 4-bit groups for which the kernel is faster here."""
    stored = {module: compressed_weight(module) for module in model.modules()}
    made: dict[nn.Module, nn.Module] = {}
    for module, grid in stored.items():
        if not is_of(module, (nn.Linear,)) or not isinstance(grid, GridWeight):
            continue
        # A tied weight stays: the embedding reads it too.
        if grid.rows[1] <= 256 and list(stored.values()).count(grid) == 1:
            layer = Int4Linear(copy.deepcopy(grid), cast(nn.Linear, module).bias)
            if layer.gains():
                made[module] = layer
    return with_modules(model, made)
