"""Write the pages whose figures are computed: answers, tutorial, choosing, numerics and others.

    make docs        or        python docs/computed.py

A page is written from Markdown in docs/source. Its Python blocks are run, in one namespace per
section (a heading with `##`), so that each section can be typed by itself. Then these lines

    | question | = unit | `call` | ...      `=` becomes the value of the call
    `call` is {{=}}                         the same in a sentence
    {{expression}}                          the value alone, for figures from stored rows
    <!-- python                             a block, up to -->, that is run but not shown
    @accounting x. z.                       rows of accounting's own table, by their ids
    @rows warmup process=cold: a, b as c    a table of stored rows, some columns, some renamed
    @script train                           the file docs/tutorial/train.py
    @output train                           what it printed when docs/tutorial/run.py ran it
    @results ddp two-hosts case=step: a     the same, of a bench's newest results; digits=6 for more

are replaced by their values. No figure on these pages is typed by hand: a test writes the pages
again, and another runs every call of the finished page in a fresh namespace.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "answers.md": "answers-*.md",
    "choosing.md": "choosing.md",
    "scaling_out.md": "scaling_out.md",
    "numerics.md": "numerics.md",
    "tutorial.md": "tutorial.md",
}
ACCOUNTING = ROOT / "packages" / "accounting" / "tests"
NOTE = "<!-- Written by docs/computed.py from docs/source: change that, then `make docs`. -->"

#: Flags of a processor on which the speed of a product depends.
NAMED_FLAGS = ("avx2", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")

Row = dict[str, Any]


def main() -> None:
    """Write every page and every picture."""
    os.chdir(ROOT)  # A reader types the calls in this folder.
    for name in PAGES:
        (DOCS / name).write_text(compute_page(name))
    (ROOT / "README.md").write_text(compute_readme())
    (DOCS / "benchmarking.md").write_text(compute_benchmarking())
    for name, drawing in draw_pictures().items():
        (DOCS / "answers" / "pictures" / name).write_text(drawing)


def draw_pictures() -> dict[str, str]:
    """Return every picture by the name of its file, drawn from the stored rows."""
    pictures: dict[str, str] = _import_module(
        "pictures", DOCS / "answers" / "pictures.py"
    ).draw_all()
    return pictures


def compute_page(name: str) -> str:
    """Return one page with its figures."""
    text = "\n".join(path.read_text() for path in sorted((DOCS / "source").glob(PAGES[name])))
    finished = "".join(map(_compute_section, split_sections(text)))
    finished = finished.replace("@contents\n", list_contents(finished))
    title, rest = finished.split("\n", 1)
    return f"{title}\n\n{NOTE}\n{rest}".rstrip() + "\n"


def split_sections(text: str) -> list[str]:
    """Split a text at its `##` headings; the first part is the text before them."""
    return re.split(r"^(?=## )", text, flags=re.MULTILINE)


def _compute_section(text: str) -> str:
    namespace: dict[str, Any] = {"row": row, "rows": rows, "result": result}
    parts: list[str] = []
    blocks = r"(^```python\n.*?^```$|^<!-- python\n.*?^-->\n\n)"
    for part in re.split(blocks, text, flags=re.DOTALL | re.MULTILINE):
        if part.startswith("```python"):
            parts.append(part)
            run(part.removeprefix("```python\n").removesuffix("```"), namespace)
        elif part.startswith("<!-- python"):
            run(part.removeprefix("<!-- python\n").removesuffix("-->\n\n"), namespace)
        else:
            parts.append("\n".join(_write_line(line, namespace) for line in part.split("\n")))
    return "".join(parts)


def compute_readme() -> str:
    """Return the root README with a new table between its markers."""
    return re.sub(
        r"(<!-- (@(?:results|rows) .*?) -->\n).*?(?=<!-- end -->)",
        lambda m: f"{m[1]}{chr(10).join(_iter_table_lines(m[2]))}\n",
        (ROOT / "README.md").read_text(),
        flags=re.DOTALL,
    )


def compute_benchmarking() -> str:
    """Return docs/benchmarking.md with the figures that no check of the audit compares."""
    from llmsys_suite.report.unaudited import UNAUDITED

    lines = ["| stage | figures (and the errors that no check finds) |", "|---|---|"]
    lines += [f"| {stage} | {entry} |" for stage, entries in UNAUDITED.items() for entry in entries]
    begin, end = "<!-- unaudited -->\n", "<!-- /unaudited -->"
    head, rest = (DOCS / "benchmarking.md").read_text().split(begin)
    return head + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def run(code: str, namespace: dict[str, Any]) -> None:
    """Execute a block as if it were typed, without its output."""
    code = re.sub(r"^(\s*)print\((.*)\)$", r"\1(\2)", code, flags=re.MULTILINE)
    exec(compile(code, "<page>", "exec"), namespace)


def row(name: str, /, **wanted: Any) -> Row:
    """Return the only stored row of docs/answers/rows/NAME.json that matches."""
    (matching,) = rows(name, **wanted)
    return matching


def rows(name: str, /, **wanted: Any) -> list[Row]:
    """Return the stored rows of docs/answers/rows/NAME.json that match."""
    return _select_rows(_read_stored(name)["rows"], wanted)


def result(name: str, label: str, /, **wanted: Any) -> Row:
    """Return the only row of a bench's newest results that matches."""
    (matching,) = _select_rows(
        _import_module("measure", DOCS / "measure.py").find_newest(name, label)["rows"], wanted
    )
    return matching


