"""The command `llmsys step`: the requested cases, and their rows as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from llmsys_suite.config import SIZES, UsageError, count_gpus
from llmsys_suite.folder import RunFolder, create_folder
from llmsys_suite.results import format_cell
from llmsys_suite.step import sweep
from llmsys_suite.step.case import PHASES, Case

Row = dict[str, Any]
ROWS = "rows.json"


def benchmark(
    *,
    sizes: str,
    contexts: str,
    dtypes: str,
    compiled: bool,
    checkpointed: bool,
    rows: int,
    limit: float,
    profile: bool,
    device: str,
    out: Path | None,
) -> Iterator[str]:
    """Yield lines of a Markdown table as cases are measured; write the rows to `out`/rows.json.

    Without `out` nothing is written. `limit` is in seconds. Raises UsageError for invalid options.
    """
    if not 0 < limit < math.inf:
        raise UsageError(f"expected --time-limit to be a number of seconds > 0, got {limit:g}")
    if profile and out is None:
        raise UsageError("--profile needs --out, the folder to which operators are written")
    if device == "cuda" and not count_gpus():
        raise UsageError("--device cuda: torch finds no CUDA device on this machine; use cpu")
    cases = [
        Case(
            size=size,
            context=context,
            rows=rows,
            dtype=dtype,
            compile=is_compiled,
            checkpoint=is_checkpointed,
            device=device,
        )
        for size, context, dtype, is_compiled, is_checkpointed in product(
            SIZES if sizes == "all" else _split(sizes),
            _parse_contexts(contexts),
            _split(dtypes),
            (False, True) if compiled else (False,),
            (False, True) if checkpointed else (False,),
        )
    ]
    if not cases:
        raise UsageError("expected at least one size, context and dtype, such as --sizes tiny")
    if out is not None:
        create_folder(out, ROWS, json.dumps(_build_table(cases, [])))
    yield from _iter_measured_lines(cases, limit, profile, out)
    if device == "cuda":
        case = json.dumps(asdict(cases[0]))
        yield f"\nnsys profile -t cuda,nvtx -o step python -m llmsys_suite.step.process '{case}'"


def _iter_measured_lines(
    cases: Sequence[Case], limit: float, profile: bool, out: Path | None
) -> Iterator[str]:
    yield _join(["case", "warm-up", *(f"{p}, ms" for p in PHASES), "tokens/s", "MFU", "note"])
    yield "|---" * 8 + "|"
    measured = []
    for row in sweep.measure(cases, limit=limit, profile=profile):
        measured.append(row)
        if out is not None:  # after every row, in case of an interruption
            RunFolder(out).write_json(ROWS, _build_table(cases, measured))
        yield _join(_format_cells(row))
    if out is not None:
        yield f"\nwritten to {out / ROWS}"


def _build_table(cases: Sequence[Case], rows: list[Row]) -> dict[str, Any]:
    return {"cases": [asdict(case) for case in cases], "rows": rows}


def _format_cells(row: Row) -> list[str]:
    """Return the cells of a table's row; cells without a measurement are empty."""
    enabled = [key for key in ("compile", "checkpoint") if row[key]]
    name = ", ".join([row["size"], f"{row['rows']} x {row['context']}", row["dtype"], *enabled])
    times = []
    for phase in PHASES:
        mean, std = (format_cell(row.get(f"{phase}_{name}_ms", "")) for name in ("mean", "std"))
        times.append(f"{mean} ± {std}" if mean else "")
    rate = f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else ""
    # An MFU below 10 % has one more digit.
    mfu = f"{row['mfu']:.{1 if row['mfu'] < 0.1 else 0}%}" if "mfu" in row else ""
    return [name, str(row.get("warmup", "")), *times, rate, mfu, row["note"]]


def _join(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _split(text: str) -> list[str]:
    """Return the different names in a text such as "tiny,small"."""
    return list(dict.fromkeys(name for name in text.split(",") if name))


def _parse_contexts(text: str) -> list[int]:
    """Return the different numbers in a text such as "128,512"; raise UsageError for others."""
    try:
        return list(dict.fromkeys(int(number) for number in _split(text)))
    except ValueError:
        raise UsageError(
            f"expected --contexts to be integers such as 128,512, got {text}"
        ) from None
