"""The command `python -m flashattn2.bench`: one table, and the rows as JSON if requested."""

import argparse
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from flashattn2.bench import cases
from flashattn2.bench.rounds import Row


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: print one table, and write the rows as JSON if requested."""
    parser = argparse.ArgumentParser(prog="python -m flashattn2.bench", description=cases.__doc__)
    parser.add_argument("--device", default="cpu", choices=cases.DEVICES)
    parser.add_argument("--quick", action="store_true", help="run for seconds instead of minutes")
    parser.add_argument("--cases", nargs="+", default=list(cases.CASES), choices=cases.CASES)
    parser.add_argument("--json", type=Path, help="write the rows, and nothing else, to this file")
    arguments = parser.parse_args(argv)
    rows = []
    for row in cases.measure_cases(arguments.device, arguments.quick, arguments.cases):
        rows.append(row)
        if arguments.json:
            # Replace the file after every row, so that an interrupted run keeps its measurements.
            part = arguments.json.with_name(f"{arguments.json.name}.{os.getpid()}.part")
            part.write_text(json.dumps(rows, indent=1) + "\n")
            part.replace(arguments.json)
    print(format_table(rows))


def format_table(rows: list[Row]) -> str:
    """Return the rows as aligned text, with one block per set of columns."""
    blocks = []
    for columns, group in itertools.groupby(rows, key=tuple):
        cells = [columns, *(tuple(_format_cell(v) for v in row.values()) for row in group)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _format_cell(value: float | int | str) -> str:
    """Return the text of one cell, with four significant digits for floats."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