def list_contents(text: str) -> str:
    """Return links to all headings, one line per `##` heading with its subheadings."""
    lines: list[str] = []
    for marks, heading in re.findall(r"^(##+) (.*)$", text, re.MULTILINE):
        link = f"[{heading}](#{get_anchor(heading)})"
        if marks == "##":
            lines.append(f"- {link}")
        else:
            lines[-1] += (": " if lines[-1].count("](") == 1 else " · ") + link
    return "\n".join(lines) + "\n"


def get_anchor(heading: str) -> str:
    """Return the anchor that GitHub and the site generate for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def format_value(value: Any) -> str:
    """Format a value as the pages write it."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.7g}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.0f}" if abs(value) < 1e16 else f"{value:.6g}"
    return str(value)


def _write_line(line: str, namespace: dict[str, Any]) -> str:
    if line.startswith("@accounting "):
        return "\n".join(_iter_question_rows(line.split()[1:], namespace))
    if line.startswith("@script "):
        script = DOCS / "tutorial" / f"{line.split()[1]}.py"
        return f"```py\n{script.read_text().rstrip()}\n```"
    if line.startswith("@output "):
        output = DOCS / "tutorial" / "outputs" / f"{line.split()[1]}.txt"
        return f"```text\n{output.read_text().rstrip()}\n```"
    if line == "@models":
        return "\n".join(_iter_model_rows(namespace))
    if line == "@sizes":
        return "\n".join(_iter_size_rows(namespace))
    if line == "@largest":
        return "\n".join(_iter_largest_rows())
    if line.startswith(("@rows ", "@results ")):
        return "\n".join(_iter_table_lines(line))
    cells = re.findall(r"(?<=\| )=(?: [^|]*)?(?= \|)", line)
    if cells:
        (call,) = re.findall(r"\| `([^`]+)` \|", line)
        value = format_value(eval(call, namespace))
        return line.replace(f"| {cells[0]} |", f"| {value}{cells[0][1:].rstrip()} |", 1)
    line = re.sub(
        r"`([^`]+)`( \w+) \{\{=\}\}",
        lambda m: f"`{m[1]}`{m[2]} {format_value(eval(m[1], namespace))}",
        line,
    )
    return re.sub(r"\{\{(.+?)\}\}", lambda m: _format_in_sentence(eval(m[1], namespace)), line)


def _format_in_sentence(value: Any) -> str:
    """Format a figure within a sentence, with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else format_value(value)


def _iter_question_rows(prefixes: list[str], namespace: dict[str, Any]) -> Iterator[str]:
    """Yield the rows of accounting's table whose ids have one of the prefixes, evaluated here."""
    if str(ACCOUNTING) not in sys.path:
        sys.path.insert(0, str(ACCOUNTING))
    from answers import ANSWERS

    yield "| question | answer | call | derivation |"
    yield "|---|---|---|---|"
    for answer in ANSWERS:
        if answer.id.startswith(tuple(prefixes)):
            value = f"{format_value(eval(answer.call, namespace))} {answer.unit}".rstrip()
            # Markdown would show the text between two asterisks in italics, without them.
            derivation = re.sub(r" *\* *", " × ", answer.derivation)
            yield f"| {answer.question} | {value} | `{answer.call}` | {derivation} |"


