"""The dynamic programme finds the best clustering there is, and Lloyd never beats it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyml.quantization.kmeans import find_best_centroids, kmeans


def compute_squared_error(values, centroids, codes):
    return float((values - centroids[codes.long()]).square().sum())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=9),
    st.integers(1, 4),
)
def test_no_partition_into_intervals_is_better(numbers, k):
    values = torch.tensor(numbers, dtype=torch.float64)
    ordered = values.sort().values
    best = min(
        sum(
            float((ordered[a:b] - ordered[a:b].mean()).square().sum())
            for a, b in itertools.pairwise((0, *cuts, len(numbers)))
            if b > a
        )
        for cuts in itertools.combinations_with_replacement(range(len(numbers) + 1), k - 1)
    )
    assert compute_squared_error(values, *kmeans(values, k)) == pytest.approx(
        best, rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("k", [2, 16, 64])
def test_more_values_than_the_summary_stay_close_to_the_optimum(k):
    generator = torch.Generator().manual_seed(k)
    values = torch.randn(2, 1300, generator=generator, dtype=torch.float64).prod(0)
    ordered, counts = values.unique(return_counts=True)
    centroids = find_best_centroids(ordered, counts, k)
    codes = torch.bucketize(values, (centroids[1:] + centroids[:-1]) / 2)
    best = compute_squared_error(values, centroids, codes)
    ours = compute_squared_error(values, *kmeans(values, k))
    assert best * (1 - 1e-9) <= ours <= best * 1.01


@pytest.mark.parametrize("largest", [1.0, 1e8, 1e-200, 1e300])
def test_an_outlier_of_any_size_leaves_the_other_values_to_the_other_centroids(largest):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, generator=generator, dtype=torch.float64).mul(1e-30 * largest)
    values = torch.cat([torch.tensor([-largest], dtype=torch.float64), values])
    centroids, _ = kmeans(values, 9)
    alone, _ = kmeans(values[1:] / largest, 8)
    assert torch.allclose(centroids[1:] / largest, alone, rtol=1e-3, atol=0)
