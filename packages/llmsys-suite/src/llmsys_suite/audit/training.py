"""The checks of `plan` and `train`, from what was predicted, recorded and probed.

Pure functions of records, so that a folder can be audited again. Each tolerance is the honest
distance, the largest that tests/test_honest.py sees over seeds, times the factor beside it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from llmsys_suite.audit import reference, wire
from llmsys_suite.audit.again import global_batch
from llmsys_suite.audit.check import Check, closest, equal, furthest, near, none, within
from llmsys_suite.config import RunConfig
from llmsys_suite.folder import Sample
from llmsys_suite.measure.samples import (
    LOCAL,
    PEER,
    SERVER,
    SINGLE,
    WHOLE_STEP,
    loss_curves,
    ranks_of,
)
from llmsys_suite.stages.results import Plan, Train

#: A gradient in float32 beside float64, per parameter: 8e-7 at the most. Times six.
GRADIENT = 5e-6
#: The first losses: 4e-7 at the most. Times five.
REPLAYED_LOSS = 2e-6
#: Adam divides small gradients by their own size, and rounding grows with every step: what the
#: weights moved in n steps differs by 1e-4 sqrt(n) at the most, a loss by 2e-6 sqrt(n). Times five.
MOVED = 5e-4
LOSS = 1e-5
#: Of DiLoCo's first rounds, a row a rank: a weight whose gradient is nothing but rounding takes a
#: whole step up or down. Over 300 seeds 1.3e-3 at the most, 1e-4 in the middle. Times five.
ROUNDS_MOVED = 6.5e-3
#: What operators take for the length of their run is not predicted; a CPU's kernels take more.
PEAK_BYTES = {"cpu": 0.10, "cuda": 0.05}
#: Between two clocks that are read one after the other; the median of the steps.
CLOCK = 0.02
#: The same work at another time, or of a model of other depth: red at a factor of two, whatever
#: neighbors do to the caches.
BAND = 1.6
#: What Python does between two phases, in seconds of its thread.
BETWEEN_S = 2e-3
#: DiLoCo's last loss over one process's, as ranks drift apart: 1.084 at the most at any of the
#: first 50 steps of six seeds of the tiny model, 1.036 of twelve of the mini one. Twice as far.
DRIFTED = 1.17

Records = dict[tuple[str, int], list[Sample]]


def checks(
    config: RunConfig,
    plan: Plan,
    train: Train,
    samples: list[Sample],
    evidence: dict[str, Any],
) -> Iterator[Check]:
    """All of them, in the order of a report."""
    samples = [s for s in samples if s["stage"] == "train"]
    steps = _steps(samples)
    yield from _plan(config, plan, evidence)
    yield from _data(config, train, steps, evidence["text"])
    yield from _weights(config, train, evidence)
    yield from _losses(config, train, samples, evidence)
    yield from _times(config, plan, train, samples, steps, evidence)
    yield from wire.checks(config, plan, train, samples, evidence)


def _plan(config: RunConfig, plan: Plan, evidence: dict[str, Any]) -> Iterator[Check]:
    counted, parameters = evidence["counted"], evidence["counted"]["parameters"]
    yield equal("parameters", "plan", "the reference's weights", parameters, plan.parameters)
    yield equal(
        "FLOPs a step, full attention", "plan", "torch's counter on the reference",
        counted["flops_full"], plan.step_flops_full,
    )  # fmt: skip
    yield equal(
        "FLOPs a step, causal", "plan", "torch's counter, half of attention's products left out",
        counted["flops_causal"], plan.step_flops_causal, 1e-9,
    )  # fmt: skip
    yield equal(
        "peak memory of a step", "plan", "live bytes of a real step",
        plan.measured_peak_bytes, plan.training_peak_bytes, PEAK_BYTES[config.device],
    )  # fmt: skip
    kept = sum(plan.training_bytes_by_part[part] for part in ("weights", "optimizer"))
    yield equal(
        "weights and moments", "plan", "a real optimizer's tensors", evidence["kept_bytes"], kept
    )
    yield equal("gradient bytes", "plan", "4 bytes a weight", 4 * parameters, plan.gradient_bytes)
    wire_bytes = 2 * (config.world - 1) / config.world * 4 * parameters
    yield equal(
        "DDP's wire bytes a rank", "plan", "2 (n - 1) / n of the gradients",
        wire_bytes, plan.ddp_wire_bytes_per_rank, 1 / max(1.0, wire_bytes),  # a whole byte
    )  # fmt: skip
    yield within(
        "rate of a matrix product, in yardsticks'", "plan", "both timed in the audit",
        evidence["product_in_yardsticks"],
        plan.peak / plan.yardstick_flops_per_second, BAND,
    )  # fmt: skip


def _data(config: RunConfig, train: Train, steps: Records, text: dict[str, Any]) -> Iterator[Check]:
    total = config.warmup + config.steps
    missing, foreign, twice, tokens, uneven = [], [], [], [], []
    for row in train.rows:
        name = row["variant"]
        seen: dict[str, int] = {}
        read: list[str] = []
        ranks = range(ranks_of(name, config.world))
        by_step: dict[tuple[int, int], list[Sample]] = defaultdict(list)
        for rank in ranks:
            for s in steps[name, rank]:
                by_step[rank, s["step"]].append(s)
        for step in range(total):
            records = [by_step[rank, step] for rank in ranks]
            missing += [
                f"{name} step {step} rank {rank}"
                for rank, found in enumerate(records)
                if len(found) != 1 or found[0]["warmup"] != (step < config.warmup)
            ]
            there = [found[0] for found in records if found]
            rows = [digest for s in there for digest in s["row_digests"]]
            if rows != text["row_digests"][step]:
                foreign.append(f"{name} step {step}")
            if (before := seen.setdefault("".join(rows), step)) != step:
                twice.append(f"{name} steps {before} and {step}")
            tokens.append(sum(s["tokens"] for s in there))
            read += rows
        windows = text["windows"]
        for epoch in range(config.epochs):
            mine = read[epoch * len(windows) : (epoch + 1) * len(windows)]
            if unread := (Counter(windows) - Counter(mine)).total():
                uneven.append(f"{name} epoch {epoch}: {unread} of {len(windows)} unread")
    yield none(
        "every step of every rank", "samples", "the configuration's ranks and steps", missing
    )
    yield none(
        "ranks' rows are the global batch", "digests of each rank's batches",
        "a sampler of the audit's own", foreign,
    )  # fmt: skip
    if text["distinct"]:
        yield none("no batch twice", "digests of each variant's batches", "each other", twice)
    if config.epochs:
        yield none("each window of the text once an epoch", "digests of the ranks' rows",
                   "the text, cut in order", uneven)  # fmt: skip
    each = config.rows * config.context
    yield equal(
        "tokens", "samples", "rows x context of every step and variant",
        each * total * len(train.rows), sum(tokens),
    )  # fmt: skip


def _losses(
    config: RunConfig, train: Train, samples: list[Sample], evidence: dict[str, Any]
) -> Iterator[Check]:
    curves = loss_curves(samples)
    alone, local = curves[SINGLE], curves.get(LOCAL)
    if local is not None:
        # Until its ranks drift apart it is one process too.
        curves[LOCAL] = local[:1]
    off = [
        (abs(curve[step] / value - 1), f"{variant} step {step}: {curve[step]:.9g}, {value:.9g}")
        for variant, curve in curves.items()
        for step, value in enumerate(evidence["probe"]["replayed_losses"])
        if step < len(curve)
    ]
    yield furthest("first losses", "samples", "float64 and AdamW written out", off, REPLAYED_LOSS)
    off = [
        (abs(ours / theirs - 1), f"{variant} step {step}: {ours:.9g}, {theirs:.9g}")
        for variant, curve in curves.items()
        for step, (ours, theirs) in enumerate(zip(curve, alone, strict=False))
    ]
    tolerance = LOSS * math.sqrt(len(alone))
    yield furthest("all losses", "each variant", "one process", off, tolerance)
    off = [
        (abs(row["final_loss"] / alone[-1] - 1), f"{row['variant']}: {row['final_loss']:.9g}")
        for row in train.rows
        if row["variant"] != LOCAL
    ]
    yield furthest("reported final loss", "summary", "one process's last", off, tolerance)
    for row in train.rows:
        if row["variant"] == LOCAL and local:
            yield equal(f"{LOCAL}: reported final loss", "summary", "the ranks' mean", local[-1],
                        row["final_loss"], 1e-9)  # fmt: skip
            yield Check(f"{LOCAL}: final loss", "summary", "one process's", alone[-1],
                        row["final_loss"], alone[-1] / DRIFTED, alone[-1] * DRIFTED)  # fmt: skip
    yield Check(
        "the loss falls", "one process, last over first", "one", 1.0, alone[-1] / alone[0], 0.0, 1.0
    )


def _weights(config: RunConfig, train: Train, evidence: dict[str, Any]) -> Iterator[Check]:
    total = config.warmup + config.steps
    for row in train.rows:
        name = row["variant"]
        found = evidence["probe"]["variants"][name]
        for key, what in (("gradients", "averaged gradients"), ("weights", "what SGD moved")):
            if key in found:
                ranks = [
                    (distance, f"rank {rank} {where}")
                    for rank, (distance, where) in enumerate(found[key])
                ]
                yield furthest(f"{name}: {what}", "every rank", "float64", ranks, GRADIENT)
        loss = statistics.mean(found["loss"])
        exact = evidence["probe"]["exact_loss"]
        yield equal(f"{name}: loss", "the ranks' mean", "float64", exact, loss, REPLAYED_LOSS)
        if name == SINGLE:
            continue
        final = train.final_weights[name]
        yield none(
            f"{name}: trained weights, bit by bit", "every rank", "rank 0",
            final["differ"] + ["ranks are missing"] * (final["ranks"] != config.world),
        )  # fmt: skip
        if name == LOCAL:
            rounds = enumerate(evidence["probe"]["rounds"])
            moved = [(away, f"rank {rank} {where}") for rank, (away, where) in rounds]
            yield furthest(f"{LOCAL}: what rounds moved", "every rank", "written out in float64",
                           moved, ROUNDS_MOVED)  # fmt: skip
            continue
        distance, where = final["from_one_process"]
        tolerance = MOVED * math.sqrt(total)
        yield near(
            f"{name}: what training moved", "rank 0", "one process", distance, tolerance, where
        )


def _times(
    config: RunConfig,
    plan: Plan,
    train: Train,
    samples: list[Sample],
    steps: Records,
    evidence: dict[str, Any],
) -> Iterator[Check]:
    pairs = []
    for (name, rank), found in steps.items():
        ratios = [s["seconds"] / (s["ended"] - s["began"]) for s in found]
        # A core may be lost between the two readings, in some steps.
        ratios.sort(key=lambda ratio: abs(ratio - 1))
        pairs.append((1.0, ratios[len(ratios) // 4], f"{name} rank {rank}"))
    yield closest("time of a step", "the recorder", "another clock around it", pairs, CLOCK)
    slowest = slowest_seconds(steps)
    pairs = [
        (statistics.median(slowest[row["variant"]].values()) * 1e3, row["step_ms"], row["variant"])
        for row in train.rows
    ]
    yield closest("reported step time", "summary", "the slowest rank by the other clock",
                pairs, CLOCK)  # fmt: skip
    every, epoch = slowest_seconds(steps, warmup=True), evidence["text"]["epoch_steps"]
    pairs = [
        (sum(every[row["variant"]].values()) / config.epochs if config.epochs
         else statistics.median(slowest[row["variant"]].values()) * epoch,
         row["epoch_s"], row["variant"])
        for row in train.rows
    ]  # fmt: skip
    yield closest("reported time of an epoch", "summary", "the other clock, over its steps",
                pairs, CLOCK)  # fmt: skip
    pairs = []
    for row in train.rows:
        if "ratio_p50" in row:
            both = slowest[row["variant"]].keys() & slowest[PEER].keys()
            ours = statistics.median(
                slowest[row["variant"]][step] / slowest[PEER][step] for step in both
            )
            pairs.append((ours, row["ratio_p50"], row["variant"]))
    yield closest("reported ratio to the peer", "summary", "the other clock, round by round",
                pairs, 2 * CLOCK)  # fmt: skip
    yield none(
        "no rank ends a step before all have begun it", "each rank's clock", "the others'",
        _too_early(steps) if evidence["one_host"] else (),
    )  # fmt: skip
    yield from _phases(samples)
    spans = [
        (told, own, f"{stage} rank {rank}")
        for stage, rank, own, told in evidence["stage_clocks"]
        if told > 1.0
    ]
    if spans:
        yield closest("time of a stage", "each rank's clock", "the launcher's", spans, 0.1)
    shares = []
    for stage, rank, _, told in evidence["stage_clocks"]:
        if stage == "train":
            own = [s["seconds"] for (_, r), found in steps.items() if r == rank for s in found]
            shares.append((sum(own) / told, f"rank {rank}"))
    if shares:
        share, where = max(shares)
        yield Check("time of all steps", "their sum, over the launcher's clock of the stage", "one",
                    1.0, share, 0.0, 1.0, where)  # fmt: skip
    yield from _work(config, plan, train, steps, slowest, evidence)


def _phases(samples: list[Sample]) -> Iterator[Check]:
    """Check that the phases of a step contain its thread's work and fit into the step.

    By the thread's clock, because on a busy machine a core may be lost between two phases.
    """
    parts: dict[tuple[str, int, int], list[list[Sample]]] = defaultdict(lambda: [[], []])
    for s in samples:
        if not s["warmup"]:
            parts[s["variant"], s["rank"], s["step"]][s["phase"] == WHOLE_STEP].append(s)
    work, wall = defaultdict(list), []
    for (name, rank, step), (phases, wholes) in parts.items():
        if wholes:
            (whole,) = wholes[:1]
            inside = sum(s["core_s"] for s in phases)
            work[f"{name} rank {rank}"].append((inside + BETWEEN_S) / (whole["core_s"] + 1e-9))
            length = sum(s["seconds"] for s in phases) / whole["seconds"]
            wall.append((length, f"{name} rank {rank} step {step}"))
    least, where = min(((statistics.median(r), name) for name, r in work.items()), default=(0, ""))
    yield Check("work in the phases of a step", "their thread's time", "the whole step's", 1.0,
                least, 0.95, math.inf, where)  # fmt: skip
    most, where = max(wall, default=(math.nan, ""))
    yield Check("time in the phases of a step", "their sum", "the whole step", 1.0,
                most, 0.0, 1.001, where)  # fmt: skip


def _work(
    config: RunConfig,
    plan: Plan,
    train: Train,
    steps: Records,
    slowest: dict[str, dict[int, float]],
    evidence: dict[str, Any],
) -> Iterator[Check]:
    pairs = []
    for row in train.rows:
        ranks = ranks_of(row["variant"], config.world)
        seconds = statistics.median(slowest[row["variant"]].values())
        reach = ranks * plan.peak * seconds
        pairs.append((evidence["counted"]["flops_causal"] / reach, row["mfu"], row["variant"]))
    yield closest("utilization", "summary", "counted FLOPs, the other clock, the rate",
                pairs, CLOCK)  # fmt: skip
    alone = [s for s in steps[SINGLE, 0] if not s["warmup"]]
    measured = statistics.median(s["core_s"] / s["one_layer_s"] for s in alone)
    yield within(
        "time of one process's step, over one layer's", "plan, from one and three layers",
        "samples", measured, plan.step_yardsticks / plan.layer_yardsticks, BAND,
    )  # fmt: skip
    pairs = [
        (1.0, statistics.median(s["core_s"] / s["seconds"] for s in found), f"{name} rank {rank}")
        for (name, rank), found in steps.items()
    ]
    share, where = max((actual, where) for _, actual, where in pairs)
    yield Check("a thread's time is within the step's", "the thread's clock over the recorder's",
                "one", 1.0, share, 0.0, 1 + CLOCK, where)  # fmt: skip


def _steps(samples: list[Sample]) -> Records:
    steps: Records = defaultdict(list)
    for s in samples:
        if s["phase"] == WHOLE_STEP:
            steps[s["variant"], s["rank"]].append(s)
    return steps


def slowest_seconds(steps: Records, *, warmup: bool = False) -> dict[str, dict[int, float]]:
    """Variant -> measured step -> seconds of its slowest rank, by the clock outside.

    A core that was lost between the two clocks' readings is no part of the step: what they differ
    by, as far as the kernel says that this rank waited for a core.
    """
    slowest: dict[str, dict[int, float]] = defaultdict(dict)
    for (name, _), found in steps.items():
        for s in found:
            if warmup >= s["warmup"]:
                seconds = s["ended"] - s["began"]
                seconds -= min(max(0.0, seconds - s["seconds"]), s["queued_s"])
                slowest[name][s["step"]] = max(slowest[name].get(s["step"], 0.0), seconds)
    return slowest


def _too_early(steps: Records) -> Iterator[str]:
    by_step: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for (name, _), found in steps.items():
        for s in found:
            # A push to the server does not wait for the other workers'; the next pull does.
            if name not in (SERVER, LOCAL):
                by_step[name, s["step"]].append(s)
    for (name, step), found in by_step.items():
        if min(s["ended"] for s in found) < max(s["began"] for s in found):
            yield f"{name} step {step}"


def text_evidence(config: RunConfig, text: bytes) -> dict[str, Any]:
    """Return the digests of every global batch, as the independent sampler draws them."""
    batches = [
        reference.row_digests(global_batch(text, config, step))
        for step in range(config.warmup + config.steps)
    ]
    # The text cut in order, whatever order an epoch reads it in; what fills no step is left out.
    steps = (len(text) - 1) // (config.rows * config.context)
    ends = range(config.context, 1 + config.context * config.rows * steps, config.context)
    cut = (text[end - config.context : end + 1] for end in ends if config.epochs)
    return {
        "row_digests": batches,
        "distinct": len({"".join(batch) for batch in batches}) == len(batches),
        "epoch_steps": steps,
        "windows": [reference.digest(window[:-1], window[1:]) for window in cut],
    }
