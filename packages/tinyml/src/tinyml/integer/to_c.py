"""Export of an integer network as one C99 file without float arithmetic.

The program consists of arrays, one function and a `main`. It needs a C compiler and stdint, and
allocates no memory. Its arithmetic is that of `integer.layers`, operation by operation, so the bits
are the same. Values are stored in one arena. The memory of a value is reused after its last reader,
so the reported RAM is what the program uses.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from torch import Tensor, nn

from tinyml.export.atomic_file import atomic_file
from tinyml.integer import layers as integer_layers
from tinyml.integer.model import IntegerModel

_ALIGN = 16
# Reserved names in addition to those in kernels.c.
_TAKEN = (
    "main arena input output memcpy memmove fread fwrite stdin stdout auto break case char "
    "continue default do double else enum extern float goto inline long register restrict short "
    "signed sizeof struct switch typedef union unsigned volatile while"
)


@dataclass(frozen=True)
class CProgram:
    """The C source and its memory requirements."""

    source: str
    #: Weights, biases, multipliers, shifts and tables: all constant arrays.
    flash_bytes: int
    #: The arena of int8 values, input and output included.
    ram_bytes: int

    def save(self, path: str | Path) -> None:
        """Write the source; the file is written completely or not at all."""
        with atomic_file(path) as part:
            part.write_text(self.source)


def to_c(model: IntegerModel, *, name: str = "network") -> CProgram:
    """Return `model` as C99; the function is `void NAME(const int8_t *input, int8_t *output)`.

    `main` reads inputs of `NAME_INPUT` int8 values (channels, rows, columns) from standard input
    and writes `NAME_OUTPUT` values for each. Compile with -DNAME_NO_MAIN to leave `main` out.
    """
    if not isinstance(model, IntegerModel):
        raise TypeError(f"expected an IntegerModel, got {type(model).__name__}")
    kernels = files("tinyml.integer").joinpath("kernels.c").read_text()
    taken = {*_TAKEN.split(), *re.findall(r"\w+", kernels)}
    array = r"(weight|bias|multiplier|shift|table)_\d+"
    if (
        not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII)
        or name in taken
        or re.fullmatch(array, name)
    ):
        raise ValueError(
            f"expected the name of a C function that the program does not use, got {name!r}"
        )
    sizes = [math.prod(shape) for shape in model.shapes]
    offsets, arena = _offsets(model, sizes)
    arrays = _Arrays()
    body: list[str] = []
    for number, (layer, sources) in enumerate(zip(model.layers, model.sources, strict=True)):
        out = f"arena + {offsets[number + 1]}"
        inputs = [f"arena + {offsets[source]}" for source in sources]
        shapes = [model.shapes[source] for source in sources]
        body += [f"/* {number}: {type(layer).__name__} */"]
        body += _layer(layer, number, inputs, out, shapes, model.shapes[number + 1], arrays)
    upper = name.upper()
    lines = [
        f"/* {len(model.layers)} layers, {arrays.bytes} bytes of constants, {arena} of values. */",
        "#include <stdint.h>",
        "#include <string.h>",
        f"#define {upper}_INPUT {sizes[0]}",
        f"#define {upper}_OUTPUT {sizes[-1]}",
        _called(kernels, "\n".join(body)),
        *arrays.lines,
        f"static int8_t arena[{arena}];",
        f"void {name}(const int8_t *input, int8_t *output);",
        f"void {name}(const int8_t *input, int8_t *output) {{",
        f"    memcpy(arena + {offsets[0]}, input, {sizes[0]});",
        *(f"    {line}" for line in body),
        f"    memcpy(output, arena + {offsets[len(model.layers)]}, {sizes[-1]});",
        "}",
        f"#ifndef {upper}_NO_MAIN",
        "#include <stdio.h>",
        "int main(void) {",
        f"    static int8_t input[{upper}_INPUT], output[{upper}_OUTPUT];",
        "    while (fread(input, 1, sizeof input, stdin) == sizeof input) {",
        f"        {name}(input, output);",
        "        if (fwrite(output, 1, sizeof output, stdout) != sizeof output) return 1;",
        "    }",
        "    return 0;",
        "}",
        "#endif",
    ]
    return CProgram("\n".join(lines) + "\n", arrays.bytes, arena)


def _called(kernels: str, body: str) -> str:
    """Return the functions of `kernels` that the body calls, directly or not, to avoid warnings."""
    functions: list[str] = []
    for function in reversed(re.split(r"(?m)^(?=static )", kernels)):
        name = re.search(r"\w+(?=\()", function)
        if name and re.search(rf"\b{name[0]}\(", body):
            functions.insert(0, function)
            body += function
    return "".join(functions)


class _Arrays:
    """Constant arrays and their total size in bytes."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bytes = 0

    def add(self, name: str, kind: str, tensor: Tensor) -> str:
        values = tensor.flatten().tolist()
        self.bytes += len(values) * {"int8_t": 1, "uint8_t": 1, "int32_t": 4}[kind]
        rows = [
            ",".join(map(_literal, values[first : first + 24]))
            for first in range(0, len(values), 24)
        ]
        joined = ",\n    ".join(rows)
        self.lines.append(f"static const {kind} {name}[{len(values)}] = {{\n    {joined}}};")
        return name


