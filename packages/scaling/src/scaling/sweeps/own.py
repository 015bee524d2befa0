"""One's own runs as a sweep: from a table of rates, batch sizes and losses, or from a function."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scaling.runs import ScalingWarning
from scaling.sweeps.sweep import Sweep, swept, tried
from scaling.tables.cells import blank, decimal_comma, list_some, number
from scaling.tables.names import REPETITIONS, SWEPT, recognize
from scaling.tables.source import Located, located
from scaling.tables.states import keep_finished

DIVERGED = ("nan", "inf", "infinity", "diverged")

JUMP = 0.5
"""Rise of log loss above the least beyond which a language model has diverged."""

SAME_SIZE, SAME_TOKENS = 0.01, 0.05
"""Relative differences below which runs are of one model size, and of one length."""

Runs = dict[tuple[float, float], list[tuple[int, float]]]
"""(row, loss) of every run, by batch size and rate."""


def fit_sweep(
    source: Any,
    *,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, Any] | None = None,
) -> Sweep:
    """Return the sweep of one's own runs: a rate, a batch size and a final loss each.

    `source` is a CSV, JSON, DataFrame, mapping of columns or records, as for `load_runs`; `columns`
    names those of "rate", "batch_size" and "loss" that are not called as usual; `where` keeps the
    rows that say so. Rows without a loss and runs that did not finish are left out. Diverged runs
    are left out too, with a warning and a count: their loss is nan, inf or "diverged", or a number
    that no curve through the other rates explains, such as the logarithm of the vocabulary. Runs at
    one batch size and rate are repetitions.

    Raise `ValueError` for a bad cell, and for rows of several settings, such as two model sizes:
    each has a best rate of its own. `where` picks one, and `fit_sweeps` fits them all.
    """
    table, left_out = _read(source, where or {})
    found = _columns(table, columns or {})
    _require_one_setting(table, found)
    return _fitted(table, found, left_out)


def fit_sweeps(
    source: Any,
    by: str | Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, Any] | None = None,
) -> dict[tuple[str, ...], Sweep]:
    """Return the sweep of each setting, by the text of its cells in the columns `by`.

    The other arguments are those of `fit_sweep`, and so are the errors within a setting.
    """
    names = (by,) if isinstance(by, str) else tuple(by)
    table, left_out = _read(source, where or {})
    present = {name for _, record in table for name in record}
    if missing := [name for name in names if name not in present]:
        raise ValueError(f"by = {by!r}: no column {missing[0]!r}; there are {sorted(present)}")
    found = _columns(table, columns or {})
    groups: dict[tuple[str, ...], Located] = {}
    for row, record in table:
        groups.setdefault(tuple(str(record.get(name)) for name in names), []).append((row, record))
    for group in groups.values():
        _require_one_setting(group, found)
    return {key: _fitted(group, found, left_out) for key, group in groups.items()}


def _read(source: Any, where: Mapping[str, Any]) -> tuple[Located, list[str]]:
    table = [(row, record) for row, record in located(source, None) if record]
    for name, wanted in where.items():
        table = [(row, record) for row, record in table if str(record.get(name)) == str(wanted)]
    left_out: list[str] = []
    table = keep_finished(table, where, left_out)
    if not table:
        raise ValueError("; ".join(["the table holds no runs", *left_out]))
    for message in left_out:
        warnings.warn(message, ScalingWarning, stacklevel=3)
    return table, left_out


def _columns(table: Located, given: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the rate, the batch size and the loss."""
    present = list(dict.fromkeys(name for _, record in table for name in record))
    found = {}
    for ours, usual in SWEPT.items():
        name = given.get(ours)
        likely = [n for n in present if (_plain(n) in usual if name is None else n == name)]
        if len(likely) != 1:
            raise ValueError(
                f"columns {present}: which is the {ours}? Pass columns={{{ours!r}: '…'}}"
            )
        found[ours] = likely[0]
    return found


def _require_one_setting(table: Located, found: Mapping[str, str]) -> None:
    """Raise `ValueError` if the rows are of several model sizes, lengths or other settings."""
    present = dict.fromkeys(name for _, record in table for name in record)
    settings = {n: _settings(n, table, found) for n in present if n not in found.values()}
    settings = {name: told for name, told in settings.items() if told}
    if not settings:
        return
    sizes = [n for n in settings if recognize(n, "parameters") or recognize(n, "tokens")]
    name = (sizes or [*settings])[0]
    raise ValueError(
        f"column {name!r} takes {len(settings[name])} values ({list_some(settings[name])}): a sweep"
        f" is of one setting, as each has a best rate of its own; pass where={{{name!r}: "
        f"{settings[name][0]!r}}}, or fit each by itself with fit_sweeps(…, by={sizes or name!r});"
        f" columns that differ so: {list_some(settings)}"
    )


