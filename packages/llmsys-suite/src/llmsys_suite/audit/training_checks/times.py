"""Checks of times: recorded times against a second clock, peers against the audit's peers."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations

from llmsys_suite.audit.check import Check, Sources, select_clock_ratio
from llmsys_suite.audit.peers import LEAST_ROUNDS, MEASURES
from llmsys_suite.audit.tolerances import CLOCK
from llmsys_suite.audit.training_checks.record import Record, compute_clocked_seconds
from llmsys_suite.folder import Sample
from llmsys_suite.measure import others
from llmsys_suite.measure.samples import PEER, PHASES, SERVER, WHOLE_STEP, count_ranks

#: With fewer steps, the lower quartile of the differences of two clocks is the smallest one, which
#: a wait for a core between the readings may disturb too. The wait is then subtracted.
FEWEST_CLOCKED_STEPS = 4


def check_steps(record: Record) -> Iterator[Check]:
    """Compare the recorder's times with a second clock, and torch's thread count with the audit's.

    Also check that no rank reports the times of another rank.
    """
    clock_ratios = []
    threads = []
    for (name, rank), samples in record.steps.items():
        where = f"{name} rank {rank}"
        if len(samples) < FEWEST_CLOCKED_STEPS:
            ratios = [s["seconds"] / compute_clocked_seconds(s) for s in samples]
        else:
            ratios = [s["seconds"] / (s["ended"] - s["began"]) for s in samples]
        clock_ratios.append((1.0, select_clock_ratio(ratios), where))
        for s in samples:
            threads.append((record.evidence["threads"], s["threads"], f"{where} step {s['step']}"))
    recorder = Sources("the recorder", "another clock around it")
    yield recorder.check_all_equal("time of a step", clock_ratios, CLOCK)
    clocks = Sources("clocks of all ranks", "one reading per step")
    yield clocks.check_none("copied times", _find_copied_times(record))
    yield Sources("torch in the step", "torch in the audit").check_all_equal("threads", threads)


def _find_copied_times(record: Record) -> list[str]:
    """Return the variants in which two ranks have equal readings in more than half of the steps.

    The readings are those of the second clock. In a few steps, ranks can start and end at the same
    reading by chance.
    """
    ranks: dict[str, dict[tuple[float, float], list[int]]] = defaultdict(lambda: defaultdict(list))
    for (name, rank), samples in record.steps.items():
        for s in samples:
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
    """Compare the reported step times, ratios and utilization with a second clock.

    The percentiles of the ratios are compared with the recorder's times. One disturbed reading of
    the second clock could move them, and `check_steps` compares the recorder with that clock.
    """
    slowest = record.compute_slowest_seconds()
    recorded = record.reduce_by_step(lambda sample: float(sample["seconds"]), max)
    flops = record.evidence["model_counts"]["flops_causal"]
    step_ms = []
    ratios = []
    spread = []
    utilization = []
    for row in record.train.rows:
        name = row["variant"]
        seconds = statistics.median(slowest[name].values())
        step_ms.append((1e3 * seconds, row["step_ms"], name))
        peak = count_ranks(name, record.config.world) * record.plan.peak
        utilization.append((flops / (peak * seconds), row["mfu"], name))
        # Variants that ran one after another have no rounds in common with the peer.
        if record.plan.variants_fit_together:
            rounds = slowest[name].keys() & slowest[PEER].keys()
            by_round = sorted(slowest[name][r] / slowest[PEER][r] for r in rounds)
            ratios.append((statistics.median(by_round), row.get("ratio_p50", math.nan), name))
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
        yield Sources("summary", against).check_all_equal(f"reported {name}", pairs, tolerance)


def check_rounds(record: Record) -> Iterator[Check]:
    """Check that a rank ends the steps of all variants before it begins the next round.

    Ratios divide times of one round, because a slow second affects neighboring steps alike.
    """
    if not record.plan.variants_fit_together:
        # The report states that the variants ran one after another.
        return
    start_times: dict[tuple[int, int], float] = {}
    stop_times: dict[tuple[int, int], float] = {}
    for (_, rank), samples in record.steps.items():
        for s in samples:
            key = rank, s["step"]
            start_times[key] = min(start_times.get(key, math.inf), s["began"])
            stop_times[key] = max(stop_times.get(key, -math.inf), s["ended"])
    early = [
        f"rank {rank} step {step}"
        for (rank, step), start_time in start_times.items()
        if start_time < stop_times.get((rank, step - 1), -math.inf)
    ]
    clock = Sources("each rank's clock", "the end of the previous round")
    yield clock.check_none("variants are interleaved step by step", early)


def check_peers(record: Record) -> Iterator[Check]:
    """Compare the times of torch's DDP and FSDP2 with those of the audit's DDP and FSDP2.

    The audit's peers do not run in the stage `train`. Therefore the audit's rounds also time
    another variant, and the peer's ratio to that variant is compared with the ratio in the stage.
    The second comparison is left out if the stage has too few rounds for it.
    """
    fractions = others.compute_foreign_cpu_fractions(record.list_whole_steps(PEER))
    for name, by_measure in record.evidence["peers"].items():
        peer = Sources("the run's variant", f"the audit's own {name}")
        for measure_name, ratios in by_measure.items():
            measure = MEASURES[measure_name]
            yield peer.check_factor(
                f"{measure_name} of {name}", 1.0, ratios["audit"], measure.allowed_factor
            )
            means = record.reduce_by_step(measure.seconds_of, statistics.mean)
            for other in ratios.keys() - {"audit"}:
                # Step 0 also creates state and connections. It is in `means` without a warm-up.
                rounds = (means[name].keys() & means[other].keys()) - {0}
                if measure.needs_undisturbed_rounds:
                    both = [*record.list_whole_steps(name), *record.list_whole_steps(other)]
                    rounds -= others.find_disturbed_rounds(both, fractions)
                if len(rounds) < LEAST_ROUNDS:
                    continue
                by_round = [means[name][r] / means[other][r] for r in rounds]
                low, high = compute_median_bounds(by_round)
                yield Sources("the audit's own timing", "rounds of the stage").check_between(
                    f"{measure_name} of {name} over that of {other}",
                    statistics.median(by_round),
                    ratios[other],
                    low / measure.allowed_factor,
                    high * measure.allowed_factor,
                )


def compute_median_bounds(sample: list[float]) -> tuple[float, float]:
    """Return two order statistics that enclose the median of the distribution.

    The probability that they do is at least 0.9, except for samples of three and four values.
    """
    ordered = sorted(sample)
    left_out = max(0, int(len(ordered) / 2 - math.sqrt(len(ordered))))
    return ordered[left_out], ordered[-1 - left_out]


def check_phases(record: Record) -> Iterator[Check]:
    """Check the phases of every step after the warm-up, and the fractions of time in each phase.

    Every step must have all of its phases, and their sum may exceed the step by one thousandth.
    """
    parts: dict[tuple[str, int, int], list[Sample]] = defaultdict(list)
    step_seconds: dict[tuple[str, int, int], float] = {}
    total_seconds: dict[tuple[str, str], float] = defaultdict(float)
    for s in record.samples:
        if s["warmup"]:
            continue
        total_seconds[s["variant"], s["phase"]] += s["seconds"]
        key = s["variant"], s["rank"], s["step"]
        if s["phase"] == WHOLE_STEP:
            step_seconds[key] = s["seconds"]
        else:
            parts[key].append(s)
    sums = []
    missing = []
    for (name, rank, step), seconds in step_seconds.items():
        where = f"{name} rank {rank} step {step}"
        inside = parts[name, rank, step]
        recorded = {s["phase"] for s in inside}
        # The parameter server updates the parameters, so its workers have no optimizer phase.
        required = {"forward", "backward", "communication" if name == SERVER else "optimizer"}
        missing += [f"{where}: {phase}" for phase in required - recorded]
        sums.append((sum(s["seconds"] for s in inside) / seconds, where))
    yield Sources("samples", "the phases of a step").check_none("phases of every step", missing)
    total = Sources("the sum of the phases over the step", "the step")
    yield total.check_distances("time in the phases of a step", sums, 1.001)
    fractions = []
    for row in record.train.rows:
        name = row["variant"]
        for phase in PHASES:
            fraction = total_seconds[name, phase] / total_seconds[name, WHOLE_STEP]
            fractions.append((fraction, row[f"{phase}_share"], f"{name} {phase}"))
    yield Sources("summary", "samples").check_all_equal(
        "reported shares of phases", fractions, 1e-9
    )
