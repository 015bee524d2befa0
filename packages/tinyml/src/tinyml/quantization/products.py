"""Exact integer products by the fastest implementation on this machine.

Note [Exact products]
Every implementation returns the same integers, so the choice changes the time but never a bit.
A sum of int8 products is exact in float32 while no partial sum exceeds 2^24. The weights determine
when this holds: 127 times the sum of |w| along a row bounds every partial sum.

Without int8 dot products (VNNI, AMX), a CPU adds pairs of products in 16 bits, and `torch._int_mm`
saturates (pytorch issue 136746). `w >> 1` has one bit less than w and cannot saturate. Since
w = 2 (w >> 1) + (w & 1), two products replace one.

An instruction may exist and still be slow, so the CPU's flags are not used. At the first product of
a shape class every implementation runs on the actual weights and on the hardest inputs. Those that
return a wrong integer are dropped, and the fastest of the others is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyml.conversion import is_autocast, without_autocast
from tinyml.timing import Timing, measure

EXACT_IN_FLOAT32 = 2**24
_SMALLEST = 16  # torch 2.11's int8 product returns uninitialized memory for inner sizes of 1


@dataclass(frozen=True)
class Choice:
    """The implementation for a class of shapes, and the timings of the alternatives."""

    #: The times of each implementation that is exact on this machine.
    timing: Timing
    #: Implementations that returned a wrong integer on this machine.
    wrong: tuple[str, ...] = ()

    @property
    def selected(self) -> str:
        """Return the name of the implementation."""
        return self.timing.selected

    def __str__(self) -> str:
        wrong = f", wrong here: {', '.join(self.wrong)}" if self.wrong else ""
        return f"{self.timing}{wrong}"


_chosen: dict[Any, Choice] = {}


class Exact:
    """int8 weights that are multiplied by the fastest exact implementation on this machine.

    `product(inputs)` returns exact sums as float32, float64 or int32. Subclasses define
    `implementations`. The last of them, "float64", is exact on every machine (Note [Exact
    products]).
    """

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes
        self._prepared: dict[str, Any] = {}
        self._selected: dict[object, str] = {}

    def implementations(self) -> dict[str, Callable[[Any, Tensor], Tensor]]:
        """Return all implementations by name."""
        raise NotImplementedError

    def shape_of(self, inputs: Tensor) -> tuple[int, ...]:
        """Return the class of shapes that these inputs belong to."""
        raise NotImplementedError

    def details(self) -> object:
        """Return properties other than shapes that affect time or correctness."""
        return None

    def hardest(self, inputs: Tensor) -> list[tuple[Exact, Tensor]]:
        """Return pairs of weights and inputs for which saturation changes the result."""
        raise NotImplementedError

    def product(self, inputs: Tensor) -> Tensor:
        """Return exact sums for integers stored as float32 or int8."""
        if not torch.compiler.is_compiling() and is_autocast(inputs.device):
            with without_autocast(inputs.device):  # which rounds the inputs to 16 bits
                return self.product(inputs)
        return self.implementations()[self.implementation(inputs)](self, inputs)

    def implementation(self, inputs: Tensor) -> str:
        """Return the name of the implementation for inputs like these; see `choice`."""
        if torch.compiler.is_compiling() or not inputs.numel():
            return "float64"  # a compiled graph cannot be timed
        count = (len(inputs) - 1).bit_length()
        key = count, inputs.shape[1:], inputs.device, torch.get_num_threads()
        if key not in self._selected:
            self._selected[key] = self.choice(inputs).selected
        return self._selected[key]

    @torch.no_grad()
    def choice(self, inputs: Tensor) -> Choice:
        """Return the implementation for inputs like these, measured at the first call."""
        threads = torch.get_num_threads()
        key = type(self), self.shape_of(inputs), self.details(), str(inputs.device), threads
        if key in _chosen:
            return _chosen[key]
        if not inputs.numel() or not self.codes.numel():
            return Choice(Timing("float64", {}, {}))
        trials = self.hardest(inputs)
        exact = [self.implementations()["float64"](*trial).double() for trial in trials]
        calls: dict[str, Callable[[], Tensor]] = {}
        wrong = []
        for name, implementation in self.implementations().items():
            try:
                sums = [implementation(*trial).double() for trial in trials]
            except (RuntimeError, AttributeError):  # not available for this build or shape
                continue
            if all(map(torch.equal, sums, exact)):
                calls[name] = lambda call=implementation: call(self, inputs)  # type: ignore[misc]
            else:
                wrong.append(name)
        timing = measure(calls)
        best = timing.selected
        self._prepared = {name: value for name, value in self._prepared.items() if name == best}
        _chosen[key] = Choice(timing, tuple(wrong))
        return _chosen[key]

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a prepared form of the codes that belongs to one implementation, computed once."""
        if (value := self._prepared.get(name)) is None:
            value = self._prepared[name] = make()
        return value


