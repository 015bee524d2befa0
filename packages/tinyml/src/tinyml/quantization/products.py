"""Products of whole numbers, by whichever exact way is fastest on the machine at hand.

Notable:
- every way returns the same integers, so which one is taken changes the time and never a bit;
- a sum of int8 products is exact in float32 while no partial sum can pass 2^24. The weights say how
  far that goes: 127 times the sum of |w| along a row bounds everything that is met on the way;
- without int8 dot products (VNNI, AMX) a processor adds pairs of products in 16 bits, and
  `torch._int_mm` clips them (pytorch issue 136746). Half of a weight, w >> 1, has one bit less and
  cannot be clipped: w = 2 (w >> 1) + (w & 1), two products instead of one;
- an instruction that exists may still be slow, so nothing is chosen by the processor's flags: at
  the first product of a shape class every way is tried on the real weights, those that return a
  wrong integer are dropped, and the fastest is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyml.timing import Timing, measure

EXACT_IN_FLOAT32 = 2**24
_SMALLEST = 16  # torch 2.11's int8 product returns memory that it never wrote for inner sizes of 1


@dataclass(frozen=True)
class Choice:
    """The way that is taken for a class of shapes, and what it was measured against."""

    shape: tuple[int, ...]
    """Tokens or images (to the next power of two), then the other sizes."""
    threads: int
    timing: Timing
    """Of each way that is exact here."""
    wrong: tuple[str, ...] = ()
    """Ways that returned a wrong integer on this machine."""
    extra_bytes: int = 0
    """What the way keeps beside the codes while the model is in memory; never in a state dict."""

    @property
    def way(self) -> str:
        """The name of the way."""
        return self.timing.way

    def __str__(self) -> str:
        text = f"{' x '.join(map(str, self.shape))}, {self.threads} threads: {self.timing}"
        text += f", wrong here: {', '.join(self.wrong)}" if self.wrong else ""
        return text + (f", {self.extra_bytes:,} bytes kept beside" if self.extra_bytes else "")


_chosen: dict[Any, Choice] = {}


class Exact:
    """int8 weights that many inputs meet, by the fastest of the ways that are exact here.

    `product(inputs)` gives exact sums as float32, float64 or int32. Subclasses say which `ways`
    there are, the last of them, "float64", the plainest and right everywhere.
    """

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes
        self._kept: dict[str, Any] = {}
        self._ways: dict[object, str] = {}

    def ways(self) -> dict[str, Callable[[Any, Tensor], Tensor]]:
        """Every way by name."""
        raise NotImplementedError

    def shape_of(self, inputs: Tensor) -> tuple[int, ...]:
        """The class of shapes that inputs belong to."""
        raise NotImplementedError

    def details(self) -> object:
        """What the time and the rightness of a way depend on beside the shapes."""
        return None

    def hardest(self, inputs: Tensor) -> list[tuple[Exact, Tensor]]:
        """Weights, and inputs at the ends of their range, where a clipped sum shows."""
        raise NotImplementedError

    def product(self, inputs: Tensor) -> Tensor:
        """Whole numbers, as float32 or int8 -> exact sums."""
        return self.ways()[self.way(inputs)](self, inputs)

    def way(self, inputs: Tensor) -> str:
        """The name of the way for inputs like these; see `choice`."""
        if torch.compiler.is_compiling() or not inputs.numel():
            return "float64"  # nothing can be timed inside a compiled graph
        count = (len(inputs) - 1).bit_length()
        key = count, inputs.shape[1:], inputs.device, torch.get_num_threads()
        if key not in self._ways:
            self._ways[key] = self.choice(inputs).way
        return self._ways[key]

    @torch.no_grad()
    def choice(self, inputs: Tensor) -> Choice:
        """The way for inputs like these, measured if it is the first time."""
        shape, threads = self.shape_of(inputs), torch.get_num_threads()
        key = type(self), shape, self.details(), str(inputs.device), threads
        if key in _chosen:
            return _chosen[key]
        if not inputs.numel() or not self.codes.numel():
            return Choice(shape, threads, Timing("float64", {}, {}))
        trials = self.hardest(inputs)
        exact = [self.ways()["float64"](*trial).double() for trial in trials]
        calls: dict[str, Callable[[], Tensor]] = {}
        wrong = []
        for name, way in self.ways().items():
            try:
                sums = [way(*trial).double() for trial in trials]
            except (RuntimeError, AttributeError):  # this build or shape has no such product
                continue
            if all(map(torch.equal, sums, exact)):
                calls[name] = lambda way=way: way(self, inputs)  # type: ignore[misc]
            else:
                wrong.append(name)
        timing = measure(calls)
        best = timing.way
        self._kept = {way: kept for way, kept in self._kept.items() if way == best}
        extra = sum(t.nbytes for t in self._kept.get(best, ()) if isinstance(t, Tensor))
        _chosen[key] = Choice(shape, threads, timing, tuple(wrong), extra)
        return _chosen[key]

    def keep(self, way: str, make: Callable[[], Any]) -> Any:
        """What `way` makes of the codes, once."""
        if (kept := self._kept.get(way)) is None:
            kept = self._kept[way] = make()
        return kept


def ends(like: Tensor, low: int, high: int, seed: int) -> Tensor:
    """Random numbers, each one of the two ends."""
    signs = torch.randint(0, 2, like.shape, generator=torch.Generator().manual_seed(seed)).bool()
    return torch.where(signs, high, low).to(like)


class Int8Weights(Exact):
    """int8 codes (outputs, inputs) for inputs (tokens, inputs) of at most `largest`: 127 or 128."""

    def __init__(self, codes: Tensor, *, largest: int = 127) -> None:
        super().__init__(codes)
        self.largest = largest
        self._edges: list[int] | None = None

    def ways(self) -> dict[str, Callable[[Any, Tensor], Tensor]]:
        """Those of this file."""
        return WAYS

    def shape_of(self, inputs: Tensor) -> tuple[int, ...]:
        """Tokens to the next power of two, inputs, outputs."""
        tokens = 1 << (len(inputs) - 1).bit_length() if len(inputs) else 0
        return tokens, inputs.shape[1], len(self.codes)

    def hardest(self, inputs: Tensor) -> list[tuple[Exact, Tensor]]:
        """Half of the rows with neighbors that add up, not cancel."""
        codes = ends(self.codes, -128, 127, 0)
        codes[: (len(codes) + 1) // 2] = 127
        hard, inputs = Int8Weights(codes, largest=self.largest), inputs.float()
        trials = [ends(inputs, -self.largest, 127, seed) for seed in (1, 2)]
        trials.append(torch.full_like(inputs, -self.largest))
        return [(hard, trial) for trial in trials]

    @property
    def edges(self) -> list[int]:
        """Where to cut the inputs so that float32 is exact inside each part: 0, ..., inputs."""
        if self._edges is None:
            self._edges = exact_parts(self.codes, self.largest)
        return self._edges


def exact_parts(codes: Tensor, largest: int) -> list[int]:
    """Cuts 0, ..., inputs between which `largest` * sum |w| stays within 2^24 for every row."""
    inputs = codes.shape[1]
    width = max(1, EXACT_IN_FLOAT32 // (128 * largest))  # enough whatever the codes are
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
    # Each part is exact; their sum may not be in float32, so they are added as integers.
    total = torch.zeros((), dtype=torch.int32, device=inputs.device)
    for a, b in itertools.pairwise(edges):
        total = total + F.linear(inputs[:, a:b], weight(a, b)).to(torch.int32)
    return total


def _float64(weights: Int8Weights, inputs: Tensor) -> Tensor:
    return (inputs.double() @ weights.codes.t().double()).to(torch.int32)


WAYS: dict[str, Callable[[Int8Weights, Tensor], Tensor]] = {
    "int8": _int8,
    "int8 halves": _int8_halves,
    "float32": _float32,
    "float32 kept": _float32_kept,
    "float64": _float64,
}
"""The exact ways, the plainest last: it is right everywhere, and the others are held against it."""


def _check_offered(codes: Tensor, inputs: Tensor) -> None:
    outputs, width = codes.shape
    fits = min(outputs, width) >= _SMALLEST
    if inputs.is_cuda:
        fits &= len(inputs) > _SMALLEST and not width % 8 and not outputs % 8
    if not fits:
        raise RuntimeError("there is no int8 product of this shape")
