"""Whether a set of runs can identify a law at all, decided from its design before any fit.

Note [Conditioning of the design]
The law E + A / N^alpha + B / D^beta is a constant, a curve in x = log N and a curve in y = log D.
A curve takes a slope and a bend, so x, y, x^2 / 2 and y^2 / 2 must be independent over the runs.
If they are not, a fit still converges: with D = 20 N, for example, two power laws of one variable
swap their exponents unnoticed, and a bootstrap repeats the same wrong law. The measure of their
independence is the smallest singular value of these four centered columns, per root of the number
of runs. It is 0 for one size, one token count, one budget and D = c N^a, a few thousandths for
these with 1 % of jitter, and 0.05 to 1 for published tables and their parts.
"""

import math

import numpy as np

from scaling.runs import Array

LEAST = 0.04
"""Smallest singular value of an identifying design: see Note [Conditioning of the design]."""

REMEDY = "train several sizes at each of three or more budgets, a factor of ten apart in all"


def require_identified(parameters: Array, tokens: Array) -> None:
    """Raise `ValueError` with the cause unless the runs identify a law of N and D."""
    if cause := design_defect(parameters, tokens):
        raise ValueError(f"these {len(parameters)} runs do not identify a law: {cause}; {REMEDY}")


def design_defect(parameters: Array, tokens: Array) -> str:
    """Return why the runs do not identify a law of N and D; empty if they do."""
    x, y = (v - v.mean() for v in np.log([parameters, tokens]))
    if singular_values(np.stack([x, y, x**2 / 2, y**2 / 2])).min() >= LEAST:
        return ""
    return line_defect(parameters, tokens) or (
        "log N and log D take too few separate values, or one is a smooth function of the other, so"
        " the terms of N and D stand in for each other"
    )


def line_defect(parameters: Array, tokens: Array) -> str:
    """Return which line the runs lie on in log N and log D; empty if they lie on none."""
    logs = np.log([parameters, tokens])
    centered = logs - logs.mean(1)[:, None]
    if singular_values(centered).min() >= LEAST:
        return ""
    a, b = np.linalg.svd(centered)[0][:, -1]  # a x + b y is constant over the runs
    thickness = f"within {math.expm1(float((a * centered[0] + b * centered[1]).std())):.2g}"
    middle_n, middle_d = np.exp(logs.mean(1))
    if np.ptp(centered) < LEAST:
        return f"all of them have {middle_n:.3g} parameters and {middle_d:.3g} tokens {thickness}"
    if abs(b) < 0.05:
        return f"column 'parameters' is {middle_n:.3g} in all of them {thickness}"
    if abs(a) < 0.05:
        return f"column 'tokens' is {middle_d:.3g} in all of them {thickness}"
    slope = -a / b
    if abs(slope + 1) < 0.05:
        return f"they hold one budget, 6 N D = {6 * middle_n * middle_d:.3g} {thickness}"
    if abs(slope - 1) < 0.05:
        return f"all of them have {middle_d / middle_n:.3g} tokens per parameter {thickness}"
    return f"tokens follow the parameters as D = c N^{slope:.2f} {thickness}"


def singular_values(columns: Array) -> Array:
    """Return the singular values of (k, n) columns, centered, per root of n; 0 for missing rows."""
    count, n = columns.shape
    centered = columns - columns.mean(1)[:, None]
    values = np.linalg.svd(centered, compute_uv=False) / math.sqrt(n)
    padded: Array = np.concatenate([values, np.zeros(count - len(values))])
    return padded
