"""The report's section of each stage: one sentence about its numbers, one plot, one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from llmsys_suite import results as stage_results
from llmsys_suite.folder import RunFolder
from llmsys_suite.measure.samples import PEER
from llmsys_suite.report import plots
from llmsys_suite.report.sentences import compare_interleaved, describe_fastest
from llmsys_suite.report.unaudited import describe_unaudited
from llmsys_suite.results import format_cell

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
    "audit": {"name": "check", "source": "source", "actual": "value", "against": "against",
        "low": "minimum", "high": "maximum", "where": "largest difference"},
}  # fmt: skip


def pick(rows: Sequence[Row], columns: dict[str, str]) -> list[Row]:
    """Return the rows with only the keys of `columns`, renamed to the values of `columns`."""
    return [{new: row[old] for old, new in columns.items() if old in row} for row in rows]


def build_plan_rows(results: Results, evidence: Row) -> list[Row]:
    """Return rows of predicted and measured values and their ratio, if neither is missing or 0."""
    plan = results["plan"]
    train = results.get("train")
    rows = train.rows if isinstance(train, stage_results.Train) else []
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
        if measured and predicted
    ]


@dataclass(frozen=True)
class Section:
    """The section of one stage; `unaudited` is a sentence on the figures that no check covers."""

    title: str
    finding: str
    rows: Sequence[Row] = ()
    #: An SVG, or an empty string.
    picture: str = ""
    #: Titles, and the tables or texts that are folded under them.
    folded: Sequence[tuple[str, Sequence[Row] | str]] = ()
    unaudited: str = ""


def iter_sections(folder: RunFolder) -> Iterator[Section]:
    """Yield the sections of the finished stages, in the order in which they ran."""
    results = folder.results
    for stage, result in results.items():
        if isinstance(result, stage_results.Skipped):
            section = Section(stage, f"Skipped: {result.skipped}.")
        else:
            section = MAKERS[stage](result, results, folder)
        yield replace(section, unaudited=describe_unaudited(stage) if "audit" in results else "")


def _build_plan(plan: stage_results.Plan, results: Results, folder: RunFolder) -> Section:
    evidence = folder.read_json("evidence.json") if "audit" in results else {}
    rows = build_plan_rows(results, evidence)
    worst = max(rows, key=lambda row: abs(math.log(row["ratio"])))
    finding = (
        f"Largest deviation: the measured {worst['figure']} is {worst['ratio']:.3g} times the "
        "planned value."
    )
    parts = [
        {"part": name, "MiB": nbytes / MIB} for name, nbytes in plan.training_bytes_by_part.items()
    ]
    memory = "memory at the peak of one process's step, with AdamW's moments"
    return Section("plan", finding, rows, folded=[(memory, parts), ("derivation", plan.derivation)])


def _build_links(links: stage_results.Links, *_: Any) -> Section:
    rows = [row for row in links.rows if row["case"] == "all_reduce"]
    largest = max(row["size_bytes"] for row in rows)
    best = max((r for r in rows if r["size_bytes"] == largest), key=lambda r: r["busbw_gbps"])
    finding = (
        f"An all-reduce of {largest / MIB:g} MiB is fastest with {best['algorithm']}: "
        f"{best['busbw_gbps']:.3g} GB/s, {best['ratio_p50']:.3g} times the rate of its peer (80 % "
        f"of rounds: {best['ratio_p10']:.3g} to {best['ratio_p90']:.3g})."
    )
    shown = pick(rows, COLUMNS["links"])
    largest_rows = [row for row in shown if row["bytes"] == largest]
    return Section("links", finding, largest_rows, folded=[("all sizes", shown)])


def _build_attention(attention: stage_results.Attention, *_: Any) -> Section:
    rows = attention.rows
    ours = min((r for r in rows if r["kernel"] != "SDPA"), key=lambda r: r["forward_backward_ms"])
    shown = pick(rows, COLUMNS["attention"])
    return Section(
        "attention",
        compare_interleaved(attention.interleaved, ours["kernel"], "SDPA"),
        shown,
        folded=[("why this kernel", attention.explain)],
    )


def _build_train(train: stage_results.Train, _: Results, folder: RunFolder) -> Section:
    shown = pick(train.rows, COLUMNS["train"])
    folded = [("tensors that a rank stores after the training, MiB", _list_stored_rows(train))]
    received = [row for row in train.rows if "wire_bytes" in row]
    if received:
        columns = {"variant": "variant", "wire_bytes": "bytes"}
        folded.append(("bytes that a rank's sockets receive per step", pick(received, columns)))
    picture = plots.plot_phases(train.rows)
    return Section("train", describe_fastest(folder), shown, picture, folded)


def _list_stored_rows(train: stage_results.Train) -> list[Row]:
    """Return the maximum over ranks of the stored MiB, by variant and kind of tensor."""
    return [
        {"variant": name}
        | {kind: max(n[kind] for n in final["stored"]) / MIB for kind in final["stored"][0]}
        for name, final in train.final_weights.items()
    ]


def _build_learn(learn: stage_results.Learn, _: Results, folder: RunFolder) -> Section:
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


def _build_parallel(parallel: stage_results.Parallel, *_: Any) -> Section:
    rows = parallel.rows
    best, *slower = sorted(rows, key=lambda row: row["iteration_ms"])
    finding = f"{best['split']} takes {format_cell(best['iteration_ms'])} ms per iteration"
    if slower:
        ratio = best["iteration_ms"] / slower[0]["iteration_ms"]
        finding += f", {ratio:.2f} of {slower[0]['split']}'s time"
    worst = max((abs(row["loss"] / row["single_loss"] - 1), row["split"]) for row in rows)
    finding += f". The largest relative difference from one process's loss is {worst[0]:.1e} "
    finding += f"({worst[1]})."
    return Section("parallel", finding, pick(rows, COLUMNS["parallel"]))


def _build_memory(memory: stage_results.Memory, _: Results, folder: RunFolder) -> Section:
    longest = memory.peaks[-1]
    keys = ("training_peak_mib", "checkpointed_peak_mib", "inference_peak_mib")
    training, checkpointed, inference = (format_cell(longest[key]) for key in keys)
    finding = (
        f"Training {folder.config.size} on {memory.rows} x {longest['context']} tokens peaks at "
        f"{training} MiB, or {checkpointed} MiB if blocks are recomputed. Inference peaks at "
        f"{inference} MiB."
    )
    folded = [("largest at the peak", memory.largest)]
    shown = pick(memory.peaks, COLUMNS["memory"])
    picture = plots.plot_timeline(folder.config.size, memory.training_timeline)
    return Section("memory", finding, shown, picture, folded)


def _build_scale(scale: stage_results.Scale, *_: Any) -> Section:
    optimum = scale.extrapolated
    finding = f"No law: {'; '.join(scale.warnings)}."
    if optimum:
        width = optimum["high"] / optimum["low"] if optimum["low"] else math.inf
        bounds = f"{optimum['low']:,.0f} to {optimum['high']:,.0f}"
        interval = f"95 % interval {bounds}, {width:.1f}-fold"
        if width >= 1000:
            interval = "95 % interval wider than 1,000-fold"
        finding = (
            f"The best size grows as C^{scale.law['exponent']:.2f}; at "
            f"{optimum['compute_flops']:.3g} FLOPs it is {optimum['parameters']:,.0f} ({interval})."
        )
        if width >= 2:
            finding += " The runs do not determine it closely."
    shown = pick(scale.runs, COLUMNS["scale"])
    folded: list[tuple[str, Any]] = [("every run", shown)]
    folded += [("warnings", "\n".join(scale.warnings))] if scale.warnings else []
    by_budget = groupby(shown, key=lambda run: run["FLOPs"])
    best = [min(runs, key=lambda run: run["held out"]) for _, runs in by_budget]
    return Section("scale", finding, best, plots.plot_isoflop(scale), folded)


def _build_inspect(inspect: stage_results.Inspect, *_: Any) -> Section:
    significant = [head["kind"] for head in inspect.heads if not head["by_chance"]]
    kinds = f"heads for {', '.join(significant)}" if significant else "no head beyond chance"
    shown = pick(inspect.heads, COLUMNS["inspect"])
    lens = [("logit lens", inspect.lens)]
    return Section("inspect", f"The trained model has {kinds}.", shown, "", lens)


def _build_compress(compress: stage_results.Compress, _: Results, folder: RunFolder) -> Section:
    rows = compress.rows
    shown = pick(rows, COLUMNS["compress"])
    unit = folder.config.loss_unit
    whole = rows[0]["heldout_loss"]
    near = [row for row in rows if row["heldout_loss"] <= 1.01 * whole]
    if not near:
        return Section(
            "compress", f"The loss of the uncompressed model is {format_cell(whole)}.", shown
        )
    best = max(near, key=lambda row: row["smaller"])
    finding = (
        f"The smallest model whose loss is at most 1 % higher is that of {best['method']}: "
        f"{best['smaller']:.2g} times smaller, {best['heldout_loss'] - whole:+.4f} {unit}."
    )
    return Section("compress", finding, shown)


def _build_audit(_: stage_results.Audit, __: Results, folder: RunFolder) -> Section:
    checks = folder.read_json("checks.json")
    failed = pick([check for check in checks if not check["passed"]], COLUMNS["audit"])
    finding = f"{len(checks) - len(failed)} of {len(checks)} checks passed."
    shown = pick(checks, COLUMNS["audit"])
    return Section("audit", finding, failed, folded=[("all checks", shown)])


MAKERS: dict[str, Callable[..., Section]] = {
    "plan": _build_plan, "links": _build_links, "attention": _build_attention,
    "train": _build_train, "learn": _build_learn, "parallel": _build_parallel,
    "memory": _build_memory, "scale": _build_scale, "inspect": _build_inspect,
    "compress": _build_compress, "audit": _build_audit,
}  # fmt: skip
