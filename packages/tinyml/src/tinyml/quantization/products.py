"""Exact integer products by the fastest implementation on this machine.

Note [Exact products]
Every implementation returns the same integers, so the choice changes the time but never a bit.
A sum of int8 products is exact in float32 while no partial sum exceeds 2^24. Every partial sum of a
row of weights w is at most 127 times the sum of |w|. If this bound exceeds 2^24 for a row, sums are
computed in parts, whose totals are added as integers. The sums are also exact if torch rounds the
inputs of float32 products to bfloat16 or TF32, because both represent all codes.

Without int8 dot products (VNNI, AMX), an x86 CPU adds pairs of products in 16 bits, and
`torch._int_mm` saturates (pytorch issue 136746). `torch._int_mm` is used only if it returns the
exact integers for extreme weights and inputs.

An instruction may exist and still be slow, so the CPU's flags are not used. At the first product of
a shape class, all supported implementations are timed, and the fastest exact one is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyml.conversion import without_autocast
from tinyml.timing import Timing, is_captured, measure

EXACT_IN_FLOAT32 = 2**24
#: The number of products whose sum is exact in float32 for all codes and inputs.
_EXACT_INPUTS = EXACT_IN_FLOAT32 // (128 * 127)
#: The smallest sizes of an int8 product. torch 2.11's product returns uninitialized memory for
#: inner sizes of 1.
_MIN_SIZE = 16

_timings: dict[Any, Timing] = {}


class Int8Weights:
    """int8 codes (outputs, inputs), multiplied by the fastest exact implementation on this machine.

    `product(inputs)` takes integers (tokens, inputs) from -127 to 127, stored as floats, and
    returns exact sums (tokens, outputs) as float32 or int32 (Note [Exact products]).
    """

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes
        self._dense: Tensor | None = None

    def compute_product(self, inputs: Tensor) -> Tensor:
        """Return exact sums of the products of `inputs` with every row of codes."""
        if is_captured():
            return _multiply_in_float64(self, inputs)
        with without_autocast(inputs.device):  # autocast would round the inputs to 16 bits
            return IMPLEMENTATIONS[self.get_timing(inputs).selected](self, inputs)

    @torch.no_grad()
    def get_timing(self, inputs: Tensor) -> Timing:
        """Return the timing of the implementations for the shape class of `inputs`, measured once.

        Numbers of tokens that round up to the same power of two have one timing.
        """
        if not inputs.numel():
            return Timing("float64", {}, {})
        shape_class = (len(inputs) - 1).bit_length(), *self.codes.shape
        key = shape_class, self.is_exact_in_float32, inputs.device, torch.get_num_threads()
        if key not in _timings:
            calls = {name: partial(call, self) for name, call in IMPLEMENTATIONS.items()}
            _timings[key] = measure(
                calls, inputs, lambda name: name != "int8" or self._is_int8_exact(inputs)
            )
            if _timings[key].selected != "float32":
                self._dense = None  # the measurement has created it
        return _timings[key]

    @cached_property
    def is_exact_in_float32(self) -> bool:
        """Return True if no partial sum of a row can exceed 2^24."""
        largest = self.codes.short().abs().sum(1, dtype=torch.int64).amax()
        return 127 * int(largest) <= EXACT_IN_FLOAT32

    def _is_int8_exact(self, inputs: Tensor) -> bool:
        """Return True if the int8 product is exact for extreme weights and inputs of this shape.

        Half of the weight rows are constant (127), so that neighboring products have equal signs
        if the inputs do, and saturation changes the result.
        """
        codes = _draw_random_ends(self.codes, -128, 127, seed=0)
        codes[: (len(codes) + 1) // 2] = 127
        weights = Int8Weights(codes)
        trials = [_draw_random_ends(inputs, -127, 127, seed) for seed in (1, 2)]
        trials.append(torch.full(inputs.shape, -127.0, device=inputs.device))
        sums = [IMPLEMENTATIONS["int8"](weights, trial.float()) for trial in trials]
        exact = [_multiply_in_float64(weights, trial) for trial in trials]
        return all(map(torch.equal, sums, exact))

    def get_dense(self) -> Tensor:
        """Return the codes as float32, computed once."""
        if self._dense is None:
            self._dense = self.codes.float()
        return self._dense


def _draw_random_ends(like: Tensor, low: int, high: int, seed: int) -> Tensor:
    """Return a tensor like `like` of random numbers, each of which is `low` or `high`."""
    # `torch.vmap` refuses the random numbers of torch.
    numbers = np.random.default_rng(seed).choice([low, high], like.shape)
    return torch.as_tensor(numbers, dtype=like.dtype, device=like.device)


def _multiply_in_int8(weights: Int8Weights, inputs: Tensor) -> Tensor:
    outputs, width = weights.codes.shape
    is_supported = min(outputs, width) >= _MIN_SIZE
    if inputs.is_cuda:
        is_supported &= len(inputs) > _MIN_SIZE and not width % 8 and not outputs % 8
    if not is_supported:
        raise RuntimeError("int8 products do not support this shape")
    return torch._int_mm(inputs.to(torch.int8), weights.codes.t())


def _multiply_in_float32(weights: Int8Weights, inputs: Tensor) -> Tensor:
    inputs, dense = inputs.float(), weights.get_dense()
    if weights.is_exact_in_float32:
        return F.linear(inputs, dense)
    # The sums of the parts are exact for all codes, and their total is a sum of integers.
    total = torch.zeros((), dtype=torch.int32, device=inputs.device)
    for start in range(0, dense.shape[1], _EXACT_INPUTS):
        part = slice(start, start + _EXACT_INPUTS)
        total = total + F.linear(inputs[:, part], dense[:, part]).to(torch.int32)
    return total


def _multiply_in_float64(weights: Int8Weights, inputs: Tensor) -> Tensor:
    return (inputs.double() @ weights.codes.t().double()).to(torch.int32)


#: All implementations. "float64" is exact on every machine, and "int8" is compared with it.
IMPLEMENTATIONS: dict[str, Callable[[Int8Weights, Tensor], Tensor]] = {
    "int8": _multiply_in_int8,
    "float32": _multiply_in_float32,
    "float64": _multiply_in_float64,
}
