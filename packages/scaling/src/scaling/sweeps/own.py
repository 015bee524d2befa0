"""One's own runs as a sweep: from a table of rates, batch sizes and losses, or from a function."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from scaling.sweeps.sweep import Sweep, swept, tried
from scaling.tables.cells import blank, decimal_comma, number
from scaling.tables.names import SWEPT
from scaling.tables.source import located

DIVERGED = ("nan", "inf", "infinity", "diverged")


def fit_sweep(source: Any, *, columns: Mapping[str, str] | None = None) -> Sweep:
    """One's own runs: a rate, a batch size and a final loss each, with repetitions as they are.

    `source` is a CSV, JSON, DataFrame, mapping of columns or records, as for `load_runs`; `columns`
    names those of "rate", "batch_size" and "loss" that are not called as usual. Rows without a loss
    are left out; diverged ones (nan, inf) count as infinitely bad. ValueError names a bad cell.
    """
    table = [(row, r) for row, r in located(source, None) if r]
    if not table:
        raise ValueError("the table holds no runs")
    present = list(dict.fromkeys(name for _, record in table for name in record))
    found = {}
    for ours, usual in SWEPT.items():
        given = (columns or {}).get(ours)
        likely = [n for n in present if (_plain(n) in usual if given is None else n == given)]
        if len(likely) != 1:
            raise ValueError(
                f"columns {present}: which is the {ours}? Pass columns={{{ours!r}: '…'}}"
            )
        found[ours] = likely[0]
    comma = decimal_comma((name, [(i, r.get(name)) for i, r in table]) for name in found.values())
    runs: dict[tuple[float, float], list[float]] = {}
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
        runs.setdefault((size, rate), []).append(loss)
    if not runs:
        raise ValueError(f"no row has a loss in column {found['loss']!r}")
    sizes, rates = (np.array(sorted({pair[i] for pair in runs})) for i in (0, 1))
    seeds = max(map(len, runs.values()))
    by_seed = np.full((len(sizes), seeds, len(rates)), np.nan)
    for (size, rate), losses in runs.items():
        at = int(np.searchsorted(sizes, size)), int(np.searchsorted(rates, rate))
        by_seed[at[0], : len(losses), at[1]] = np.log(losses)
    return swept("own", "own", rates, sizes, by_seed)


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