def ends(like: Tensor, low: int, high: int, seed: int) -> Tensor:
    """Return random numbers, each of which is `low` or `high`."""
    signs = torch.randint(0, 2, like.shape, generator=torch.Generator().manual_seed(seed)).bool()
    return torch.where(signs, high, low).to(like)


class Int8Weights(Exact):
    """int8 codes (outputs, inputs) for inputs (tokens, inputs) of at most `largest`: 127 or 128."""

    def __init__(self, codes: Tensor, *, largest: int = 127) -> None:
        super().__init__(codes)
        self.largest = largest
        self._edges: list[int] | None = None

    def implementations(self) -> dict[str, Callable[[Any, Tensor], Tensor]]:
        """Return the implementations in this file."""
        return IMPLEMENTATIONS

    def shape_of(self, inputs: Tensor) -> tuple[int, ...]:
        """Return the number of tokens, rounded up to a power of two, and of inputs and outputs."""
        tokens = 1 << (len(inputs) - 1).bit_length() if len(inputs) else 0
        return tokens, inputs.shape[1], len(self.codes)

    def hardest(self, inputs: Tensor) -> list[tuple[Exact, Tensor]]:
        """Return pairs of extreme weights and inputs.

        Half of the weight rows are constant (127), so that neighboring products have equal signs
        where the inputs do.
        """
        codes = ends(self.codes, -128, 127, 0)
        codes[: (len(codes) + 1) // 2] = 127
        hard, inputs = Int8Weights(codes, largest=self.largest), inputs.float()
        trials = [ends(inputs, -self.largest, 127, seed) for seed in (1, 2)]
        trials.append(torch.full_like(inputs, -self.largest))
        return [(hard, trial) for trial in trials]

    @property
    def edges(self) -> list[int]:
        """Return positions from 0 to the number of inputs between which float32 sums are exact."""
        if self._edges is None:
            self._edges = exact_parts(self.codes, self.largest)
        return self._edges


def exact_parts(codes: Tensor, largest: int) -> list[int]:
    """Return positions 0, ..., inputs between which every row has `largest` * sum |w| <= 2^24."""
    inputs = codes.shape[1]
    width = max(1, EXACT_IN_FLOAT32 // (128 * largest))  # exact for any codes
    sums = [part.abs().sum(1, dtype=torch.int64) for part in codes.short().split(width, dim=1)]
    edges, total = [0], torch.zeros(len(codes), dtype=torch.int64, device=codes.device)
    for number, part in enumerate(sums):
        if number and int((total + part).amax()) * largest > EXACT_IN_FLOAT32:
            edges.append(number * width)
            total = torch.zeros_like(total)
        total = total + part
    return [*edges, inputs]


def _int8(weights: Int8Weights, inputs: Tensor) -> Tensor:
    _check_offered(weights.codes, inputs)
    return torch._int_mm(inputs.to(torch.int8), weights.codes.t())


def _int8_halves(weights: Int8Weights, inputs: Tensor) -> Tensor:
    _check_offered(weights.codes, inputs)
    half, rest = weights.keep("int8 halves", lambda: (weights.codes >> 1, weights.codes & 1))
    codes = inputs.to(torch.int8)
    return torch._int_mm(codes, half.t()).mul_(2).add_(torch._int_mm(codes, rest.t()))


def _float32_kept(weights: Int8Weights, inputs: Tensor) -> Tensor:
    (dense,) = weights.keep("float32 kept", lambda: (weights.codes.float(),))
    return _in_parts(inputs.float(), lambda a, b: dense[:, a:b], weights.edges)


def _float32(weights: Int8Weights, inputs: Tensor) -> Tensor:
    return _in_parts(inputs.float(), lambda a, b: weights.codes[:, a:b].float(), weights.edges)


def _in_parts(inputs: Tensor, weight: Callable[[int, int], Tensor], edges: Sequence[int]) -> Tensor:
    if len(edges) == 2:
        return F.linear(inputs, weight(*edges))
    # Each part is exact, but the sum may not be exact in float32, so integers are added.
    total = torch.zeros((), dtype=torch.int32, device=inputs.device)
    for a, b in itertools.pairwise(edges):
        total = total + F.linear(inputs[:, a:b], weight(a, b)).to(torch.int32)
    return total


def _float64(weights: Int8Weights, inputs: Tensor) -> Tensor:
    return (inputs.double() @ weights.codes.t().double()).to(torch.int32)


#: All implementations; the last is exact on every machine and checks the others.
IMPLEMENTATIONS: dict[str, Callable[[Int8Weights, Tensor], Tensor]] = {
    "int8": _int8,
    "int8 halves": _int8_halves,
    "float32": _float32,
    "float32 kept": _float32_kept,
    "float64": _float64,
}


def _check_offered(codes: Tensor, inputs: Tensor) -> None:
    outputs, width = codes.shape
    fits = min(outputs, width) >= _SMALLEST
    if inputs.is_cuda:
        fits &= len(inputs) > _SMALLEST and not width % 8 and not outputs % 8
    if not fits:
        raise RuntimeError("int8 products do not support this shape")
