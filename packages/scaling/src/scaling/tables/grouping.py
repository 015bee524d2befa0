"""Groups of runs that differ only by rounding, such as the runs of one budget."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scaling.tables.cells import parse_numbers
from scaling.tables.table import Table
from scaling.units import Array

#: Largest relative difference at which the sizes of two runs count as equal.
SAME_SIZE = 0.01

#: Largest relative difference at which the tokens, or the compute, of two runs count as equal.
SAME_TOKENS = 0.05

#: Largest relative difference at which two numbers of a setting count as equal, due to rounding.
SAME_SETTING = 1e-4


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
