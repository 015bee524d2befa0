"""The report's section of each stage: one sentence about its numbers, one plot, one table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from scipy.stats import quantile_test

from llmsys_suite import results as of
from llmsys_suite.folder import RunFolder
from llmsys_suite.measure.samples import PEER, SINGLE
from llmsys_suite.report import plots
from llmsys_suite.report.compare import has_enough_rounds, round_ratios

MIB = 2**20
Row = dict[str, Any]
Results = dict[str, Any]

#: Titles of the columns of each stage's table, by the keys of its rows.
COLUMNS: dict[str, dict[str, str]] = {
    "links": {"algorithm": "algorithm", "size_bytes": "bytes", "time_us": "time, µs",
        "busbw_gbps": "bus, GB/s", "wire_bytes": "wire bytes", "wrong": "wrong"},
    "attention": {"kernel": "kernel", "forward_backward_ms": "time, ms",
        "ratio_to_sdpa_p50": "of SDPA's", "max_error": "largest error"},
    "train": {"variant": "variant", "step_ms": "step, ms", "ratio_p50": "of DDP's",
        "ratio_p10": "p10", "ratio_p90": "p90", "exposed_ms": "waiting, ms", "mfu": "MFU",
        "final_loss": "loss"},
    "parallel": {"split": "split", "iteration_ms": "iteration, ms", "bubble": "bubble, planned",
        "waiting": "waiting", "loss": "loss", "single_loss": "one process's",
        "trained_loss": "trained"},
    "memory": {"context": "tokens",
        "inference_peak_mib": "inference, MiB",
        "training_peak_mib": "training, MiB", "checkpointed_peak_mib": "checkpointed, MiB",
        "residual_stream_mib": "residual stream, MiB"},
    "scale": {"compute_flops": "FLOPs", "width": "width", "parameters": "parameters",
        "tokens": "tokens", "steps": "steps", "loss": "held out"},
    "inspect": {"kind": "kind", "layer": "layer", "head": "head", "score": "score",
        "chance": "by chance"},
    "compress": {"method": "method", "size_bytes": "bytes", "smaller": "smaller, x",
        "heldout_loss": "held out", "speedup_p50": "speed, x"},
    "audit": {"name": "check", "source": "source", "actual": "says", "against": "against",
        "low": "least", "high": "most", "where": "furthest off"},
}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """One stage: a sentence, a picture (SVG), a table and collapsed details."""

    title: str
    finding: str
    rows: Sequence[Row] = ()
    picture: str = ""
    folded: Sequence[tuple[str, Sequence[Row] | str]] = ()


def sections(folder: RunFolder) -> Iterator[Section]:
    """Yield the sections of the finished stages, in the order in which they ran."""
    results = folder.results
    for stage, result in results.items():
        if isinstance(result, of.Skipped):
            yield Section(stage, f"Skipped: {result.skipped}.")
        else:
            yield MAKERS[stage](result, results, folder)


def pick(rows: Sequence[Row], columns: dict[str, str]) -> list[Row]:
    """Return the rows with only the keys of `columns`, renamed to its values."""
    return [{new: row[old] for old, new in columns.items() if old in row} for row in rows]


def evidence_of(folder: RunFolder) -> Row:
    """Return the evidence of the audit, or {} without an audit."""
    there = isinstance(folder.results.get("audit"), of.Audit)
    evidence: Row = folder.read_json("evidence.json") if there else {}
    return evidence


def planned(results: Results, evidence: Row) -> list[Row]:
    """Return rows of predicted and measured values and their ratio, where both exist."""
    plan = results["plan"]
    train = results.get("train")
    rows = train.rows if isinstance(train, of.Train) else []
    received = [row["wire_bytes"] for row in rows if row["variant"] == PEER and "wire_bytes" in row]
    counts = evidence.get("model_counts", {})
    pairs = [
        ("parameters", plan.parameters, counts.get("parameters")),
        ("GFLOPs per step", plan.step_flops_full / 1e9,
         counts["flops_full"] / 1e9 if counts else None),
        ("peak of a step, MiB", plan.training_peak_bytes / MIB,
         plan.measured_peak_bytes / MIB),
        ("DDP's wire, MiB per rank", plan.ddp_wire_bytes_per_rank / MIB,
         received[0] / MIB if received else None),
    ]  # fmt: skip
    return [
        {"figure": name, "planned": predicted, "measured": measured, "ratio": measured / predicted}
        for name, predicted, measured in pairs
        if measured
    ]


def _plan(plan: of.Plan, results: Results, folder: RunFolder) -> Section:
    rows = planned(results, evidence_of(folder))
    worst = max(rows, key=lambda row: abs(math.log(row["ratio"])))
    finding = (
        f"Largest deviation: the measured {worst['figure']} is {worst['ratio']:.3g} times the "
        "planned one."
    )
    parts = [
        {"part": name, "MiB": nbytes / MIB} for name, nbytes in plan.training_bytes_by_part.items()
    ]
    memory = "memory at the peak of one process's step, with AdamW's moments"
    return Section("plan", finding, rows, folded=[(memory, parts), ("derivation", plan.derivation)])


def _links(links: of.Links, *_: Any) -> Section:
    rows = [row for row in links.rows if row["case"] == "all_reduce"]
    largest = max(row["size_bytes"] for row in rows)
    best = max((r for r in rows if r["size_bytes"] == largest), key=lambda r: r["busbw_gbps"])
    finding = (
        f"An all-reduce of {largest / MIB:g} MiB is fastest with {best['algorithm']}: "
        f"{best['busbw_gbps']:.3g} GB/s, {best['ratio_p50']:.3g} times the rate of its peer (80 % "
        f"of rounds: {best['ratio_p10']:.3g} to {best['ratio_p90']:.3g})."
    )
    shown = pick(rows, COLUMNS["links"])
    top = [row for row in shown if row["bytes"] == largest]
    return Section("links", finding, top, folded=[("all sizes", shown)])


def _attention(attention: of.Attention, *_: Any) -> Section:
    rows = attention.rows
    ours = min((r for r in rows if r["kernel"] != "SDPA"), key=lambda r: r["forward_backward_ms"])
    shown = pick(rows, COLUMNS["attention"])
    seconds = attention.interleaved.seconds
    ratios = [a / b for a, b in zip(seconds[ours["kernel"]], seconds["SDPA"], strict=True)]
    finding = against(ours["kernel"], "SDPA", ratios)
    return Section("attention", finding, shown, folded=[("why this kernel", attention.explain)])


def _train(train: of.Train, _: Results, folder: RunFolder) -> Section:
    shown = pick(train.rows, COLUMNS["train"])
    stored = [
        {"variant": name}
        | {kind: max(n[kind] for n in final["stored"]) / MIB for kind in final["stored"][0]}
        for name, final in train.final_weights.items()
    ]
    folded = [("most that a rank stores after the training, MiB", stored)]
    received = [row for row in train.rows if "wire_bytes" in row]
    if received:
        columns = {"variant": "variant", "wire_bytes": "bytes"}
        folded.append(("bytes that a rank's sockets receive per step", pick(received, columns)))
    return Section("train", fastest(folder), shown, plots.phases(train.rows), folded)


def _learn(learn: of.Learn, _: Results, folder: RunFolder) -> Section:
    first, (steps, last) = learn.heldout[0][1], learn.heldout[-1]
    unit = folder.config.loss_unit
    # The steps before a checkpoint may have used another variant and another number of ranks.
    trained = "The training" if learn.begun_at else learn.variant
    finding = (
        f"{trained} took the held-out loss from {first:.2f} to {last:.2f} {unit} in "
        f"{steps} steps of {learn.tokens:,} tokens in all."
    )
    if learn.begun_at:
        finding += (
            f" A checkpoint contains the first {learn.begun_at} steps; {learn.variant} took the "
            f"other {steps - learn.begun_at}."
        )
    shown = [{"step": step, f"held out, {unit}": loss} for step, loss in learn.heldout]
    return Section("learn", finding, shown)


def _parallel(parallel: of.Parallel, *_: Any) -> Section:
    rows = parallel.rows
    best, *others = sorted(rows, key=lambda row: row["iteration_ms"])
    finding = f"{best['split']} takes {best['iteration_ms']:.3g} ms per iteration"
    if others:
        ratio = best["iteration_ms"] / others[0]["iteration_ms"]
        finding += f", {ratio:.2f} of {others[0]['split']}'s time"
    off, far = max((abs(row["loss"] / row["single_loss"] - 1), row["split"]) for row in rows)
    finding += f". The largest relative difference from one process's loss is {off:.1e} ({far})."
    return Section("parallel", finding, pick(rows, COLUMNS["parallel"]))


def _memory(memory: of.Memory, _: Results, folder: RunFolder) -> Section:
    top = memory.peaks[-1]
    finding = (
        f"Training {folder.config.size} on {memory.rows} x {top['context']} tokens peaks at "
        f"{top['training_peak_mib']:,.4g} MiB, or {top['checkpointed_peak_mib']:,.4g} MiB if "
        f"blocks are recomputed. Inference peaks at {top['inference_peak_mib']:,.4g} MiB."
    )
    folded = [("largest at the peak", memory.largest)]
    shown = pick(memory.peaks, COLUMNS["memory"])
    picture = plots.timeline(f"{folder.config.size}", memory.training_timeline)
    return Section("memory", finding, shown, picture, folded)


def _scale(scale: of.Scale, *_: Any) -> Section:
    at, finding = scale.extrapolated, f"No law: {'; '.join(scale.warnings)}."
    if at:
        apart = at["high"] / at["low"] if at["low"] else math.inf
        finding = (
            f"The best size grows as C^{scale.law['exponent']:.2f}; at {at['compute_flops']:.0e}"
            f" FLOPs it is {at['parameters']:,.0f} (95 % interval {at['low']:,.0f} to "
            f"{at['high']:,.0f}, {apart:.1f}-fold)."
            + ("" if apart < 2 else " The runs do not determine it closely.")
        )
    shown = pick(scale.runs, COLUMNS["scale"])
    folded: list[tuple[str, Any]] = [("every run", shown)]
    folded += [("warnings", "\n".join(scale.warnings))] if scale.warnings else []
    by_budget = groupby(shown, key=lambda run: run["FLOPs"])
    best = [min(runs, key=lambda run: run["held out"]) for _, runs in by_budget]
    return Section("scale", finding, best, plots.isoflop(scale), folded)


def _inspect(inspect: of.Inspect, *_: Any) -> Section:
    real = [head["kind"] for head in inspect.heads if not head["by_chance"]]
    kinds = f"heads for {', '.join(real)}" if real else "no head beyond chance"
    cut = inspect.ablation
    finding = (
        f"The trained model has {kinds}. Without head {cut['layer']}.{cut['head']} its loss is "
        f"{cut['loss']:.3f}, and {inspect.lens[-1]['target_loss']:.3f} with it."
    )
    shown = pick(inspect.heads, COLUMNS["inspect"])
    folded = [("logit lens", inspect.lens), ("attribution", inspect.attribution)]
    return Section("inspect", finding, shown, "", folded)


def _compress(compress: of.Compress, _: Results, folder: RunFolder) -> Section:
    rows = compress.rows
    unit = folder.config.loss_unit
    whole = rows[0]["heldout_loss"]
    near = [row for row in rows if row["heldout_loss"] <= 1.01 * whole]
    best = max(near, key=lambda row: row["smaller"])
    finding = (
        f"The smallest file whose loss is at most 1 % higher is that of {best['method']}: "
        f"{best['smaller']:.2g} times smaller, {best['heldout_loss'] - whole:+.4f} {unit}."
    )
    return Section("compress", finding, pick(rows, COLUMNS["compress"]))


def _audit(_: of.Audit, __: Results, folder: RunFolder) -> Section:
    checks = folder.read_json("checks.json")
    failed = [check for check in checks if not check["passed"]]
    finding = f"{len(checks) - len(failed)} of {len(checks)} checks passed."
    folded = [("all checks", pick(checks, COLUMNS["audit"]))]
    return Section("audit", finding, pick(failed, COLUMNS["audit"]), folded=folded)


MAKERS: dict[str, Callable[..., Section]] = {
    "plan": _plan, "links": _links, "attention": _attention, "train": _train, "learn": _learn,
    "parallel": _parallel, "memory": _memory,
    "scale": _scale, "inspect": _inspect, "compress": _compress, "audit": _audit,
}  # fmt: skip


def interval(values: Sequence[float], among: int = 1) -> tuple[float, float, float]:
    """Return the median and a 95 % interval from order statistics.

    The interval is unbounded if there are too few values. It is corrected for the choice of the
    best of `among` variants.
    """
    test = quantile_test(values, p=0.5)
    low, high = test.confidence_interval(confidence_level=1 - 0.05 / among)
    if math.isnan(low):
        low, high = 0.0, math.inf
    return statistics.median(values), float(low), float(high)


def against(name: str, peer: str, ratios: Sequence[float], among: int = 1) -> str:
    """Return a sentence on the time of `name` over the time of `peer` in the same rounds."""
    middle, low, high = interval(ratios, among)
    if not math.isfinite(high):
        return f"Cannot tell {name} from {peer} in {len(ratios)} rounds: {middle:.2f} of its time."
    sentence = f"{name} takes {middle:.2f} of {peer}'s time (95 % interval {low:.2f} to {high:.2f})"
    if low <= 1 <= high:
        return f"Cannot tell {name} from {peer}: {sentence}."
    return f"{sentence}: {'faster' if high < 1 else 'slower'}."


def fastest(folder: RunFolder) -> str:
    """Return a sentence on the fastest variant, or an empty string if only one was trained.

    Like `llmsys compare`, it uses only rounds that other programs did not disturb. If the variants
    ran one after another, they have no rounds in common, and the sentence says so.
    """
    plan = folder.results.get("plan")
    if isinstance(plan, of.Plan) and not plan.variants_fit_together:
        return (
            "Cannot tell which variant is the fastest: they do not fit in memory together and ran "
            "one after another, so a ratio divides times of different moments."
        )
    rounds = {name: pair for name, pair in round_ratios(folder.samples()).items() if name != SINGLE}
    if not rounds:
        return ""
    decided = {
        name: pair for name, pair in rounds.items() if has_enough_rounds(len(pair[0]), pair[1])
    }
    if not decided:
        used, disturbed = max(((len(logs), lost) for logs, lost in rounds.values()))
        return (
            f"Cannot tell which variant is the fastest: {used} of {used + disturbed} rounds were "
            "not disturbed by other programs, which is too few."
        )
    ratios = {name: [math.exp(log) for log in logs] for name, (logs, _) in decided.items()}
    best = min(ratios, key=lambda name: statistics.median(ratios[name]))
    return against(best, PEER, ratios[best], len(ratios))