def _settings(name: str, table: Located, found: Mapping[str, str]) -> list[Any]:
    """Return the values of a column that tells settings apart; empty if it does not."""
    cells = [record.get(name) for _, record in table]
    told = list(dict.fromkeys(str(cell) for cell in cells))
    if len(told) < 2 or _plain(name) in REPETITIONS:
        return []
    if recognize(name, "parameters"):
        return told if _spread(cells) > SAME_SIZE else []
    pairs = [tuple(str(r.get(found[k])) for k in ("batch_size", "rate")) for _, r in table]
    groups: dict[Any, list[Any]] = {}
    if recognize(name, "tokens") or recognize(name, "compute"):
        # Trained for a number of steps, larger batches see more tokens.
        for cell, (size, _) in zip(cells, pairs, strict=True):
            groups.setdefault(size, []).append(cell)
        return told if any(_spread(group) > SAME_TOKENS for group in groups.values()) else []
    # Any other column is a setting if repetitions differ by it and it has few values: a name, a
    # date or a measurement has as many as there are rows.
    for cell, pair in zip(cells, pairs, strict=True):
        groups.setdefault(pair, []).append(str(cell))
    differs = any(len(set(group)) > 1 for group in groups.values())
    return told if differs and len(told) * 3 <= len(table) else []


def _spread(cells: Sequence[Any]) -> float:
    """Return the relative range of numbers; inf if one is not a number."""
    values = [number(cell, False) for cell in cells if not blank(cell)]
    if not values or not all(math.isfinite(v) and v > 0 for v in values):
        return math.inf if values else 0.0
    return max(values) / min(values) - 1


def _fitted(table: Located, found: Mapping[str, str], left_out: Sequence[str]) -> Sweep:
    runs = _runs(table, found)
    if not runs:
        raise ValueError(f"no row has a loss in column {found['loss']!r}")
    rows = _mark_diverged(runs)
    said = [*left_out]
    if rows:
        said.append(
            f"column {found['loss']!r} says that {len(rows)} of {sum(map(len, runs.values()))} runs"
            f" diverged (rows {list_some(rows)}): left out"
        )
        warnings.warn(said[-1], ScalingWarning, stacklevel=3)
    sizes, rates = (np.array(sorted({pair[i] for pair in runs})) for i in (0, 1))
    seeds = max(map(len, runs.values()))
    by_seed = np.full((len(sizes), seeds, len(rates)), np.nan)
    for (size, rate), losses in runs.items():
        at = int(np.searchsorted(sizes, size)), int(np.searchsorted(rates, rate))
        by_seed[at[0], : len(losses), at[1]] = np.log([loss for _, loss in losses])
    sweep = swept("own", "own", rates, sizes, by_seed)
    read = ", ".join(f"{ours} by {name!r}" for ours, name in found.items())
    return replace(sweep, diverged=len(rows), explanation="\n".join([read, *said]))


def _runs(table: Located, found: Mapping[str, str]) -> Runs:
    """Return the losses by batch size and rate; inf if they diverged."""
    comma = decimal_comma((name, [(i, r.get(name)) for i, r in table]) for name in found.values())
    runs: Runs = {}
    for row, record in table:
        cell = record.get(found["loss"])
        said = str(cell).strip().lower()
        if blank(cell) and said != "nan":
            continue
        rate, size = (number(record.get(found[k]), comma) for k in ("rate", "batch_size"))
        loss = math.inf if said in DIVERGED else number(cell, comma, thousands=False)
        for name, value in (("rate", rate), ("batch_size", size)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"column {found[name]!r} must be positive and finite, but row {row}:"
                    f" {record.get(found[name])!r}"
                )
        if not loss > 0:
            raise ValueError(f"column {found['loss']!r} must be positive, but row {row}: {cell!r}")
        runs.setdefault((size, rate), []).append((row, loss))
    return runs


def _mark_diverged(runs: Runs) -> list[int]:
    """Set the losses of diverged runs to inf, and return the rows of all of them.

    Beyond the best rate a loss rises smoothly, as it does below it. A run diverged if its loss is
    more than `JUMP` above the least in logs and above four times the rise on the other side.
    """
    for size in {size for size, _ in runs}:
        curve = {rate: losses for (of, rate), losses in runs.items() if of == size}
        finite = {r: [z for _, z in pairs if z < math.inf] for r, pairs in curve.items()}
        least = {rate: min(losses) for rate, losses in finite.items() if losses}
        if not least:
            continue
        best = min(least, key=lambda rate: least[rate])
        below = [math.log(z / least[best]) for rate, z in least.items() if rate < best]
        bound = max(JUMP, 4 * max(below, default=math.inf))
        for rate, pairs in curve.items():
            if rate >= best:
                runs[size, rate] = [
                    (row, math.inf if math.log(z / least[best]) > bound else z) for row, z in pairs
                ]
    return sorted(row for losses in runs.values() for row, z in losses if z == math.inf)


def trained(
    task: Callable[[float, int, int], float],
    rates: Sequence[float] | None,
    batch_sizes: Sequence[int] | None,
    seeds: int,
    seed: int,
) -> Sweep:
    """The sweep of a function of (rate, batch size, seed), called one after the other."""
    if rates is None or batch_sizes is None:
        raise ValueError("a task of your own needs rates and batch_sizes to be tried at")
    grid, sizes = tried(rates, batch_sizes)
    counts = sizes.tolist()
    found = np.array(
        [
            [[float(task(r, b, seed + i)) for r in grid.tolist()] for i in range(seeds)]
            for b in counts
        ]
    )
    found[~np.isfinite(found)] = np.inf
    if (found <= 0).any():
        raise ValueError(f"the task's loss is {found.min():g}; it must be positive")
    name = getattr(task, "__name__", "own")
    return swept(name, "own", grid, sizes.astype(float), np.log(found))


def _plain(name: str) -> str:
    return "".join(c for c in name.rsplit(".")[-1].lower() if c.isalnum())
