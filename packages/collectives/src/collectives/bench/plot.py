"""A plot of bandwidth against size (requires matplotlib)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import pyplot


def plot(rows: Sequence[Mapping[str, float | int | str]], path: Path) -> None:
    """Plot the bus bandwidth of all-reduce against size, with one panel per number of processes."""
    worlds = sorted({int(row["world"]) for row in rows})
    figure, axes = pyplot.subplots(1, len(worlds), figsize=(6 * len(worlds), 4), squeeze=False)
    for axis, world in zip(axes[0], worlds, strict=True):
        chosen = [r for r in rows if r["case"] == "all_reduce" and r["world"] == world]
        for name in dict.fromkeys(str(row["algorithm"]) for row in chosen):
            series = [row for row in chosen if row["algorithm"] == name]
            sizes = [float(row["size_bytes"]) for row in series]
            axis.plot(sizes, [float(row["busbw_gbps"]) for row in series], "o-", label=name)
        axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="busbw GB/s")
        axis.set_title(f"all-reduce, {world} processes")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
