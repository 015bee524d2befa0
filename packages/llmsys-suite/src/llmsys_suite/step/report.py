"""`llmsys step`: the requested cases, and their rows as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from llmsys_suite.config import SIZES, UsageError, count_gpus
from llmsys_suite.folder import RunFolder, create_folder
from llmsys_suite.step import sweep
from llmsys_suite.step.case import PHASES, Case


def requested_cases(
    *,
    sizes: str,
    contexts: str,
    dtypes: str,
    compiled: bool,
    checkpointed: bool,
    rows: int,
    device: str,
) -> list[Case]:
    """Return a case per combination of the options; raise UsageError if an option is invalid."""
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
    return cases


def benchmark(cases: Sequence[Case], limit: float, out: Path | None) -> Iterator[str]:
    """Yield lines of a Markdown table as cases are measured; write the rows to `out`/rows.json.

    Without `out` nothing is written. Raises UsageError if `out` is not empty or cannot be written.
    """
    if out is not None:
        create_folder(out, "rows.json", "{}\n")
    yield _line(["case", "warm-up", *(f"{p}, ms" for p in PHASES), "tokens/s", "MFU", "note"])
    yield "|---" * 8 + "|"
    measured = []
    for row in sweep.measure(cases, limit=limit):
        measured.append(row)
        if out is not None:  # after every row, in case of an interruption
            table = {"cases": [asdict(case) for case in cases], "rows": measured}
            RunFolder(out).write_json("rows.json", table)
        yield _line(_cells(row))


def _cells(row: dict[str, Any]) -> list[str]:
    options = [key for key in ("compile", "checkpoint") if row[key]]
    case = ", ".join([row["size"], f"{row['rows']} x {row['context']}", row["dtype"], *options])
    if row["note"]:
        return [case, *[""] * 6, row["note"]]
    times = [
        f"{_short(row[f'{phase}_mean_ms'], 3)} ± {_short(row[f'{phase}_std_ms'], 2)}"
        for phase in PHASES
    ]
    return [
        case,
        str(row["warmup"]),
        *times,
        f"{row['tokens_per_s']:,.0f}",
        f"{row['mfu']:.1%}",
        "",
    ]


def _short(value: float, digits: int) -> str:
    """Return `digits` significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))


def _numbers(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(number) for number in _names(text)))
    except ValueError:
        raise UsageError(f"contexts {text!r} are no whole numbers; give some as 128,512") from None
