"""Lloyd to its fixed point, the palette's gradient, and bytes."""

import copy
import time

import pytest
import torch
from figures import assert_at_least, assert_at_most
from hypothesis import given
from hypothesis import strategies as st
from tinyml import kmeans_quantize, load, save, size_of
from tinyml.quantization.kmeans import kmeans
from tinyml.quantization.pack import pack, unpack
from torch import nn


@given(st.integers(1, 8), st.integers(0, 70), st.randoms(use_true_random=False))
def test_packing_loses_nothing_and_wastes_nothing(bits, count, random):
    codes = torch.tensor([random.randrange(2**bits) for _ in range(count)], dtype=torch.uint8)
    packed = pack(codes, bits)
    assert torch.equal(unpack(packed, bits, count), codes)
    assert packed.numel() <= -(-count * bits // 8) + 2  # a partial byte for each of 3 planes


@pytest.mark.parametrize("codes", [[-1, 3], [0, 16], [-8, 7], [0, 256]])
def test_codes_out_of_range_are_not_packed(codes):
    # Converted to bytes, 256 is 0 and -8 is 248, whose low bits are those of 8.
    with pytest.raises(ValueError, match=f"from 0 to 15 for 4 bits, got {codes[0]} to {codes[1]}"):
        pack(torch.tensor(codes), 4)


def run_plain_lloyd(values, k):
    centroids = torch.linspace(float(values.min()), float(values.max()), k, dtype=torch.float64)
    codes = None
    while True:
        new = (values[:, None] - centroids).abs().argmin(1)
        if codes is not None and torch.equal(new, codes):
            return centroids, codes
        codes = new
        for c in range(k):
            if (codes == c).any():
                centroids[c] = values[codes == c].mean()


@pytest.mark.parametrize(("n", "k"), [(50, 2), (500, 4), (2000, 16), (3000, 64)])
def test_the_result_is_a_fixed_point_and_better_than_from_even_centroids(n, k):
    values = torch.randn(2, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    values = values.prod(0)
    centroids, codes = kmeans(values, k)
    nearest = (values[:, None] - centroids).abs().argmin(1)
    assert torch.equal(codes.long(), nearest)
    means = torch.stack([values[nearest == number].mean() for number in range(k)])
    torch.testing.assert_close(centroids, means, rtol=0, atol=1e-12)
    even, even_codes = run_plain_lloyd(values, k)
    error = (values - even[even_codes]).square().sum()
    assert error >= (1.3 if k >= 16 else 1 - 1e-12) * (values - centroids[nearest]).square().sum()


def test_few_distinct_values_are_stored_exactly():
    values = torch.tensor([[0.1, 0.2, 0.1], [0.3, 0.2, 0.1]])
    centroids, codes = kmeans(values, 16)
    assert centroids.numel() == 3  # min(2^4, the number of distinct values)
    assert torch.equal(centroids[codes.long()].float(), values)


def test_the_palette_gets_the_sum_of_its_weights_gradients():
    torch.manual_seed(0)
    model = nn.Linear(9, 7)
    quantized = kmeans_quantize(model, 2)
    dense = copy.deepcopy(model)
    dense.weight.data = quantized.weight.detach().clone()
    inputs = torch.randn(5, 9)
    quantized(inputs).square().sum().backward()
    dense(inputs).square().sum().backward()
    palette = quantized.parametrizations.weight.original
    codes = (quantized.weight.reshape(-1, 1) == palette).long().argmax(1)
    expected = torch.zeros(4).index_add(0, codes, dense.weight.grad.flatten())
    torch.testing.assert_close(palette.grad, expected)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_a_model_runs_and_takes_its_bits(bits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    tokens = torch.arange(20)
    quantized = kmeans_quantize(model, bits)
    assert len(quantized[1].weight.unique()) == 2**bits
    weights = [50 * 8, 8 * 64, 64 * 8]
    expected = sum(n * bits // 8 + 4 * 2**bits for n in weights) + 4 * (64 + 8)
    assert size_of(quantized).bytes == expected
    if bits == 8:
        assert (quantized(tokens) - model(tokens)).norm() < 0.02 * model(tokens).norm()


def test_layers_that_share_a_weight_share_its_palette():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 16)
            self.head = nn.Linear(16, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    model = Tied()
    quantized = kmeans_quantize(model, 4)
    assert size_of(model).bytes == 40 * 16 * 4
    assert size_of(quantized).bytes == 40 * 16 // 2 + 16 * 4
    assert torch.equal(quantized.embed.weight, quantized.head.weight)
    quantized(torch.arange(5)).sum().backward()
    assert len(list(quantized.parameters())) == 1


def test_the_zero_row_of_padding_stays_zero(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 16, padding_idx=3, sparse=True))
    tokens = torch.tensor([3, 5])
    quantized = kmeans_quantize(model, 2)
    optimizer = torch.optim.SGD(quantized.parameters(), 1.0)
    quantized(tokens).square().sum().backward()
    optimizer.step()
    save(quantized, tmp_path / "model.safetensors")
    for other in (quantized, load(model, tmp_path / "model.safetensors"), copy.deepcopy(quantized)):
        assert not other(tokens)[0].any()
        assert torch.equal(other(tokens), quantized(tokens))
    other = kmeans_quantize(nn.Sequential(nn.Embedding(40, 16)), 2)
    with pytest.raises(RuntimeError, match="zero_row"):
        other.load_state_dict(quantized.state_dict())
    model[0].weight.data[3] = 1  # it was trained or set
    assert kmeans_quantize(model, 2)(tokens)[0].any()


def test_bits_by_layer_leave_the_others():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    quantized = kmeans_quantize(model, {"1": 2})
    assert torch.equal(quantized[0].weight, model[0].weight)
    assert len(quantized[1].weight.unique()) == 4


def test_nan_and_more_clusters_than_codes_are_errors():
    with pytest.raises(ValueError, match="finite"):
        kmeans(torch.tensor([1.0, float("nan")]), 2)
    with pytest.raises(ValueError, match="sum is finite"):
        kmeans(torch.tensor([1.7e308, 1.6e308, 1.0], dtype=torch.float64), 2)
    for count in (0, 257):
        with pytest.raises(ValueError, match=f"clusters, got {count}"):
            kmeans(torch.randn(4), count)


@pytest.mark.timing
def test_ten_million_weights_take_at_most_two_sorts():
    weights = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)) * 0.02

    def seconds(call):
        start = time.process_time()
        call()
        return time.process_time() - start

    ratios = [seconds(lambda: kmeans(weights, 16)) / seconds(weights.sort) for _ in range(3)]
    assert_at_most("tinyml: k-means of ten million weights over a sort", 2, sorted(ratios)[1])


def compute_squared_error(weights, rounded):
    return (weights.double() - rounded.double()).square().sum()


DISTRIBUTIONS = {
    "normal": torch.distributions.Normal(0.0, 1.0),
    "heavy tails": torch.distributions.StudentT(2.0),
    "one-sided": torch.distributions.LogNormal(0.0, 1.0),
    "two peaks": torch.distributions.Beta(0.3, 0.3),
}


@pytest.mark.parametrize("k", [16, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_error_is_at_most_that_of_sklearn(name, k):
    cluster = pytest.importorskip("sklearn.cluster", reason="scikit-learn is not installed")
    torch.manual_seed(0)
    values = DISTRIBUTIONS[name].sample((3000,)).double()
    centroids, codes = kmeans(values, k)
    theirs = cluster.KMeans(k, random_state=0, n_init=10).fit(values.numpy()[:, None])
    assert compute_squared_error(values, centroids[codes.int()]) <= theirs.inertia_ * (1 + 1e-9)


@pytest.mark.timing
def test_ten_million_weights_are_nearer_than_by_sklearn_and_sooner():
    cluster = pytest.importorskip("sklearn.cluster", reason="scikit-learn is not installed")
    weights = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)) * 0.02
    start = time.process_time()
    theirs = cluster.KMeans(16, random_state=0, n_init="auto").fit(weights.numpy()[:, None])
    middle = time.process_time()
    centroids, codes = kmeans(weights, 16)
    ours = time.process_time() - middle
    # scikit-learn adds up its own error in float32.
    their_centroids = torch.from_numpy(theirs.cluster_centers_[:, 0])
    error = compute_squared_error(weights, centroids[codes.int()])
    assert error < compute_squared_error(weights, their_centroids[torch.from_numpy(theirs.labels_)])
    assert_at_least("tinyml: k-means of scikit-learn over ours", 2, (middle - start) / ours)


def test_integers_are_clustered_in_float64_and_complex_numbers_are_refused():
    large = 2**40 + torch.tensor([0, 1, 100, 101])
    centroids, codes = kmeans(large, 2)
    assert (centroids - 2**40).tolist() == [0.5, 100.5]
    assert codes.tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="expected real values"):
        kmeans(torch.ones(3, dtype=torch.complex64), 2)
