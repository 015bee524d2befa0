import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling import Law
from scipy.optimize import minimize_scalar

ROUNDED = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)

laws = st.builds(
    Law,
    E=st.floats(0, 3),
    A=st.floats(10, 5000),
    B=st.floats(10, 5000),
    alpha=st.floats(0.15, 0.8),
    beta=st.floats(0.15, 0.8),
)


def search_least_loss(law: Law, compute: float) -> float:
    """Return the least loss over sizes by a search."""

    def loss(log_n):
        return law.predict(np.exp(log_n), compute / 6 / np.exp(log_n))

    grid = np.linspace(0, math.log(compute / 6), 400)
    best = int(np.argmin(loss(grid)))
    bracket = (grid[max(best - 1, 0)], grid[min(best + 1, 399)])
    result = minimize_scalar(loss, bounds=bracket, method="bounded", options={"xatol": 1e-9})
    return float(result.fun)


@settings(max_examples=40, deadline=None)
@given(law=laws, exponent=st.floats(18, 26))
def test_closed_form_optimum_agrees_with_a_search(law, exponent):
    compute = 10.0**exponent
    best = law.optimal(compute)
    assert 6 * best.parameters * best.tokens == pytest.approx(compute, rel=1e-9)
    assert best.loss <= search_least_loss(law, compute) * (1 + 1e-10)


def test_optimum_of_the_rounded_chinchilla_constants():
    # G = (alpha A / (beta B))^(1 / (alpha + beta)), N = G (C / 6)^(beta / (alpha + beta)).
    # G of Note [Closed-form optimum] is the best size at C = 6.
    assert ROUNDED.optimal(6.0).parameters == pytest.approx(1.34471064277253, rel=1e-12)
    assert ROUNDED.exponent == pytest.approx(0.45161290322580644, rel=1e-12)
    best = ROUNDED.optimal(5.76e23)
    assert best.parameters == pytest.approx(0.5986950904970205 * 5.76e23**0.45161290322580644)
    assert best.tokens == pytest.approx(0.27838321929165066 * 5.76e23**0.5483870967741935)
    # The paper's Approaches 1 and 2 give 20 tokens per parameter instead.
    assert best.tokens / best.parameters == pytest.approx(92.6, abs=0.1)


@pytest.mark.parametrize("name", ["A", "B", "alpha", "beta"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_law_without_an_optimum_is_refused(name, value):
    with pytest.raises(ValueError, match=f"expected {name} to be positive"):
        dataclasses.replace(ROUNDED, **{name: value})
