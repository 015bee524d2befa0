"""The report of a run: one self-contained HTML page, and its sentences and tables in Markdown."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmsys_suite.folder import RunFolder
from llmsys_suite.measure.samples import SINGLE
from llmsys_suite.report import plots
from llmsys_suite.report.sections import Results, Row, Section, iter_sections
from llmsys_suite.report.sentences import describe_fastest
from llmsys_suite.report.unaudited import NOT_AUDITED, OF_THE_RUN
from llmsys_suite.results import Audit, Learn, Plan, Train, format_cell

if TYPE_CHECKING:
    from llmsys_suite.ranks.rank import Run

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #596275; --line: #dfe3ea; --paper: #fff;
  --card: #f5f7fa; --red: #a01515; --green: #14692c; --link: #1f5fa8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ee; --soft: #a3adbf; --line: #343b48;
  --paper: #14171d; --card: #1c2129; --red: #ff8a8a; --green: #7ddc98; --link: #86b8f2; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.15rem;
  margin: 2.2rem 0 .4rem; text-transform: capitalize; } a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: .2rem .9rem; border-block: 1px solid var(--line);
  padding: .4rem 0; } .soft { color: var(--soft); } .finding { font-weight: 600; }
.good { color: var(--green); } .bad { color: var(--red); }
.two { display: flex; flex-wrap: wrap; gap: 0 2rem; align-items: start; }
.two > figure { flex: 0 1 29rem; } .two > div { max-width: 100%; } .top > div { flex: 1 1 24rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums;
  font-size: .87rem; } th, td { padding: .12rem .45rem; text-align: right;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
#audit .two td { color: var(--red); } svg { max-width: 100%; height: auto; display: block; }
pre { background: var(--card); padding: .6rem; white-space: pre-wrap; font-size: .8rem; margin: 0; }
figure { margin: .4rem 0; } figcaption, summary { color: var(--soft); font-size: .87rem; }
@media print { nav, details { display: none; } section { break-inside: avoid; } }
"""
FILES = ("inspect.html", "report.md", "checks.json", "summary.json", "samples.jsonl", "env.json")


def run(run: Run) -> None:
    """Write the report of the run, on rank 0."""
    if run.folder is not None:
        write_report(run.folder)


def write_report(folder: RunFolder) -> str:
    """Write report.md and report.html, and rewrite the manifest of a complete run.

    Return the text of report.md.
    """
    stage_sections = list(iter_sections(folder))
    label = OF_THE_RUN if "audit" in folder.results else ""
    head = [f"# {format_title(folder)}", "", *iter_opening_lines(folder), "", label, ""]
    markdown = "\n".join([*head, *map(_format_markdown_section, stage_sections)])
    folder.write_text("report.md", markdown)
    folder.write_text("report.html", format_page(folder, stage_sections))
    if folder.complete:
        folder.seal()
    return markdown


def format_headline(path: Path) -> str:
    """Return the summary that `llmsys run` prints after a run, with the path of the report."""
    folder = RunFolder(path)
    return "\n".join([*iter_opening_lines(folder), f"report: {path / 'report.html'}"])


def format_title(folder: RunFolder) -> str:
    """Return the title: the size of the model and, if a stage trains it, its text."""
    plan = folder.results.get("plan")
    size = f"{plan.parameters:,} parameters" if isinstance(plan, Plan) else folder.config.size
    if "train" not in folder.config.stages and "learn" not in folder.config.stages:
        return f"A decoder of {size}"
    text = folder.read_json("env.json").get("text_source", "text")
    return f"A decoder of {size}, trained on {text}"


def iter_opening_lines(folder: RunFolder) -> Iterator[str]:
    """Yield the first lines of a report: machine, failures, audit, losses and fastest variant."""
    results = folder.results
    config = folder.config
    env = folder.read_json("env.json")
    where = ", ".join(env["gpus"]) or f"{env['processor']}, {env['cores']} cores"
    ranks = "1 rank" if config.world == 1 else f"{config.world} ranks"
    yield (
        f"{where}; {ranks} on {config.backend}; torch {env['torch']}, Python "
        f"{env['python']}; {env['date']}; load {env['load_average']} at the start."
    )
    if folder.failure is not None:
        stage, reason = folder.failure
        yield f"FAILED stage {stage}: {reason}"
    missing = [s for s in config.stages if s not in results and s != "report"]
    if missing and not folder.complete:
        yield f"FAILED to end: this run was cut off before the end of {', '.join(missing)}."
    if isinstance(audit := results.get("audit"), Audit):
        yield f"audit: {audit.checks - len(audit.red)}/{audit.checks} passed"
        yield from (f"FAILED {name}" for name in audit.red)
    else:
        yield NOT_AUDITED
    if isinstance(train := results.get("train"), Train):
        losses = train.losses[SINGLE]
        change = f"{losses[0]:.3f} -> {losses[-1]:.3f}"
        yield f"loss: {change} in one process's {_format_steps(len(losses))}"
        yield describe_fastest(folder) or "Only one variant was trained."
    if isinstance(learn := results.get("learn"), Learn):
        steps, loss = learn.heldout[-1]
        parts = f" of {learn.variant}"
        if begun_at := learn.begun_at:
            parts = f", {begun_at} of a checkpoint and {steps - begun_at}{parts}"
        yield f"held out: {loss:.3f} {config.loss_unit} after {_format_steps(steps)}{parts}"


