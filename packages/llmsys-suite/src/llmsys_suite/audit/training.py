"""Checks of `plan` and `train` from predictions, records and probes.

Every check is a pure function of the records, so that a run folder can be audited again. The
tolerances on weights, gradients and losses are the largest deviation that tests/test_honest.py
finds in fault-free runs, times the factor stated in the comment. The other tolerances are chosen
limits.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from llmsys_suite.audit import reference, text, wire
from llmsys_suite.audit.again import global_batch
from llmsys_suite.audit.check import Check, equal, near, none, within, worst_distance, worst_equal
from llmsys_suite.audit.rounding import allowed
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

#: Distance of a float32 gradient from float64 per parameter: 8e-7 at most, times six.
GRADIENT = 5e-6
#: Relative difference of the first losses: 4e-7 at most, times five.
REPLAYED_LOSS = 2e-6
#: Adam divides small gradients by their magnitude, so rounding grows with every step: after n
#: steps weight changes differ by 1e-4 sqrt(n) and losses by 2e-6 sqrt(n) at most, times five.
WEIGHT_CHANGE = 5e-4
LOSS = 1e-5
#: Distance of DiLoCo's first rounds with one row per rank. A weight whose gradient is only rounding
#: takes a whole step in either direction. Over 300 seeds 1.3e-3 at most, times five.
DILOCO_WEIGHT_CHANGE = 6.5e-3
#: The temporary memory of operators is not predicted; CPU kernels use more of it.
PEAK_BYTES = {"cpu": 0.10, "cuda": 0.05}
#: Allowed relative difference between two clocks that are read in succession.
CLOCK = 0.02
#: Allowed factor between times of the same work at different moments or depths. It detects a factor
#: of two, regardless of the load that other programs put on the caches.
BAND = 1.6
#: Allowed factor between the run's torch DDP and the audit's, timed in the same rounds.
PEER_BAND = 1.4
#: Allowed thread time per step of Python code outside the phases, in seconds.
BETWEEN_S = 2e-3
#: Ratio of DiLoCo's last loss to one process's, because its ranks diverge: at most 1.084 over the
#: first 50 steps and six seeds of the tiny model. The band is twice as wide.
DILOCO_LOSS_RATIO = 1.17

Records = dict[tuple[str, int], list[Sample]]


def checks(
    config: RunConfig, plan: Plan, train: Train, samples: list[Sample], evidence: dict[str, Any]
) -> Iterator[Check]:
    """Yield all checks in the order of the report."""
    samples = [s for s in samples if s["stage"] == "train"]
    steps = _steps(samples)
    yield from _plan(config, plan, evidence)
    yield from text.checks(evidence["split"])
    yield from _data(config, train, steps, evidence["text"])
    yield from _weights(config, train, evidence)
    yield from _losses(config, train, samples, evidence)
    yield from _times(config, plan, train, samples, steps, evidence)
    yield from wire.checks(config, plan, train, samples, evidence)


def _plan(config: RunConfig, plan: Plan, evidence: dict[str, Any]) -> Iterator[Check]:
    counted, parameters = evidence["counted"], evidence["counted"]["parameters"]
    yield equal("parameters", "plan", "the reference's weights", parameters, plan.parameters)
    yield equal(
        "FLOPs per step, full attention",
        "plan",
        "torch's counter on the reference",
        counted["flops_full"],
        plan.step_flops_full,
    )
    yield equal(
        "FLOPs per step, causal",
        "plan",
        "torch's counter, half of attention's products left out",
        counted["flops_causal"],
        plan.step_flops_causal,
        1e-9,
    )
    yield equal(
        "peak memory of a step",
        "plan",
        "live bytes of a real step",
        plan.measured_peak_bytes,
        plan.training_peak_bytes,
        PEAK_BYTES[config.device],
    )
    stored = sum(plan.training_bytes_by_part[part] for part in ("weights", "optimizer"))
    yield equal(
        "weights and moments", "plan", "a real optimizer's tensors", evidence["kept_bytes"], stored
    )
    yield equal("gradient bytes", "plan", "4 bytes per weight", 4 * parameters, plan.gradient_bytes)
    wire_bytes = 2 * (config.world - 1) / config.world * 4 * parameters
    yield equal(
        "DDP's wire bytes per rank",
        "plan",
        "2 (n - 1) / n of the gradients",
        wire_bytes,
        plan.ddp_wire_bytes_per_rank,
        1 / max(1.0, wire_bytes),  # a whole byte
    )
    yield within(
        "matrix-product rate over the reference matmul's rate",
        "plan",
        "both timed in the audit",
        evidence["product_over_reference"],
        plan.peak / plan.reference_flops_per_second,
        BAND,
    )


def _data(
    config: RunConfig, train: Train, steps: Records, batches: dict[str, Any]
) -> Iterator[Check]:
    missing: list[str] = []
    foreign: list[str] = []
    repeated: list[str] = []
    unread: list[str] = []
    tokens = 0
    for row in train.rows:
        name = row["variant"]
        rows_by_step = []
        for step, rank_samples in enumerate(_samples_by_step(config, name, steps)):
            missing += [
                f"{name} step {step} rank {rank}"
                for rank, recorded in enumerate(rank_samples)
                if len(recorded) != 1 or recorded[0]["warmup"] != (step < config.warmup)
            ]
            first = [recorded[0] for recorded in rank_samples if recorded]
            rows_by_step.append([digest for s in first for digest in s["row_digests"]])
            tokens += sum(s["tokens"] for s in first)
        foreign += [
            f"{name} step {step}"
            for step, rows in enumerate(rows_by_step)
            if rows != batches["row_digests"][step]
        ]
        repeated += [f"{name} {steps_}" for steps_ in _repeated_steps(rows_by_step)]
        unread += [f"{name} {epoch}" for epoch in _unread(config, rows_by_step, batches["windows"])]
    yield none(
        "every step of every rank", "samples", "the configuration's ranks and steps", missing
    )
    yield none(
        "ranks' rows are the global batch",
        "digests of each rank's batches",
        "the audit's independent sampler",
        foreign,
    )
    if batches["distinct"]:
        digests = "digests of each variant's batches"
        yield none("no batch twice", digests, "each other", repeated)
    if config.epochs:
        name = "each window of the text once per epoch"
        yield none(name, "digests of the ranks' rows", "the text, cut in order", unread)
    total = config.rows * config.context * (config.warmup + config.steps) * len(train.rows)
    yield equal("tokens", "samples", "rows x context of every step and variant", total, tokens)


def _samples_by_step(config: RunConfig, name: str, steps: Records) -> list[list[list[Sample]]]:
    """Return the samples of a variant by step and rank."""
    ranks = range(ranks_of(name, config.world))
    by_rank_and_step: dict[tuple[int, int], list[Sample]] = defaultdict(list)
    for rank in ranks:
        for s in steps[name, rank]:
            by_rank_and_step[rank, s["step"]].append(s)
    total = config.warmup + config.steps
    return [[by_rank_and_step[rank, step] for rank in ranks] for step in range(total)]


def _repeated_steps(rows_by_step: list[list[str]]) -> Iterator[str]:
    """Yield the pairs of steps that read the same batch."""
    first: dict[str, int] = {}
    for step, rows in enumerate(rows_by_step):
        before = first.setdefault("".join(rows), step)
        if before != step:
            yield f"steps {before} and {step}"


def _unread(config: RunConfig, rows_by_step: list[list[str]], windows: list[str]) -> Iterator[str]:
    """Yield the epochs that did not read every window of the text once."""
    read = [digest for rows in rows_by_step for digest in rows]
    for epoch in range(config.epochs):
        rows = read[epoch * len(windows) : (epoch + 1) * len(windows)]
        if unread := (Counter(windows) - Counter(rows)).total():
            yield f"epoch {epoch}: {unread} of {len(windows)} unread"


def _losses(
    config: RunConfig, train: Train, samples: list[Sample], evidence: dict[str, Any]
) -> Iterator[Check]:
    curves = loss_curves(samples)
    alone, local = curves[SINGLE], curves.get(LOCAL)
    if local is not None:
        # Until its ranks diverge, DiLoCo computes the losses of one process.
        curves[LOCAL] = local[:1]
    off = [
        (abs(curve[step] / value - 1), f"{variant} step {step}: {curve[step]:.9g}, {value:.9g}")
        for variant, curve in curves.items()
        for step, value in enumerate(evidence["probe"]["replayed_losses"])
        if step < len(curve)
    ]
    tolerance = allowed(config, "replayed loss", REPLAYED_LOSS)
    yield worst_distance("first losses", "samples", "float64 and AdamW written out", off, tolerance)
    off = [
        (abs(ours / theirs - 1), f"{variant} step {step}: {ours:.9g}, {theirs:.9g}")
        for variant, curve in curves.items()
        for step, (ours, theirs) in enumerate(zip(curve, alone, strict=False))
    ]
    tolerance = allowed(config, "loss", LOSS) * math.sqrt(len(alone))
    yield worst_distance("all losses", "each variant", "one process", off, tolerance)
    off = [
        (abs(row["final_loss"] / alone[-1] - 1), f"{row['variant']}: {row['final_loss']:.9g}")
        for row in train.rows
        if row["variant"] != LOCAL
    ]
    yield worst_distance("reported final loss", "summary", "one process's last", off, tolerance)
    for row in train.rows:
        if row["variant"] == LOCAL and local:
            yield equal(
                f"{LOCAL}: reported final loss",
                "summary",
                "the ranks' mean",
                local[-1],
                row["final_loss"],
                1e-9,
            )
            yield Check(
                f"{LOCAL}: final loss",
                "summary",
                "one process's",
                alone[-1],
                row["final_loss"],
                alone[-1] / DILOCO_LOSS_RATIO,
                alone[-1] * DILOCO_LOSS_RATIO,
            )
    yield Check(
        "the loss falls", "one process, last over first", "one", 1.0, alone[-1] / alone[0], 0.0, 1.0
    )


def _weights(config: RunConfig, train: Train, evidence: dict[str, Any]) -> Iterator[Check]:
    total = config.warmup + config.steps
    for row in train.rows:
        name = row["variant"]
        probed = evidence["probe"]["variants"][name]
        for key, what in (
            ("gradients", "averaged gradients"),
            ("weights", "weight change of one SGD step"),
        ):
            if key in probed:
                ranks = [
                    (distance, f"rank {rank} {where}")
                    for rank, (distance, where) in enumerate(probed[key])
                ]
                yield worst_distance(f"{name}: {what}", "every rank", "float64", ranks, GRADIENT)
        loss = statistics.mean(probed["loss"])
        exact = evidence["probe"]["exact_loss"]
        yield equal(f"{name}: loss", "the ranks' mean", "float64", exact, loss, REPLAYED_LOSS)
        if name == SINGLE:
            continue
        final = train.final_weights[name]
        yield none(
            f"{name}: trained weights, bit by bit",
            "every rank",
            "rank 0",
            final["differ"] + ["ranks are missing"] * (final["ranks"] != config.world),
        )
        if name == LOCAL:
            rounds = enumerate(evidence["probe"]["rounds"])
            moved = [(away, f"rank {rank} {where}") for rank, (away, where) in rounds]
            yield worst_distance(
                f"{LOCAL}: weight change of the first DiLoCo rounds",
                "every rank",
                "written out in float64",
                moved,
                DILOCO_WEIGHT_CHANGE,
            )
            continue
        distance, where = final["from_one_process"]
        tolerance = allowed(config, "weight change", WEIGHT_CHANGE) * math.sqrt(total)
        yield near(
            f"{name}: weight change of the training",
            "rank 0",
            "one process",
            distance,
            tolerance,
            where,
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
    for (name, rank), rank_samples in steps.items():
        ratios = [s["seconds"] / (s["ended"] - s["began"]) for s in rank_samples]
        # In some steps another program takes the core between the two readings.
        ratios.sort(key=lambda ratio: abs(ratio - 1))
        pairs.append((1.0, ratios[len(ratios) // 4], f"{name} rank {rank}"))
    yield worst_equal("time of a step", "the recorder", "another clock around it", pairs, CLOCK)
    slowest = slowest_seconds(steps)
    pairs = [
        (statistics.median(slowest[row["variant"]].values()) * 1e3, row["step_ms"], row["variant"])
        for row in train.rows
    ]
    yield worst_equal(
        "reported step time", "summary", "the slowest rank by the other clock", pairs, CLOCK
    )
    every, epoch = slowest_seconds(steps, warmup=True), evidence["text"]["epoch_steps"]
    pairs = [
        (
            sum(every[row["variant"]].values()) / config.epochs
            if config.epochs
            else statistics.median(slowest[row["variant"]].values()) * epoch,
            row["epoch_s"],
            row["variant"],
        )
        for row in train.rows
    ]
    yield worst_equal(
        "reported time of an epoch", "summary", "the other clock, over its steps", pairs, CLOCK
    )
    pairs = []
    for row in train.rows:
        if "ratio_p50" in row:
            both = slowest[row["variant"]].keys() & slowest[PEER].keys()
            ours = statistics.median(
                slowest[row["variant"]][step] / slowest[PEER][step] for step in both
            )
            pairs.append((ours, row["ratio_p50"], row["variant"]))
    yield worst_equal(
        "reported ratio to the peer", "summary", "the other clock, round by round", pairs, 2 * CLOCK
    )
    yield none(
        "no rank ends a step before all have begun it",
        "each rank's clock",
        "the others'",
        _too_early(steps) if evidence["one_host"] else (),
    )
    yield within(
        "time of torch DDP",
        "the run's variant",
        "the audit's own torch DDP",
        1.0,
        evidence["peer_ratio"],
        PEER_BAND,
    )
    yield from _phases(samples)
    spans = [
        (launcher_seconds, rank_seconds, f"{stage} rank {rank}")
        for stage, rank, rank_seconds, launcher_seconds in evidence["stage_clocks"]
        if launcher_seconds > 1.0
    ]
    if spans:
        yield worst_equal("time of a stage", "each rank's clock", "the launcher's", spans, 0.1)
    shares = []
    for stage, rank, _, launcher_seconds in evidence["stage_clocks"]:
        if stage == "train":
            rank_seconds = [
                s["seconds"]
                for (_, r), rank_samples in steps.items()
                if r == rank
                for s in rank_samples
            ]
            shares.append((sum(rank_seconds) / launcher_seconds, f"rank {rank}"))
    if shares:
        fraction, where = max(shares)
        yield Check(
            "time of all steps",
            "their sum, over the launcher's clock of the stage",
            "one",
            1.0,
            fraction,
            0.0,
            1.0,
            where,
        )
    yield from _work(config, plan, train, steps, slowest, evidence)


def _phases(samples: list[Sample]) -> Iterator[Check]:
    """Check that the phases of a step contain its thread's work and fit into the step.

    The first check uses thread time, because on a busy machine another program may take the core
    between two phases. The second check uses wall time.
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
    yield Check(
        "work in the phases of a step",
        "their thread's time",
        "the whole step's",
        1.0,
        least,
        0.95,
        math.inf,
        where,
    )
    most, where = max(wall, default=(math.nan, ""))
    yield Check(
        "time in the phases of a step", "their sum", "the whole step", 1.0, most, 0.0, 1.001, where
    )


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
        peak_flops = ranks * plan.peak * seconds
        pairs.append((evidence["counted"]["flops_causal"] / peak_flops, row["mfu"], row["variant"]))
    yield worst_equal(
        "utilization", "summary", "counted FLOPs, the other clock, the rate", pairs, CLOCK
    )
    alone = [s for s in steps[SINGLE, 0] if not s["warmup"]]
    measured = statistics.median(s["core_s"] / s["one_layer_s"] for s in alone)
    yield within(
        "time of one process's step, over one layer's",
        "plan, from one and three layers",
        "samples",
        measured,
        plan.step_matmuls / plan.layer_matmuls,
        BAND,
    )
    pairs = [
        (
            1.0,
            statistics.median(s["core_s"] / s["seconds"] for s in rank_samples),
            f"{name} rank {rank}",
        )
        for (name, rank), rank_samples in steps.items()
    ]
    fraction, where = max((actual, where) for _, actual, where in pairs)
    yield Check(
        "a thread's time is within the step's",
        "the thread's clock over the recorder's",
        "one",
        1.0,
        fraction,
        0.0,
        1 + CLOCK,
        where,
    )


