"""Shapes and options in a short list that contains every pair of values."""

import itertools

import pytest
import torch

# Every pair of values of two options occurs at least once.
SHAPES = {  # batch, heads, kv_heads, seq_q, seq_k
    "square": (2, 2, 2, 48, 48),
    "more keys": (1, 4, 2, 37, 70),
    "fewer keys": (1, 2, 1, 70, 37),
    # Many rows, because the errors of one row are correlated.
    "one query": (12, 4, 1, 1, 45),
}
OPTIONS = {
    "is_causal": (False, True),
    "window": (None, (19, 3), (None, 5), 1, (40, None)),
    "softcap": (None, 2.0),
    "scale": (None, 0.7),
    "dim": (16, 24, (40, 24), (16, 48)),
    "sinks": (False, True),
    "shape": tuple(SHAPES),
    "tma": (True, False),
    "splits": (1, 3),
}


def choose_pairs(options):
    """Return a short list of choices that contains every pair of values of two options."""
    missing = {
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(options, 2)
        for x in range(len(options[a]))
        for y in range(len(options[b]))
    }
    rows = []
    while missing:
        # Sorted, so that every process makes the same list.
        row = dict(sorted(min(missing, key=sorted)))
        for name, values in options.items():
            if name not in row:
                row[name] = max(
                    range(len(values)),
                    key=lambda i: sum(frozenset(((name, i), p)) in missing for p in row.items()),
                )
        missing -= {frozenset(p) for p in itertools.combinations(row.items(), 2)}
        rows.append({name: options[name][i] for name, i in row.items()})
    return rows


def list_cases_of_pairs(options):
    """Return the cases of `choose_pairs`; the usual tests run those with a new value."""
    seen = set()
    cases = []
    for case in choose_pairs(options):
        values = {(option, str(value)) for option, value in case.items()}
        marks = [pytest.mark.exhaustive] if values <= seen else []
        seen |= values
        cases.append(pytest.param(case, marks=marks))
    return cases


def make_sinks(requested, shape):
    """Return one sink per head, some above every score and some below."""
    return {"sinks": torch.randn(SHAPES[shape][1]) * 2} if requested else {}


def draw_tensors(shape, dim, dtype=torch.float32):
    batch, heads, kv_heads, seq_q, seq_k = SHAPES[shape]
    dim, v_dim = dim if isinstance(dim, tuple) else (dim, dim)
    q = torch.randn(batch, heads, seq_q, dim)
    k, v = (torch.randn(batch, kv_heads, seq_k, d) for d in (dim, v_dim))
    return [x.to(dtype) for x in (q, k, v)]
