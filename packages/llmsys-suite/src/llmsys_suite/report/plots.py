"""The report's pictures, each one inline SVG that takes the page's own color of text."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from llmsys_suite.stages.results import Learn, Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#4a86c8", "#e07b28", "#4e9a56", "#c0507a", "#8a6cc0", "#8c8c8c", "#b59b1d")
#: Stands for the page's color while matplotlib draws, which knows none such.
INK = "#010203"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}


def figure(draw: Callable[[Axes], Any], alt: str, width: float = 4.8, height: float = 3.0) -> str:
    """Return the SVG of the plot that `draw` draws."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE | {"svg.hashsalt": alt}):
        drawn = Figure(figsize=(width, height), layout="constrained")
        draw(drawn.subplots())
        text = io.StringIO()
        drawn.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue().replace(INK, "currentColor")
    label = alt.replace('"', "'")
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def below(axes: Axes, columns: int = 3) -> None:
    """Put the legend under the plot, where it covers nothing."""
    axes.legend(ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def learning(learn: Learn) -> str:
    """Loss of each step, and the held-out loss."""

    def draw(axes: Axes) -> None:
        axes.plot(learn.losses, color=COLORS[0], linewidth=0.7, label="training")
        steps, heldout = zip(*learn.heldout, strict=True)
        axes.plot(steps, heldout, "o-", color=COLORS[1], markersize=3, label="held out")
        axes.set(xlabel="step", ylabel="nats a byte")
        axes.legend()

    return figure(draw, "Loss against steps, held-out loss beside it", height=2.6)


def phases(rows: Sequence[dict[str, Any]]) -> str:
    """Each variant's step, cut into its phases; the sending that computing hid is a line."""
    names = [row["variant"] for row in rows]

    def draw(axes: Axes) -> None:
        left = [0.0] * len(rows)
        for color, part in zip(
            COLORS, ("forward", "backward", "communication", "optimizer"), strict=False
        ):
            widths = [row["step_ms"] * row.get(f"{part}_share", 0.0) for row in rows]
            axes.barh(names, widths, left=left, color=color, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        ends = [row["step_ms"] * (row["forward_share"] + row["backward_share"]) for row in rows]
        for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
            hidden = row.get("hidden_ms", 0.0)
            axes.plot([end - hidden, end], [i + 0.3] * 2, color=COLORS[3], lw=2.5)
        axes.plot([], [], color=COLORS[3], lw=2.5, label="sending that computing hid")
        axes.invert_yaxis()
        axes.set(xlabel="ms, median step of the slowest rank")
        below(axes, 2)

    return figure(draw, "Phases of a step of every way of training", height=1.2 + 0.26 * len(rows))


def links(rows: Sequence[dict[str, Any]]) -> str:
    """Bus bandwidth against size for each algorithm."""
    series = [r for r in rows if r["case"] == "all_reduce"]

    def draw(axes: Axes) -> None:
        for color, name in zip(COLORS, dict.fromkeys(r["algorithm"] for r in series), strict=False):
            mine = [r for r in series if r["algorithm"] == name]
            x, y = [r["size_bytes"] for r in mine], [r["busbw_gbps"] for r in mine]
            axes.plot(x, y, "o-", color=color, markersize=3, label=name)
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
        below(axes, 4)

    return figure(draw, "Bus bandwidth of an all-reduce against its size")


def timeline(models: dict[str, Any]) -> str:
    """Live memory over a training step of each model, as shares of its named peak."""

    def draw(axes: Axes) -> None:
        for color, (size, model) in zip(COLORS, models.items(), strict=False):
            live = [mib for _, mib in model["training_timeline"]]
            peak, at = max(live), live.index(max(live)) / len(live)
            phase = model["training_timeline"][live.index(peak)][0]
            x, y = [i / len(live) for i in range(len(live))], [mib / peak for mib in live]
            what = f"{size}: peak {peak:,.3g} MiB, in {phase or 'the start'}"
            axes.plot(x, y, color=color, label=what)
            axes.plot(at, 1, "v", color=color)
        axes.set(xlabel="a training step, operator by operator", ylabel="alive, of the peak")
        axes.set_ylim(0, 1.1)
        below(axes, 1)

    return figure(draw, "Live memory over a training step, its peak marked")


def roofline(products: Sequence[dict[str, Any]], peak: float) -> str:
    """Draw the rate of each product under the roofs of the smallest and largest working set."""
    smallest = min(products, key=lambda row: row["working_set_bytes"])
    largest = max(products, key=lambda row: row["working_set_bytes"])

    def draw(axes: Axes) -> None:
        for row, style in ((smallest, "-"), (largest, "--")):
            rate = row["bytes_per_second"]
            x = [0.1, peak / rate, 1e3]
            y = [min(peak, rate * intensity) / 1e9 for intensity in x]
            size = row["working_set_bytes"] / 2**20
            axes.plot(x, y, style, color=COLORS[5], label=f"roof at {size:.2g} MiB")
        for color, row in zip(COLORS * 9, products, strict=False):
            x_, y_ = row["flops_per_byte"], row["gflops"]
            axes.plot(x_, y_, "o", color=color, label=row["operator"])
        axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="GFLOP/s of one rank")
        below(axes, 2)

    return figure(draw, "Products of a forward pass under the roofline", height=3.6)


def isoflop(scale: Scale) -> str:
    """Loss against size for each budget, the bottom of each valley, and the interval beyond."""

    def draw(axes: Axes) -> None:
        budgets = dict.fromkeys(run["compute_flops"] for run in scale.runs)
        for color, budget in zip(cycle(COLORS), budgets, strict=False):
            mine = [run for run in scale.runs if run["compute_flops"] == budget]
            x, y = [run["parameters"] for run in mine], [run["loss"] for run in mine]
            axes.plot(x, y, "o-", color=color, markersize=3, label=f"{budget:.3g} FLOPs")
        for valley in scale.valleys:
            axes.plot(valley["parameters"], valley["loss"], "*", color=INK, markersize=9)
        if at := scale.extrapolated:
            label = f"best size at {at['compute_flops']:.0e}, 95 %"
            axes.axvspan(at["low"], at["high"], color=COLORS[5], alpha=0.2, label=label)
        axes.set(xscale="log", xlabel="parameters", ylabel="held-out nats a byte")
        below(axes, 2)

    return figure(draw, "IsoFLOP valleys; stars are fitted optima", height=3.4)


def compression(rows: Sequence[dict[str, Any]]) -> str:
    """Held-out loss against bytes."""

    def draw(axes: Axes) -> None:
        for color, row in zip(COLORS, rows, strict=False):
            at = row["size_bytes"] / 2**20, row["heldout_loss"]
            axes.plot(*at, "o", color=color, markersize=7, label=row["method"])
        axes.set(xlabel="MiB", ylabel="held-out nats a byte")
        below(axes)

    return figure(draw, "Held-out loss against bytes", height=3.4)


def bars(names: Sequence[str], values: Sequence[float], unit: str) -> str:
    """One bar a row."""

    def draw(axes: Axes) -> None:
        axes.barh(names, values, color=COLORS[0])
        axes.invert_yaxis()
        axes.set(xlabel=unit)

    return figure(draw, f"{unit}: {', '.join(names)}", height=0.9 + 0.28 * len(names))


def patterns(patterns_by_head: dict[str, list[list[float]]]) -> str:
    """Draw the attention of the strongest head per kind, from each token (down) to earlier ones."""

    def draw(axes: Axes) -> None:
        side = len(next(iter(patterns_by_head.values())))
        gap = [[None] * (side // 6)] * side
        wide = [
            [float("nan") if x is None else x for part in parts for x in part]
            for parts in zip(*(p for m in patterns_by_head.values() for p in (m, gap)), strict=True)
        ]
        axes.imshow(wide, cmap="viridis", vmin=0, vmax=100, interpolation="nearest")
        axes.set_xticks(
            [side / 2 + i * (side + side // 6) for i in range(len(patterns_by_head))],
            [name.replace(": ", "\n") for name in patterns_by_head],
        )
        axes.set_yticks([])
        axes.grid(visible=False)

    return figure(draw, "Attention of the heads that are most of each kind", 5.6, 2.2)
