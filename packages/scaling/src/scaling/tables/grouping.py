"""Groups of runs that differ only by rounding, such as the runs of one budget."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scaling.tables.cells import parse_numbers
from scaling.tables.table import Reading, Table
from scaling.units import Array

#: Largest relative difference at which the sizes of two runs count as equal.
SAME_SIZE = 0.01

#: Largest relative difference at which the tokens, or the compute, of two runs count as equal.
SAME_TOKENS = 0.05

#: Largest relative differences between runs of the same design: their size, tokens and compute.
DESIGN_TOLERANCES = {"parameters": SAME_SIZE, "tokens": SAME_TOKENS, "compute": SAME_TOKENS}

#: Largest relative difference at which two numbers of a setting count as equal, due to rounding.
SAME_SETTING = 1e-4

#: Maximum number of rows that are searched for unknown settings: a million would take seconds.
MAX_SEARCHED_ROWS = 5000


def cluster(values: Array, tolerance: float, max_factor: float = 2.0) -> NDArray[np.intp]:
    """Return the group index of each value, from 0 for the group of the smallest values.

    A relative gap wider than `tolerance` starts a new group. A group whose values differ by more
    than `max_factor` is divided into groups that span at most a factor of 1 + `tolerance`.
    """
    order = np.argsort(values, kind="stable")
    logs = np.log(values[order])
    width = math.log1p(tolerance)
    is_start = np.diff(logs, prepend=-np.inf) > width
    is_start[:1] = True  # also if `tolerance` is infinite
    for group in np.split(np.arange(len(logs)), np.flatnonzero(is_start[1:]) + 1):
        if len(group) and logs[group[-1]] - logs[group[0]] > math.log(max_factor):
            start = logs[group[0]]
            for i in group:
                if logs[i] > start + width:
                    start = logs[i]
                    is_start[i] = True
    codes = np.empty(len(values), np.intp)
    codes[order] = np.cumsum(is_start) - 1
    return codes


def encode_settings(
    table: Table, names: Sequence[str], tolerance: float = SAME_SETTING
) -> NDArray[np.intp]:
    """Return the index, counted from 0, of each row's combination of values in some columns.

    Positive numbers are grouped, from the smallest, so that the numbers of a group differ by at
    most a factor of 1 + `tolerance`. All zeros are one setting. Other cells are compared as text.
    Therefore, the texts 3e-4 and 0.0003 are one setting, but -3e-4 and -0.0003 are two.
    """
    keys = []
    for name in names:
        codes = table.encode_columns([name])
        numbers = parse_numbers(table.get_cells(name))
        is_positive = np.isfinite(numbers) & (numbers > 0)
        groups = cluster(numbers[is_positive], tolerance, 1 + tolerance)
        codes[is_positive] = len(table) + groups
        codes[numbers == 0] = -1
        keys.append(codes)
    index: NDArray[np.intp] = np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1)
    return index


def bin_designs(reading: Reading) -> list[NDArray[np.intp]]:
    """Return the bin of each row on the axes of a design; equal values have the same bin."""
    return [
        np.floor(np.log(reading.values[k]) / np.log1p(tolerance)).astype(np.intp)
        for k, tolerance in DESIGN_TOLERANCES.items()
        if k in reading.values
    ]


def choose_searched_rows(keys: Sequence[NDArray[np.intp]]) -> NDArray[np.intp]:
    """Return the rows that are searched for unknown settings, at most `MAX_SEARCHED_ROWS`.

    Only runs that are repeated show a setting. They may be far apart, as in joined exports of two
    experiments. Therefore, complete groups of rows with equal keys are chosen first, evenly over
    the sorted groups. The first rows of the table fill the remainder.
    """
    num_rows = len(keys[0])
    if num_rows <= MAX_SEARCHED_ROWS:
        return np.arange(num_rows)
    order = np.lexsort(keys)
    is_start = np.any([np.diff(key[order], prepend=-1) != 0 for key in keys], axis=0)
    groups = np.cumsum(is_start) - 1
    is_repeated = np.bincount(groups) > 1
    repeated = is_repeated[groups]
    step = -(-np.count_nonzero(repeated) // MAX_SEARCHED_ROWS) or 1
    chosen = order[repeated & (((np.cumsum(is_repeated) - 1) % step)[groups] == 0)]
    # A large group is sampled at random: every n-th row might have one of two settings only.
    chosen = np.random.default_rng(0).permutation(chosen)[:MAX_SEARCHED_ROWS]
    first = np.setdiff1d(np.arange(MAX_SEARCHED_ROWS), chosen)
    return np.sort(np.concatenate([chosen, first])[:MAX_SEARCHED_ROWS])


def encode_designs(reading: Reading, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the index of the design (size, tokens, compute) of each of some rows."""
    keys = []
    for k, tolerance in DESIGN_TOLERANCES.items():
        if k in reading.values:
            keys.append(cluster(reading.values[k][rows], tolerance, 1 + tolerance))
    codes: NDArray[np.intp] = np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1)
    return codes


def select_below_cuts(axis: Array, fractions: Sequence[float]) -> list[NDArray[np.bool_]]:
    """Return masks of the runs up to each quantile of an axis such as compute.

    Runs within 1 % of a cut are below it, because budgets are often equal only up to rounding.
    Equal masks are returned once, and a mask that selects all runs is left out.
    """
    masks: dict[int, NDArray[np.bool_]] = {}
    for cut in np.quantile(axis, fractions, method="lower"):
        below = axis <= cut * 1.01
        masks[int(below.sum())] = below
    masks.pop(len(axis), None)
    return list(masks.values())
