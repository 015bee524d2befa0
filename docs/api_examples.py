"""Examples of public names, one page per package in docs/source/api, which doctest runs.

A page starts with a block of imports. Each heading below it is a public name, with a sentence and a
block of lines that a reader can type, followed by their output.
"""

from __future__ import annotations

import contextlib
import doctest
import re
import tempfile
from pathlib import Path

PAGES = Path(__file__).parent / "source" / "api"
HEADING = re.compile(r"^## (.+)\n", re.MULTILINE)
BLOCK = re.compile(r"^```pycon\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def get_page_path(package: str) -> Path:
    """Return the path of a package's page."""
    return PAGES / f"{package}.md"


def read_introduction(package: str) -> str:
    """Return the Markdown between the title and the first name: the imports of all examples."""
    first = HEADING.split(get_page_path(package).read_text())[0]
    return first.partition("\n")[2].strip()


def read_examples(package: str) -> dict[str, str]:
    """Return the Markdown of each public name's example, in the order of the page."""
    _, *sections = HEADING.split(get_page_path(package).read_text())
    names = sections[0::2]
    return dict(zip(names, (text.strip() for text in sections[1::2]), strict=True))


def run(package: str) -> str:
    """Run all blocks of a page in an empty folder; return doctest's report, empty without failures.

    The blocks share their variables, and later blocks run even if an earlier one fails.
    """
    path = get_page_path(package)
    blocks = "\n\n".join(BLOCK.findall(path.read_text()))
    test = doctest.DocTestParser().get_doctest(blocks, {}, path.name, str(path), 0)
    report: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return "".join(report)
