"""The table of a benchmark by size: cases that fit are timed, others extrapolated.

A step consists of a number of equal layers and a constant part, so its time is linear in the number
of layers. Two models with few layers determine the line, which is compared with the largest case
that fits.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from llmsys_suite.environment import GIB, available_memory_bytes
from llmsys_suite.step.case import PHASES, STEPS, WARMUPS, Case

Row = dict[str, Any]
#: Layers of the two models that the line goes through.
FEW = (2, 4)
#: Minimum fraction of a matrix product's rate that a step of a whole model is expected to reach.
USUAL = 1 / 3
#: Usable fraction of free memory; the process itself and the workspaces of kernels need the rest.
FILLED = 0.8


class LeftOut(Exception):
    """The reason why a case was not timed."""


class TooLarge(LeftOut):
    """The case needs more memory than is available, compiled or not."""


def measure(
    cases: Sequence[Case],
    *,
    limit: float = 60.0,
    extrapolate: bool = True,
    profile: bool = False,
) -> Iterator[Row]:
    """Yield the rows of each case: one per number of warm-up steps, or one with the reason.

    `limit` is in seconds per case. With `extrapolate`, a case that does not fit has times predicted
    from fewer layers, and the largest case that fits is predicted too, for comparison. With
    `profile` rows have `operators`.
    """
    largest: tuple[int, Case, float] | None = None
    rates: dict[str, float] = {}
    too_large: set[Case] = set()
    for case in cases:
        if case.compile and replace(case, compile=False) in too_large:
            continue  # its row covers both
        try:
            require_fit(case, limit, rates.get(case.dtype, 0.0))
            measured = in_a_process(case, limit, profile=profile)
        except LeftOut as reason:
            fewer = extrapolate and case.model.num_layers > max(FEW)
            line = extrapolated(case, limit) if fewer else case.labels() | {"note": ""}
            yield line | {"note": "; ".join(filter(None, (str(reason), line["note"])))}
            if isinstance(reason, TooLarge) and "step_p50_ms" not in line:
                too_large.add(case)
            continue
        rates[case.dtype] = measured["product_rate"]
        rows = [row(case, measured, skipped) for skipped in WARMUPS]
        yield from rows
        if (work := case.executed_flops()) > (largest[0] if largest else 0):
            largest = work, case, rows[-1]["step_p50_ms"]
    if extrapolate and largest and largest[1].model.num_layers > max(FEW):
        _, case, largest_ms = largest
        line = extrapolated(case, limit)
        if "step_p50_ms" in line:
            line["note"] += f": {line['step_p50_ms'] / largest_ms:.2f} of what it takes"
        yield line


def require_fit(case: Case, limit: float, rate: float = 0.0) -> None:
    """Raise LeftOut if a case needs too much memory or, at a product's `rate`, too much time."""
    needed, free = case.peak_bytes(), available_memory_bytes(case.device)
    if needed > FILLED * free:
        raise TooLarge(f"needs {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")
    steps = max(WARMUPS) + STEPS
    seconds = steps * case.executed_flops() / (USUAL * rate) if rate else 0.0
    if seconds > limit:
        raise LeftOut(f"would take {seconds:.0f} s")


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
    """Return means, deviations, percentiles and utilization of the steps after `warmup` steps."""
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


def extrapolated(case: Case, limit: float) -> Row:
    """Return the predicted time of a case, from steps of models with few layers."""
    labels = case.labels() | {"warmup": max(WARMUPS)}
    few = [replace(case, layers=layers) for layers in FEW]
    try:
        for shallow in few:
            require_fit(shallow, limit)
        ends = [row(shallow, in_a_process(shallow, limit), max(WARMUPS)) for shallow in few]
    except LeftOut as reason:
        return labels | {"note": f"not extrapolated: {FEW[1]} layers: {reason}"}
    beyond = (case.model.num_layers - FEW[0]) / (FEW[1] - FEW[0])
    for key in (*(f"{phase}_mean_ms" for phase in PHASES), "step_p50_ms"):
        low, high = (end[key] for end in ends)
        labels[key] = low + beyond * (high - low)
    labels["tokens_per_s"] = case.tokens / (labels["step_p50_ms"] / 1e3)
    return labels | {"note": f"extrapolated from {FEW[0]} and {FEW[1]} layers"}


def pays_after(rows: Sequence[Row]) -> dict[str, float]:
    """Return the compile time, the speedup, and the steps that compensate for compiling."""
    plain, compiled = (next(r for r in rows if r["compile"] is which) for which in (False, True))
    cost = compiled["first_step_ms"] - plain["first_step_ms"]
    gain = plain["step_p50_ms"] - compiled["step_p50_ms"]
    return {
        "compile_s": cost / 1e3,
        "speedup": plain["step_p50_ms"] / compiled["step_p50_ms"],
        "steps": cost / gain if gain > 0 else float("inf"),
    }
