"""Write the pages whose figures are computed: answers, choosing, scaling out, numerics.

    make docs        or        python docs/computed.py

A page is written from Markdown under docs/source. Its Python blocks are run, in one namespace a
section (a heading of two marks), so that each section can be typed by itself, and then

    | question | = unit | `call` | ...      `=` becomes what the call gives
    `call` is {{=}}                         the same in a sentence
    {{expression}}                          the value alone, for figures out of stored rows
    <!-- python                             a block, up to -->, that is run for these and left out
    @accounting x. z.                       rows of accounting's own table, by their ids
    @rows warmup process=cold: a, b as c    a table of stored rows, some columns, some renamed
    @results ddp two-hosts case=step: a     the same, of a bench's newest results; digits=6 for more

become what they stand for. So no figure on these pages is typed; a test writes them again, and
another types every call of the finished page into a fresh namespace.
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
}
ACCOUNTING = ROOT / "packages" / "accounting" / "tests"
NOTE = "<!-- Written by docs/computed.py from docs/source: change that, then `make docs`. -->"

# Of a processor, those that decide how fast a product is.
NAMED_FLAGS = ("avx2", "avx512_vnni", "avx512_bf16", "amx")

Row = dict[str, Any]


def main() -> None:
    """Write every page and every picture."""
    os.chdir(ROOT)  # where a reader types
    for name in PAGES:
        (DOCS / name).write_text(page(name))
    (ROOT / "README.md").write_text(readme())
    for name, drawing in drawings().items():
        (DOCS / "answers" / "pictures" / name).write_text(drawing)


def drawings() -> dict[str, str]:
    """Every picture by its file's name, drawn from the stored rows."""
    found: dict[str, str] = _module("pictures", DOCS / "answers" / "pictures.py").drawings()
    return found


def page(name: str) -> str:
    """One page, computed."""
    text = "\n".join(path.read_text() for path in sorted((DOCS / "source").glob(PAGES[name])))
    finished = "".join(map(_section, sections(text)))
    finished = finished.replace("@contents\n", contents(finished))
    title, rest = finished.split("\n", 1)
    return f"{title}\n\n{NOTE}\n{rest}".rstrip() + "\n"


def sections(text: str) -> list[str]:
    """What stands before the first heading of two marks, then each with all below it."""
    return re.split(r"^(?=## )", text, flags=re.MULTILINE)


def _section(text: str) -> str:
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
            parts.append("\n".join(_written(line, namespace) for line in part.split("\n")))
    return "".join(parts)


def readme() -> str:
    """The root README with the table between its markers written anew."""
    return re.sub(
        r"(<!-- (@(?:results|rows) .*?) -->\n).*?(?=<!-- end -->)",
        lambda m: f"{m[1]}{chr(10).join(_table(m[2]))}\n",
        (ROOT / "README.md").read_text(),
        flags=re.DOTALL,
    )


def run(code: str, namespace: dict[str, Any]) -> None:
    """Execute a block as somebody who types it would, with what it prints left out."""
    code = re.sub(r"^(\s*)print\((.*)\)$", r"\1(\2)", code, flags=re.MULTILINE)
    exec(compile(code, "<page>", "exec"), namespace)


def row(name: str, /, **wanted: Any) -> Row:
    """The one stored row of docs/answers/rows/NAME.json that matches."""
    (found,) = rows(name, **wanted)
    return found


def rows(name: str, /, **wanted: Any) -> list[Row]:
    """All stored rows of docs/answers/rows/NAME.json that match."""
    return _matching(_stored(name)["rows"], wanted)


def result(name: str, label: str, /, **wanted: Any) -> Row:
    """The one row that matches in a bench's newest results."""
    (found,) = _matching(
        _module("measure", DOCS / "measure.py").newest(name, label)["rows"], wanted
    )
    return found


def contents(text: str) -> str:
    """Links to all headings, the smaller ones after the larger one that they belong to."""
    lines: list[str] = []
    for marks, heading in re.findall(r"^(##+) (.*)$", text, re.MULTILINE):
        link = f"[{heading}](#{anchor(heading)})"
        if marks == "##":
            lines.append(f"- {link}")
        else:
            lines[-1] += (": " if lines[-1].count("](") == 1 else " · ") + link
    return "\n".join(lines) + "\n"


def anchor(heading: str) -> str:
    """What GitHub and the site make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def shown(value: Any) -> str:
    """A value as the pages write it."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.7g}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.0f}" if abs(value) < 1e16 else f"{value:.6g}"
    return str(value)


