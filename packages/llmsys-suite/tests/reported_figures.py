"""Every figure that a run reports, by stage and name, and results with one doubled figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from llmsys_suite.results import Audit, Skipped

#: Fields that are not figures of the report: raw timings, and records that only the audit reads.
RECORDS = ("interleaved", "final_weights")
#: The figures that no check compares, by the words that label them in the report.
LABELED = {
    "plan": {
        "the memory of the ranks of a host, and of all variants together": (
            "host_peak_bytes",
            "all_variants_bytes",
        )
    },
    "links": {
        "times": ("rows.time_us", "rows.p99_us"),
        "ratios to the peer": ("rows.ratio_p50", "rows.ratio_p10", "rows.ratio_p90"),
        "calls in place": (
            "rows.in_place_time_us",
            "rows.in_place_p99_us",
            "rows.in_place_algbw_gbps",
            "rows.in_place_busbw_gbps",
            "rows.in_place_wrong",
        ),
        "the number of hosts": ("rows.hosts",),
    },
    "train": {"hidden and exposed communication": ("rows.hidden_ms", "rows.exposed_ms")},
    "parallel": {"waiting": ("rows.waiting",)},
    "memory": {
        "the peak of inference": ("peaks.inference_peak_mib",),
        "the timeline": ("training_timeline",),
    },
    "scale": {"the interval of the extrapolation": ("extrapolated.low", "extrapolated.high")},
    "inspect": {
        "the lens before the last layer, and entropies": ("lens.entropy",),
        "the scores of heads other than previous-token heads, and scores by chance": (
            "heads.chance",
            "heads.p_value",
        ),
    },
}


def list_figures(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (stage, name) of each number; numbers of the same column have the same name."""
    names: dict[tuple[str, str], None] = {}
    for stage, result in results.items():
        if result is None or isinstance(result, Skipped | Audit):
            continue
        for field in dataclasses.fields(result):
            if field.name not in RECORDS:
                for name in _iter_names(getattr(result, field.name), field.name):
                    names[stage, name] = None
    return list(names)


def double_figure(result: Any, name: str) -> Any:
    """Return a copy of a result whose numbers of this name are doubled, or 1 instead of 0."""
    field = name.partition(".")[0]
    change = _build_changer(name)
    return dataclasses.replace(result, **{field: change(getattr(result, field), field)})


def _iter_names(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _iter_names(inner, _get_entry_name(name, key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _iter_names(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name


def _get_entry_name(name: str, key: str) -> str:
    """Return the name of an entry: field and column, without names of models and variants."""
    column = key.isidentifier() and key.islower() and not key.startswith(("mini", "tiny"))
    return f"{name.partition('.')[0]}.{key}" if column else name


def _build_changer(name: str) -> Callable[[Any, str], Any]:
    def change(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: change(inner, _get_entry_name(path, key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(change(inner, path) for inner in value)
        if path == name and isinstance(value, int | float) and not isinstance(value, bool):
            return 2 * value if value else 1
        return value

    return change
