"""Pictures as SVG: what the weights look like, what each layer can lose, what bytes cost.

Notable: no other package draws them, and the same numbers give the same bytes, so that a picture
can be committed beside the rows that it shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from tinyml.layers import PRUNABLE
from tinyml.pruning.sensitivity import Sensitivity

COLORS = ("#2563ab", "#c2571a", "#3d8b40", "#8250a8", "#b0303f", "#6b7280", "#0f7c7c", "#a16207")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 330, 230, 52, 26, 12, 40

Points = Sequence[tuple[float, ...]]
"""(x, y), or (x, y, low, high) with an interval of y."""


@dataclass(frozen=True)
class Panel:
    """Lines over two axes."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    level: float | None = None
    """A dashed line across, such as the untouched model's metric."""
    log_x: bool = False
    log_y: bool = False
    filled: bool = False

    def svg(self, legend: bool) -> list[str]:
        """Its elements, with the corner at 0, 0."""
        xs = [point[0] for line in self.lines.values() for point in line]
        ys = [y for line in self.lines.values() for point in line for y in point[1:]]
        ys += [] if self.level is None else [self.level]
        ys = [y for y in ys if y > 0] if self.log_y else ys
        across = _Axis(xs, self.log_x, _LEFT, _WIDTH - _RIGHT)
        up = _Axis(ys, self.log_y, _HEIGHT - _BOTTOM, _TOP)
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts = [
            f'<text x="{_LEFT}" y="16" font-size="12">{_plain(self.title)}</text>',
            f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{_plain(self.x)}</text>',
            f'<text x="12" y="{_HEIGHT / 2}" text-anchor="middle" '
            f'transform="rotate(-90 12 {_HEIGHT / 2})">{_plain(self.y)}</text>',
        ]
        for value in across.ticks():
            parts.append(
                f'<text x="{across(value):.1f}" y="{_HEIGHT - _BOTTOM + 14}" '
                f'text-anchor="middle">{value:g}</text>'
            )
        for value in up.ticks():
            parts.append(
                f'<path d="M{_LEFT} {up(value):.1f}H{_WIDTH - _RIGHT}" stroke="#e5e7eb"/><text '
                f'x="{_LEFT - 4}" y="{up(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
            )
        if self.level is not None:
            parts.append(
                f'<path d="M{_LEFT} {up(self.level):.1f}H{_WIDTH - _RIGHT}" stroke="#6b7280" '
                'stroke-dasharray="4 3"/>'
            )
        for number, (name, line) in enumerate(self.lines.items()):
            color = COLORS[number % len(COLORS)]
            places = [f"{across(x):.1f} {up(y):.1f}" for x, y, *_ in line]
            base = f"V{_HEIGHT - _BOTTOM}H{across(line[0][0]):.1f}Z" if self.filled else ""
            fill = color if self.filled else "none"
            parts.append(f'<path d="M{"L".join(places)}{base}" fill="{fill}" stroke="{color}"/>')
            for x, _, *ends in line:
                if ends:
                    low, high = (f"{up(end):.1f}" for end in ends)
                    parts.append(f'<path d="M{across(x):.1f} {low}V{high}" stroke="{color}"/>')
            if not self.filled:
                dots = (place.split() for place in places)
                parts += [f'<circle cx="{x}" cy="{y}" r="2.4" fill="{color}"/>' for x, y in dots]
            if legend:
                y = _HEIGHT - _BOTTOM - 8 - 13 * (len(self.lines) - 1 - number)
                parts.append(
                    f'<text x="{_WIDTH - _RIGHT - 4}" y="{y}" text-anchor="end" '
                    f'fill="{color}">{_plain(name)}</text>'
                )
        return parts


@dataclass(frozen=True)
class Picture:
    """Panels side by side, three in a row."""

    panels: Sequence[Panel] = field(default=())

    def svg(self) -> str:
        """The drawing."""
        columns = min(3, len(self.panels))
        width, height = columns * _WIDTH, -(-len(self.panels) // columns) * _HEIGHT
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="10" fill="#374151">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]
        for number, panel in enumerate(self.panels):
            x, y = number % columns * _WIDTH, number // columns * _HEIGHT
            inside = panel.svg(legend=len(panel.lines) > 1)
            parts += [f'<g transform="translate({x} {y})">', *inside, "</g>"]
        return "\n".join([*parts, "</svg>"]) + "\n"

    _repr_svg_ = svg  # what notebooks show

    def save(self, path: str | Path) -> None:
        """Write the drawing."""
        Path(path).write_text(self.svg())


class _Axis:
    def __init__(self, values: Sequence[float], log: bool, start: float, end: float) -> None:
        self._log, self._start, self._end = log, start, end
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        room = 0.0 if log else 0.05 * (high - low) or 0.5
        self._low, self._high = self._scaled(low) - room, self._scaled(high) + room
        if self._high == self._low:
            self._high += 1

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self._log else value

    def __call__(self, value: float) -> float:
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return self._start + min(max(share, 0.0), 1.0) * (self._end - self._start)

    def ticks(self) -> list[float]:
        if self._log:
            powers = range(math.ceil(self._low - 1e-9), math.floor(self._high + 1e-9) + 1)
            found = [10.0**power for power in powers]
            return found if len(found) > 1 else [10**self._low, 10**self._high]
        step = 10 ** math.floor(math.log10((self._high - self._low) / 2))
        step *= next(n for n in (1, 2, 5, 10) if (self._high - self._low) / (n * step) <= 5)
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        return [round(number * step, 10) for number in range(first, last + 1)]


def _plain(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


@torch.no_grad()
def plot_weights(model: nn.Module, *, bins: int = 128, nonzero: bool = False) -> Picture:
    """A histogram of every layer's weights; `nonzero` leaves pruned ones out."""
    panels = []
    for name, layer in model.named_modules():
        if isinstance(layer, PRUNABLE) and isinstance(layer.weight, torch.Tensor):
            values = layer.weight.detach().flatten().float().cpu()
            values = values[values != 0] if nonzero else values
            counts, edges = torch.histogram(values, bins)
            points = list(zip(edges.tolist(), counts.tolist(), strict=False))
            title = f"{name or type(model).__name__}: {int(counts.sum()):,}"
            panels.append(Panel(title, "weight", "count", {name: points}, log_y=True, filled=True))
    if not panels:
        raise ValueError(f"{type(model).__name__} has no linear layer or convolution to draw")
    return Picture(panels)


def plot_sensitivity(result: Sensitivity, *, metric: str = "metric") -> Picture:
    """The metric of each layer's trials, and a line at the untouched model's."""
    return Picture(
        [
            Panel(name, "amount", metric, {name: list(values.items())}, level=result.baseline)
            for name, values in result.values.items()
        ]
    )


def plot_frontier(
    lines: Mapping[str, Points],
    *,
    x: str = "KiB",
    metric: str = "metric",
    level: float | None = None,
) -> Picture:
    """What each way keeps of a metric at each size, or time: one line for each way."""
    return Picture([Panel("", x, metric, lines, level=level, log_x=True)])
