"""The table of a benchmark by size: what fits is timed, the rest extrapolated from fewer layers.

A step is a number of equal layers and what stands around them, so its time is a line in their
number: two models of few layers give it. The line is held against the largest case that fits.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmsys_suite.environment import GIB, available_memory_bytes
from llmsys_suite.step.case import PHASES, STEPS, WARMUPS, Case

Row = dict[str, Any]
#: Layers of the two models that the line goes through.
FEW = (2, 4)
#: What a step of a whole model reaches of the rate of a product, at the least.
USUAL = 1 / 3
#: Of the memory that is free; plain attention holds some more than accounting says.
FILLED = 0.8


class LeftOut(Exception):
    """Why a case was not timed."""


class TooLarge(LeftOut):
    """It takes more memory than there is, compiled or not."""


def measure(
    cases: Sequence[Case],
    *,
    limit: float = 60.0,
    extrapolate: bool = True,
    profile: bool = False,
    traces: Path | None = None,
) -> Iterator[Row]:
    """Rows of each case in turn: one for each number of warm-up steps, or one that says why not.

    `limit` is in seconds, for a case. With `extrapolate`, the row of a case that does not fit has
    the times that fewer layers foretell, and the largest that fits has one too, to be held against.
    A row's `operators` are there with `profile`; Chrome's traces go into the folder `traces`.
    """
    largest: tuple[int, Case, float] | None = None
    rates: dict[str, float] = {}
    too_large: set[Case] = set()
    for case in cases:
        if case.compile and replace(case, compile=False) in too_large:
            continue  # one row says so for both
        try:
            require_fit(case, limit, rates.get(case.dtype, 0.0))
            found = in_a_process(case, limit, profile=profile, traces=traces)
        except LeftOut as reason:
            fewer = extrapolate and case.model.num_layers > max(FEW)
            line = extrapolated(case, limit) if fewer else case.labels() | {"note": ""}
            yield line | {"note": "; ".join(filter(None, (str(reason), line["note"])))}
            if isinstance(reason, TooLarge) and "step_p50_ms" not in line:
                too_large.add(case)
            continue
        rates[case.dtype] = found["product_rate"]
        rows = [row(case, found, skipped) for skipped in WARMUPS]
        yield from rows
        if (work := case.executed_flops()) > (largest[0] if largest else 0):
            largest = work, case, rows[-1]["step_p50_ms"]
    if extrapolate and largest and largest[1].model.num_layers > max(FEW):
        _, case, measured = largest
        line = extrapolated(case, limit)
        if "step_p50_ms" in line:
            line["note"] += f": {line['step_p50_ms'] / measured:.2f} of what it takes"
        yield line


def require_fit(case: Case, limit: float, rate: float = 0.0) -> None:
    """LeftOut where memory, or at a product's `rate` the time, does not allow a case."""
    needed, free = case.peak_bytes(), available_memory_bytes(case.device)
    if needed > FILLED * free:
        raise TooLarge(f"needs {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")
    steps = max(WARMUPS) + STEPS
    seconds = steps * case.executed_flops() / (USUAL * rate) if rate else 0.0
    if seconds > limit:
        raise LeftOut(f"would take {seconds:.0f} s")


def in_a_process(
    case: Case, limit: float, *, profile: bool = False, traces: Path | None = None
) -> dict[str, Any]:
    """Return the output of `step.process`; raise `LeftOut` if it fails or exceeds its time."""
    asked: dict[str, Any] = asdict(case) | {"profile": profile}
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        name = "-".join(str(value) for value in case.labels().values())
        asked["trace"] = str(traces / f"{name}.json")
    command = [sys.executable, "-m", "llmsys_suite.step.process", json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise LeftOut(f"did not end within {limit:g} s") from None
    if done.returncode:
        if done.returncode < 0:  # for want of memory, as a rule; what it said before is no reason
            raise LeftOut(f"ended by {signal.Signals(-done.returncode).name}")
        raise LeftOut((done.stderr.strip().splitlines() or ["it ended without a word"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(case: Case, found: dict[str, Any], warmup: int) -> Row:
    """Of the ten steps after `warmup` others: means, deviations, percentiles, utilization."""
    kept = found["seconds"][warmup : warmup + STEPS]
    clock = found["clock"][warmup : warmup + STEPS + 1]
    result = case.labels() | {"warmup": warmup}
    for part, phase in enumerate(PHASES):
        values = [1e3 * seconds[part] for seconds in kept]
        result[f"{phase}_mean_ms"] = statistics.mean(values)
        result[f"{phase}_std_ms"] = statistics.stdev(values)
    whole = sorted(1e3 * sum(seconds) for seconds in kept)
    middle = statistics.median(whole)
    peak = middle / 1e3 * found["product_rate"]
    return result | {
        "step_p10_ms": whole[len(whole) // 10],
        "step_p50_ms": middle,
        "step_p90_ms": whole[-1 - len(whole) // 10],
        "tokens_per_s": case.tokens / (middle / 1e3),
        "mfu": case.useful_flops() / peak,
        "hfu": case.executed_flops() / peak,
        "first_step_ms": 1e3 * sum(found["seconds"][0]),
        "product_rate": found["product_rate"],
        "peak_gib": found["peak_bytes"] / GIB,
        "loss": found["loss"],
        "threads": found["threads"],
        "seconds": kept,
        "clocked_s": [end - begin for begin, end in pairwise(clock)],
        "operators": found["operators"],
        "note": "",
    }


def extrapolated(case: Case, limit: float) -> Row:
    """Return the predicted time of a case, from steps of models with few layers."""
    labels = case.labels() | {"warmup": max(WARMUPS)}
    few = [replace(case, layers=layers) for layers in FEW]
    try:
        for each in few:
            require_fit(each, limit)
        ends = [row(each, in_a_process(each, limit), max(WARMUPS)) for each in few]
    except LeftOut as reason:
        return labels | {"note": f"not extrapolated: {FEW[1]} layers: {reason}"}
    beyond = (case.model.num_layers - FEW[0]) / (FEW[1] - FEW[0])
    for key in (*(f"{phase}_mean_ms" for phase in PHASES), "step_p50_ms"):
        low, high = (end[key] for end in ends)
        labels[key] = low + beyond * (high - low)
    labels["tokens_per_s"] = case.tokens / (labels["step_p50_ms"] / 1e3)
    return labels | {"note": f"extrapolated from {FEW[0]} and {FEW[1]} layers"}


def pays_after(rows: Sequence[Row]) -> dict[str, float]:
    """Compiled and plain rows of one case: seconds that compiling takes, and steps that pay it."""
    plain, made = (next(r for r in rows if r["compile"] is which) for which in (False, True))
    cost = made["first_step_ms"] - plain["first_step_ms"]
    gain = plain["step_p50_ms"] - made["step_p50_ms"]
    return {
        "compile_s": cost / 1e3,
        "speedup": plain["step_p50_ms"] / made["step_p50_ms"],
        "steps": cost / gain if gain > 0 else float("inf"),
    }
