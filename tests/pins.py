"""Pin every package of the resolution exactly, in pyproject.toml.

The lock is not committed, because it contains the address of a package index. The pins and the date
of the resolution determine the same environment without it.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from workspace import ROOT, UV

PINS = re.compile(r"^constraint-dependencies = \[.*?\]$", re.DOTALL | re.MULTILINE)


def list_pins(lock: dict[str, Any]) -> list[str]:
    """Return an exact requirement per package of a parsed uv.lock, without workspace members."""
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
    """Resolve without pins, and pin every package of the result. A failure restores the pins."""
    pyproject = ROOT / "pyproject.toml"
    text_with_pins = pyproject.read_text()
    write_pins(pyproject, [])
    (ROOT / "uv.lock").unlink(missing_ok=True)
    try:
        subprocess.run([UV, "lock"], cwd=ROOT, check=True)
        write_pins(pyproject, list_pins(tomllib.loads((ROOT / "uv.lock").read_text())))
        subprocess.run([UV, "lock"], cwd=ROOT, check=True)
    except BaseException:
        # `uv sync` writes a lock for these pins.
        pyproject.write_text(text_with_pins)
        (ROOT / "uv.lock").unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    main()
