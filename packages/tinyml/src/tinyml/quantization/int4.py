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

from tinyml.layers import Replacement, compressed_weight, is_conv1d
from tinyml.quantization.grid_weight import GridWeight
from tinyml.quantization.int8 import SHOWN_TOKENS, choose, close_ones, plain_linear
from tinyml.quantization.products import fastest, in_order

_times: dict[object, dict[str, float]] = {}


class Int4Linear(Replacement):
    """y = x w^T + bias with w = S (q - Z) of 4 bits, by the kernel or by a dense weight made anew.

    For inference. `grid` is the stored weight; what the kernel reads is made of it at first use and
    takes as many bytes again, never in a state dict.
    """

    bias: Tensor | None

    def __init__(self, grid: GridWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.grid = grid
        shape = grid.shape[::-1] if grid.transposed else grid.shape
        self.out_features, self.in_features = shape
        self.group_size = grid.rows[1]
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._prepared: tuple[object, Tensor, Tensor] | None = None

    @property
    def weight(self) -> Tensor:
        """The dense weight that the codes stand for."""
        dense = self.grid(self.grid.scale)
        return dense.t() if self.grid.transposed else dense

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        alone = inputs.numel() and self._chosen(inputs)[0] == "weights alone"
        return self._weights_alone(inputs) if alone else self._dense(inputs)

    def restored(self) -> nn.Module:
        """An nn.Linear."""
        return plain_linear(self.weight, self.bias, self.grid.transposed)

    def explain(self, tokens: Sequence[int] = SHOWN_TOKENS) -> list[str]:
        """For so many tokens on this machine: what is computed, and the times that say so."""
        lines = []
        for count in tokens:
            kind, times = self._chosen(self._example(count))
            listed = ", ".join(f"{name} {ms:.3g} ms" for name, ms in in_order(times))
            how = "a dense weight made anew" if kind == "float" else kind
            lines.append(f"{count} tokens: computed by {how} ({listed})")
        return lines

    def gains(self, tokens: Sequence[int] = SHOWN_TOKENS) -> bool:
        """Whether the kernel is faster here than float32 for any of these numbers of tokens."""
        return any(choose(self._chosen(self._example(n))[1]) == "weights alone" for n in tokens)

    def _example(self, tokens: int) -> Tensor:
        scale = self.grid.scale
        return torch.randn(tokens, self.in_features, device=scale.device, dtype=scale.dtype)

    def _dense(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.to(inputs.dtype), self.bias)

    def _weights_alone(self, inputs: Tensor) -> Tensor:
        packed, scales = self._weights()
        divided = inputs if self.grid.divide is None else inputs / self.grid.divide
        tokens = divided.reshape(-1, self.in_features).bfloat16()
        outputs = torch._weight_int4pack_mm_for_cpu(tokens, packed, self.group_size, scales).float()
        if self.bias is not None:
            outputs.add_(self.bias)
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)

    def _chosen(self, inputs: Tensor) -> tuple[str, dict[str, float]]:
        """The faster of both for so many tokens, and the times, that of a kept float weight too."""
        count = (inputs.numel() // self.in_features - 1).bit_length()
        shape = count, self.in_features, self.out_features, self.group_size
        key = *shape, inputs.dtype, inputs.device, torch.get_num_threads()
        if key not in _times:
            probe, dense = torch.randn_like(inputs), self.weight.to(inputs.dtype)
            calls: dict[str, Callable[[], Tensor]] = {
                "weights alone": lambda: self._weights_alone(probe),
                "a dense weight made anew": lambda: self._dense(probe),
                "float": lambda: F.linear(probe, dense, self.bias),
            }
            _times[key] = fastest(close_ones(calls))
        times = _times[key]
        alone = times.get("weights alone", float("inf")) < times["a dense weight made anew"]
        return "weights alone" if alone else "float", times

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
        return self._prepared[1:]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_prepared": None}


def with_int4_linears(model: nn.Module) -> nn.Module:
    """Replace, in place, the linear layers of 4-bit groups for which the kernel is faster here."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            grid = None if child is None else compressed_weight(child)
            linear = isinstance(child, nn.Linear) or (child is not None and is_conv1d(child))
            if not linear or not isinstance(grid, GridWeight) or grid.rows[1] > 256:
                continue
            if sum(compressed_weight(module) is grid for module in model.modules()) > 1:
                continue  # tied: the embedding reads it too
            bias = cast(nn.Linear, child).bias
            made = Int4Linear(copy.deepcopy(grid), bias)
            if made.gains():
                setattr(parent, name, made)
    return model
