"""Checks of `profile`: operators by a timer, steps by another clock, FLOPs by torch's counter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from llmsys_suite import results
from llmsys_suite.audit import peers
from llmsys_suite.audit.check import Check, Sources, same_rows
from llmsys_suite.audit.flops import Flops, count_flops
from llmsys_suite.audit.tolerances import CLOCK, PATIENCE_S, RATE_BAND, SHORTEST_BAND
from llmsys_suite.config import size_of
from llmsys_suite.model import Decoder, ModelConfig, plain_attention
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import profile
from llmsys_suite.step.case import PHASES, WARMUPS
from llmsys_suite.step.training import Step


def checks(run: Run, result: results.Profile) -> Iterator[Check]:
    """Check the operators and every row of the table of step times."""
    for row in result.operators:
        # The timer includes the profiler and, on a busy machine, long gaps between operators.
        timer = row["timer_ms"]
        low = 0.01 * timer if run.device.type == "cpu" else 0.0
        yield Sources("profiler", "a timer around it").between(
            f"{row['phase']}: operators' total", timer, row["total_ms"], low, 1.05 * timer + 0.5
        )
    unfused = Sources("phases without batched products", "attention without a fused kernel")
    passes = result.operators[:2]
    fused = [row["phase"] for row in passes if not row["attention_product_share"]]
    yield unfused.none("products of attention", fused)
    yield from _complete(run, result)
    for size, rows in groupby(result.protocol, key=itemgetter("size")):
        timed = [row for row in rows if not row["note"]]
        flops = _flops(run, size) if timed else None
        for row in timed:
            assert flops is not None
            yield from ten_steps(row)
            yield from _utilization(run, row, flops)
    yield from _step_again(run, result.protocol)
    flops = _flops(run, run.config.size)
    first = result.operators[0]
    counter = Sources("profile", "torch's counter")
    yield counter.equal("FLOPs of the timed step", flops.executed, _step_flops(run))
    yield counter.equal(
        "FLOPs of attention's products", flops.attention_forward, first["attention_product_flops"]
    )
    scores = flops.attention_forward / (4 * run.model.d_model // run.model.num_heads)
    five = Sources("profile", "five per score")
    yield five.equal("FLOPs of softmax", 5 * scores, first["softmax_flops"])


def _step_flops(run: Run) -> int:
    """Count the FLOPs of a step as the stage times it, so that no part of its work is left out."""
    step = Step(profile.case_of(run))
    with FlopCounterMode(display=False) as counter:
        step.timed()
    return counter.get_total_flops()


def _step_again(run: Run, protocol: results.Rows) -> Iterator[Check]:
    """Time each phase of a step of the run's model, and compare the shortest times.

    The thread's clock is compared, because other programs may disturb all steps of the stage.
    Further steps are taken while a phase is too long, because they also slow the thread.
    """
    size = run.config.size
    rows = [row for row in protocol if row["size"] == size and not row["note"]]
    if not rows:
        return
    reported = np.array([step for row in rows for step in row["core_seconds"]]).min(axis=0)
    steps = _timed_steps(run)
    next(steps)  # creates the state of the optimizer
    shortest = next(steps)
    stop_time = time.monotonic() + PATIENCE_S
    while (shortest > SHORTEST_BAND * reported).any() and time.monotonic() < stop_time:
        shortest = np.minimum(shortest, next(steps))
    timed = Sources("shortest time of a phase", "the audit's own timing")
    for phase, expected, actual in zip(PHASES, shortest, reported, strict=True):
        yield timed.within(f"{size}: {phase}", float(expected), float(actual), SHORTEST_BAND)


def _timed_steps(run: Run) -> Iterator[np.ndarray]:
    """Take steps one after another and yield the thread's seconds of the phases of each step."""
    model = Decoder(run.model, plain_attention).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = run.config.rows // run.world
    tokens = torch.zeros(rows, run.config.context, dtype=torch.long, device=run.device)
    while True:
        clocks = [peers.thread_seconds(run)]
        with run.autocast():
            loss = model.loss(tokens, tokens)
        clocks.append(peers.thread_seconds(run))
        loss.backward()
        clocks.append(peers.thread_seconds(run))
        optimizer.step()
        optimizer.zero_grad()
        clocks.append(peers.thread_seconds(run))
        yield np.diff(clocks)


def _complete(run: Run, result: results.Profile) -> Iterator[Check]:
    """Check that each size has a row per number of warm-up steps, or one row with a reason."""
    expected: list[tuple[str, int | None]] = []
    for size in dict.fromkeys((run.config.size, *profile.SIZES_TIMED)):
        is_timed = not any(row["note"] for row in result.protocol if row["size"] == size)
        expected += [(size, warmup) for warmup in (WARMUPS if is_timed else (None,))]
    reported = [(row["size"], None if row["note"] else row["warmup"]) for row in result.protocol]
    yield same_rows("sizes and warm-up steps", expected, reported)
    yield same_rows("phases", PHASES, [row["phase"] for row in result.operators])


@cache
def _meta_weights(size: str, vocabulary: int, context: int) -> dict[str, Tensor]:
    """Return the parameters of a size on the meta device, without memory."""
    with torch.device("meta"):
        model = Decoder(ModelConfig.named(size, vocabulary=vocabulary, context=context))
    return dict(model.named_parameters())


def _flops(run: Run, size: str) -> Flops:
    config = run.config
    weights = _meta_weights(size, config.vocabulary, config.context)
    rows = max(1, config.rows // run.world)
    return count_flops(weights, rows, config.context, size_of(size).num_heads)


def ten_steps(row: results.Row) -> Iterator[Check]:
    """Compare a row of the table with its measured steps, and their clock with a second one."""
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
    layers = size_of(row["size"]).num_layers
    yield Sources("reported", "the size").equal(f"{name}: layers", layers, row["layers"])
    # Take the median of the fractions: another program may use the core between two parts.
    fraction = float(np.median(steps.sum(axis=1) / row["clocked_s"]))
    clock = Sources("its parts", "another clock around them")
    yield clock.between(f"{name}: a step", 1, fraction, 0.9, 1.01)
    core_steps = np.array(row["core_seconds"])
    core = core_steps.sum() + row["queued_s"]
    thread = Sources("its parts", "the thread's time and its waits for a core")
    low, high = core_steps.sum() / (1 + CLOCK), SHORTEST_BAND * core
    yield thread.between(f"{name}: all steps", core, steps.sum(), low, high)


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
