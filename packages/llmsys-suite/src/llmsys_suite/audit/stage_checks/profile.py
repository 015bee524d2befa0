"""Checks of `profile`: operators by a timer, steps by another clock, FLOPs by torch's counter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmsys_suite import results
from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.flops import Flops, count_flops
from llmsys_suite.config import SIZES
from llmsys_suite.ranks.rank import Run
from llmsys_suite.step.case import PHASES
from llmsys_suite.variants.initial_weights import initial_weights

#: Allowed factor between the rates of a product in two processes.
RATE_BAND = 2.5


def checks(run: Run, result: results.Profile) -> Iterator[Check]:
    """Compare the operators and every row of the protocol, on rank 0."""
    if run.rank:
        return
    for row in result.operators:
        # The timer spans the profiler too; on a busy machine much lies between operators.
        timer = row["timer_ms"]
        low = 0.01 * timer if run.device.type == "cpu" else 0.0
        yield Sources("profiler", "a timer around it").between(
            f"{row['phase']}: operators' total", timer, row["total_ms"], low, 1.05 * timer + 0.5
        )
    rows = max(1, run.config.rows // run.world)
    weights = initial_weights(run)
    flops = count_flops(weights, rows, run.config.context, run.model.num_heads)
    for row in result.protocol:
        if not row["note"]:
            yield from ten_steps(row)
            if row["size"] == run.config.size:
                yield from _utilization(run, row, flops)
    first = result.operators[0]
    counter = Sources("profile", "torch's counter")
    yield counter.equal(
        "FLOPs of attention's products", flops.attention_forward, first["attention_product_flops"]
    )
    scores = flops.attention_forward / (4 * run.model.d_model // run.model.num_heads)
    five = Sources("profile", "five per score")
    yield five.equal("FLOPs of softmax", 5 * scores, first["softmax_flops"])


def ten_steps(row: results.Row) -> Iterator[Check]:
    """Compare a row of the protocol with its steps, and their clock with another one."""
    name = f"{row['size']}, ten steps after {row['warmup']}"
    steps = np.array(row["seconds"])
    means = 1e3 * steps.mean(axis=0)
    pairs = [(mean, row[f"{p}_mean_ms"], p) for mean, p in zip(means, PHASES, strict=True)]
    deviations = 1e3 * steps.std(axis=0, ddof=1)
    pairs += [(std, row[f"{p}_std_ms"], p) for std, p in zip(deviations, PHASES, strict=True)]
    numpys = Sources("reported", "numpy's, of the steps")
    yield numpys.all_equal(f"{name}: means and deviations", pairs, 1e-9)
    whole = 1e3 * np.sort(steps.sum(axis=1))
    tenth = len(whole) // 10
    percentiles = [
        (float(np.median(whole)), row["step_p50_ms"], "p50"),
        (float(whole[tenth]), row["step_p10_ms"], "p10"),
        (float(whole[-1 - tenth]), row["step_p90_ms"], "p90"),
    ]
    yield numpys.all_equal(f"{name}: percentiles", percentiles, 1e-9)
    size = SIZES[row["size"]]
    yield Sources("reported", "the size").equal(f"{name}: layers", size.num_layers, row["layers"])
    # The median of the fractions, because another program may use the core between two parts.
    fraction = float(np.median(steps.sum(axis=1) / row["clocked_s"]))
    clock = Sources("its parts", "another clock around them")
    yield clock.between(f"{name}: a step", 1, fraction, 0.9, 1.01)


def _utilization(run: Run, row: results.Row, flops: Flops) -> Iterator[Check]:
    name = f"{row['size']}, ten steps after {row['warmup']}"
    seconds = row["step_p50_ms"] / 1e3
    available = seconds * row["product_rate"]
    counter = Sources("reported", "torch's counter")
    yield counter.equal(f"{name}: MFU", flops.useful / available, row["mfu"], 1e-9)
    yield counter.equal(f"{name}: HFU", flops.executed / available, row["hfu"], 1e-9)
    tokens = max(1, run.config.rows // run.world) * run.config.context
    shape = Sources("reported", "the run's rows and context")
    yield shape.equal(f"{name}: tokens per second", tokens / seconds, row["tokens_per_s"], 1e-9)
    yield shape.equal(f"{name}: tokens", tokens, row["rows"] * row["context"])
    rate = Sources("its process", "the stage plan")
    peak = run.results["plan"].peak
    yield rate.within(f"{name}: rate of a product", peak, row["product_rate"], RATE_BAND)
