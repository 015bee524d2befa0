"""`llmsys step`: the requested cases are timed, and their rows are printed as a table.

A case that is not timed gets a row with the reason.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from llmsys_suite.config import SIZES, UsageError, count_gpus
from llmsys_suite.environment import GIB, available_memory_bytes
from llmsys_suite.folder import RunFolder, create_folder
from llmsys_suite.step.case import PHASES, STEPS, WARMUPS, Case

Row = dict[str, Any]
#: Fraction of free memory that a case may use. The remainder is for the process itself and for
#: workspaces of kernels.
FILLED = 0.8


class LeftOut(Exception):
    """The reason why a case was not timed."""


def benchmark(
    *,
    sizes: str,
    contexts: str,
    dtype: str,
    compile: bool,
    checkpoint: bool,
    rows: int,
    time_limit: float,
    profile: bool,
    device: str,
    out: Path | None,
) -> Iterator[str]:
    """Yield lines of a Markdown table as cases are measured; write the rows to `out`/rows.json.

    Without `out` nothing is written. Raises UsageError for invalid options.
    """
    if not 0 < time_limit < math.inf:
        raise UsageError(f"--time-limit {time_limit} is not a number of seconds")
    if profile and out is None:
        raise UsageError("--profile writes operators; name a folder with --out")
    if device == "cuda" and not count_gpus():
        raise UsageError("device cuda needs a CUDA device and this machine shows none; use cpu")
    cases = [
        Case(
            size=size,
            context=context,
            rows=rows,
            dtype=name,
            compile=is_compiled,
            checkpoint=is_checkpointed,
            device=device,
        )
        for size, context, name, is_compiled, is_checkpointed in product(
            SIZES if sizes == "all" else _names(sizes),
            _numbers(contexts),
            _names(dtype),
            (False, True) if compile else (False,),
            (False, True) if checkpoint else (False,),
        )
    ]
    if not cases:
        raise UsageError("no case is requested; name sizes, contexts and dtypes as A,B")
    if out is not None:
        create_folder(out, "rows.json", "")
    yield from _measured_lines(cases, time_limit, profile, out)
    if device == "cuda":
        case = json.dumps(asdict(cases[0]))
        yield f"\nnsys profile -t cuda,nvtx -o step python -m llmsys_suite.step.process '{case}'"


def measure(cases: Sequence[Case], *, limit: float = 60.0, profile: bool = False) -> Iterator[Row]:
    """Yield the rows of each case: one per number of warm-up steps, or one with a refusal.

    The `note` of a row is the reason why its case was not timed. `limit` is in seconds per case.
    With `profile`, rows have `operators`.
    """
    for case in cases:
        try:
            require_fit(case)
            measured = in_a_process(case, limit, profile=profile)
        except LeftOut as reason:
            yield case.labels() | {"note": str(reason)}
            continue
        for skipped in WARMUPS:
            yield row(case, measured, skipped)


def require_fit(case: Case) -> None:
    """Raise LeftOut if a case needs more memory than is free."""
    needed, free = case.peak_bytes(), available_memory_bytes(case.device)
    if needed > FILLED * free:
        raise LeftOut(f"needs {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")


def in_a_process(case: Case, limit: float, *, profile: bool = False) -> dict[str, Any]:
    """Return the output of `step.process`; raise `LeftOut` if it fails or exceeds its time."""
    options = json.dumps(asdict(case) | {"profile": profile})
    command = [sys.executable, "-m", "llmsys_suite.step.process", options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise LeftOut(f"did not end within {limit:g} s") from None
    if done.returncode:
        if done.returncode < 0:  # usually out of memory
            raise LeftOut(f"ended by {signal.Signals(-done.returncode).name}")
        raise LeftOut((done.stderr.strip().splitlines() or ["it ended without a message"])[-1])
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def row(case: Case, measured: dict[str, Any], warmup: int) -> Row:
    """Return statistics of `STEPS` steps after `warmup` steps: times, rates and utilization."""
    counted = measured["seconds"][warmup : warmup + STEPS]
    result = case.labels() | {"warmup": warmup}
    for part, phase in enumerate(PHASES):
        values = [1e3 * seconds[part] for seconds in counted]
        result[f"{phase}_mean_ms"] = statistics.mean(values)
        result[f"{phase}_std_ms"] = statistics.stdev(values)
    whole = sorted(1e3 * sum(seconds) for seconds in counted)
    middle = statistics.median(whole)
    peak = middle / 1e3 * measured["product_rate"]
    return result | {
        "step_p10_ms": whole[len(whole) // 10],
        "step_p50_ms": middle,
        "step_p90_ms": whole[-1 - len(whole) // 10],
        "tokens_per_s": case.tokens / (middle / 1e3),
        "mfu": case.useful_flops() / peak,
        "hfu": case.executed_flops() / peak,
        "first_step_ms": 1e3 * sum(measured["seconds"][0]),
        "product_rate": measured["product_rate"],
        "peak_gib": measured["peak_bytes"] / GIB,
        "loss": measured["loss"],
        "threads": measured["threads"],
        "seconds": counted,
        "operators": measured["operators"],
        "note": "",
    }


def _measured_lines(
    cases: Sequence[Case], limit: float, profile: bool, out: Path | None
) -> Iterator[str]:
    yield _line(["case", "warm-up", *(f"{p}, ms" for p in PHASES), "tokens/s", "MFU", "note"])
    yield "|---" * 8 + "|"
    measured = []
    for row in measure(cases, limit=limit, profile=profile):
        measured.append(row)
        if out is not None:  # after every row, in case of an interruption
            table = {"cases": [asdict(case) for case in cases], "rows": measured}
            RunFolder(out).write_json("rows.json", table)
        yield _line(_cells(row))
    if out is not None:
        yield f"\n{out}: rows.json"


def _cells(row: Row) -> list[str]:
    def time(phase: str) -> str:
        if f"{phase}_mean_ms" not in row:
            return ""
        spread = f" ± {_short(row[f'{phase}_std_ms'], 2)}" if f"{phase}_std_ms" in row else ""
        return f"{_short(row[f'{phase}_mean_ms'], 3)}{spread}"

    rate = f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else ""
    used = f"{row['mfu']:.{1 if row['mfu'] < 0.1 else 0}%}" if "mfu" in row else ""
    warmup = str(row.get("warmup", ""))
    return [_name(row), warmup, *map(time, PHASES), rate, used, row["note"]]


def _short(value: float, digits: int) -> str:
    """Return `digits` significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def _name(row: Row) -> str:
    ways = [key for key in ("compile", "checkpoint") if row[key]]
    return ", ".join([row["size"], f"{row['rows']} x {row['context']}", row["dtype"], *ways])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))


def _numbers(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(number) for number in _names(text)))
    except ValueError:
        raise UsageError(f"contexts {text!r} are no whole numbers; give some as 128,512") from None
