"""`llmsys step`: the requested cases, their rows as tables, and sentences about them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from llmsys_suite.config import SIZES, UsageError, count_gpus
from llmsys_suite.folder import RunFolder
from llmsys_suite.step import sweep
from llmsys_suite.step.case import PHASES, WARMUPS, Case

Row = dict[str, Any]
LABELS = ("size", "context", "dtype", "compile", "checkpoint", "warmup")


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
    """Yield lines of Markdown as they are measured; write tables to `out` if it is given."""
    if not 0 < limit < math.inf:
        raise UsageError(f"--time-limit {limit} is not a number of seconds")
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
        _make_folder(out)
    yield from _measured_lines(cases, limit, profile, out)
    if device == "cuda":
        case = json.dumps(asdict(cases[0]))
        yield f"\nnsys profile -t cuda,nvtx -o step python -m llmsys_suite.step.process '{case}'"


def _make_folder(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty; name another folder with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}") from None


def _measured_lines(
    cases: Sequence[Case], limit: float, profile: bool, out: Path | None
) -> Iterator[str]:
    yield _line(["case", "warm-up", *(f"{p}, ms" for p in PHASES), "tokens/s", "MFU", "note"])
    yield "|---" * 8 + "|"
    measured = []
    traces = out / "traces" if out is not None and profile else None
    for row in sweep.measure(cases, limit=limit, profile=profile, traces=traces):
        measured.append(row)
        if out is not None:  # after every row, in case of an interruption
            table = {"cases": [asdict(case) for case in cases], "rows": measured}
            RunFolder(out).write_json("rows.json", table)
        yield _line(_cells(row))
    yield from sentences(measured)
    if profile:
        yield from _kernels(measured)
    if out is not None:
        yield f"\n{out}: rows.json" + (", traces" if profile else "")


def sentences(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the effects of compiling and of checkpointing, if both variants were measured."""
    last = [r for r in rows if r.get("warmup") == max(WARMUPS) and "first_step_ms" in r]
    for base in last:
        for key, sentence in (("compile", _compiled), ("checkpoint", _checkpointed)):
            same = [r for r in last if r[key] and _without(r, key) == _without(base, key)]
            if not base[key] and same:
                yield "\n" + sentence(base, same[0])


def _compiled(plain: Row, compiled: Row) -> str:
    paid = sweep.pays_after([plain, compiled])
    after = f"pays after {paid['steps']:.0f} steps" if paid["steps"] < math.inf else "never pays"
    return (
        f"{_name(plain)}: compiling takes {paid['compile_s']:.1f} s and makes a step "
        f"{paid['speedup']:.2f} times as fast: it {after}."
    )


def _checkpointed(eager: Row, checkpointed: Row) -> str:
    return (
        f"{_name(eager)}: running blocks again takes "
        f"{checkpointed['step_p50_ms'] / eager['step_p50_ms']:.2f} of the time and "
        f"{checkpointed['peak_gib'] / eager['peak_gib']:.2f} of the process's peak memory."
    )


def _kernels(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the operators of each case, phase by phase."""
    for row in rows:
        if row.get("warmup") != max(WARMUPS) or not row.get("operators"):
            continue
        yield f"\n{_name(row)}\n"
        yield _line(
            [
                "phase",
                "timer, ms",
                "operators, ms",
                "products",
                "attention's",
                "softmax",
                "most time in",
            ]
        )
        yield "|---" * 7 + "|"
        for phase in row["operators"]:
            top = ", ".join(f"{o['operator']} x {o['calls']}" for o in phase["top"][:3])
            yield _line(
                [
                    phase["phase"],
                    f"{phase['timer_ms']:.3g}",
                    f"{phase['total_ms']:.3g}",
                    f"{phase['product_share']:.1%}",
                    f"{phase['attention_product_share']:.1%}",
                    f"{phase['softmax_share']:.1%}",
                    top,
                ]
            )
        first = row["operators"][0]
        if first["softmax_share"] and first["attention_product_share"]:  # compiled, they are one
            yield (
                f"\nIn the forward pass softmax takes "
                f"{first['softmax_share'] / first['attention_product_share']:.2f} of the time of "
                f"attention's products, for "
                f"{first['softmax_flops'] / first['attention_product_flops']:.3f} of their FLOPs."
            )


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


def _without(row: Row, key: str) -> list[Any]:
    return [row[label] for label in LABELS if label != key]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))


def _numbers(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(number) for number in _names(text)))
    except ValueError:
        raise UsageError(f"contexts {text!r} are no whole numbers; give some as 128,512") from None
