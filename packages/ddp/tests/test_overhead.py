"""The overhead model: the formula and its optimum."""

import pytest
from ddp import optimal_bucket_bytes, overhead_seconds
from hypothesis import given
from hypothesis import strategies as st

positive = st.floats(1e-3, 1e3)


@given(size=positive, bandwidth=positive, latency=positive)
def test_optimal_bucket_size_minimizes_the_overhead(size, bandwidth, latency):
    best = size / optimal_bucket_bytes(size, bandwidth, latency)
    least = overhead_seconds(size, bandwidth, latency, best)
    assert least == pytest.approx(2 * (size * latency / bandwidth) ** 0.5)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert overhead_seconds(size, bandwidth, latency, best * factor) > least


def test_overhead_of_a_hand_computed_example():
    # 100 MB in 4 buckets over 1 GB/s: the last 25 MB take 25 ms; 4 calls of 1 ms are 4 ms.
    assert overhead_seconds(100e6, 1e9, 1e-3, 4) == pytest.approx(0.029)
    # sqrt(100e6 B * 1e-3 s * 1e9 B/s) = 10 MB
    assert optimal_bucket_bytes(100e6, 1e9, 1e-3) == pytest.approx(10e6)


@pytest.mark.parametrize("invalid", [0.0, -1.0, float("nan")])
def test_arguments_that_are_not_positive_are_refused(invalid):
    with pytest.raises(ValueError, match="expected model_bytes > 0"):
        overhead_seconds(invalid, 1e9, 1e-3, 4)
    with pytest.raises(ValueError, match="expected bandwidth > 0"):
        optimal_bucket_bytes(1e6, invalid, 1e-3)


def test_negative_latency_is_refused():
    with pytest.raises(ValueError, match="expected latency >= 0, got latency=-1"):
        overhead_seconds(80e6, 1e9, -1.0, 4)
