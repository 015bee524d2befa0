"""The finding of each stage: one sentence derived from its numbers, one picture, one table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llmsys_suite.folder import RunFolder
from llmsys_suite.measure.interleaved import Interleaved
from llmsys_suite.measure.samples import LINK_RATE, LOCAL, PEER, SINGLE
from llmsys_suite.report import plots
from llmsys_suite.report.compare import has_enough_rounds, round_ratios
from llmsys_suite.stages import results as of

MIB = 2**20
Row = dict[str, Any]
Results = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """One stage: a finding, a picture (SVG), a table and collapsed details."""

    title: str
    finding: str
    rows: Sequence[Row] = ()
    picture: str = ""
    folded: Sequence[tuple[str, Sequence[Row] | str]] = ()
    #: Rows that are shown in red.
    failed: frozenset[int] = frozenset()

    @property
    def unaudited(self) -> str:
        """Return a sentence on the figures that no check covers, or an empty string."""
        figures = UNAUDITED.get(self.title, "")
        return f"Reported, not audited: {figures}." if figures else ""


#: Figures that no check of the audit compares with an independent source, by stage.
UNAUDITED = {
    "links": "times, and the sums of collectives other than all-reduce",
    "attention": "times of kernels other than SDPA beyond their total",
    "train": "shares of the phases, hidden and exposed communication, p10 and p90 of ratios, "
    "peak memory of each variant",
    "learn": "losses between the first, one random step and the last, and the text",
    "parallel": "waiting, and the order of events in a schedule",
    "profile": "deviations and percentiles, top operators and their shares, the roofline, "
    "times of torch.compile",
    "precision": "what autocast does to other operators than those listed",
    "memory": "owners at the peak, the timeline of inference, mixed precision",
    "scale": "losses of all runs but the shortest, the interval of the extrapolation",
    "inspect": "the lens between layers, kinds of heads other than previous, the induction circuit",
    "compress": "times beyond their total and ratios",
}


def sections(folder: RunFolder) -> Iterator[Section]:
    """Yield the sections of the finished stages in their order."""
    results = folder.results
    for stage, result in results.items():
        if isinstance(result, of.Skipped):
            yield Section(stage, f"Skipped: {result.skipped}.")
        else:
            yield MAKERS[stage](result, results, folder)


def evidence_of(folder: RunFolder) -> Row:
    """Return the evidence of the audit, or {} without an audit."""
    there = isinstance(folder.results.get("audit"), of.Audit)
    evidence: Row = folder.read_json("evidence.json") if there else {}
    return evidence


def pick(rows: Sequence[Row], **columns: str) -> list[Row]:
    """Return some columns of rows under other names."""
    return [{new: row[old] for old, new in columns.items() if old in row} for row in rows]


def interval(values: Sequence[float], among: int = 1) -> tuple[float, float, float]:
    """Return the median and a 95 % interval from order statistics.

    The number of values below the true median is binomial for any distribution. `among` corrects
    for the choice of the best among that number of variants.
    """
    ordered, n = sorted(values), len(values)
    total, cut = 0.0, 0
    while cut < n // 2 and total + math.comb(n, cut) / 2**n <= 0.025 / among:
        total += math.comb(n, cut) / 2**n
        cut += 1
    low, high = (ordered[cut - 1], ordered[n - cut]) if cut else (0.0, math.inf)
    return statistics.median(ordered), low, high


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

    It uses the rounds that `llmsys compare` uses: those that other programs did not disturb.
    """
    rounds = {
        name: pair
        for name, pair in round_ratios(folder.samples()).items()
        if name not in (SINGLE, LOCAL)
    }
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


def of_rounds(interleaved: Interleaved, name: str, peer: str) -> str:
    """Return `against` for two contenders of interleaved timings."""
    pairs = zip(interleaved.seconds[name], interleaved.seconds[peer], strict=True)
    return against(name, peer, [a / b for a, b in pairs])


