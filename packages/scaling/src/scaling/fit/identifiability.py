"""Checks that a set of runs can identify a law, from N and D alone, before any fit.

Note [Conditioning of the design]
The law E + A / N^alpha + B / D^beta is the sum of three terms: a constant, a curve in x = log N and
a curve in y = log D. Each curve has a slope and a curvature, so x, y, x^2 / 2 and y^2 / 2 must be
linearly independent over the runs. If they are not, a fit still converges. With D = 20 N, for
example, both terms are power laws of one variable and can exchange their exponents. A bootstrap
then repeats the same wrong law. The measure of independence is the smallest singular value of these
four centered columns, divided by the square root of the number of runs. It is 0 if all runs have
one size, one token count, one budget or tokens D = c N^a. With 1 % of jitter, it is a few
thousandths for such designs. For published tables and their subsets, it is 0.05 to 1.
"""

import math

import numpy as np

from scaling.units import Array

#: Smallest singular value at which runs identify a law: see Note [Conditioning of the design].
MIN_SINGULAR_VALUE = 0.04

REMEDY = "train several sizes at each of three or more budgets that span at least a factor of ten"


def explain_unidentified(parameters: Array, tokens: Array) -> str:
    """Return why the runs do not identify a law of N and D, with a remedy; empty if they do."""
    x, y = (v - v.mean() for v in np.log([parameters, tokens]))
    columns = np.stack([x, y, x**2 / 2, y**2 / 2])
    if compute_singular_values(columns).min() >= MIN_SINGULAR_VALUE:
        return ""
    cause = describe_line(parameters, tokens) or (
        "log N, log D and their squares are almost linearly dependent over these runs, as they are"
        " if all but a few runs lie on one curve, so the terms of N and D cannot be told apart"
    )
    return f"these {len(parameters)} runs do not identify a law: {cause}; {REMEDY}"


def describe_line(parameters: Array, tokens: Array) -> str:
    """Return a description of the line on which log N and log D lie, or an empty string."""
    logs = np.log([parameters, tokens])
    centered = logs - logs.mean(1)[:, None]
    spreads = compute_singular_values(logs)
    if spreads.min() >= MIN_SINGULAR_VALUE:
        return ""
    a, b = np.linalg.svd(centered)[0][:, -1]  # a x + b y is constant over the runs
    deviation = math.expm1(float((a * centered[0] + b * centered[1]).std()))
    thickness = f"within {100 * deviation:.2g} %"
    mean_n, mean_d = np.exp(logs.mean(1))
    if spreads.max() < MIN_SINGULAR_VALUE:
        return f"all of them have {mean_n:.3g} parameters and {mean_d:.3g} tokens {thickness}"
    if abs(b) < 0.05:
        return f"column 'parameters' is {mean_n:.3g} in all of them {thickness}"
    if abs(a) < 0.05:
        return f"column 'tokens' is {mean_d:.3g} in all of them {thickness}"
    slope = -a / b
    if abs(slope + 1) < 0.05:
        return f"they have one budget, 6 N D = {6 * mean_n * mean_d:.3g} {thickness}"
    if abs(slope - 1) < 0.05:
        return f"all of them have {mean_d / mean_n:.3g} tokens per parameter {thickness}"
    return f"tokens follow the parameters as D = c N^{slope:.2f} {thickness}"


def compute_singular_values(columns: Array) -> Array:
    """Center k columns (k, n) and return their singular values (k,), divided by sqrt(n).

    If n < k, the missing singular values are 0.
    """
    count, n = columns.shape
    centered = columns - columns.mean(1)[:, None]
    values = np.linalg.svd(centered, compute_uv=False) / math.sqrt(n)
    padded: Array = np.concatenate([values, np.zeros(count - len(values))])
    return padded