def _steps(samples: list[Sample]) -> Records:
    steps: Records = defaultdict(list)
    for s in samples:
        if s["phase"] == WHOLE_STEP:
            steps[s["variant"], s["rank"]].append(s)
    return steps


def slowest_seconds(steps: Records, *, warmup: bool = False) -> dict[str, dict[int, float]]:
    """Return {variant: {step: seconds of the slowest rank}}, measured by the outer clock.

    Time that the rank waited for a core, as counted by the kernel, is subtracted, up to the
    difference between the two clocks.
    """
    slowest: dict[str, dict[int, float]] = defaultdict(dict)
    for (name, _), rank_samples in steps.items():
        for s in rank_samples:
            if warmup >= s["warmup"]:
                seconds = s["ended"] - s["began"]
                seconds -= min(max(0.0, seconds - s["seconds"]), s["queued_s"])
                slowest[name][s["step"]] = max(slowest[name].get(s["step"], 0.0), seconds)
    return slowest


def _too_early(steps: Records) -> Iterator[str]:
    by_step: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for (name, _), rank_samples in steps.items():
        for s in rank_samples:
            # A push to the server does not wait for the other workers; the next pull does.
            if name not in (SERVER, LOCAL):
                by_step[name, s["step"]].append(s)
    for (name, step), rank_samples in by_step.items():
        if min(s["ended"] for s in rank_samples) < max(s["began"] for s in rank_samples):
            yield f"{name} step {step}"


def text_evidence(config: RunConfig, train: bytes) -> dict[str, Any]:
    """Return what the independent sampler expects.

    The entries are the row digests of each global batch, whether all batches are distinct, the
    number of steps per epoch, and the digests of an epoch's windows.
    """
    batches = [
        reference.row_digests(global_batch(train, config, step))
        for step in range(config.warmup + config.steps)
    ]
    # Windows in the order of the text; an incomplete last step is left out.
    steps = (len(train) - 1) // (config.rows * config.context)
    ends = range(config.context, 1 + config.context * config.rows * steps, config.context)
    cut = (train[end - config.context : end + 1] for end in ends if config.epochs)
    return {
        "row_digests": batches,
        "distinct": len({"".join(batch) for batch in batches}) == len(batches),
        "epoch_steps": steps,
        "windows": [reference.digest(window[:-1], window[1:]) for window in cut],
    }