def planned(results: Results, evidence: Row) -> list[Row]:
    """Return the predictions of the plan beside the measured values."""
    plan, train = results["plan"], results.get("train")
    rows = train.rows if isinstance(train, of.Train) else []
    probe = evidence.get("probe", {}).get("variants", {}).get(PEER, {})
    counted = evidence.get("counted", {})
    pairs = [
        ("parameters", plan.parameters, counted.get("parameters")),
        ("GFLOPs per step", plan.step_flops_full / 1e9,
         counted["flops_full"] / 1e9 if counted else None),
        ("peak of a step, MiB", plan.training_peak_bytes / MIB,
         plan.measured_peak_bytes / MIB),
        ("DDP's wire, MiB a rank", plan.ddp_wire_bytes_per_rank / MIB,
         max(probe["received"]) / MIB if probe.get("received") else None),
        ("one process's step, ms", plan.step_ms,
         next((r["step_ms"] for r in rows if r["variant"] == SINGLE), None)),
    ]  # fmt: skip
    return [
        {"figure": name, "planned": predicted, "measured": measured, "ratio": measured / predicted}
        for name, predicted, measured in pairs
        if measured
    ]


def _plan(plan: of.Plan, results: Results, folder: RunFolder) -> Section:
    rows = planned(results, evidence_of(folder))
    worst = max(rows, key=lambda row: abs(math.log(row["ratio"])))
    finding = f"Furthest off: {worst['figure']}, measured {worst['ratio']:.3g} of what was planned."
    parts = plan.training_bytes_by_part
    picture = plots.bars([*parts], [n / MIB for n in parts.values()], "MiB at a step's peak")
    return Section("plan", finding, rows, picture, [("derivation", plan.derivation)])


def _links(links: of.Links, *_: Any) -> Section:
    rows = [row for row in links.rows if row["case"] == "all_reduce"]
    largest = max(row["size_bytes"] for row in rows)
    best = max((r for r in rows if r["size_bytes"] == largest), key=lambda r: r["busbw_gbps"])
    finding = (
        f"Of {largest / MIB:g} MiB {best['algorithm']} sums fastest: {best['busbw_gbps']:.3g} GB/s,"
        f" {best['ratio_p50']:.3g} times its peer (80 % of rounds: {best['ratio_p10']:.3g} to "
        f"{best['ratio_p90']:.3g})."
    )
    shown = pick(
        rows,
        algorithm="algorithm",
        size_bytes="bytes",
        time_us="time, µs",
        busbw_gbps="bus, GB/s",
        wire_bytes="wire bytes",
        wrong="wrong",
    )
    top = [row for row in shown if row["bytes"] == largest]
    return Section("links", finding, top, plots.links(rows), [("all sizes", shown)])


def _attention(attention: of.Attention, *_: Any) -> Section:
    rows = attention.rows
    ours = min((r for r in rows if r["kernel"] != "SDPA"), key=lambda r: r["forward_backward_ms"])
    shown = pick(
        rows,
        kernel="kernel",
        forward_backward_ms="time, ms",
        ratio_to_sdpa_p50="of SDPA's",
        max_error="largest error",
    )
    picture = plots.bars(
        [r["kernel"] for r in rows],
        [r["forward_backward_ms"] for r in rows],
        "ms, forward and backward",
    )
    return Section(
        "attention",
        of_rounds(attention.interleaved, ours["kernel"], "SDPA"),
        shown,
        picture,
        [("why this kernel", attention.explain)],
    )


def _train(train: of.Train, _: Results, folder: RunFolder) -> Section:
    shown = pick(
        train.rows,
        variant="variant",
        step_ms="step, ms",
        ratio_p50="of DDP's",
        ratio_p10="p10",
        ratio_p90="p90",
        exposed_ms="waiting, ms",
        mfu="MFU",
        final_loss="loss",
    )
    how = "an epoch, s" if folder.config.epochs else "an epoch at the median step, s"
    epochs = pick(train.rows, variant="variant", epoch_s=how, final_loss="loss")
    finding, folded = fastest(folder), [("time of an epoch", epochs)]
    link = pick(
        [row for row in train.rows if "link_ms" in row],
        variant="variant",
        wire_bytes="bytes received a step",
        link_ms="on the link, ms",
        link_computing_share="computing",
    )
    if link:
        shares = {row["variant"]: row["computing"] for row in link}
        name = f"over {LINK_RATE / 1e6:.0f} Mbit/s"
        if LOCAL in shares and PEER in shares:
            finding += (
                f" Between hosts {name}, by the bytes that sockets counted, {LOCAL} would compute "
                f"{shares[LOCAL]:.1%} of its time, {PEER} {shares[PEER]:.1%}."
            )
        folded += [(f"each variant {name}: bytes over the rate, nothing hidden", link)]
    return Section("train", finding, shown, plots.phases(train.rows), folded)


