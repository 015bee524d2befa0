"""Pin every package of the resolution exactly, in pyproject.toml.

The lock itself is not committed: it would spell out the address of one package index. The pins and
the date they were resolved at say the same without it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Where `uv run` started this, it says which uv that was.
UV = os.environ.get("UV", "uv")
PINS = re.compile(r"^constraint-dependencies = \[.*?\]$", re.DOTALL | re.MULTILINE)


def pins_of(lock: dict[str, Any]) -> list[str]:
    """One exact requirement for each package in a parsed uv.lock, the workspace's own left out."""
    pins = []
    for package in lock["package"]:
        if package["name"] in lock["manifest"]["members"]:
            continue
        pin = f"{package['name']}=={package['version']}"
        markers = package.get("resolution-markers", [])
        if markers:
            pin += " ; " + " or ".join(f"({marker})" for marker in markers)
        pins.append(pin)
    return sorted(pins)


def write_pins(pyproject: Path, pins: list[str]) -> None:
    """Replace the constraint-dependencies of `pyproject`."""
    lines = "".join(f'    "{pin}",\n' for pin in pins)
    text = f"constraint-dependencies = [\n{lines}]" if pins else "constraint-dependencies = []"
    pyproject.write_text(PINS.sub(lambda _: text, pyproject.read_text()))


def main() -> None:
    """Resolve anew without pins, then pin what came out."""
    pyproject = ROOT / "pyproject.toml"
    write_pins(pyproject, [])
    (ROOT / "uv.lock").unlink(missing_ok=True)
    subprocess.run([UV, "lock"], cwd=ROOT, check=True)
    write_pins(pyproject, pins_of(tomllib.loads((ROOT / "uv.lock").read_text())))
    subprocess.run([UV, "lock"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