def _format_steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def format_page(folder: RunFolder, stage_sections: Sequence[Section]) -> str:
    """Return the HTML page."""
    results = folder.results
    heading = html.escape(format_title(folder))
    lines = list(iter_opening_lines(folder))
    summary = "".join(
        f'<p class="{_choose_css_class(line, results)}">{html.escape(line)}</p>'
        for line in lines[1:]
    )
    curve = ""
    samples = ""
    if isinstance(learn := results.get("learn"), Learn):
        curve = f"<figure>{plots.plot_losses(learn, folder.config.loss_unit)}</figure>"
        samples = (
            "<figure><figcaption>written after training, from held-out text</figcaption><pre>"
            f'<span class="soft">{html.escape(learn.written["prompt"])}</span>'
            f"{html.escape(learn.written['written'])}</pre></figure>"
        )
    contents = "".join(f'<a href="#{s.title}">{s.title}</a>' for s in stage_sections)
    files = "".join(f'<a href="{f}">{f}</a>' for f in FILES if (folder.path / f).exists())
    seconds = [
        {"stage": s, "seconds": r["stage_seconds"], "peak of a process, MiB": r["peak_process_mib"]}
        for s, r in folder.summary["stages"].items()
    ]
    body = "\n".join(_format_html_section(section) for section in stage_sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{heading}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{heading}</h1>"
        f'<p class="soft">{html.escape(lines[0])}</p><div class="two top"><div>{summary}</div>'
        f"{curve}</div>"
        f"{samples}<nav>{contents}</nav>\n{body}\n"
        f"<details><summary>seconds of each stage</summary>{_format_html_table(seconds)}</details>"
        f'<p class="soft">{OF_THE_RUN if "audit" in results else ""}</p>'
        f"<nav>{files}</nav></body></html>\n"
    )


def _choose_css_class(line: str, results: Results) -> str:
    """Return the CSS classes of a line of `iter_opening_lines`."""
    if line.startswith("FAILED"):
        return "bad"
    audit = results.get("audit")
    if line.startswith("audit:") and isinstance(audit, Audit):
        return "good finding" if audit.passed else "bad finding"
    return ""


def _format_html_section(section: Section) -> str:
    parts = [f'<section id="{section.title}"><h2>{section.title}</h2>']
    parts.append(f'<p class="finding">{html.escape(section.finding)}</p><div class="two">')
    parts += [f"<figure>{section.picture}</figure>"] if section.picture else []
    parts.append(_format_html_table(section.rows) + "</div>")
    if section.unaudited:
        parts.append(f'<p class="soft">{html.escape(section.unaudited)}</p>')
    for name, content in section.folded:
        if isinstance(content, str):
            shown = f"<pre>{html.escape(content)}</pre>"
        else:
            shown = _format_html_table(content)
        parts.append(f"<details><summary>{html.escape(name)}</summary>{shown}</details>")
    return "".join(parts) + "</section>"


def _format_html_table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    columns = _list_columns(rows)
    head = "".join(f"<th>{html.escape(c.replace('_', ' '))}</th>" for c in columns)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{html.escape(format_cell(row.get(c, '')))}</td>" for c in columns)
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _format_markdown_section(section: Section) -> str:
    lines = [f"## {section.title.capitalize()}", "", section.finding, ""]
    if section.rows:
        columns = _list_columns(section.rows)
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in section.rows:
            lines.append("| " + " | ".join(format_cell(row.get(c, "")) for c in columns) + " |")
    if section.unaudited:
        lines += ["", section.unaudited]
    return "\n".join([*lines, ""])


def _list_columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))