def _learn(learn: of.Learn, *_: Any) -> Section:
    first, (steps, last) = learn.heldout[0][1], learn.heldout[-1]
    finding = (
        f"{learn.variant} took the held-out loss from {first:.2f} to {last:.2f} nats a byte in "
        f"{steps} steps of {learn.tokens:,} tokens in all."
    )
    shown = [{"step": step, "held out, nats a byte": loss} for step, loss in learn.heldout]
    return Section("learn", finding, shown, plots.learning(learn))


def _parallel(parallel: of.Parallel, *_: Any) -> Section:
    rows = parallel.rows
    best, *others = sorted(rows, key=lambda row: row["iteration_ms"])
    finding = f"{best['split']} takes {best['iteration_ms']:.3g} ms an iteration"
    if others:
        ratio = best["iteration_ms"] / others[0]["iteration_ms"]
        finding += f", {ratio:.2f} of {others[0]['split']}'s time"
    off, far = max((abs(row["loss"] / row["single_loss"] - 1), row["split"]) for row in rows)
    finding += f"; the loss furthest from one process's is off by {off:.1e} of it ({far})."
    shown = pick(
        rows,
        split="split",
        iteration_ms="iteration, ms",
        bubble="bubble, planned",
        waiting="waiting",
        loss="loss",
        single_loss="one process's",
        trained_loss="trained",
    )
    picture = plots.bars(
        [r["split"] for r in rows], [r["iteration_ms"] for r in rows], "ms an iteration"
    )
    return Section("parallel", finding, shown, picture)


def _profile(profile: of.Profile, results: Results, _: RunFolder) -> Section:
    operators, products = profile.operators, profile.products
    worst = max(operators, key=lambda row: row["timer_ms"])
    finding = (
        f"{worst['phase'].capitalize()} takes longest, {worst['timer_ms']:.3g} ms under the "
        f"profiler; products are {worst['product_share']:.0%} of its operators' time, softmax "
        f"{worst['softmax_share']:.1%}."
    )
    shown = pick(
        operators,
        phase="phase",
        timer_ms="timer, ms",
        total_ms="operators, ms",
        top_operator="top",
        top_share="its share",
        product_share="products",
        softmax_share="softmax",
    )
    for row, operator in zip(shown, operators, strict=True):
        row["top"] = f"{operator['top_operator'].removeprefix('aten::')} x {operator['top_calls']}"
    plan, picture = results.get("plan"), ""
    if products and isinstance(plan, of.Plan):
        picture = plots.roofline(products, plan.peak)
    protocol = [{k: v for k, v in r.items() if not isinstance(v, list)} for r in profile.protocol]
    folded = [("steps after warm-ups, by size", protocol)]
    folded += [("products by shape", products)] if products else []
    return Section("profile", finding, shown, picture, folded)


def _precision(precision: of.Precision, *_: Any) -> Section:
    rows = precision.accumulation
    shown = pick(
        rows,
        sum_in="sum in",
        term_in="terms in",
        sum="0.01 x 1000",
        relative_error="relative error",
    )
    picture = plots.bars(
        [f"{r['term_in']} in {r['sum_in']}" for r in rows],
        [r["relative_error"] for r in rows],
        "relative error",
    )
    dtypes = [{"part": part, "dtype": x} for part, x in precision.autocast_dtypes.items()]
    folded = [("dtypes under autocast", dtypes), ("times", precision.timing)]
    return Section(
        "precision", of_rounds(precision.interleaved, "bfloat16", "float32"), shown, picture, folded
    )


def _memory(memory: of.Memory, *_: Any) -> Section:
    rows = [{"model": size, **p} for size, m in memory.models.items() for p in m["peaks"]]
    top = rows[-1]
    finding = (
        f"Training {top['model']} at {top['context']} tokens peaks at "
        f"{top['training_peak_mib'] / 1024:.3g} GiB, {top['checkpointed_peak_mib'] / 1024:.3g} with"
        f" blocks run twice; inference at {top['inference_peak_mib'] / 1024:.3g}."
    )
    shown = pick(
        rows,
        model="model",
        context="tokens",
        inference_peak_mib="inference, MiB",
        training_peak_mib="training, MiB",
        checkpointed_peak_mib="checkpointed, MiB",
        residual_stream_mib="residual stream, MiB",
    )
    folded = [(f"largest at the peak, {s}", m["largest"]) for s, m in memory.models.items()]
    folded += [
        (f"held for the backward pass, {s}, by line of model.py", m["saved"])
        for s, m in memory.models.items()
    ]
    folded += [("held for the backward pass in mixed precision", memory.mixed)]
    return Section("memory", finding, shown, plots.timeline(memory.models), folded)


