"""The report of a run: the same tables as Markdown and as one HTML page with its plots inside."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmsys_suite.folder import RunFolder
from llmsys_suite.report import plots

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1d2330; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #e3e6ec; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.failed { background: #fbdcdc; color: #8c1010; font-weight: 600; }
.passed { color: #14692c; } svg { max-width: 100%; height: auto; } p.note { color: #596275; }
"""
MIB = 2**20


@dataclass(frozen=True)
class Table:
    """Rows of one shape; `failed` marks those to be seen in red."""

    rows: Sequence[dict[str, Any]]
    failed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Section:
    """A heading, sentences, tables and plots (SVG)."""

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[str] = ()
    details: Sequence[str] = field(default=())


def write_report(folder: RunFolder) -> str:
    """Write report.md and report.html from what the folder holds; return the first."""
    made = list(sections(folder))
    markdown = "\n".join(_markdown(section) for section in made)
    folder.write_text("report.md", markdown)
    folder.write_text("report.html", _page(made))
    if folder.complete:
        folder.seal()
    return markdown


def headline(path: Path) -> str:
    """The lines of a report that a terminal shows at the end of a run."""
    folder = RunFolder(path)
    stages = folder.summary["stages"]
    lines = []
    lines += [f"FAILED stage {s}: {r['failed']}" for s, r in stages.items() if "failed" in r]
    if "losses" in stages.get("train", {}):
        losses = stages["train"]["losses"]["single process"]
        lines.append(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    if "checks" in stages.get("audit", {}):
        audit = stages["audit"]
        lines.append(f"audit: {audit['checks'] - len(audit['red'])}/{audit['checks']} passed")
        lines += [f"  FAILED {name}" for name in audit["red"]]
    lines.append(f"report: {path / 'report.html'}")
    return "\n".join(lines)


def sections(folder: RunFolder) -> Iterator[Section]:
    """The report's parts, those of the stages that ran."""
    stages = folder.summary["stages"]
    yield _overview(folder, stages)
    makers = {
        "plan": _plan,
        "links": _links,
        "attention": _attention,
        "train": _train,
        "parallel": _parallel,
        "profile": _profile,
        "precision": _precision,
        "memory": _memory,
        "scale": _scale,
        "inspect": _inspect,
        "compress": _compress,
    }
    for stage, make in makers.items():
        result = stages.get(stage)
        if result is None:
            continue
        if "failed" in result:
            yield Section(stage.capitalize(), [f"**This stage failed: {result['failed']}.**"])
        elif "skipped" in result:
            yield Section(stage.capitalize(), [f"Skipped: {result['skipped']}."])
        else:
            yield make(result)
    if "checks" in stages.get("audit", {}):
        yield _audit(folder)


def _overview(folder: RunFolder, stages: dict[str, Any]) -> Section:
    config, env = folder.config, folder.read_json("env.json")
    where = ", ".join(env["gpus"]) or f"{env['processor']}, {env['cores']} cores"
    notes = [
        f"{config.size} model, {config.world} ranks on {config.backend}, {config.rows} rows of "
        f"{config.context} tokens a step, seed {config.seed}.",
        f"{env['date']}: {where}; torch {env['torch']}, Python {env['python']}; "
        f"load average {env['load_average']} at the start.",
    ]
    audited = "checks" in stages.get("audit", {})
    if not folder.complete and not audited:
        notes.append("**This run is incomplete.**")
    if audited:
        failed = stages["audit"]["red"]
        count = stages["audit"]["checks"]
        notes.append(
            f"**{len(failed)} of {count} audit checks failed.**"
            if failed
            else f"**All {count} audit checks passed.**"
        )
    rows = [
        {
            "stage": name,
            "seconds": result["stage_seconds"],
            "peak process MiB": result["peak_process_mib"],
        }
        for name, result in stages.items()
    ]
    return Section("One model's life", notes, [Table(rows)] if rows else [])


def _plan(plan: dict[str, Any]) -> Section:
    rows = [
        {"figure": "parameters", "predicted": plan["parameters"]},
        {"figure": "FLOPs a step, full attention", "predicted": plan["step_flops_full"]},
        {"figure": "FLOPs a step, causal", "predicted": plan["step_flops_causal"]},
        {"figure": "training memory, MiB", "predicted": plan["training_peak_bytes"] / MIB},
        {"figure": "gradient MiB a step", "predicted": plan["gradient_bytes"] / MIB},
        {"figure": "DDP wire MiB a rank", "predicted": plan["ddp_wire_bytes_per_rank"] / MIB},
        {"figure": "one process's step, ms", "predicted": plan["step_ms"]},
    ]
    return Section("Plan", ["What the run costs, said before it ran."], [Table(rows)],
                   details=[plan["derivation"]])  # fmt: skip


def _links(links: dict[str, Any]) -> Section:
    rows = links["rows"]
    notes = ["All-reduce between the ranks, in nccl-tests' columns."]
    return Section("Links", notes, [Table(rows)], [plots.links(rows)])


def _attention(attention: dict[str, Any]) -> Section:
    shape = " x ".join(map(str, attention["shape"]))
    notes = [f"Forward and backward at (batch, heads, seq, dim) = {shape}, taking turns."]
    return Section(
        "Attention", notes, [Table(attention["rows"])], details=[str(attention["explain"])]
    )


def _train(train: dict[str, Any]) -> Section:
    losses = train["losses"]["single process"]
    notes = [
        f"The loss falls from {losses[0]:.3f} to {losses[-1]:.3f} nats a byte. The step is the "
        "slowest rank's; ratios are to torch's DDP in the same round.",
    ]
    rows = train["rows"]
    return Section(
        "Train", notes, [Table(rows)], [plots.losses(train["losses"]), plots.phases(rows)]
    )


def _parallel(parallel: dict[str, Any]) -> Section:
    notes = ["The model split by layers and inside layers, on torch's own tools."]
    return Section("Parallel", notes, [Table(parallel["rows"])])


def _profile(profile: dict[str, Any]) -> Section:
    tables = [Table(profile["protocol"]), Table(profile["operators"])]
    if profile["compiled"]:
        tables.append(Table(profile["compiled"]))
    notes = ["Mean and deviation over ten steps after so many warm-ups; then one profiled step."]
    return Section("Profile", notes, tables)


def _precision(precision: dict[str, Any]) -> Section:
    dtypes = [
        {"part": part, "dtype": dtype} for part, dtype in precision["autocast_dtypes"].items()
    ]
    notes = ["Adding 0.01 a thousand times; dtypes under bf16 autocast; both in time."]
    tables = [Table(precision["accumulation"]), Table(dtypes), Table(precision["timing"])]
    return Section("Precision", notes, tables)


def _memory(memory: dict[str, Any]) -> Section:
    tables, drawn = [], []
    for size, model in memory["models"].items():
        tables.append(Table([{"model": size, **row} for row in model["peaks"]]))
        tables.append(Table(model["largest"]))
        drawn.append(plots.timeline(size, model["training_timeline"], model["inference_timeline"]))
    notes = ["Live bytes, counted operator by operator on the meta device."]
    return Section("Memory", notes, tables, drawn)


def _scale(scale: dict[str, Any]) -> Section:
    notes = []
    if scale["law"]:
        at = scale["extrapolated"]
        notes.append(
            f"N_opt = {scale['law']['scale']:.3g} C^{scale['law']['exponent']:.3f}; at "
            f"{at['compute_flops']:.1e} FLOPs {at['parameters']:.3g} parameters, 95 % interval "
            f"{at['low']:.3g} to {at['high']:.3g}. So small a budget shows the method, not a law."
        )
    notes += [f"Doubt: {doubt}." for doubt in scale["doubts"]]
    return Section("Scale", notes, [Table(scale["runs"])], [plots.isoflop(scale)])


def _inspect(inspect: dict[str, Any]) -> Section:
    notes = [f"The logit lens, and the head that is most of each kind; more in {inspect['page']}."]
    return Section("Inspect", notes, [Table(inspect["lens"]), Table(inspect["heads"])])


def _compress(compress: dict[str, Any]) -> Section:
    notes = ["Bytes against held-out loss of the trained model."]
    return Section(
        "Compress", notes, [Table(compress["rows"])], [plots.compression(compress["rows"])]
    )


def _audit(folder: RunFolder) -> Section:
    checks = folder.read_json("checks.json")
    rows = [
        {
            "check": c["name"],
            "source": c["source"],
            "says": c["actual"],
            "against": c["against"],
            "which says": c["expected"],
            "least": c["low"],
            "most": c["high"],
            "furthest off": c["where"],
            "passed": "yes" if c["passed"] else "NO",
        }
        for c in checks
    ]
    failed = frozenset(i for i, c in enumerate(checks) if not c["passed"])
    notes = ["Each check names its two sources; a figure without a row here has no check."]
    return Section("Audit", notes, [Table(rows, failed)])


def _markdown(section: Section) -> str:
    lines = [f"## {section.title}", ""]
    for note in section.notes:
        lines += [note, ""]
    for table in section.tables:
        if table.rows:
            columns = _columns(table)
            lines.append("| " + " | ".join(columns) + " |")
            lines.append("|" + "---|" * len(columns))
            lines += [
                "| " + " | ".join(_cell(row.get(c, "")) for c in columns) + " |"
                for row in table.rows
            ]
            lines.append("")
    for detail in section.details:
        lines += ["```", detail, "```", ""]
    return "\n".join(lines)


def _page(made: list[Section]) -> str:
    body = "\n".join(_html(section) for section in made)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>llmsys report</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _html(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    for note in section.notes:
        strong = note.startswith("**")
        text = html.escape(note.strip("*"))
        parts.append(f"<p><strong>{text}</strong></p>" if strong else f"<p class='note'>{text}</p>")
    parts += section.plots
    for table in section.tables:
        if table.rows:
            columns = _columns(table)
            head = "".join(f"<th>{html.escape(c.replace('_', ' '))}</th>" for c in columns)
            rows = []
            for i, row in enumerate(table.rows):
                cells = "".join(f"<td>{html.escape(_cell(row.get(c, '')))}</td>" for c in columns)
                mark = " class='failed'" if i in table.failed else ""
                rows.append(f"<tr{mark}>{cells}</tr>")
            parts.append(f"<table><tr>{head}</tr>{''.join(rows)}</table>")
    for detail in section.details:
        parts.append(
            f"<details><summary>derivation</summary><pre>{html.escape(detail)}</pre></details>"
        )
    return "\n".join(parts)


def _columns(table: Table) -> list[str]:
    return list(dict.fromkeys(column for row in table.rows for column in row))


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)
