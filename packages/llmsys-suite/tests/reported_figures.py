"""Every figure that a run reports, by stage and name, and results with one doubled figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from llmsys_suite.results import Audit, Skipped

#: Fields that are not figures of the report: raw timings, and records that only the audit reads.
RECORDS = ("interleaved", "final_weights")


def figures(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (stage, name) of each number; numbers of the same column have the same name."""
    names: dict[tuple[str, str], None] = {}
    for stage, result in results.items():
        if result is None or isinstance(result, Skipped | Audit):
            continue
        for field in dataclasses.fields(result):
            if field.name not in RECORDS:
                for name in _names(getattr(result, field.name), field.name):
                    names[stage, name] = None
    return list(names)


def doubled(result: Any, name: str) -> Any:
    """Return a copy of a result whose numbers of this name are doubled, or 1 instead of 0."""
    field = name.partition(".")[0]
    change = _changer(name)
    return dataclasses.replace(result, **{field: change(getattr(result, field), field)})


def _names(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _names(inner, _below(name, key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _names(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name


def _below(name: str, key: str) -> str:
    """Return the name of an entry: field and column, without names of models and variants."""
    column = key.isidentifier() and key.islower() and not key.startswith(("mini", "tiny"))
    return f"{name.partition('.')[0]}.{key}" if column else name


def _changer(name: str) -> Callable[[Any, str], Any]:
    def change(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: change(inner, _below(path, key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(change(inner, path) for inner in value)
        if path == name and isinstance(value, int | float) and not isinstance(value, bool):
            return 2 * value if value else 1
        return value

    return change
