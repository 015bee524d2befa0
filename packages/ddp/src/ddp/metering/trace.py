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
class Event:
    """A bar of the chart."""

    #: 0 for computation, above 0 for communication.
    lane: int
    name: str
    start: float
    stop: float
    #: Names of the parameters of a bucket; empty for computation.
    parameters: str = ""


def list_events(step: StepRecord) -> list[Event]:
    """Return the events of a step. Events in the same lane do not overlap."""
    result = [Event(0, "forward", *span) for span in step.forwards]
    result.append(Event(0, "loss and backward", *step.backward))
    result.append(Event(0, "waiting for gradients", *step.waiting))
    # Stop time of the last event of each communication lane.
    lane_stops: list[float] = []
    for number, bucket in enumerate(step.buckets):
        lane = _claim_lane(lane_stops, bucket)
        names = ", ".join(bucket.parameters)
        result.append(Event(1 + lane, f"bucket {number}", bucket.sent, bucket.done, names))
    return result


def svg(steps: Mapping[str, StepRecord]) -> str:
    """Return a chart of one step of each design, on one time scale, as the text of an SVG.

    Computation is blue, and the wait after it is red. Communication is green while it is hidden
    behind the computation, and orange otherwise.
    """
    stops = {name: _compute_last_stop(step) for name, step in steps.items()}
    longest = max(stops[name] - step.start for name, step in steps.items())
    scale = (_WIDTH - _LEFT - 20) / longest
    parts: list[str] = []
    y = 24
    for name, step in steps.items():
        start = step.start
        stop = stops[name]
        step_events = list_events(step)
        parts.append(_draw_text(_LEFT - 8, y + 12, name, anchor="end"))
        for event in step_events:
            bar_y = y + _ROW_HEIGHT * min(event.lane, _MAX_LANES)
            for piece_start, piece_stop, color in _split_event(event, step):
                x = _LEFT + (piece_start - start) * scale
                bar_width = (piece_stop - piece_start) * scale
                parts.append(_draw_bar(x, bar_y, bar_width, color, event))
        y += _ROW_HEIGHT * (1 + min(_MAX_LANES, max(event.lane for event in step_events)))
        label = f"waits {1e3 * step.exposed_seconds:.0f} ms of {1e3 * (stop - start):.0f}"
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


def _split_event(event: Event, step: StepRecord) -> list[tuple[float, float, str]]:
    """Return start, stop and color of the pieces of an event; split communication at the wait."""
    if not event.lane:
        return [(event.start, event.stop, _COLORS[event.name])]
    split_time = min(max(step.waiting[0], event.start), event.stop)
    return [(event.start, split_time, _HIDDEN), (split_time, event.stop, _EXPOSED)]


def _compute_last_stop(step: StepRecord) -> float:
    return max([step.waiting[1], *(bucket.done for bucket in step.buckets)])


def _draw_bar(x: float, y: float, width: float, color: str, event: Event) -> str:
    if width <= 0:
        return ""
    milliseconds = 1e3 * (event.stop - event.start)
    title = escape(f"{event.name}: {milliseconds:.3g} ms {event.parameters}")
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{_ROW_HEIGHT - 3}" '
        f'fill="{color}"><title>{title}</title></rect>'
    )


def _draw_text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'
