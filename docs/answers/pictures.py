"""Draw the pictures of the pages from stored rows, as small SVG files with reproducible bytes.

python docs/answers/pictures.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COLORS = ("#2563ab", "#c2571a", "#3d8b40", "#8250a8", "#b0303f", "#6b7280", "#0f7c7c", "#a16207")
#: Size of a picture and its margins, in pixels.
WIDTH = 680
HEIGHT = 300
LEFT = 74
RIGHT = 225
TOP = 34
BOTTOM = 44

Point = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """Lines over two axes, each linear or logarithmic."""

    title: str
    x: str
    y: str
    lines: dict[str, Sequence[Point]]
    log_x: bool = False
    log_y: bool = False
    dots: bool = True
    #: The start of each interval of x, and its name.
    bands: Sequence[tuple[float, str]] = field(default=())

    def svg(self) -> str:
        """Return the drawing as SVG."""
        points = [point for line in self.lines.values() for point in line]
        across = _Axis([p[0] for p in points], self.log_x, LEFT, WIDTH - RIGHT)
        up = _Axis([p[1] for p in points], self.log_y, HEIGHT - BOTTOM, TOP, zero=not self.log_y)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="11" fill="#374151">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="17" font-size="13" fill="#111827">{self.title}</text>',
        ]
        for value, label in across.ticks():
            parts.append(
                f'<text x="{across(value):.1f}" y="{HEIGHT - BOTTOM + 15}" '
                f'text-anchor="middle">{label}</text>'
            )
        for value, label in up.ticks():
            y = up(value)
            parts.append(
                f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>'
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
            )
        for start, name in self.bands:
            parts.append(
                f'<path d="M{across(start):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#9ca3af" '
                f'stroke-dasharray="3 3"/><text x="{across(start) + 3:.1f}" '
                f'y="{HEIGHT - BOTTOM - 6}">{name}</text>'
            )
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{self.x}</text>')
        parts.append(
            f'<text x="14" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
            f'transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) / 2})">{self.y}</text>'
        )
        for index, (name, line) in enumerate(self.lines.items()):
            color = COLORS[index % len(COLORS)]
            where = [f"{across(x):.1f} {up(y):.1f}" for x, y in line]
            parts.append(
                f'<path d="M{"L".join(where)}" fill="none" stroke="{color}" stroke-width="1.8"/>'
            )
            if self.dots:
                for coordinates in where:
                    x, y = coordinates.split()
                    parts.append(f'<circle cx="{x}" cy="{y}" r="2.6" fill="{color}"/>')
            y = TOP + 14 + 17 * index
            parts.append(
                f'<path d="M{WIDTH - RIGHT + 12} {y - 4}h16" stroke="{color}" stroke-width="2.5"/>'
                f'<text x="{WIDTH - RIGHT + 33}" y="{y}">{name}</text>'
            )
        return "\n".join([*parts, "</svg>", ""])


class _Axis:
    def __init__(
        self, values: Sequence[float], log: bool, low: float, high: float, *, zero: bool = False
    ) -> None:
        self.log = log
        self.low = low
        self.high = high
        self.least = 0.0 if zero and min(values) >= 0 else min(values)
        self.most = max(values) if log or not zero else 1.03 * max(values)

    def __call__(self, value: float) -> float:
        a = self.least
        b = self.most
        v = value
        if self.log:
            a = math.log(a)
            b = math.log(b)
            v = math.log(v)
        return self.low + (v - a) / ((b - a) or 1) * (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        if self.log:
            base = 10 if self.most / self.least > 300 else 2
            first = math.ceil(math.log(self.least, base) - 1e-9)
            last = math.floor(math.log(self.most, base) + 1e-9)
            step = max(1, (last - first) // 6)
            values = [float(base) ** k for k in range(first, last + 1, step)]
        else:
            step = 10.0 ** math.floor(math.log10((self.most - self.least) / 3))
            while (self.most - self.least) / step > 6:
                step *= 2 if str(step)[0] != "2" and "2" not in f"{step:g}" else 2.5
            first = math.ceil(self.least / step - 1e-9)
            values = [step * k for k in range(first, int(self.most / step + 1e-9) + 1)]
        return [(value, _format_label(value)) for value in values]


def _format_label(value: float) -> str:
    """Return a number with at most three digits, and large ones with commas or a power of ten."""
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"


def draw_all() -> dict[str, str]:
    """Return every picture by the name of its file."""
    charts = {
        "memory-training.svg": _draw_timeline("training", "a training step"),
        "memory-inference.svg": _draw_timeline("inference", "inference"),
        "weights.svg": _draw_histogram(),
        "sensitivity.svg": _draw_sensitivity(),
        "bits.svg": _draw_bits(),
        "rates.svg": _draw_rates(),
        "curves-linear-sgd.svg": _draw_curves("linear", "sgd", "linear regression, SGD"),
        "curves-linear-adam.svg": _draw_curves(
            "linear", "adam", "linear regression, Adam, noise 8"
        ),
        "curves-mlp-sgd.svg": _draw_curves("mlp", "sgd", "network, SGD"),
        "curves-mlp-adam.svg": _draw_curves("mlp", "adam", "network, Adam"),
        "isoflop.svg": _draw_isoflop(),
    }
    return {name: chart.svg() for name, chart in charts.items()}


def read_rows(name: str) -> list[dict[str, Any]]:
    """Return the stored rows of one measurement."""
    results = json.loads((FOLDER / "rows" / f"{name}.json").read_text())
    stored: list[dict[str, Any]] = results["rows"]
    return stored


def _draw_timeline(kind: str, what: str) -> Chart:
    drawn = read_rows("layers")[-1]["drawn"][kind]
    line = [(float(i), live) for i, (_, live) in enumerate(drawn)]
    bands, last = [], None
    for i, (phase, _) in enumerate(drawn):
        if phase and phase != last:
            bands.append((float(i), phase))
            last = phase
    return Chart(
        f"live memory of 2.7B over {what}, batch 4, context 512, float32",
        "operators in order, the highest of every few",
        "GiB",
        {"live": line},
        dots=False,
        bands=bands,
    )


def _draw_histogram() -> Chart:
    names = {"0": "first conv", "3": "second conv", "7": "third conv", "12": "linear"}
    lines = {
        names[row["layer"]]: [(-4 + 8 * (i + 0.5) / 33, s) for i, s in enumerate(row["shares"])]
        for row in read_rows("digits")
        if row["case"] == "histogram"
    }
    return Chart(
        "weights of a trained classifier", "standard deviations", "share", lines, dots=False
    )


def _draw_sensitivity() -> Chart:
    names = {"0": "first conv", "3": "second conv", "7": "third conv", "12": "linear"}
    lines = {
        names[row["layer"]]: [(float(k), v) for k, v in row.items() if k[0] == "0"]
        for row in read_rows("digits")
        if row["case"] == "sensitivity"
    }
    return Chart(
        "one layer pruned, the others whole", "share of weights at zero", "accuracy", lines
    )


def _draw_bits() -> Chart:
    stored = [row for row in read_rows("digits") if row["case"] == "bits"]
    lines = {
        name: [(float(row["bits"]), row[f"{key}_error"]) for row in stored]
        for name, key in (("k-means", "kmeans"), ("linear", "linear"))
    }
    return Chart(
        "change of the weights by quantizing them", "bits", "relative error", lines, log_y=True
    )


def _draw_rates() -> Chart:
    lines = {}
    for row in read_rows("rates"):
        noise = f", noise {row['label_noise']:g}" if row["task"] == "linear" else ""
        points = [
            (float(key.removeprefix("batch_")), value)
            for key, value in row.items()
            if key.startswith("batch_") and value is not None
        ]
        lines[f"{row['task']} {row['optimizer']}{noise}, {row['steps']} steps"] = points
    return Chart("best learning rate", "batch size", "rate", lines, log_x=True, log_y=True)


def _draw_curves(task: str, optimizer: str, name: str) -> Chart:
    """Draw the final loss over the rate; rates above which the loss grows are left out."""
    stored = [
        r for r in read_rows("rate_curves") if (r["task"], r["optimizer"]) == (task, optimizer)
    ]
    first = max(loss for row in stored for _, loss in row["curve"][:1])
    lines = {
        f"batch {row['batch']}": [(rate, loss) for rate, loss in row["curve"] if loss < 1.5 * first]
        for row in stored
    }
    return Chart(f"final loss: {name}", "rate", "loss", lines, log_x=True, log_y=True, dots=False)


def _draw_isoflop() -> Chart:
    lines = {"parameters": [], "tokens": []}  # type: dict[str, list[Point]]
    for row in read_rows("isoflop"):
        if row["fit"] not in ("valley", "a parabola each"):
            continue
        lines["parameters"].append((row["compute"], row["parameters"]))
        lines["tokens"].append((row["compute"], row["tokens"]))
    return Chart(
        "the optimum by compute: nine budgets, then 1e23 and 1e24",
        "compute, FLOP",
        "N and D",
        lines,
        log_x=True,
        log_y=True,
    )


if __name__ == "__main__":
    for name, drawing in draw_all().items():
        (FOLDER / "pictures" / name).write_text(drawing)
