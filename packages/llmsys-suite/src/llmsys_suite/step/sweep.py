"""Timing of the cases of a benchmark; a case that is not timed gets a row with the reason."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from llmsys_suite.environment import GIB, available_memory_bytes, signal_name
from llmsys_suite.step.case import PHASES, STEPS, WARMUPS, Case

Row = dict[str, Any]
#: Fraction of free memory that a case may use. The remainder is for the process itself and for
#: workspaces of kernels.
FILLED = 0.8


class LeftOut(Exception):
    """The reason why a case was not timed."""


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
            raise LeftOut(f"ended by {signal_name(-done.returncode)}")
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
