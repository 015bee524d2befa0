"""The last steps as a picture: when was computed, when sent, and for what did somebody wait.

As a Chrome trace for chrome://tracing or Perfetto, and as an SVG that stands in a report.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from ddp.metering.records import StepRecord

_COLORS = {"forward": "#9ecae1", "loss and backward": "#3182bd", "waiting for gradients": "#de2d26"}
_BUCKET, _HIDDEN = "#fdae6b", "#74c476"
_LEGEND = [
    *((color, name) for name, color in _COLORS.items()),
    (_HIDDEN, "sent, hidden behind the computation"),
    (_BUCKET, "sent, not hidden"),
]


@dataclass(frozen=True)
class Event:
    """A bar: seconds from `begin` to `end`, in lane 0 (computation) or in one of the link's."""

    lane: int
    name: str
    begin: float
    end: float
    details: Mapping[str, object]


def events(steps: Iterable[StepRecord]) -> list[Event]:
    """What happened in `steps`; bars of one lane do not overlap."""
    found: list[Event] = []
    lanes: list[float] = []
    for step in steps:
        found += [Event(0, "forward", *span, {}) for span in step.forwards]
        found.append(Event(0, "loss and backward", *step.backward, {}))
        found.append(Event(0, "waiting for gradients", *step.waiting, {}))
        for number, bucket in enumerate(step.buckets):
            free = (lane for lane, busy in enumerate(lanes) if busy <= bucket.sent)
            lane = next(free, len(lanes))
            lanes[lane : lane + 1] = [bucket.done]
            details = {
                "parameters": ", ".join(bucket.parameters),
                "gradient_bytes": bucket.gradient_bytes,
                "exposed_ms": 1e3 * bucket.exposed_seconds,
            }
            found.append(Event(1 + lane, f"bucket {number}", bucket.sent, bucket.done, details))
    return found


def chrome_trace(steps: Iterable[StepRecord], rank: int = 0) -> dict[str, Any]:
    """`steps` as a Chrome trace: a process a rank, a thread a lane."""
    found = events(steps)
    bars: list[dict[str, Any]] = [
        {"name": e.name, "ph": "X", "pid": rank, "tid": e.lane, "args": dict(e.details)}
        | {"ts": 1e6 * e.begin, "dur": 1e6 * (e.end - e.begin)}
        for e in found
    ]
    for lane in range(1 + max((e.lane for e in found), default=0)):
        name = f"communication {lane - 1}" if lane else "computation"
        named = {"name": "thread_name", "ph": "M", "pid": rank, "tid": lane}
        bars.append(named | {"args": {"name": name}})
    return {"traceEvents": bars, "displayTimeUnit": "ms"}


def svg(steps: Mapping[str, StepRecord], *, width: int = 900) -> str:
    """A step of each design, one above the other, on one scale of time.

    Computation is blue, the wait after it red; what travels is green while it hides behind the
    computation and orange where it does not.
    """
    left, row, gap = 110, 16, 12
    spans = {name: _span(step) for name, step in steps.items()}
    longest = max(end - begin for begin, end in spans.values())
    scale = (width - left - 20) / longest
    parts, y = [], 24
    for name, step in steps.items():
        bars, (begin, end) = events([step]), spans[name]
        parts.append(_text(left - 8, y + 12, name, anchor="end"))
        for bar in bars:
            top = y + row * min(bar.lane, 6)
            cuts = [(bar.begin, bar.end, _COLORS.get(bar.name, _HIDDEN))]
            if bar.lane:
                cut = min(max(step.waiting[0], bar.begin), bar.end)
                cuts = [(bar.begin, cut, _HIDDEN), (cut, bar.end, _BUCKET)]
            for start, stop, color in cuts:
                x = left + (start - begin) * scale
                parts.append(_bar(x, top, (stop - start) * scale, row - 3, color, bar))
        exposed = f"waits {1e3 * step.exposed_seconds:.0f} ms of {1e3 * (end - begin):.0f}"
        lanes = 1 + min(6, max(bar.lane for bar in bars))
        y += row * lanes
        parts.append(_text(left, y + 9, exposed))
        y += gap + 12
    x = float(left)
    for color, meaning in _LEGEND:
        parts.append(f'<rect x="{x:g}" y="5" width="10" height="10" fill="{color}"/>')
        parts.append(_text(x + 14, 14, meaning))
        x += 26 + 6.2 * len(meaning)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" '
    style = 'font-family="sans-serif" font-size="11">'
    ground = f'<rect width="{width}" height="{y}" fill="white"/>'
    return head + style + ground + "".join(parts) + "</svg>\n"


def write(path: str | Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    beside = Path(f"{path}.{os.getpid()}.part")
    beside.write_text(text)
    beside.replace(path)


def _span(step: StepRecord) -> tuple[float, float]:
    begins = [step.backward[0], *(begin for begin, _ in step.forwards)]
    return min(begins), max(step.waiting[1], *(bucket.done for bucket in step.buckets), 0.0)


def _bar(x: float, y: float, width: float, height: float, color: str, bar: Event) -> str:
    if width <= 0:
        return ""
    milliseconds = 1e3 * (bar.end - bar.begin)
    said = escape(f"{bar.name}: {milliseconds:.3g} ms {bar.details.get('parameters', '')}")
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height}" fill="{color}">'
        f"<title>{said}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'
