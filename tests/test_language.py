"""Rules of language and code shape that ruff cannot check: see docs/contributing.md.

Each area of the repository is one test.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from source_text import iter_comments
from workspace import PACKAGES, ROOT

#: A docstring or comment that opens with one of these words is a fragment without a subject.
FRAGMENT = re.compile(r"(?:Of|What|Whether|Which|Who|Whose|How|Those|That|Nobody|None)\b")

FORMAT_SKIP = re.compile(r"#\s*fmt:\s*(?:skip|off)\s*$")

#: Words that say nothing about what a name stands for.
FILLER = frozenset(
    (
        *("told", "heard", "said", "asked", "look", "meet", "found", "given", "held", "kept"),
        *("own", "each", "one", "here", "made", "place", "share", "again", "way"),
    )
)

UNITS = (
    "threads?|bytes?|bits?|FLOPs?|seconds?|hours?|tokens?|USD|numbers?|calls?|steps?|lines?|times?|one"
    "|GiB|MiB|KiB|GB|MB|ms"
)
COUNTED = (
    "parameter|token|byte|rank|step|layer|head|element|call|row|worker|server|process|device|GPU"
    "|hour|million|trillion"
)

NO_ARTICLE = "longer|more|less|fewer|later|better|worse|larger|smaller"
COMPARISON = "that|as|more|less|faster|slower|larger|smaller"

#: Each idiom and what to write instead; a table of docs/contributing.md explains most of them.
IDIOMS = (
    (rf"\b(?:{UNITS}) an? (?:{COUNTED})\b", "per"),
    (rf"(?<!there )\b(?:is|are|was|were) no (?!{NO_ARTICLE})", "is not a"),
    (rf"\bso (?:many|much) (?!{COMPARISON})", "the name of the argument"),
    (r"\bwhat is (?:sent|held|kept|left|asked|told|given|made)\b", "a noun"),
    (r"\b(?:is|are|was|were|be|been) (?:told|heard|asked|lent|owed)\b", "a standard verb"),
    (r"\bheld against\b", "compared with"),
    (r"\b(?:whoever|whatever|likewise)\b", "a noun"),
    (r"\bof (?:its|their|his) own\b", "its own, separate"),
    (r"\bmade anew\b", "rebuilt"),
    (r"\b(?:at a glance|second source|yardstick|planted defect)\b", "a standard term"),
    (r"\b(?:plain file|a stranger|the house|wings|seam|borrowed|debt)\b", "a standard term"),
    (r"\bwho (?:is|are)\b", "the noun that is meant"),
    (r"\bin turns\b", "alternately, interleaved"),
)

#: The largest number of words in a sentence of a page.
MAX_WORDS = 25

HTML_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
#: Code, or a template of docs/source; each counts as one word.
INLINE_CODE = re.compile(r"\{\{.*?\}\}|`[^`]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
#: The spaces after a sentence and its closing marks, or the separator of a list of references.
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\bal\.)[*_)\"']*\s+|\s+·\s+")
LIST_ITEM = re.compile(r"^(?:[-*+]|\d+\.)\s+")
#: The first characters of headings, table rows, pictures, HTML and the tables of docs/source.
NOT_PROSE = ("#", "|", "![", "<", "@")


@cache
def list_areas() -> dict[str, list[Path]]:
    """Return the files of each area: two per package, its tests apart, and those of the root."""
    found = {}
    for package in PACKAGES:
        top = ROOT / "packages" / package
        files = sorted((*top.rglob("*.py"), *top.rglob("*.md")))
        tests = top / "tests"
        found[package] = [path for path in files if not path.is_relative_to(tests)]
        found[f"{package}/tests"] = [path for path in files if path.is_relative_to(tests)]
    tests = [ROOT / "conftest.py", *(ROOT / "tests").rglob("*.py")]
    docs = [ROOT / "README.md", *(ROOT / "docs").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    found["tests"] = [path for path in tests if path != Path(__file__)]
    # The command of the site creates docs/_site from the other pages.
    found["docs"] = [path for path in docs if "_site" not in path.relative_to(ROOT).parts]
    return found


def iter_prose(text: str, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring and of each block of comments."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring
    yield from iter_comment_blocks(text)


def iter_comment_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield each block of comments on consecutive lines of one column, joined to one text."""
    block: list[str] = []
    first = last = column = -1
    for row, start, comment in iter_comments(text):
        words = comment.lstrip("#: ")
        if block and row == last + 1 and start == column:
            block.append(words)
        else:
            if block:
                yield first, " ".join(block)
            block, first, column = [words], row, start
        last = row
    if block:
        yield first, " ".join(block)