def _written(line: str, namespace: dict[str, Any]) -> str:
    if line.startswith("@accounting "):
        return "\n".join(_questions(line.split()[1:], namespace))
    if line == "@models":
        return "\n".join(_models(namespace))
    if line == "@sizes":
        return "\n".join(_sizes(namespace))
    if line == "@largest":
        return "\n".join(_largest())
    if line.startswith(("@rows ", "@results ")):
        return "\n".join(_table(line))
    cells = re.findall(r"(?<=\| )=(?: [^|]*)?(?= \|)", line)
    if cells:
        (call,) = re.findall(r"\| `([^`]+)` \|", line)
        value = shown(eval(call, namespace))
        return line.replace(f"| {cells[0]} |", f"| {value}{cells[0][1:].rstrip()} |", 1)
    line = re.sub(
        r"`([^`]+)`( \w+) \{\{=\}\}",
        lambda m: f"`{m[1]}`{m[2]} {shown(eval(m[1], namespace))}",
        line,
    )
    return re.sub(r"\{\{(.+?)\}\}", lambda m: _said(eval(m[1], namespace)), line)


def _said(value: Any) -> str:
    """A figure within a sentence: three digits."""
    return f"{value:.3g}" if isinstance(value, float) else shown(value)


def _questions(prefixes: list[str], namespace: dict[str, Any]) -> Iterator[str]:
    """The rows of accounting's table whose ids begin so, their calls run in this page's names."""
    if str(ACCOUNTING) not in sys.path:
        sys.path.insert(0, str(ACCOUNTING))
    from answers import ANSWERS

    yield "| question | answer | call | derivation |"
    yield "|---|---|---|---|"
    for answer in ANSWERS:
        if answer.id.startswith(tuple(prefixes)):
            value = f"{shown(eval(answer.call, namespace))} {answer.unit}".rstrip()
            yield f"| {answer.question} | {value} | `{answer.call}` | {answer.derivation} |"


def _models(namespace: dict[str, Any]) -> Iterator[str]:
    """One row a published model, each column by the call at its head."""
    calls = (
        "parameters(MODELS[name]).total",
        "parameters(MODELS[name], active=True).total",
        "kv_cache(MODELS[name]).total",
    )
    yield "| name | " + " | ".join(f"`{call}`" for call in calls) + " |"
    yield "|---|---|---|---|"
    for name in namespace["MODELS"]:
        values = (shown(eval(call, namespace | {"name": name})) for call in calls)
        yield f"| {name} | " + " | ".join(values) + " |"


def _sizes(namespace: dict[str, Any]) -> Iterator[str]:
    """What a step of each of the course's models holds, in two precisions."""
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


def _largest() -> Iterator[str]:
    """What holds most at the peak of the 2.7B model's step."""
    for each in _stored("layers")["rows"][-1]["largest"]:
        columns = ("operator", "made_in", "module", "blocks", "largest_mib", "total_mib")
        yield "| " + " | ".join(_cell(each[column]) for column in columns) + " |"


def _table(line: str) -> Iterator[str]:
    """A table of stored rows, with the command and the machine that made them below."""
    asked, _, columns = line.partition(": ")
    directive, name, *more = asked.split()
    if directive == "@results":
        kept = _module("measure", DOCS / "measure.py").newest(name, more.pop(0))
    else:
        kept = _stored(name)
    wanted: Row = {}
    for condition in more:
        key, _, value = condition.partition("=")
        wanted[key] = [_parsed(part) for part in value.split("/")]
    digits = wanted.pop("digits", [3])[0]
    pairs = [column.split(" as ") for column in columns.split(", ")]
    yield "| " + " | ".join(pair[-1].replace("_", " ") for pair in pairs) + " |"
    yield "|" + "---|" * len(pairs)
    found = _matching(kept["rows"], wanted)
    if not found:
        raise ValueError(f"no row for {line!r}")
    for each in found:
        yield "| " + " | ".join(_cell(each.get(pair[0]), digits) for pair in pairs) + " |"
    yield ""
    yield f"*{_provenance(kept)}*"


def _matching(rows: list[Row], wanted: Row) -> list[Row]:
    return [
        each
        for each in rows
        if all(
            each.get(key) in (value if isinstance(value, list) else [value])
            for key, value in wanted.items()
        )
    ]


def _parsed(text: str) -> Any:
    text = text.replace("~", " ")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _cell(value: Any, digits: int = 3) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        whole = digits == 3 and 1000 <= abs(value) < 1e15
        return f"{value:,.0f}" if whole else f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _provenance(kept: Row) -> str:
    facts = kept["environment"]
    parts = facts["gpus"] or [facts["processor"], f"{facts['cores']} cores"]
    if "memory_gib" in facts:
        parts = [*parts, f"{facts['memory_gib']:.0f} GiB"]
    if facts.get("threads") and "docs/answers/" in kept["command"]:
        parts = [*parts, f"{facts['threads']} thread{'s' * (facts['threads'] > 1)} a process"]
    if flags := [flag for flag in facts.get("cpu_flags", ()) if flag in NAMED_FLAGS]:
        parts = [*parts, " ".join(flags)]
    return (
        f"`{kept['command']}`, {facts['date'][:10]}: {', '.join(parts)}; "
        f"torch {facts['torch']}, Python {facts['python']}."
    )


def _stored(name: str) -> Row:
    kept: Row = json.loads((DOCS / "answers" / "rows" / f"{name}.json").read_text())
    return kept


def _module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
