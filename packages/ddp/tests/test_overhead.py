"""The overhead model: formula, optimum, and a fit that recovers the parameters of a sweep."""

from dataclasses import replace

import pytest
from ddp import fit, optimal_bucket_bytes, overhead_seconds
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


@given(bandwidth=st.floats(1e7, 1e11), latency=st.floats(1e-5, 1e-2), floor=st.floats(0, 0.1))
def test_fit_recovers_the_parameters_of_a_sweep(bandwidth, latency, floor):
    size = 80e6
    best = size / optimal_bucket_bytes(size, bandwidth, latency)
    counts = [best / 8, best / 2, best, best * 3, best * 8]
    seconds = [floor + overhead_seconds(size, bandwidth, latency, n) for n in counts]
    fitted = fit(size, counts, seconds)
    assert fitted.bandwidth == pytest.approx(bandwidth, 1e-6)
    assert fitted.latency == pytest.approx(latency, 1e-6)
    assert fitted.bucket_bytes == pytest.approx(optimal_bucket_bytes(size, bandwidth, latency))
    for count, expected in zip(counts, seconds, strict=True):
        assert fitted.seconds(count) == pytest.approx(expected)


def test_fit_minimizes_the_squared_relative_errors():
    size = 80e6
    counts = [1, 2, 4, 8, 16, 32]
    noise = [1.1, 0.95, 1.08, 0.9, 1.05, 0.97]
    seconds = []
    for count, factor in zip(counts, noise, strict=True):
        seconds.append(factor * (0.01 + overhead_seconds(size, 1e9, 2e-3, count)))
    fitted = fit(size, counts, seconds)

    def error(overhead):
        pairs = zip(counts, seconds, strict=True)
        return sum((overhead.seconds(n) / expected - 1) ** 2 for n, expected in pairs)

    for name in ("bandwidth", "latency", "floor"):
        for factor in (0.99, 1.01):
            changed = replace(fitted, **{name: factor * getattr(fitted, name)})
            assert error(changed) > error(fitted)


def test_sweep_without_trade_off_is_refused():
    with pytest.raises(ValueError, match="no optimum"):
        fit(80e6, [1, 2, 4, 8], [1.0, 0.6, 0.4, 0.3])
    with pytest.raises(ValueError, match="at least 3 different"):
        fit(80e6, [1, 2, 2], [1.0, 0.6, 0.7])
    with pytest.raises(ValueError, match="expected bandwidth > 0, got bandwidth=0"):
        optimal_bucket_bytes(1e6, 0, 1e-3)


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan")])
def test_size_that_is_not_positive_is_refused(size):
    with pytest.raises(ValueError, match="expected model_bytes > 0"):
        fit(size, [1, 2, 4, 8], [1.0, 0.6, 0.5, 0.7])


@pytest.mark.parametrize("invalid", [0.0, -1.0, float("nan"), float("inf")])
def test_measurements_that_are_not_positive_are_refused(invalid):
    with pytest.raises(ValueError, match="expected positive, finite bucket counts and seconds"):
        fit(80e6, [1, 2, 4, 8], [1.0, invalid, 0.5, 0.7])
    with pytest.raises(ValueError, match="expected positive, finite bucket counts and seconds"):
        fit(80e6, [1, 2, invalid, 8], [1.0, 0.6, 0.5, 0.7])
    with pytest.raises(ValueError, match="expected a time per bucket count"):
        fit(80e6, [1, 2, 4, 8], [1.0])
    with pytest.raises(ValueError, match="expected latency >= 0, got latency=-1"):
        overhead_seconds(80e6, 1e9, -1.0, 4)