def iter_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each function, class, argument and assigned variable."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def is_filler(name: str) -> bool:
    """Return True if a name consists of filler words only."""
    words = [word for word in name.lower().split("_") if word]
    return bool(words) and all(word in FILLER for word in words)


def is_table(node: ast.stmt) -> bool:
    """Return True if a statement writes down a table: a literal of rows, or test parameters."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return bool(node.decorator_list)
    value = getattr(node, "value", None)
    if isinstance(value, ast.Call) and len(value.args) == 1:
        value = value.args[0]
    return isinstance(value, ast.List | ast.Tuple | ast.Dict | ast.Set)


def get_first_line(node: ast.stmt) -> int:
    """Return the first line of a statement, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def get_last_line(node: ast.stmt) -> int:
    """Return the last line of a statement."""
    return node.end_lineno or node.lineno


def iter_misplaced_format_skips(path: Path, text: str, nodes: list[ast.AST]) -> Iterator[int]:
    """Yield lines whose formatting is switched off outside kernels and tables."""
    if {"kernels", "experimental"} & set(path.parts):
        return
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    for row, line in enumerate(text.splitlines(), 1):
        if not FORMAT_SKIP.search(line):
            continue
        around = [node for node in statements if get_first_line(node) <= row <= get_last_line(node)]
        innermost = max(around, key=lambda node: node.lineno, default=None)
        if innermost is None or not is_table(innermost):
            yield row