def _literal(value: int) -> str:
    return "INT32_MIN" if value == -(2**31) else str(value)


def _layer(
    layer: nn.Module,
    number: int,
    inputs: list[str],
    out: str,
    before: list[tuple[int, ...]],
    after: tuple[int, ...],
    arrays: _Arrays,
) -> list[str]:
    if isinstance(layer, integer_layers.IntegerProduct):
        named = {
            "weight": "int8_t", "bias": "int32_t", "multiplier": "int32_t", "shift": "uint8_t"
        }  # fmt: skip
        parts = [
            arrays.add(f"{key}_{number}", kind, getattr(layer, key)) for key, kind in named.items()
        ]
        pointers = ", ".join([inputs[0], out, *parts])
        if layer.geometry is None:
            rows, width = math.prod(before[0][:-1]), before[0][-1]
            numbers = [layer.after.zero, rows, width, after[-1]]
            return [f"multiply({pointers}, {_comma(numbers)});"]
        g = layer.geometry
        numbers = [
            layer.before.zero, layer.after.zero, *before[0], after[0],
            *g.kernel, *g.stride, *g.padding, *g.dilation, g.groups, *after[1:],
        ]  # fmt: skip
        return [f"convolve({pointers}, {_comma(numbers)});"]
    if isinstance(layer, integer_layers.IntegerPool):
        g = layer.geometry
        numbers = [*before[0], *g.kernel, *g.stride, *g.padding, *after[1:], int(layer.largest)]
        return [f"pool({inputs[0]}, {out}, {_comma([*numbers, layer.scale.zero])});"]
    if isinstance(layer, integer_layers.IntegerTable):
        table = arrays.add(f"table_{number}", "int8_t", layer.table)
        loop = f"for (int i = 0; i < {math.prod(after)}; i++)"
        return [f"{loop} ({out})[i] = {table}[({inputs[0]})[i] + 128];"]
    if isinstance(layer, integer_layers.IntegerReshape):
        return [f"memmove({out}, {inputs[0]}, {math.prod(after)});"]
    assert isinstance(layer, integer_layers.Mixed)
    index = ["i"] * len(inputs)
    if isinstance(layer, integer_layers.IntegerGate):
        index = [_broadcast(after, shape) for shape in before]
    centered = [
        f"(({name})[{i}] - ({zero}))"
        for name, i, zero in zip(inputs, index, layer.zeros, strict=True)
    ]
    factors = layer.multiplier.tolist()
    if isinstance(layer, integer_layers.IntegerGate):
        term = f"(int64_t){' * '.join(centered)} * {factors[0]}"
        return [_loop(math.prod(after), out, term, layer)]
    pairs = zip(centered, factors, strict=True)
    terms = [f"(int64_t){value} * ({factor})" for value, factor in pairs]
    if isinstance(layer, integer_layers.IntegerSum):
        return [_loop(math.prod(after), out, " + ".join(terms), layer)]
    counts = [math.prod(shape) for shape in before]
    starts = itertools.accumulate(counts, initial=0)
    offsets = [f"{out} + {start}" for start in starts]
    return [_loop(*part, layer) for part in zip(counts, offsets, terms, strict=False)]


def _loop(count: int, out: str, term: str, layer: integer_layers.Mixed) -> str:
    loop = f"for (int i = 0; i < {count}; i++)"
    numbers = _comma([int(layer.shift), layer.after.zero])
    return f"{loop} ({out})[i] = requantized({term}, {numbers});"


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> str:
    """Return C code that maps index i of shape `first` to the index in shape `second`."""
    if first == second:
        return "i"
    terms = []
    inner = 1
    stride = 1
    for a, b in zip(reversed(first), reversed(second), strict=True):
        if b != 1:
            terms.append(f"i / {inner} % {a} * {stride}")
        inner, stride = inner * a, stride * b
    return " + ".join(terms) or "0"


def _offsets(model: IntegerModel, sizes: list[int]) -> tuple[list[int], int]:
    """Return the offset of each value and the size of the arena, by first fit among live values."""
    last = dict.fromkeys(range(len(sizes)), 0)
    for number, sources in enumerate(model.sources):
        for source in sources:
            last[source] = number
    last[len(sizes) - 1] = len(sizes)
    offsets: list[int] = []
    for value, size in enumerate(sizes):
        # Layer `value - 1` writes this value while all values that it reads are still live.
        busy = sorted(
            (offsets[v], offsets[v] + sizes[v]) for v in range(value) if last[v] >= value - 1
        )
        start = 0
        for a, b in busy:
            if start + size <= a:
                break
            start = max(start, -(-b // _ALIGN) * _ALIGN)
        offsets.append(start)
    return offsets, max(offset + size for offset, size in zip(offsets, sizes, strict=True))


def _comma(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in numbers)
