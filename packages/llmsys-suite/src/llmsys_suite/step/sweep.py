"""Timing of the cases of a benchmark. A case that cannot be timed has a row with the reason."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from llmsys_suite.environment import GIB, get_signal_name, read_available_memory_bytes
from llmsys_suite.step.case import PHASES, STEPS, WARMUPS, Case

Row = dict[str, Any]
#: Fraction of free memory that a case may use. The process itself and the workspaces of kernels use
#: the remainder.
FILLED = 0.8


class LeftOut(Exception):
    """The reason why a case was not timed."""


def measure(cases: Sequence[Case], *, limit: float = 60.0, profile: bool = False) -> Iterator[Row]:
    """Yield the rows of each case: one row per number of warm-up steps in `WARMUPS`.

    A case that cannot be timed has one row, whose `note` is the reason. `limit` is in seconds per
    case. With `profile`, `operators` has the operators of a step.
    """
    for case in cases:
        try:
            require_fit(case)
            measured = run_in_process(case, limit, profile=profile)
        except LeftOut as reason:
            yield case.get_labels() | {"note": str(reason)}
            continue
        for skipped in WARMUPS:
            yield compute_row(case, measured, skipped)


def require_fit(case: Case) -> None:
    """Raise LeftOut if a case needs more than the fraction `FILLED` of the free memory."""
    needed, free = case.predict_peak_bytes(), read_available_memory_bytes(case.device)
    if needed > FILLED * free:
        raise LeftOut(f"needs {needed / GIB:.1f} GiB; a case may use {FILLED * free / GIB:.1f} GiB")


def run_in_process(case: Case, limit: float, *, profile: bool = False) -> dict[str, Any]:
    """Return the output of `step.process`; raise LeftOut if it fails or exceeds `limit` seconds."""
    options = json.dumps(asdict(case) | {"profile": profile})
    command = [sys.executable, "-m", "llmsys_suite.step.process", options]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise LeftOut(f"did not end within {limit:g} s; raise --time-limit") from None
    if child.returncode < 0:
        # The kernel sends SIGKILL if memory runs out.
        raise LeftOut(f"ended by {get_signal_name(-child.returncode)}")
    if child.returncode:
        lines = child.stderr.strip().splitlines()
        raise LeftOut(lines[-1] if lines else "ended without a message")
    measured: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return measured


def compute_row(case: Case, measured: dict[str, Any], warmup: int) -> Row:
    """Return statistics of `STEPS` steps after `warmup` steps: times, rates and utilization."""
    steps = measured["seconds"][warmup : warmup + STEPS]
    result = case.get_labels() | {"warmup": warmup}
    for i, phase in enumerate(PHASES):
        phase_ms = [1e3 * seconds[i] for seconds in steps]
        result[f"{phase}_mean_ms"] = statistics.mean(phase_ms)
        result[f"{phase}_std_ms"] = statistics.stdev(phase_ms)
    step_ms = sorted(1e3 * sum(seconds) for seconds in steps)
    median_ms = statistics.median(step_ms)
    peak_flops = median_ms / 1e3 * measured["product_rate"]
    return result | {
        "step_p10_ms": step_ms[len(step_ms) // 10],
        "step_p50_ms": median_ms,
        "step_p90_ms": step_ms[-1 - len(step_ms) // 10],
        "tokens_per_s": case.tokens / (median_ms / 1e3),
        "mfu": case.count_useful_flops() / peak_flops,
        "hfu": case.count_executed_flops() / peak_flops,
        "first_step_ms": 1e3 * sum(measured["seconds"][0]),
        "product_rate": measured["product_rate"],
        "peak_gib": measured["peak_bytes"] / GIB,
        "loss": measured["loss"],
        "threads": measured["threads"],
        "seconds": steps,
        "operators": measured["operators"],
        "note": "",
    }
