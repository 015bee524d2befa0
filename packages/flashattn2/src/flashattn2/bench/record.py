"""The record of a bench run: a dated JSON file with the rows and the machine."""

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, float | int | str]


def write(rows: list[Row], out: Path, command: Sequence[str], device: str) -> Path:
    """Write flashattn2.json to `OUT/DATE-cpu` or `-gpu` and return its path.

    The file is written under another name and then renamed.
    """
    facts = environment(device)
    folder = out / f"{facts['date'][:10]}-{'gpu' if facts['gpus'] else 'cpu'}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "flashattn2.json"
    part = path.with_suffix(".part")
    record = {"environment": facts, "command": " ".join(command), "rows": rows}
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)
    return path


def environment(device: str) -> dict[str, Any]:
    """Return the versions and the hardware that the results depend on."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpus": [],
    }
    if device == "cuda":
        import triton

        facts |= {"gpus": [torch.cuda.get_device_name()], "cuda": torch.version.cuda}
        facts |= {"triton": triton.__version__}
    return facts


def processor() -> str:
    """Return the processor's name in /proc/cpuinfo, or the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
