"""Write docs/guarantees.md: what each package guarantees, and the tests that show it.

    python docs/guarantees.py

packages/NAME/guarantees.toml contains the claims, the question that each answers, and the tests.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/guarantees.toml"))
#: The questions of users, by their keys in guarantees.toml, in the order of the page.
QUESTIONS = {
    "right": "Are the results right?",
    "works": "Does it work with my code?",
    "input": "What happens if I use it wrongly?",
    "failure": "What happens when something fails?",
    "continue": "Can I save, stop and continue?",
    "cost": "What does it cost in time, memory and bytes?",
    "sure": "How sure are its estimates?",
    "checks": "Which faults do its checks find?",
    "compiled": "What does the compiler generate?",
    "observe": "Can I see what it does?",
}


class Guarantee(NamedTuple):
    """A claim, the key of the question that it answers, and tests as `file.py::test_name`."""

    claim: str
    question: str
    tests: list[str]


def read_guarantees(package: str) -> list[Guarantee]:
    """Return the guarantees of a package."""
    text = (ROOT / "packages" / package / "guarantees.toml").read_text()
    return [Guarantee(**entry) for entry in tomllib.loads(text)["guarantee"]]


def write_page_text() -> str:
    """Return the page as Markdown: the packages, and in each the questions that it answers."""
    lines = [
        "# Guarantees",
        "",
        "This page lists what each package guarantees, grouped by question. Each claim names its "
        "tests, which are in `packages/NAME/tests`. Tests with the marks `timing` and `exhaustive` "
        "are run only by `make test-timing` and `make test-exhaustive`. Tests with the mark `gpu` "
        "need CUDA.",
        "",
        "The test of a measured time may allow a margin of up to 15 % beyond the figure of its "
        "claim, because processors differ (`tests/figures.py`). Tests that need public data sets "
        "(in the folder that the variable `SCALING_DATA` names) or optional programs are skipped "
        "if these are missing.",
        "",
        " · ".join(f"[{package}](#{package})" for package in PACKAGES),
    ]
    for package in PACKAGES:
        lines += ["", f"## {package}"]
        entries = read_guarantees(package)
        for key, question in QUESTIONS.items():
            answers = [entry for entry in entries if entry.question == key]
            if answers:
                lines += ["", f"### {question}", "", "| guarantee | shown by |", "|---|---|"]
                lines += [_format_row(entry) for entry in answers]
    return "\n".join(lines) + "\n"


def _format_row(entry: Guarantee) -> str:
    claim = entry.claim.replace("|", r"\|")
    cited = ", ".join(f"`{test}`" for test in entry.tests)
    return f"| {claim if claim.endswith('.') else claim + '.'} | {cited} |"


if __name__ == "__main__":
    (ROOT / "docs" / "guarantees.md").write_text(write_page_text())
