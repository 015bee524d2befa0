"""Checks of `precision`: sums rounded by hand, documented dtypes, losses in float64, and times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from llmsys_suite import results
from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, Sources, same_rows
from llmsys_suite.audit.inputs import in_float64, on_device
from llmsys_suite.audit.peers import Rounds
from llmsys_suite.audit.stage_checks import timing
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.tolerances import REPLAYED_LOSS
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants.initial_weights import seeded

#: Allowed error of a forward pass with bfloat16 products: ten times the 1e-3 of a correct one.
BFLOAT16_LOSS = 1e-2
#: Rounds of the audit's own timing.
ROUNDS = 5
#: Dtypes of the timed steps, and of sums and their terms.
DTYPES = ("float32", "bfloat16")
SUMMED = [(dtype, dtype) for dtype in ("float32", "float16", "bfloat16")]
SUMMED += [("float32", dtype) for dtype in ("float16", "bfloat16")]


def checks(run: Run, result: results.Precision) -> Iterator[Check]:
    """Check known sums, the dtypes that autocast documents, losses and times."""
    pairs = [(row["sum_in"], row["term_in"]) for row in result.accumulation]
    yield same_rows("sums", SUMMED, pairs)
    yield same_rows("dtypes", DTYPES, [row["dtype"] for row in result.timing])
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
    yield from _losses_and_times(run, result)


def _sums(rows: results.Rows) -> Iterator[Check]:
    for row in rows:
        known = _sum_rounded(row["sum_in"], row["term_in"], 1000, 0.01)
        name = f"0.01 a thousand times, {row['term_in']} in {row['sum_in']}"
        yield Sources("torch", "rounded by hand").equal(name, known, row["sum"])
        error = abs(known - 10.0) / 10.0
        by_hand = Sources("reported", "by hand")
        yield by_hand.equal(f"{name}: error", error, row["relative_error"], 1e-9)


def _losses_and_times(run: Run, result: results.Precision) -> Iterator[Check]:
    config = run.config
    model = seeded(run, run.model)
    rows = max(1, config.rows // run.world)
    text, _ = read_parts(config)
    batch = on_device(run, reference.batch(text, rows, config.context, config.seed, 0))
    exact = reference.mean_loss(in_float64(model), *batch, run.model.num_heads)
    in_dtype = Sources("reported", "float64")
    for row in result.timing:
        tolerance = REPLAYED_LOSS if row["dtype"] == "float32" else BFLOAT16_LOSS
        yield in_dtype.equal(f"loss in {row['dtype']}", exact, row["loss"], tolerance)
    losses = {row["dtype"]: row["loss"] for row in result.timing}
    apart = abs(losses["bfloat16"] / losses["float32"] - 1)
    rounding = Sources("its loss over float32's", "one")
    yield rounding.between("bfloat16 rounds", 0.0, apart, 1e-7, BFLOAT16_LOSS)
    times = {row["dtype"]: row["forward_backward_ms"] for row in result.timing}
    yield from timing.totals(result.interleaved, times)
    speedups = {row["dtype"]: row["speedup_p50"] for row in result.timing}
    yield timing.speedups(result.interleaved, "float32", speedups)

    def step(*, autocast: bool) -> None:
        with torch.autocast(run.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = model.loss(*batch)
        loss.backward()
        model.zero_grad()

    calls = {"float32": lambda: step(autocast=False), "bfloat16": lambda: step(autocast=True)}

    def compare(timed: Rounds) -> list[Check]:
        shortest = timing.shortest(result.interleaved, timed)
        return [*shortest, *timing.ratios(result.interleaved, "float32", timed)]

    yield from timing.timed_again(run, calls, compare, ROUNDS)


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
