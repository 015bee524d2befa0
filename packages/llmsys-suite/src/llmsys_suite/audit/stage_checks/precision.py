"""Checks of `precision`: sums rounded by hand, and documented dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from llmsys_suite import results
from llmsys_suite.audit.check import Check, Sources, same_rows
from llmsys_suite.ranks.rank import Run

#: Dtypes of sums and their terms.
SUMMED = [(dtype, dtype) for dtype in ("float32", "float16", "bfloat16")]
SUMMED += [("float32", dtype) for dtype in ("float16", "bfloat16")]


def checks(run: Run, result: results.Precision) -> Iterator[Check]:
    """Check known sums, and the dtypes that autocast documents."""
    pairs = [(row["sum_in"], row["term_in"]) for row in result.accumulation]
    yield same_rows("sums", SUMMED, pairs)
    yield from _sums(result.accumulation)
    documented = {
        "parameters": "float32",
        "linear output": "bfloat16",
        # Autocast keeps more operators in float32 on GPUs.
        "norm output": "float32" if run.device.type == "cuda" else "bfloat16",
        "logits": "bfloat16",
        "loss": "float32",
        "gradients": "float32",
    }
    dtypes = result.autocast_dtypes
    wrong = [f"{p}: {dtypes.get(p)}" for p in documented if dtypes.get(p) != documented[p]]
    yield Sources("torch", "its documentation").none("dtypes under autocast", wrong)


def _sums(rows: results.Rows) -> Iterator[Check]:
    for row in rows:
        known = _sum_rounded(row["sum_in"], row["term_in"], 1000, 0.01)
        name = f"0.01 a thousand times, {row['term_in']} in {row['sum_in']}"
        yield Sources("torch", "rounded by hand").equal(name, known, row["sum"])
        error = abs(known - 10.0) / 10.0
        by_hand = Sources("reported", "by hand")
        yield by_hand.equal(f"{name}: error", error, row["relative_error"], 1e-9)


def _sum_rounded(sum_in: str, term_in: str, terms: int, term: float) -> float:
    rounded = ROUND[term_in](term)
    total = 0.0
    for _ in range(terms):
        total = ROUND[sum_in](total + ROUND[sum_in](rounded))
    return total


def _to_bfloat16(x: float) -> float:
    """Round to eight bits of significand, ties to even."""
    if x == 0:
        return 0.0
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(fraction * 2**8), exponent - 8)


ROUND: dict[str, Callable[[float], float]] = {
    "float32": lambda x: float(np.float32(x)),
    "float16": lambda x: float(np.float16(x)),
    "bfloat16": _to_bfloat16,
}
