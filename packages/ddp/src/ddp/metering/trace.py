"""A chart of one step per design, as an SVG."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from ddp.metering.records import BucketRecord, StepRecord

_COLORS = {"forward": "#9ecae1", "loss and backward": "#3182bd", "waiting for gradients": "#de2d26"}
_EXPOSED = "#fdae6b"
_HIDDEN = "#74c476"
_LEGEND = [
    *((color, name) for name, color in _COLORS.items()),
    (_HIDDEN, "sent, hidden behind the computation"),
    (_EXPOSED, "sent, not hidden"),
]

#: Width of the chart, left margin, height of a row and gap between designs, in pixels.
_WIDTH = 900
_LEFT = 110
_ROW_HEIGHT = 16
_GAP = 12
#: Further communication lanes are drawn over the last one.
_MAX_LANES = 6


@dataclass(frozen=True)
class Bar:
    """A bar of the chart, from `start` to `stop`."""

    #: 0 for computation, above 0 for communication.
    lane: int
    start: float
    stop: float
    color: str
    #: The text that a browser shows for the bar.
    title: str


def list_bars(step: StepRecord) -> list[Bar]:
    """Return the bars of a step. Bars in the same lane do not overlap.

    A bucket has two bars: the time before the wait, and the time within it.
    """
    spans = [("forward", span) for span in step.forwards]
    spans += [("loss and backward", step.backward), ("waiting for gradients", step.waiting)]
    bars = [Bar(0, *span, _COLORS[name], _make_title(name, *span)) for name, span in spans]
    # Stop time of the last bar of each communication lane.
    lane_stops: list[float] = []
    for number, bucket in enumerate(step.buckets):
        lane = 1 + _claim_lane(lane_stops, bucket)
        title = _make_title(f"bucket {number}", bucket.sent, bucket.done)
        title += " " + ", ".join(bucket.parameters)
        split_time = min(max(step.waiting[0], bucket.sent), bucket.done)
        bars.append(Bar(lane, bucket.sent, split_time, _HIDDEN, title))
        bars.append(Bar(lane, split_time, bucket.done, _EXPOSED, title))
    return [bar for bar in bars if bar.start < bar.stop]


def draw_steps(steps: Mapping[str, StepRecord]) -> str:
    """Return a chart of one step of each design, on one time scale, as the text of an SVG.

    Computation is blue, and the wait after it is red. Communication is green while it is hidden
    behind the computation, and orange otherwise.
    """
    stops = {}
    for name, step in steps.items():
        stops[name] = max([step.waiting[1], *(bucket.done for bucket in step.buckets)])
    longest = max(stops[name] - step.start for name, step in steps.items())
    scale = (_WIDTH - _LEFT - 20) / longest
    parts: list[str] = []
    y = 24
    for name, step in steps.items():
        parts.append(_draw_text(_LEFT - 8, y + 12, name, anchor="end"))
        num_lanes = 1
        for bar in list_bars(step):
            lane = min(bar.lane, _MAX_LANES)
            num_lanes = max(num_lanes, 1 + lane)
            x = _LEFT + (bar.start - step.start) * scale
            width = (bar.stop - bar.start) * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{y + _ROW_HEIGHT * lane:.2f}" width="{width:.2f}" '
                f'height="{_ROW_HEIGHT - 3}" fill="{bar.color}"><title>{escape(bar.title)}</title>'
                "</rect>"
            )
        y += _ROW_HEIGHT * num_lanes
        seconds = stops[name] - step.start
        label = f"waits {1e3 * step.exposed_seconds:.0f} ms of {1e3 * seconds:.0f}"
        parts.append(_draw_text(_LEFT, y + 9, label))
        y += 2 * _GAP
    x = float(_LEFT)
    for color, meaning in _LEGEND:
        parts.append(f'<rect x="{x:g}" y="5" width="10" height="10" fill="{color}"/>')
        parts.append(_draw_text(x + 14, 14, meaning))
        x += 26 + 6.2 * len(meaning)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" '
    style = 'font-family="sans-serif" font-size="11">'
    background = f'<rect width="{_WIDTH}" height="{y}" fill="white"/>'
    return head + style + background + "".join(parts) + "</svg>\n"


def write_atomically(path: str | Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    temporary = Path(f"{path}.{os.getpid()}.part")
    temporary.write_text(text)
    temporary.replace(path)


def _claim_lane(lane_stops: list[float], bucket: BucketRecord) -> int:
    """Return the first lane that is free when the bucket is launched, and mark it as used."""
    for lane, stop in enumerate(lane_stops):
        if stop <= bucket.sent:
            lane_stops[lane] = bucket.done
            return lane
    lane_stops.append(bucket.done)
    return len(lane_stops) - 1


def _make_title(name: str, start: float, stop: float) -> str:
    return f"{name}: {1e3 * (stop - start):.3g} ms"


def _draw_text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'
