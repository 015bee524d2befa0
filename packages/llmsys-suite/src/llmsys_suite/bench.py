"""Benchmark of a whole run: variants of training, attention and compression side by side.

    python -m llmsys_suite.bench --quick

Ratios are taken between interleaved timings: training relative to torch's DDP, attention relative
to SDPA, and compression relative to the float32 model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.bench import table

from llmsys_suite.folder import RunFolder
from llmsys_suite.resolution import resolve
from llmsys_suite.start import run

Row = dict[str, float | int | str]
CASES = ("train", "attention", "compress")


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """Run the stages of `CASES`, their dependencies and the audit; return the rows of `CASES`.

    The run folder is temporary. Raises RuntimeError if the run or a check of its audit fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        config = resolve(
            [*CASES, "audit"],
            preset="gpu" if device == "cuda" else device,
            steps=4 if quick else None,
            warmup=1 if quick else None,
            learn=8 if quick else None,
            out=Path(scratch) / "run",
        )
        return collect_rows(run(config).summary["stages"])


def collect_rows(stages: dict[str, Any]) -> list[Row]:
    """Return the rows of the stages in `CASES`, each with its stage as the column `case`."""
    return [{"case": case, **row} for case in CASES for row in stages[case]["rows"]]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its rows as a table; with `--json` also write them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m llmsys_suite.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="four steps of each variant")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    measured = bench(device=arguments.device, quick=arguments.quick)
    if arguments.json:
        RunFolder(arguments.json.parent).write_json(arguments.json.name, measured)
    print(table(measured))


if __name__ == "__main__":
    main()