def _scale(scale: of.Scale, *_: Any) -> Section:
    at, finding = scale.extrapolated, f"No law: {'; '.join(scale.warnings)}."
    if at:
        apart = at["high"] / at["low"] if at["low"] else math.inf
        finding = (
            f"The best size grows as C^{scale.law['exponent']:.2f}; at {at['compute_flops']:.0e}"
            f" FLOPs it is {at['parameters']:,.0f} (95 % interval {at['low']:,.0f} to "
            f"{at['high']:,.0f}, {apart:.1f}-fold)."
            + ("" if apart < 2 else " Cannot tell it closely.")
        )
    shown = pick(
        scale.runs,
        compute_flops="FLOPs",
        width="width",
        parameters="parameters",
        tokens="tokens",
        steps="steps",
        loss="held out",
    )
    folded: list[tuple[str, Any]] = [("every run", shown)]
    folded += [("warnings", "\n".join(scale.warnings))] if scale.warnings else []
    best = [min(runs, key=lambda run: run["held out"]) for runs in _by_budget(shown)]
    return Section("scale", finding, best, plots.isoflop(scale), folded)


def _by_budget(runs: list[Row]) -> list[list[Row]]:
    return [list(group) for _, group in groupby(runs, key=lambda run: run["FLOPs"])]


def _inspect(inspect: of.Inspect, *_: Any) -> Section:
    heads, grown = inspect.heads, inspect.induction
    real = [h["kind"] for h in heads if not h["by_chance"]]
    kinds = f"heads for {', '.join(real)}" if real else "no head beyond chance: cannot tell any"
    finding = (
        f"The trained model has {kinds}. Beside it an induction circuit was grown: right "
        f"{grown['whole']:.0%} of the time, {grown['ablated']:.0%} without its head for the token "
        f"before, {grown['all_cut']:.0%} without its first layer, {grown['restored']:.0%} with "
        "that head alone put back."
    )
    shown = pick(heads, kind="kind", layer="layer", head="head", score="score", chance="by chance")
    folded = [("logit lens", inspect.lens), ("attribution", inspect.attribution)]
    return Section("inspect", finding, shown, plots.patterns(inspect.patterns), folded)


def _compress(compress: of.Compress, *_: Any) -> Section:
    rows = compress.rows
    whole = rows[0]["heldout_loss"]
    near = [row for row in rows if row["heldout_loss"] <= 1.01 * whole]
    best = max(near, key=lambda row: row["smaller"])
    finding = (
        f"At most 1 % of loss is lost by {best['method']}: {best['smaller']:.2g} times smaller, "
        f"{best['heldout_loss'] - whole:+.4f} nats a byte."
    )
    shown = pick(
        rows,
        method="method",
        size_bytes="bytes",
        smaller="smaller, x",
        heldout_loss="held out",
        speedup_p50="speed, x",
    )
    return Section("compress", finding, shown, plots.compression(rows))


def _audit(_: of.Audit, __: Results, folder: RunFolder) -> Section:
    checks = folder.read_json("checks.json")
    shown = pick(
        checks,
        name="check",
        source="source",
        actual="says",
        against="against",
        low="least",
        high="most",
        where="furthest off",
    )
    failed = frozenset(i for i, check in enumerate(checks) if not check["passed"])
    finding = f"{len(checks) - len(failed)} of {len(checks)} checks passed."
    red = [shown[i] for i in sorted(failed)]
    return Section("audit", finding, red, "", [("all checks", shown)], frozenset(range(len(red))))


MAKERS: dict[str, Callable[..., Section]] = {
    "plan": _plan, "links": _links, "attention": _attention, "train": _train, "learn": _learn,
    "parallel": _parallel, "profile": _profile, "precision": _precision, "memory": _memory,
    "scale": _scale, "inspect": _inspect, "compress": _compress, "audit": _audit,
}  # fmt: skip
