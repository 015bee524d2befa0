"""Exact products of int8 codes.

Note [Exact products]
Every function that a layer selects returns the same integers, so the choice changes only the time.
A sum of int8 products is exact in float32 while no partial sum exceeds 2^24. Every partial sum of a
row of weights w is at most 127 times the sum of |w|. If this bound exceeds 2^24 for a row, sums are
computed in parts, whose totals are added as integers. The sums are also exact if torch rounds the
inputs of float32 products to bfloat16 or TF32, because both represent all codes.

Without int8 dot products (VNNI, AMX), an x86 CPU adds pairs of products in 16 bits, and
`torch._int_mm` saturates (pytorch issue 136746). `torch._int_mm` is used only if it returns the
exact integers for extreme weights and inputs. An instruction may exist and still be slow, so the
CPU's flags are not used.

Codes are int8, (outputs, inputs), and `inputs` (tokens, inputs) are integers from -127 to 127,
stored as floats. The sums (tokens, outputs) are float32 or int32.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

EXACT_IN_FLOAT32 = 2**24
#: The number of products whose sum is exact in float32 for all codes and inputs.
_EXACT_INPUTS = EXACT_IN_FLOAT32 // (128 * 127)
#: The smallest sizes of an int8 product. torch 2.11's product returns uninitialized memory for
#: inner sizes of 1.
_MIN_SIZE = 16


def multiply_in_int8(codes: Tensor, inputs: Tensor) -> Tensor:
    """Return sums, computed by int8 instructions; raise `RuntimeError` for an unsupported shape.

    The sums may saturate; see `is_int8_exact`.
    """
    outputs, width = codes.shape
    is_supported = min(outputs, width) >= _MIN_SIZE
    if inputs.is_cuda:
        is_supported &= len(inputs) > _MIN_SIZE and not width % 8 and not outputs % 8
    if not is_supported:
        raise RuntimeError("int8 products do not support this shape")
    return torch._int_mm(inputs.to(torch.int8), codes.t())


def multiply_in_float32(dense: Tensor, inputs: Tensor, *, in_parts: bool) -> Tensor:
    """Return exact sums, computed by float32 products; `dense` contains the codes as float32.

    With `in_parts`, the sums are exact for all codes. Without it, `fits_float32` must be True.
    """
    inputs = inputs.float()
    if not in_parts:
        return F.linear(inputs, dense)
    total = torch.zeros((), dtype=torch.int32, device=inputs.device)
    for start in range(0, dense.shape[1], _EXACT_INPUTS):
        part = slice(start, start + _EXACT_INPUTS)
        total = total + F.linear(inputs[:, part], dense[:, part]).to(torch.int32)
    return total


def multiply_in_float64(codes: Tensor, inputs: Tensor) -> Tensor:
    """Return exact sums, computed by float64 products."""
    return (inputs.double() @ codes.t().double()).to(torch.int32)


def fits_float32(codes: Tensor) -> bool:
    """Return True if no partial sum of a row can exceed 2^24."""
    largest = codes.short().abs().sum(1, dtype=torch.int64).amax()
    return 127 * int(largest) <= EXACT_IN_FLOAT32


def is_int8_exact(codes: Tensor, inputs: Tensor) -> bool:
    """Return True if int8 instructions are exact for extreme weights and inputs of these shapes.

    Half of the weight rows are constant (127), so that neighboring products have equal signs if the
    inputs do, and saturation changes the result.
    """
    extreme = _draw_random_ends(codes, -128, 127, seed=0)
    extreme[: (len(codes) + 1) // 2] = 127
    trials = [_draw_random_ends(inputs, -127, 127, seed) for seed in (1, 2)]
    trials.append(torch.full(inputs.shape, -127.0, device=inputs.device))
    return all(
        torch.equal(multiply_in_int8(extreme, trial), multiply_in_float64(extreme, trial))
        for trial in trials
    )


def _draw_random_ends(like: Tensor, low: int, high: int, seed: int) -> Tensor:
    """Return a tensor like `like` of random numbers, each of which is `low` or `high`."""
    # `torch.vmap` refuses the random numbers of torch.
    numbers = np.random.default_rng(seed).choice([low, high], like.shape)
    return torch.as_tensor(numbers, dtype=like.dtype, device=like.device)
