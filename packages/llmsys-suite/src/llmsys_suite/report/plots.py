"""The report's plots, each one inline SVG."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#3465a4", "#f08030", "#4e9a56", "#b04060", "#7a5ea8", "#8c8c8c")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",
    "svg.hashsalt": "llmsys",
}


@contextmanager
def _figure(holder: list[str], width: float = 7.0, height: float = 3.2) -> Iterator[Axes]:
    """An axes to draw on; the SVG of it is appended to `holder` afterwards."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure.subplots()
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    holder.append(text.getvalue()[text.getvalue().index("<svg") :])


def losses(curves: dict[str, list[float]]) -> str:
    """The loss of every variant against the step; they should lie on one another."""
    svg: list[str] = []
    with _figure(svg) as axes:
        for i, (name, curve) in enumerate(curves.items()):
            width = 4.0 if i == 0 else 0.9
            axes.plot(curve, label=name, linewidth=width, alpha=0.5 if i == 0 else 1.0)
        axes.set(xlabel="step", ylabel="nats a byte", title="Training loss, all variants")
        axes.legend(fontsize=7, ncols=2)
    return svg[0]


def phases(rows: Sequence[dict[str, Any]]) -> str:
    """Each variant's step, cut into its phases."""
    svg: list[str] = []
    names = [row["variant"] for row in rows]
    parts = [key.removesuffix("_share") for key in rows[0] if key.endswith("_share")]
    with _figure(svg, height=0.6 + 0.3 * len(rows)) as axes:
        left = [0.0] * len(rows)
        for color, part in zip(COLORS, parts, strict=False):
            widths = [row["step_ms"] * row.get(f"{part}_share", 0.0) for row in rows]
            axes.barh(names, widths, left=left, color=color, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel="ms, median step of the slowest rank")
        axes.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return svg[0]


def links(rows: Sequence[dict[str, Any]]) -> str:
    """Bus bandwidth against size for each algorithm."""
    svg: list[str] = []
    with _figure(svg) as axes:
        series = [r for r in rows if r["case"] == "all_reduce"]
        for name in dict.fromkeys(row["algorithm"] for row in series):
            mine = [row for row in series if row["algorithm"] == name]
            axes.plot(
                [row["size_bytes"] for row in mine],
                [row["busbw_gbps"] for row in mine],
                marker="o",
                markersize=3,
                label=name,
            )
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
        axes.set_title("All-reduce")
        axes.legend(fontsize=7)
    return svg[0]


def timeline(
    size: str, training: Sequence[Sequence[Any]], inference: Sequence[Sequence[Any]]
) -> str:
    """Live memory over a training step, and over an inference pass below it."""
    svg: list[str] = []
    with _figure(svg) as axes:
        for color, phase in zip(COLORS, ("forward", "backward", "optimizer"), strict=False):
            points = [(i, mib) for i, (p, mib) in enumerate(training) if p == phase]
            if points:
                x, y = zip(*points, strict=True)
                axes.fill_between(x, y, color=color, alpha=0.6, label=f"training, {phase}")
        stretch = len(training) / max(1, len(inference))
        axes.plot(
            [i * stretch for i in range(len(inference))],
            [mib for _, mib in inference],
            color="black",
            linewidth=1,
            label="inference",
        )
        axes.set(xlabel="operators, in order", ylabel="MiB alive", title=f"Memory of {size}")
        axes.legend(fontsize=7)
    return svg[0]


def isoflop(scale: dict[str, Any]) -> str:
    """Loss against size for each budget, and the bottom of each valley."""
    svg: list[str] = []
    with _figure(svg) as axes:
        budgets = dict.fromkeys(run["compute_flops"] for run in scale["runs"])
        for color, budget in zip(COLORS, budgets, strict=False):
            mine = [run for run in scale["runs"] if run["compute_flops"] == budget]
            axes.plot(
                [run["parameters"] for run in mine],
                [run["loss"] for run in mine],
                "o-",
                color=color,
                markersize=3,
                label=f"{budget:.0e} FLOPs",
            )
        for valley in scale.get("valleys", []):
            axes.plot(valley["parameters"], valley["loss"], "*", color="black", markersize=9)
        axes.set(xscale="log", xlabel="parameters", ylabel="held-out nats a byte")
        axes.set_title("IsoFLOP valleys; stars are fitted optima")
        axes.legend(fontsize=7)
    return svg[0]


def compression(rows: Sequence[dict[str, Any]]) -> str:
    """Held-out loss against bytes."""
    svg: list[str] = []
    with _figure(svg) as axes:
        for row in rows:
            axes.plot(row["size_bytes"] / 2**20, row["heldout_loss"], "o", color=COLORS[0])
            axes.annotate(
                row["method"],
                (row["size_bytes"] / 2**20, row["heldout_loss"]),
                textcoords="offset points",
                xytext=(5, 4),
                fontsize=7,
            )
        axes.set(xlabel="MiB", ylabel="held-out nats a byte", title="Bytes against loss")
    return svg[0]
