"""Write docs/guarantees.md: what each package guarantees, and the tests that show it.

    python docs/guarantees.py

packages/NAME/guarantees.toml contains the claims and the tests that they cite.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/guarantees.toml"))


def guarantees(package: str) -> list[tuple[str, list[str]]]:
    """Return each claim of a package with the tests that show it, as `file.py::test_name`."""
    text = (ROOT / "packages" / package / "guarantees.toml").read_text()
    entries = tomllib.loads(text)["guarantee"]
    return [(entry["claim"], entry["tests"]) for entry in entries]


def page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Guarantees",
        "",
        "What each package guarantees, and the tests that show it. Each claim has a test.",
        "",
        " · ".join(f"[{package}](#{package})" for package in PACKAGES),
    ]
    for package in PACKAGES:
        lines += ["", f"## {package}", "", "| claim | shown by |", "|---|---|"]
        for claim, tests in guarantees(package):
            cited = ", ".join(f"`{test}`" for test in tests)
            lines.append(f"| {claim.replace('|', chr(92) + '|')} | {cited} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "guarantees.md").write_text(page())
