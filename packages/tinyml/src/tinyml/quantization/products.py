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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EXACT_IN_FLOAT32 = 2**24
_SMALLEST = 16  # torch 2.11's int8 product returns memory that it never wrote for inner sizes of 1
_ROUNDS, _HOPELESS_MS = 5, 100.0


@dataclass(frozen=True)
class ShapeClass:
    """What one choice holds for: tokens by powers of two, the other sizes as they are."""

    tokens: int
    inputs: int
    outputs: int
    device: str
    threads: int


@dataclass(frozen=True)
class Choice:
    """The way that is taken for a shape class, and what it was measured against."""

    shape: ShapeClass
    way: str
    milliseconds: dict[str, float]
    """The fastest of a few rounds of each way that is exact here."""
    wrong: tuple[str, ...]
    """Ways that returned a wrong integer on this machine."""
    extra_bytes: int
    """What the way keeps beside the codes while the model is in memory; never in a state dict."""

    def __str__(self) -> str:
        s, times = self.shape, self.milliseconds
        listed = ", ".join(f"{name} {times[name]:.3g} ms" for name in sorted(times, key=times.get))  # type: ignore[arg-type]
        text = f"{s.tokens} x {s.inputs} x {s.outputs}, {s.threads} threads: {self.way} ({listed}"
        text += f"; wrong here: {', '.join(self.wrong)})" if self.wrong else ")"
        return text + (f", {self.extra_bytes:,} bytes kept beside" if self.extra_bytes else "")


class Int8Weights:
    """int8 codes (outputs, inputs) that many inputs are multiplied with.

    `product(codes)` gives the exact sums as float32 or int32, whichever way is fastest here.
    `largest` bounds the inputs' absolute values: 127 or 128.
    """

    def __init__(self, codes: Tensor, *, largest: int = 127) -> None:
        self.codes, self.largest = codes, largest
        self._kept: dict[str, tuple[Tensor, ...]] = {}
        self._edges: list[int] | None = None
        self._ways: dict[object, str] = {}
        self._generation = _generation

    def product(self, inputs: Tensor) -> Tensor:
        """Whole numbers (tokens, inputs), as float32 or int8 -> sums (tokens, outputs)."""
        return WAYS[self.way(inputs)](self, inputs)

    def way(self, inputs: Tensor) -> str:
        """The name of the way for inputs like these; see `choice`."""
        if torch.compiler.is_compiling():  # nothing can be timed inside a compiled graph
            return "float64"
        key = (len(inputs) - 1).bit_length(), inputs.device, torch.get_num_threads()
        if key not in self._ways or self._generation != _generation:
            if self._generation != _generation:
                self._ways, self._generation = {}, _generation
            self._ways[key] = self.choice(inputs).way
        return self._ways[key]

    def choice(self, inputs: Tensor) -> Choice:
        """The way for inputs like these, measured if it is the first time."""
        return _choices(self, inputs)

    def keep(self, way: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `way` makes of the codes, once."""
        if way not in self._kept:
            self._kept[way] = make()
        return self._kept[way]

    def forget(self, *, but: str = "") -> None:
        """Drop what was kept by ways other than `but`."""
        self._kept = {way: kept for way, kept in self._kept.items() if way == but}

    def kept_bytes(self, way: str) -> int:
        """Bytes that `way` keeps beside the codes."""
        return sum(tensor.nbytes for tensor in self._kept.get(way, ()))

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
    return torch._int_mm(inputs.to(torch.int8), weights.codes.t())


def _int8_halves(weights: Int8Weights, inputs: Tensor) -> Tensor:
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


_chosen: dict[ShapeClass, Choice] = {}
_generation = 0


def forget_choices() -> None:
    """Measure every shape class again at its next product."""
    global _generation
    _chosen.clear()
    _generation += 1


def shape_class(inputs: Tensor, outputs: int) -> ShapeClass:
    """The class that inputs (tokens, inputs) belong to."""
    tokens = 1 << (len(inputs) - 1).bit_length() if len(inputs) else 0
    threads = torch.get_num_threads() if inputs.device.type == "cpu" else 0
    return ShapeClass(tokens, inputs.shape[1], outputs, str(inputs.device), threads)


def _choices(weights: Int8Weights, inputs: Tensor) -> Choice:
    shape = shape_class(inputs, len(weights.codes))
    if shape not in _chosen:
        _chosen[shape] = _measure(shape, weights, inputs)
    return _chosen[shape]


@torch.no_grad()
def _measure(shape: ShapeClass, weights: Int8Weights, inputs: Tensor) -> Choice:
    if not shape.tokens or not shape.inputs or not shape.outputs:
        return Choice(shape, "float64", {}, (), 0)
    hard, trials = _hardest(shape, weights)
    exact = [WAYS["float64"](hard, trial) for trial in trials]
    ways: dict[str, Callable[[], Tensor]] = {}
    wrong = []
    for name, way in WAYS.items():
        if not _offered(name, shape):
            continue
        try:
            sums = [way(hard, trial).to(torch.int32) for trial in trials]
        except RuntimeError:  # this build or device has no such product
            continue
        if all(map(torch.equal, sums, exact)):
            ways[name] = lambda way=way: way(weights, inputs)  # type: ignore[misc]
        else:
            wrong.append(name)
    times = fastest(ways)
    best = min(times, key=lambda name: times[name])
    extra = weights.kept_bytes(best)
    weights.forget(but=best)
    return Choice(shape, best, times, tuple(wrong), extra)


def _offered(way: str, shape: ShapeClass) -> bool:
    if not way.startswith("int8"):
        return True
    if shape.device.startswith("cuda") and (
        shape.tokens <= _SMALLEST or shape.inputs % 8 or shape.outputs % 8
    ):
        return False
    return min(shape.inputs, shape.outputs) >= _SMALLEST


def _hardest(shape: ShapeClass, weights: Int8Weights) -> tuple[Int8Weights, list[Tensor]]:
    """Weights and inputs of this shape at the ends of their range, where a clipped sum shows."""
    generator = torch.Generator().manual_seed(0)

    def ends(rows: int, least: int) -> Tensor:
        signs = torch.randint(0, 2, (rows, shape.inputs), generator=generator).bool()
        return torch.where(signs, 127, least).to(shape.device)

    codes = ends(shape.outputs, -128).to(torch.int8)
    codes[: shape.outputs // 2] = 127  # neighbors that add up, not cancel
    least = -weights.largest
    trials = [ends(shape.tokens, least), ends(shape.tokens, 127), ends(shape.tokens, least)]
    trials[2][:] = least
    return Int8Weights(codes, largest=weights.largest), [trial.float() for trial in trials]


def fastest(ways: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Milliseconds of each way: the least of a few rounds in turns, fewer for what is hopeless.

    One thread alone is timed by the processor's time, which other programs do not add to.
    """
    times: dict[str, float] = {}
    spent: dict[str, float] = {}
    for turn in range(_ROUNDS + 1):
        for name, call in ways.items():
            slower = turn and times[name] > 3 * min(times.values())
            if slower and (turn > 2 or spent[name] > _HOPELESS_MS):
                continue
            took = _milliseconds(call)
            spent[name] = spent.get(name, 0.0) + took
            # The first turn makes what a way keeps; it counts only if there is no other.
            times[name] = took if turn < 2 else min(times[name], took)
    return times


def _milliseconds(call: Callable[[], Tensor]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start, wall = clock(), time.perf_counter()
    if call().is_cuda:
        torch.cuda.synchronize()
        return (time.perf_counter() - wall) * 1e3
    return (clock() - start) * 1e3
