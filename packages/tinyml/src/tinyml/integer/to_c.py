"""Export of an integer network as one C99 file without float arithmetic.

The program consists of arrays, the functions of `kernels.c` that the network needs, the function of
the network and a `main`. It includes stdint.h and string.h, and stdio.h for `main`. It allocates no
memory. It computes the formulas in `integer.layers`, so the results have the same bits. Values are
stored in one static arena. The memory of a value is reused after the last layer that reads it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tinyml.export.atomic_file import atomic_file
from tinyml.integer import layers
from tinyml.integer.model import IntegerModel

_ALIGN = 16


@dataclass(frozen=True)
class CProgram:
    """The C source of a network and its memory requirements."""

    source: str
    #: The bytes of all constant arrays: weights, biases, multipliers, shifts and tables.
    flash_bytes: int
    #: The bytes of the arena of int8 values, which contains copies of the input and the output.
    ram_bytes: int

    def save(self, path: str | Path) -> None:
        """Write the source to `path`, completely or not at all."""
        with atomic_file(path) as part:
            part.write_text(self.source)


def to_c(model: IntegerModel, *, name: str = "network") -> CProgram:
    """Return `model` as C99; the function is `void NAME(const int8_t *input, int8_t *output)`.

    `main` reads inputs of `NAME_INPUT` int8 values (channels, rows, columns) from standard input
    and writes `NAME_OUTPUT` values for each; NAME is `name` in upper case. Compile with
    -DNAME_NO_MAIN to leave `main` out. `name` must not be a name of C, of `kernels.c` or of the
    other arrays in the file, such as "main", "pool" or "arena".
    """
    if not isinstance(model, IntegerModel):
        raise TypeError(f"expected an IntegerModel, got {type(model).__name__}")
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        raise ValueError(f"expected a C identifier that starts with a letter, got {name!r}")
    kernels = files("tinyml.integer").joinpath("kernels.c").read_text()
    sizes = [math.prod(shape) for shape in model.shapes]
    offsets, arena = _assign_offsets(model, sizes)
    arrays = _Arrays()
    body: list[str] = []
    for number, (layer, sources) in enumerate(zip(model.layers, model.sources, strict=True)):
        call = _Call(
            number,
            inputs=[f"arena + {offsets[source]}" for source in sources],
            output=f"arena + {offsets[number + 1]}",
            input_shapes=[model.shapes[source] for source in sources],
            output_shape=model.shapes[number + 1],
        )
        body += [f"/* {number}: {type(layer).__name__} */"]
        body += _STATEMENTS[type(layer)](layer, call, arrays)
    upper = name.upper()
    lines = [
        f"/* {len(model.layers)} layers, {arrays.bytes} bytes of constants, {arena} of values. */",
        "#include <stdint.h>",
        "#include <string.h>",
        f"#define {upper}_INPUT {sizes[0]}",
        f"#define {upper}_OUTPUT {sizes[-1]}",
        _select_functions(kernels, "\n".join(body)),
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


def _select_functions(kernels: str, body: str) -> str:
    """Return the functions of `kernels` that `body` needs; compilers warn of unused functions."""
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
        literals = ["INT32_MIN" if value == -(2**31) else str(value) for value in values]
        rows = [",".join(literals[start : start + 24]) for start in range(0, len(values), 24)]
        joined = ",\n    ".join(rows)
        self.lines.append(f"static const {kind} {name}[{len(values)}] = {{\n    {joined}}};")
        return name


@dataclass(frozen=True)
class _Call:
    """The values that a layer reads and writes: pointers into the arena, and shapes."""

    number: int
    inputs: list[str]
    output: str
    input_shapes: list[tuple[int, ...]]
    output_shape: tuple[int, ...]


def _write_matmul(layer: layers.IntegerMatMul, call: _Call, arrays: _Arrays) -> list[str]:
    named = {"weight": "int8_t", "bias": "int32_t", "multiplier": "int32_t", "shift": "uint8_t"}
    parts = [
        arrays.add(f"{key}_{call.number}", kind, getattr(layer, key)) for key, kind in named.items()
    ]
    pointers = ", ".join([call.inputs[0], call.output, *parts])
    before, after = call.input_shapes[0], call.output_shape
    if layer.geometry is None:
        rows, width = math.prod(before[:-1]), before[-1]
        return [
            f"multiply({pointers}, {_join_numbers([layer.after.zero, rows, width, after[-1]])});"
        ]
    g = layer.geometry
    numbers = [
        layer.before.zero, layer.after.zero, *before, after[0],
        *g.kernel, *g.stride, *g.padding, *g.dilation, g.groups, *after[1:],
    ]  # fmt: skip
    return [f"convolve({pointers}, {_join_numbers(numbers)});"]


def _write_pool(layer: layers.IntegerPool, call: _Call, _: _Arrays) -> list[str]:
    g = layer.geometry
    shapes = [*call.input_shapes[0], *g.kernel, *g.stride, *g.padding, *call.output_shape[1:]]
    numbers = [*shapes, int(layer.is_maximum), layer.scale.zero]
    return [f"pool({call.inputs[0]}, {call.output}, {_join_numbers(numbers)});"]


def _write_table(layer: layers.IntegerTable, call: _Call, arrays: _Arrays) -> list[str]:
    table = arrays.add(f"table_{call.number}", "int8_t", layer.table)
    value = f"{table}[({call.inputs[0]})[i] + 128]"
    return [_write_loop(math.prod(call.output_shape), call.output, value)]


def _write_reshape(_: layers.IntegerReshape, call: _Call, __: _Arrays) -> list[str]:
    return [f"memmove({call.output}, {call.inputs[0]}, {math.prod(call.output_shape)});"]


def _write_sum(layer: layers.IntegerSum, call: _Call, _: _Arrays) -> list[str]:
    total = " + ".join(_write_scaled_terms(layer, call))
    return [_write_loop(math.prod(call.output_shape), call.output, _requantize_in_c(total, layer))]


def _write_cat(layer: layers.IntegerCat, call: _Call, _: _Arrays) -> list[str]:
    lines = []
    start = 0
    for term, shape in zip(_write_scaled_terms(layer, call), call.input_shapes, strict=True):
        size = math.prod(shape)
        lines.append(_write_loop(size, f"{call.output} + {start}", _requantize_in_c(term, layer)))
        start += size
    return lines


def _write_mul(layer: layers.IntegerMul, call: _Call, _: _Arrays) -> list[str]:
    indices = [_broadcast(call.output_shape, shape) for shape in call.input_shapes]
    values = _write_centered(layer, call, indices)
    product = f"(int64_t){' * '.join(values)} * {int(layer.multiplier)}"
    return [
        _write_loop(math.prod(call.output_shape), call.output, _requantize_in_c(product, layer))
    ]


#: For each kind of layer, the C statements that compute it.
_STATEMENTS: dict[type[nn.Module], Callable[[Any, _Call, _Arrays], list[str]]] = {
    layers.IntegerMatMul: _write_matmul,
    layers.IntegerPool: _write_pool,
    layers.IntegerTable: _write_table,
    layers.IntegerReshape: _write_reshape,
    layers.IntegerSum: _write_sum,
    layers.IntegerCat: _write_cat,
    layers.IntegerMul: _write_mul,
}


def _write_centered(layer: layers.RescaledValues, call: _Call, indices: Sequence[str]) -> list[str]:
    """Return C code of q_i - Z_i for the element of each input at its index."""
    terms = zip(call.inputs, indices, layer.zeros, strict=True)
    return [f"(({name})[{index}] - ({zero}))" for name, index, zero in terms]


def _write_scaled_terms(layer: layers.RescaledValues, call: _Call) -> list[str]:
    """Return C code of m_i (q_i - Z_i) for element i of each input."""
    values = _write_centered(layer, call, ["i"] * len(call.inputs))
    pairs = zip(values, layer.multiplier.tolist(), strict=True)
    return [f"(int64_t){value} * ({multiplier})" for value, multiplier in pairs]


def _requantize_in_c(value: str, layer: layers.RescaledValues) -> str:
    return f"requantized({value}, {_join_numbers([int(layer.shift), layer.after.zero])})"


def _write_loop(size: int, output: str, value: str) -> str:
    return f"for (int i = 0; i < {size}; i++) ({output})[i] = {value};"


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> str:
    """Return C code for the index in shape `second` that belongs to index i in shape `first`."""
    if first == second:
        return "i"
    terms = []
    first_stride = 1
    second_stride = 1
    for first_size, second_size in zip(reversed(first), reversed(second), strict=True):
        if second_size != 1:
            terms.append(f"i / {first_stride} % {first_size} * {second_stride}")
        first_stride *= first_size
        second_stride *= second_size
    return " + ".join(terms) or "0"


def _assign_offsets(model: IntegerModel, sizes: list[int]) -> tuple[list[int], int]:
    """Return the offset of each value and the size of the arena, by first fit among live values."""
    last_use = model.last_use | {len(sizes) - 1: len(sizes)}
    offsets: list[int] = []
    for number, size in enumerate(sizes):
        # Layer `number - 1` writes this value while all values that the layer reads are still live.
        live = [value for value in range(number) if last_use.get(value, 0) >= number - 1]
        start = 0
        for value in sorted(live, key=lambda value: (offsets[value], sizes[value])):
            if start + size <= offsets[value]:
                break
            start = max(start, -(-(offsets[value] + sizes[value]) // _ALIGN) * _ALIGN)
        offsets.append(start)
    return offsets, max(offset + size for offset, size in zip(offsets, sizes, strict=True))


def _join_numbers(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in numbers)
