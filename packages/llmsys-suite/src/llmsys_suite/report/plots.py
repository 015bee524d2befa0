"""The plots of the report: inline SVGs that use the text color of the page."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llmsys_suite.results import Learn, Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#4a86c8", "#e07b28", "#4e9a56", "#c0507a", "#8a6cc0", "#8c8c8c", "#b59b1d")
#: Placeholder for the page's text color (currentColor), which matplotlib cannot express.
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


def draw_svg(draw: Callable[[Axes], None], alt: str, height: float = 3.0) -> str:
    """Return the SVG of a plot; `alt` is its accessible label, and `height` is in inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE | {"svg.hashsalt": alt}):
        drawn = Figure(figsize=(4.8, height), layout="constrained")
        draw(drawn.subplots())
        text = io.StringIO()
        drawn.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue().replace(INK, "currentColor")
    label = alt.replace('"', "'")
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def place_legend_below(axes: Axes, columns: int = 3) -> None:
    """Place the legend under the plot, so that it covers no data."""
    axes.legend(ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def plot_losses(learn: Learn, unit: str) -> str:
    """Return a plot of the loss of each step and of the held-out losses."""

    def draw(axes: Axes) -> None:
        axes.plot(learn.losses, color=COLORS[0], linewidth=0.7, label="training")
        steps, heldout = zip(*learn.heldout, strict=True)
        axes.plot(steps, heldout, "o-", color=COLORS[1], markersize=3, label="held out")
        axes.set(xlabel="step", ylabel=unit)
        axes.legend()

    return draw_svg(draw, "Loss against steps, held-out loss beside it", height=2.6)


def plot_phases(rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG bar chart of step times by phase; hidden communication is hatched."""
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
        hidden = [
            min(row.get("hidden_ms", 0.0), row["step_ms"] * row["backward_share"]) for row in rows
        ]
        starts = [end - width for end, width in zip(ends, hidden, strict=True)]
        hatched = [i for i, width in enumerate(hidden) if width > 0]
        axes.barh(
            [names[i] for i in hatched],
            [hidden[i] for i in hatched],
            left=[starts[i] for i in hatched],
            height=0.4,
            facecolor=COLORS[2],
            edgecolor=INK,
            hatch="////",
            linewidth=0.5,
            label="communication inside backward",
        )
        axes.invert_yaxis()
        axes.set(xlabel="ms, median step of the slowest rank")
        place_legend_below(axes, 2)

    return draw_svg(draw, "Phases of a step of every variant", height=1.4 + 0.26 * len(rows))


def plot_timeline(name: str, points: Sequence[tuple[str, float]]) -> str:
    """Return a plot of live memory over a training step, with its phases and its peak.

    `points` contains pairs of a phase and MiB.
    """

    def draw(axes: Axes) -> None:
        peak = max(mib for _, mib in points)
        unit, scale = ("GiB", 1024) if peak >= 1024 else ("MiB", 1)
        live = [mib / scale for _, mib in points]
        axes.fill_between(range(len(live)), live, color=COLORS[0], alpha=0.25)
        axes.plot(live, color=COLORS[0])
        phases_in_order = [phase for phase, _ in points]
        for phase in ("forward", "backward", "optimizer"):
            if phase in phases_in_order:
                start = phases_in_order.index(phase)
                axes.axvline(start, color=INK, linewidth=0.6, alpha=0.5)
                axes.annotate(
                    phase,
                    (start, 1.0),
                    (3, -2),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    va="top",
                    fontsize=8,
                )
        axes.plot(live.index(max(live)), max(live), "v", color=COLORS[1])
        axes.set(ylabel=f"live, {unit}", ylim=(0, 1.25 * max(live)), xticks=[])
        axes.set_title(f"{name}: peak {max(live):,.3g} {unit}", fontsize=9, loc="left")
        axes.set_xlabel("operators of a training step")

    return draw_svg(draw, f"Live memory over a training step of {name}", height=2.4)


def plot_isoflop(scale: Scale) -> str:
    """Return a plot of loss against size per budget, with the extrapolated size's interval."""

    def draw(axes: Axes) -> None:
        budgets = list(dict.fromkeys(run["compute_flops"] for run in scale.runs))
        for number, budget in enumerate(budgets):
            runs = [run for run in scale.runs if run["compute_flops"] == budget]
            axes.plot(
                [run["parameters"] for run in runs],
                [run["loss"] for run in runs],
                color=COLORS[number % len(COLORS)],
                linestyle=("-", "--")[number // len(COLORS) % 2],
                marker="os^Dv"[number % 5],
                markersize=3.5,
                linewidth=1,
                label=f"{budget:.2g} FLOPs",
            )
        if optimum := scale.extrapolated:
            label = f"best size at {optimum['compute_flops']:.3g}, 95 %"
            # The interval may be unbounded, and a wide interval would leave no room for the runs.
            sizes = [run["parameters"] for run in scale.runs]
            low = max(optimum["low"], min(sizes) / 3)
            high = min(optimum["high"], 3 * max(sizes))
            if low < high:
                axes.axvspan(low, high, color=COLORS[5], alpha=0.2, label=label)
        axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="held-out nats per byte")
        _label_plainly(axes)
        place_legend_below(axes, 3)

    return draw_svg(draw, "Held-out loss against size for each budget", height=4.0)


def _label_plainly(axes: Axes) -> None:
    """Label logarithmic axes that span about a decade with plain numbers that do not overlap."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
