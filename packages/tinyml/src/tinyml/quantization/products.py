"""Exact integer products by the fastest implementation on this machine.

Note [Exact products]
Every implementation returns the same integers, so the choice changes the time but never a bit.
A sum of int8 products is exact in float32 while no partial sum exceeds 2^24. The weights determine
when this holds: 127 times the sum of |w| along a row bounds every partial sum. It also holds if
torch rounds the inputs of float32 products to bfloat16 or TF32, which represent all codes.

Without int8 dot products (VNNI, AMX), a CPU adds pairs of products in 16 bits, and `torch._int_mm`
saturates (pytorch issue 136746).

An instruction may exist and still be slow, so the CPU's flags are not used. At the first product of
a shape class every implementation runs on the actual weights and on the hardest inputs. Those that
return a wrong integer are dropped, and the fastest of the others is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyml.conversion import is_autocast, without_autocast
from tinyml.timing import Timing, measure

EXACT_IN_FLOAT32 = 2**24
_SMALLEST = 16  # torch 2.11's int8 product returns uninitialized memory for inner sizes of 1


_chosen: dict[Any, Timing] = {}


class Int8Weights:
    """int8 codes (outputs, inputs), multiplied by the fastest exact implementation here.

    `product(inputs)` takes inputs (tokens, inputs) of at most 127 in size and returns exact sums as
    float32 or int32 (Note [Exact products]).
    """

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes
        self._dense: Tensor | None = None
        self._edges: list[int] = []

    def product(self, inputs: Tensor) -> Tensor:
        """Return exact sums for integers stored as float32."""
        if not torch.compiler.is_compiling() and is_autocast(inputs.device):
            with without_autocast(inputs.device):  # which rounds the inputs to 16 bits
                return self.product(inputs)
        is_compiling = torch.compiler.is_compiling()  # a compiled graph cannot be timed
        name = "float64" if is_compiling else self.choice(inputs).selected
        return IMPLEMENTATIONS[name](self, inputs)

    @torch.no_grad()
    def choice(self, inputs: Tensor) -> Timing:
        """Return the timing of the exact implementations for inputs like these, measured once."""
        if not inputs.numel():
            return Timing("float64", {}, {})
        count = (len(inputs) - 1).bit_length()
        key = count, *self.codes.shape, inputs.device, torch.get_num_threads()
        if key in _chosen:
            return _chosen[key]
        trials = self._hardest(inputs)
        exact = [IMPLEMENTATIONS["float64"](*trial).double() for trial in trials]
        calls: dict[str, Callable[[], Tensor]] = {}
        for name, implementation in IMPLEMENTATIONS.items():
            try:
                sums = [implementation(*trial).double() for trial in trials]
            except (RuntimeError, AttributeError):  # not available for this build or shape
                continue
            if all(map(torch.equal, sums, exact)):
                calls[name] = lambda call=implementation: call(self, inputs)  # type: ignore[misc]
        timing = _chosen[key] = measure(calls)
        if timing.selected != "float32":
            self._dense = None
        return timing

    def _hardest(self, inputs: Tensor) -> list[tuple[Int8Weights, Tensor]]:
        """Return pairs of extreme weights and inputs, for which saturation changes the result.

        Half of the weight rows are constant (127), so that neighboring products have equal signs
        where the inputs do.
        """
        codes = _ends(self.codes, -128, 127, 0)
        codes[: (len(codes) + 1) // 2] = 127
        hard, inputs = Int8Weights(codes), inputs.float()
        trials = [_ends(inputs, -127, 127, seed) for seed in (1, 2)]
        trials.append(torch.full_like(inputs, -127))
        return [(hard, trial) for trial in trials]

    def dense(self) -> tuple[Tensor, list[int]]:
        """Return the codes as float32, and the positions between which their sums are exact."""
        if self._dense is None:
            self._dense = self.codes.float()
            self._edges = exact_parts(self.codes)
        return self._dense, self._edges


def _ends(like: Tensor, low: int, high: int, seed: int) -> Tensor:
    """Return random numbers, each of which is `low` or `high`."""
    signs = torch.randint(0, 2, like.shape, generator=torch.Generator().manual_seed(seed)).bool()
    return torch.where(signs, high, low).to(like)


def exact_parts(codes: Tensor) -> list[int]:
    """Return positions 0, ..., inputs between which every row has 127 * sum |w| <= 2^24."""
    inputs = codes.shape[1]
    width = max(1, EXACT_IN_FLOAT32 // (128 * 127))  # exact for any codes
    sums = [part.abs().sum(1, dtype=torch.int64) for part in codes.short().split(width, dim=1)]
    edges, total = [0], torch.zeros(len(codes), dtype=torch.int64, device=codes.device)
    for number, part in enumerate(sums):
        if number and int((total + part).amax()) * 127 > EXACT_IN_FLOAT32:
            edges.append(number * width)
            total = torch.zeros_like(total)
        total = total + part
    return [*edges, inputs]


def _int8(weights: Int8Weights, inputs: Tensor) -> Tensor:
    _check_offered(weights.codes, inputs)
    return torch._int_mm(inputs.to(torch.int8), weights.codes.t())


def _float32(weights: Int8Weights, inputs: Tensor) -> Tensor:
    dense, edges = weights.dense()
    if len(edges) == 2:
        return F.linear(inputs.float(), dense)
    # Each part is exact, but the sum may not be exact in float32, so integers are added.
    total = torch.zeros((), dtype=torch.int32, device=inputs.device)
    for a, b in itertools.pairwise(edges):
        total = total + F.linear(inputs[:, a:b].float(), dense[:, a:b]).to(torch.int32)
    return total


def _float64(weights: Int8Weights, inputs: Tensor) -> Tensor:
    return (inputs.double() @ weights.codes.t().double()).to(torch.int32)


#: All implementations; the last is exact on every machine and checks the others.
IMPLEMENTATIONS: dict[str, Callable[[Int8Weights, Tensor], Tensor]] = {
    "int8": _int8,
    "float32": _float32,
    "float64": _float64,
}


def _check_offered(codes: Tensor, inputs: Tensor) -> None:
    outputs, width = codes.shape
    fits = min(outputs, width) >= _SMALLEST
    if inputs.is_cuda:
        fits &= len(inputs) > _SMALLEST and not width % 8 and not outputs % 8
    if not fits:
        raise RuntimeError("int8 products do not support this shape")
