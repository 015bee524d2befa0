"""The record of a bench run: a dated JSON file with the machine, and plots of the rows."""

import datetime
import itertools
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, float | int | str]


def write(rows: list[Row], out: Path, command: Sequence[str], device: str) -> list[Path]:
    """Write flashattn2.json to `OUT/DATE-cpu` or `-gpu`, and plots if matplotlib is installed.

    Returns the paths of the files.  The JSON file is written under another name and then renamed.
    """
    facts = environment(device)
    folder = out / f"{facts['date'][:10]}-{'gpu' if facts['gpus'] else 'cpu'}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "flashattn2.json"
    part = path.with_suffix(".part")
    record = {"environment": facts, "command": " ".join(command), "rows": rows}
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)
    try:
        return [path, *plot(rows, folder)]
    except ModuleNotFoundError:
        return [path]


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


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """Plot the TFLOP/s of each case and the memory of naive attention; needs matplotlib."""
    paths = []
    for case in ("flash", "train"):
        timed = [r for r in rows if r["case"] == case and not isinstance(r["time_ms"], str)]
        if timed:
            paths.append(_plot_tflops(timed, folder / f"flashattn2-{case}.png"))
    memory = [r for r in rows if r["case"] == "naive_memory"]
    if memory:
        paths.append(_plot_memory(memory, folder / "flashattn2-naive-memory.png"))
    return paths


def _plot_tflops(rows: list[Row], path: Path) -> Path:
    """Plot TFLOP/s over the sequence length, with one panel per dtype, pass and head dim."""
    from matplotlib.figure import Figure

    panels = list(
        itertools.product(sorted({str(r["dtype"]) for r in rows}), ("forward", "backward"))
    )
    dims = sorted({r["dim"] for r in rows}, key=float)
    names = list(dict.fromkeys(str(r["impl"]) for r in rows))
    figure = Figure((3.6 * len(dims) + 1.8, 2.7 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), len(dims), squeeze=False, sharex=True)
    for (i, panel), (j, dim) in itertools.product(enumerate(panels), enumerate(dims)):
        axes = grid[i][j]
        for n, name in enumerate(names):
            points = sorted(
                (float(r["seq"]), float(r["tflops"]))
                for r in rows
                if (r["dtype"], r["pass"], r["dim"], r["impl"]) == (*panel, dim, name)
            )
            if points:
                # Ours is black in every plot.
                color = "black" if name == "ours" else f"C{n - 1}"
                axes.plot(*zip(*points, strict=True), "o-", ms=3, color=color, label=name)
        axes.set_title(f"{panel[1]}, {panel[0]}, head dim {dim}", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if j == 0:
            axes.set_ylabel("TFLOP/s")
        if i == len(panels) - 1:
            axes.set_xlabel("sequence")
    handles = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)
    return path


def _plot_memory(rows: list[Row], path: Path) -> Path:
    """Plot the measured and predicted memory of naive attention over the sequence length."""
    from matplotlib.figure import Figure

    figure = Figure((6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for n, dim in enumerate(sorted({r["dim"] for r in rows}, key=float)):
        selected = sorted((r for r in rows if r["dim"] == dim), key=lambda r: float(r["seq"]))
        measured = [r for r in selected if not isinstance(r["held_mib"], str)]
        failed = [r for r in selected if isinstance(r["held_mib"], str)]
        axes.plot(
            [r["seq"] for r in selected],
            [r["predicted_mib"] for r in selected],
            color=f"C{n}",
            label=f"predicted, head dim {dim}",
        )
        axes.plot(
            [r["seq"] for r in measured], [r["held_mib"] for r in measured], "o", color=f"C{n}"
        )
        axes.plot(
            [r["seq"] for r in failed], [r["predicted_mib"] for r in failed], "x", color=f"C{n}"
        )
    axes.plot([], [], "o", color="gray", label="measured")
    axes.plot([], [], "x", color="gray", label="out of memory")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("sequence")
    axes.set_ylabel("MiB saved for the backward pass")
    axes.set_title("Naive attention, batch 8, one head, float32", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return path
