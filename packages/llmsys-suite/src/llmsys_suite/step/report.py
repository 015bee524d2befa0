"""`llmsys step`: the requested cases, and their rows as a table."""

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
from llmsys_suite.results import cell
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

    Without `out` nothing is written. Raises UsageError for invalid options.
    """
    if not 0 < limit < math.inf:
        raise UsageError(f"--time-limit {limit} is not a number of seconds")
    if profile and out is None:
        raise UsageError("--profile writes operators; name a folder with --out")
    if device == "cuda" and not count_gpus():
        raise UsageError("device cuda needs a CUDA device and this machine shows none; use cpu")
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
            SIZES if sizes == "all" else _names(sizes),
            _numbers(contexts),
            _names(dtypes),
            (False, True) if compiled else (False,),
            (False, True) if checkpointed else (False,),
        )
    ]
    if not cases:
        raise UsageError("no case is requested; name sizes, contexts and dtypes as A,B")
    if out is not None:
        create_folder(out, ROWS, json.dumps(_table(cases, [])))
    yield from _measured_lines(cases, limit, profile, out)
    if device == "cuda":
        case = json.dumps(asdict(cases[0]))
        yield f"\nnsys profile -t cuda,nvtx -o step python -m llmsys_suite.step.process '{case}'"


def _measured_lines(
    cases: Sequence[Case], limit: float, profile: bool, out: Path | None
) -> Iterator[str]:
    yield _line(["case", "warm-up", *(f"{p}, ms" for p in PHASES), "tokens/s", "MFU", "note"])
    yield "|---" * 8 + "|"
    measured = []
    for row in sweep.measure(cases, limit=limit, profile=profile):
        measured.append(row)
        if out is not None:  # after every row, in case of an interruption
            RunFolder(out).write_json(ROWS, _table(cases, measured))
        yield _line(_cells(row))
    if out is not None:
        yield f"\n{out}: {ROWS}"


def _table(cases: Sequence[Case], rows: list[Row]) -> dict[str, Any]:
    return {"cases": [asdict(case) for case in cases], "rows": rows}


def _cells(row: Row) -> list[str]:
    def time(phase: str) -> str:
        if f"{phase}_mean_ms" not in row:
            return ""
        spread = f" ± {cell(row[f'{phase}_std_ms'])}" if f"{phase}_std_ms" in row else ""
        return f"{cell(row[f'{phase}_mean_ms'])}{spread}"

    rate = f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else ""
    used = f"{row['mfu']:.{1 if row['mfu'] < 0.1 else 0}%}" if "mfu" in row else ""
    warmup = str(row.get("warmup", ""))
    return [_name(row), warmup, *map(time, PHASES), rate, used, row["note"]]


def _name(row: Row) -> str:
    enabled = [key for key in ("compile", "checkpoint") if row[key]]
    return ", ".join([row["size"], f"{row['rows']} x {row['context']}", row["dtype"], *enabled])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))


def _numbers(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(number) for number in _names(text)))
    except ValueError:
        raise UsageError(
            f"expected whole numbers as contexts, got {text!r}; pass them as 128,512"
        ) from None