def iter_dense_code(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield code that is dense for its own sake, with the line it stands on."""
    for node in nodes:
        if isinstance(node, ast.IfExp) and (
            isinstance(node.orelse, ast.IfExp) or isinstance(node.body, ast.IfExp)
        ):
            yield node.lineno, "chained conditional expression: use if statements"
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
            and len(node.value.elts) >= 3
        ):
            yield node.lineno, "tuple assignment of three or more values: use one line per value"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and len(node.args) > 1
            and isinstance(node.args[1], ast.JoinedStr)
        ):
            yield node.lineno, "dispatch by a computed attribute name: use a table of functions"


def iter_idioms(text: str) -> Iterator[str]:
    """Yield each idiom in a text, with what to write instead."""
    text = " ".join(text.split())
    for pattern, instead in IDIOMS:
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield f"{match.group()!r}: write {instead!r}"


def iter_findings_in_python(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every finding in a Python file."""
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    for row, words in iter_prose(text, nodes):
        if FRAGMENT.match(words):
            yield row, f"opens with a fragment: {words[:40]!r}"
        for idiom in iter_idioms(words):
            yield row, idiom
    for row, name in iter_names(nodes):
        if is_filler(name):
            yield row, f"filler name {name!r}"
    for row in iter_misplaced_format_skips(path, text, nodes):
        yield row, "formatting is switched off outside a kernel signature or a table"
    yield from iter_dense_code(nodes)


def iter_findings_in_markdown(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every idiom and every long sentence in a page, outside of code."""
    text = HTML_COMMENT.sub(lambda match: "\n" * match.group().count("\n"), path.read_text())
    for row, paragraph in iter_paragraphs(text):
        plain = LINK.sub(r"\1", INLINE_CODE.sub("code", paragraph))
        for idiom in iter_idioms(plain):
            yield row, idiom
        if plain.startswith(NOT_PROSE):
            continue
        for sentence in iter_sentences(plain):
            words = re.findall(r"\S*\w\S*", sentence)
            if len(words) > MAX_WORDS:
                yield row, f"{len(words)} words in a sentence: {sentence!r}"


def iter_sentences(paragraph: str) -> Iterator[str]:
    """Yield the sentences of a paragraph; a colon ends a sentence.

    A list of four or more items after a colon is not a sentence.
    """
    for sentence in SENTENCE_END.split(LIST_ITEM.sub("", paragraph, count=1)):
        opening, *parts = sentence.split(": ")
        yield opening
        for part in parts:
            if part.count(", ") + part.count("; ") < 3:
                yield part


def iter_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and text of each paragraph, list item, heading and table row of a page.

    Fenced and indented code is left out.
    """
    is_code = False
    first = 1
    lines: list[str] = []
    for row, line in enumerate([*text.splitlines(), ""], 1):
        words = line.strip().removeprefix(">").strip()
        is_fence = line.lstrip().startswith("```")
        is_code = is_code != is_fence
        is_skipped = is_code or is_fence or not words or (line.startswith("    ") and not lines)
        is_alone = words.startswith(NOT_PROSE) or (lines and lines[0].startswith(NOT_PROSE))
        if lines and (is_skipped or is_alone or LIST_ITEM.match(words)):
            yield first, " ".join(lines)
            lines = []
        if not is_skipped:
            first = first if lines else row
            lines.append(words)


def list_findings(paths: list[Path]) -> list[str]:
    """Return every finding in some files, one line of text per finding."""
    found = []
    for path in paths:
        check = iter_findings_in_python if path.suffix == ".py" else iter_findings_in_markdown
        where = path.relative_to(ROOT)
        found += [f"{where}:{row}: {text}" for row, text in sorted(check(path))]
    return found


@pytest.fixture
def no_garbage_collection():
    """Switch off garbage collection, which would scan syntax trees although they have no cycles."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("area", list_areas())
def test_area_follows_the_style_guide(area):
    paths = list_areas()[area]
    assert paths, "the area has no files"
    found = list_findings(paths)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ('def f():\n    """What is sent."""\n', "opens with a fragment"),
        ("# Whether ranks agree.\n", "opens with a fragment"),
        ("# The cost, in bytes a token.\n", "write 'per'"),
        ("# This is no copy.\n", "write 'is not a'"),
        ("# The ranks who are late.\n", "write 'the noun that is meant'"),
        ("# Each is timed in turns.\n", "write 'alternately, interleaved'"),
        ("def each(): pass\n", "filler name"),
        ("own_one = 1\n", "filler name"),
        ("x = f(1,\n   2)  # fmt: skip\n", "formatting is switched off"),
        ("x = 1 if a else 2 if b else 3\n", "chained conditional"),
        ("a, b, c = 1, f(), 'x'\n", "tuple assignment"),
        ("getattr(self, f'_{kind}')()\n", "dispatch by a computed"),
    ],
)
def test_each_rule_finds_its_example(tmp_path, code, message):
    path = tmp_path / "example.py"
    path.write_text(code)
    assert [text for _, text in iter_findings_in_python(path) if message in text]


LONG = "one " * 12 + "et al. " + "one " * 12 + "words"


@pytest.mark.parametrize(
    "page",
    [
        LONG,
        f"Short. {LONG}",
        f"- Short.\n- {LONG}",
        f"> {LONG}",
        f"Short: {LONG}",
        f"| cell |\n\n{LONG.replace(' ', chr(10))}",
        LONG.replace("one", "[one](page.md)"),
        f"```\ncode\n```\n{LONG}",
        f"# Title\n{LONG}\n| cell |",
    ],
)
def test_long_sentence_of_a_page_is_found(tmp_path, page):
    path = tmp_path / "page.md"
    path.write_text(page)
    assert [text for _, text in iter_findings_in_markdown(path)] == [
        f"27 words in a sentence: {LONG!r}"
    ]


@pytest.mark.parametrize(
    "page",
    [
        "one " * 24 + "`code of words`",
        "one " * 24 + "{{template(of, words)}}",
        "one " * 24 + "8. " + "one " * 24 + "words",
        "one " * 24 + "words: " + "one " * 24 + "words",
        "Name et al. 2020, Title · " * 6,
        "Items: " + "one item, " * 20 + "and one more",
        f"# {LONG}",
        f"| {LONG} |",
        f"```\n{LONG}\n```\n\n    {LONG}\n",
        f"<!-- python\n\n{LONG}\n-->",
    ],
)
def test_page_of_short_sentences_has_no_findings(tmp_path, page):
    path = tmp_path / "page.md"
    path.write_text(page)
    assert not [*iter_findings_in_markdown(path)]


def test_plain_code_has_no_findings(tmp_path):
    path = tmp_path / "example.py"
    path.write_text(
        '"""Bytes per token."""\n\n\ndef send(payload):\n    """Send the payload."""\n'
        "    # A retry would reduce twice.\n    first, second = payload\n    return second, first\n"
        "\n\nROWS = [\n    (1,  2),\n    (10, 20),\n]  # fmt: skip\n"
    )
    assert not [*iter_findings_in_python(path)]


if __name__ == "__main__":
    import sys

    chosen = sys.argv[1:] or [*list_areas()]
    for name in chosen:
        print("\n".join(list_findings(list_areas()[name])))