def _iter_model_rows(namespace: dict[str, Any]) -> Iterator[str]:
    """Yield one row per published model; the head of a column is the call that computes it."""
    calls = (
        "parameters(MODELS[name]).total",
        "parameters(MODELS[name], active=True).total",
        "kv_cache(MODELS[name]).total",
    )
    yield "| name | " + " | ".join(f"`{call}`" for call in calls) + " |"
    yield "|---|---|---|---|"
    for name in namespace["MODELS"]:
        values = (format_value(eval(call, namespace | {"name": name})) for call in calls)
        yield f"| {name} | " + " | ".join(values) + " |"


def _iter_size_rows(namespace: dict[str, Any]) -> Iterator[str]:
    """Yield the memory of a training step of each of the course's models, in two precisions."""
    call = "training_memory(COURSE[{name!r}], batch=4, seq=512, precision={precision!r})"
    for name in namespace["COURSE"]:
        wide = call.format(name=name, precision="fp32")
        mixed = eval(call.format(name=name, precision="mixed_bf16"), namespace)
        cells = (
            f"{eval(wide, namespace).total / 2**30:.1f}",
            f"`round({wide}.total / 2**30, 1)`",
            f"{mixed.total / 2**30:.1f}",
            f"{mixed['activations'].total / 2**30:.1f}",
        )
        yield f"| {name} | " + " | ".join(cells) + " |"


def _iter_largest_rows() -> Iterator[str]:
    """Yield the largest allocations at the peak of the 2.7B model's step."""
    for entry in _read_stored("layers")["rows"][-1]["largest"]:
        columns = ("operator", "made_in", "module", "blocks", "largest_mib", "total_mib")
        yield "| " + " | ".join(_format_cell(entry[column]) for column in columns) + " |"


def _iter_table_lines(line: str) -> Iterator[str]:
    """Yield a table of stored rows, then the command and the machine that produced them."""
    selection, _, columns = line.partition(": ")
    directive, name, *more = selection.split()
    if directive == "@results":
        stored = _import_module("measure", DOCS / "measure.py").find_newest(name, more.pop(0))
    else:
        stored = _read_stored(name)
    wanted: Row = {}
    for condition in more:
        key, _, value = condition.partition("=")
        wanted[key] = [_parse_value(part) for part in value.split("/")]
    digits = wanted.pop("digits", [3])[0]
    pairs = [column.split(" as ") for column in columns.split(", ")]
    yield "| " + " | ".join(pair[-1].replace("_", " ") for pair in pairs) + " |"
    yield "|" + "---|" * len(pairs)
    matching = _select_rows(stored["rows"], wanted)
    if not matching:
        raise ValueError(f"no row for {line!r}")
    for entry in matching:
        yield "| " + " | ".join(_format_cell(entry.get(pair[0]), digits) for pair in pairs) + " |"
    yield ""
    yield f"*{_describe_provenance(stored)}*"


def _select_rows(rows: list[Row], wanted: Row) -> list[Row]:
    return [
        entry
        for entry in rows
        if all(
            entry.get(key) in (value if isinstance(value, list) else [value])
            for key, value in wanted.items()
        )
    ]


def _parse_value(text: str) -> Any:
    text = text.replace("~", " ")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _format_cell(value: Any, digits: int = 3) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        whole = digits == 3 and 999.5 <= abs(value) < 1e15
        return f"{value:,.0f}" if whole else f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _describe_provenance(stored: Row) -> str:
    facts = stored["environment"]
    parts = facts["gpus"] or [facts["processor"], f"{facts['cores']} cores"]
    if "memory_gib" in facts:
        parts = [*parts, f"{facts['memory_gib']:.0f} GiB"]
    if facts.get("threads") and "docs/answers/" in stored["command"]:
        noun = "thread" if facts["threads"] == 1 else "threads"
        parts = [*parts, f"{facts['threads']} {noun} per process"]
    if flags := [flag for flag in facts.get("cpu_flags", ()) if flag in NAMED_FLAGS]:
        parts = [*parts, " ".join(flags)]
    return (
        f"{_format_command(stored['command'])}, {facts['date'][:10]}: {', '.join(parts)}; "
        f"torch {facts['torch']}, Python {facts['python']}."
    )


def _format_command(command: str) -> str:
    """Return a command as code, without the words that may precede it and cannot be typed."""
    words, _, code = command.rpartition(": ")
    return f"{words[:1].upper()}{words[1:]} `{code}`".strip()


def _read_stored(name: str) -> Row:
    stored: Row = json.loads((DOCS / "answers" / "rows" / f"{name}.json").read_text())
    return stored


def _import_module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses look up their module.
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
