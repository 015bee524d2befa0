"""Checks of times: reported figures against a second clock, peers against the audit's peers."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from operator import itemgetter

from llmsys_suite.audit.check import Check, Sources, clock_ratio
from llmsys_suite.audit.peers import LEAST_ROUNDS, MEASURES
from llmsys_suite.audit.tolerances import CLOCK
from llmsys_suite.audit.training_checks.record import Record
from llmsys_suite.folder import Sample
from llmsys_suite.measure import others
from llmsys_suite.measure.samples import PEER, PHASES, SERVER, WHOLE_STEP, ranks_of


def check_steps(record: Record) -> Iterator[Check]:
    """Compare the recorder's times with a second clock, and torch's thread count with the audit's.

    Two ranks that report the same readings of the second clock in more than half of the steps have
    copied one of them. In single steps, ranks can start and end at the same reading.
    """
    pairs = []
    for (name, rank), rank_samples in record.steps.items():
        ratios = [s["seconds"] / (s["ended"] - s["began"]) for s in rank_samples]
        pairs.append((1.0, clock_ratio(ratios), f"{name} rank {rank}"))
    recorder = Sources("the recorder", "another clock around it")
    yield recorder.all_equal("time of a step", pairs, CLOCK)
    clocks = Sources("clocks of all ranks", "one reading per step")
    yield clocks.none("copied times", _copied(record))
    threads = [
        (record.evidence["threads"], s["threads"], f"{name} rank {rank} step {s['step']}")
        for (name, rank), samples in record.steps.items()
        for s in samples
    ]
    yield Sources("torch in the step", "torch in the audit").all_equal("threads", threads)


def _copied(record: Record) -> list[str]:
    """Return the variants in which two ranks have equal readings in more than half of the steps."""
    ranks: dict[str, dict[tuple[float, float], list[int]]] = defaultdict(lambda: defaultdict(list))
    for (name, rank), rank_samples in record.steps.items():
        for s in rank_samples:
            ranks[name][s["began"], s["ended"]].append(rank)
    copied = []
    for name, ranks_by_reading in ranks.items():
        equal_steps: Counter[tuple[int, ...]] = Counter()
        for equal_ranks in ranks_by_reading.values():
            equal_steps.update(combinations(sorted(equal_ranks), 2))
        if 2 * max(equal_steps.values(), default=0) > record.num_steps:
            copied.append(name)
    return copied


def check_reported_times(record: Record) -> Iterator[Check]:
    """Check the reported step times, ratios and utilization against a second clock."""
    slowest = record.slowest_seconds()
    recorded = record.by_step(itemgetter("seconds"), max)
    flops = record.evidence["model_counts"]["flops_causal"]
    step_ms = []
    ratios = []
    spread = []
    utilization = []
    for row in record.train.rows:
        name = row["variant"]
        seconds = statistics.median(slowest[name].values())
        step_ms.append((1e3 * seconds, row["step_ms"], name))
        peak = ranks_of(name, record.config.world) * record.plan.peak
        utilization.append((flops / (peak * seconds), row["mfu"], name))
        # Variants that ran one after another have no rounds in common with the peer.
        if record.plan.variants_fit_together:
            rounds = slowest[name].keys() & slowest[PEER].keys()
            by_round = sorted(slowest[name][r] / slowest[PEER][r] for r in rounds)
            ratios.append((statistics.median(by_round), row.get("ratio_p50", math.nan), name))
            # One disturbed reading of a clock can move a percentile. Therefore the spread is taken
            # from the recorder's times, which `check_steps` compares with the other clock.
            by_round = sorted(recorded[name][r] / recorded[PEER][r] for r in rounds)
            tenth = len(by_round) // 10
            spread.append((by_round[tenth], row.get("ratio_p10", math.nan), f"{name}, p10"))
            spread.append((by_round[-1 - tenth], row.get("ratio_p90", math.nan), f"{name}, p90"))
    for name, against, pairs, tolerance in (
        ("step time", "the slowest rank by the other clock", step_ms, CLOCK),
        ("ratio to the peer", "the other clock, round by round", ratios, 2 * CLOCK),
        ("spread of ratios", "the samples, round by round", spread, 1e-9),
        ("utilization", "counted FLOPs, the other clock, the rate", utilization, CLOCK),
    ):
        yield Sources("summary", against).all_equal(f"reported {name}", pairs, tolerance)


def check_rounds(record: Record) -> Iterator[Check]:
    """Check that a rank ends the steps of all variants before it begins the next round.

    Ratios divide times of one round, because a slow second affects neighboring steps alike.
    """
    if not record.plan.variants_fit_together:
        return  # the report states that the variants ran one after another
    began: dict[tuple[int, int], float] = {}
    ended: dict[tuple[int, int], float] = {}
    for (_, rank), rank_samples in record.steps.items():
        for s in rank_samples:
            key = rank, s["step"]
            began[key] = min(began.get(key, math.inf), s["began"])
            ended[key] = max(ended.get(key, -math.inf), s["ended"])
    early = [
        f"rank {rank} step {step}"
        for (rank, step), began_at in began.items()
        if began_at < ended.get((rank, step - 1), -math.inf)
    ]
    clock = Sources("each rank's clock", "the end of the round before")
    yield clock.none("variants are interleaved step by step", early)


def check_peers(record: Record) -> Iterator[Check]:
    """Compare the times of torch's DDP and FSDP2 in the run with the audit's implementations.

    The audit's peers do not run in the stage `train`. Therefore the audit's rounds also time
    another variant, and the peer's ratio to that variant is compared with the ratio in the stage.
    """
    fractions = others.foreign_cpu_fractions(record.steps_of(PEER))
    for name, by_measure in record.evidence["peers"].items():
        peer = Sources("the run's variant", f"the audit's own {name}")
        for measure_name, ratios in by_measure.items():
            measure = MEASURES[measure_name]
            yield peer.within(
                f"{measure_name} of {name}", 1.0, ratios["audit"], measure.allowed_factor
            )
            means = record.by_step(measure.seconds_of, statistics.mean)
            for other in ratios.keys() - {"audit"}:
                # The first step, if no warm-up precedes it, creates state and connections.
                rounds = (means[name].keys() & means[other].keys()) - {0}
                if measure.needs_undisturbed_rounds:
                    both = [*record.steps_of(name), *record.steps_of(other)]
                    rounds -= others.disturbed_rounds(both, fractions)
                if len(rounds) < LEAST_ROUNDS:
                    continue
                by_round = [means[name][r] / means[other][r] for r in rounds]
                low, high = bounds_of_median(by_round)
                yield Sources("the audit's own timing", "rounds of the stage").between(
                    f"{measure_name} of {name} over that of {other}",
                    statistics.median(by_round),
                    ratios[other],
                    low / measure.allowed_factor,
                    high * measure.allowed_factor,
                )


def bounds_of_median(values: list[float]) -> tuple[float, float]:
    """Return order statistics that enclose the median of the distribution.

    The probability that they do is at least 0.9. It is lower for three and four values.
    """
    ordered = sorted(values)
    left_out = max(0, int(len(ordered) / 2 - math.sqrt(len(ordered))))
    return ordered[left_out], ordered[-1 - left_out]


def check_phases(record: Record) -> Iterator[Check]:
    """Check the phases of every step after the warm-up, and the fractions of time in each phase.

    Every step must have all of its phases, and their sum may exceed the step by one thousandth.
    """
    parts: dict[tuple[str, int, int], list[list[Sample]]] = defaultdict(lambda: [[], []])
    for s in record.samples:
        if not s["warmup"]:
            parts[s["variant"], s["rank"], s["step"]][s["phase"] == WHOLE_STEP].append(s)
    wall = []
    missing = []
    for (name, rank, step), (inside, wholes) in parts.items():
        recorded = {s["phase"] for s in inside}
        missing += [f"{name} rank {rank} step {step}: {p}" for p in _phases(name) - recorded]
        for whole in wholes[:1]:
            length = sum(s["seconds"] for s in inside) / whole["seconds"]
            wall.append((length, f"{name} rank {rank} step {step}"))
    yield Sources("samples", "the phases of a step").none("phases of every step", missing)
    total = Sources("their sum over the step", "one")
    yield total.all_near("time in the phases of a step", wall, 1.001)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for s in record.samples:
        if not s["warmup"]:
            seconds[s["variant"], s["phase"]] += s["seconds"]
    shares = [
        (seconds[name, phase] / seconds[name, WHOLE_STEP], row[f"{phase}_share"], f"{name} {phase}")
        for row in record.train.rows
        for name in [row["variant"]]
        for phase in PHASES
    ]
    yield Sources("summary", "samples").all_equal("reported shares of phases", shares, 1e-9)


def _phases(variant: str) -> set[str]:
    """Return the phases that every step of a variant has."""
    # The server updates the parameters.
    last = "communication" if variant == SERVER else "optimizer"
    return {"forward", "backward", last}
