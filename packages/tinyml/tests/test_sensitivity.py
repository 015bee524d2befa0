"""A scan has the metric of copies in which a single layer is compressed."""

import copy

import pytest
import torch
from tinyml import kmeans_quantize, quantize, sensitivity
from tinyml.quantization.grid import compute_grid
from torch import nn


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4 * 36, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = x + torch.relu(self.second(x))
        return self.head(x.flatten(1))


def draw_batches():
    torch.manual_seed(1)
    return [(torch.randn(n, 1, 6, 6), torch.randint(5, (n,))) for n in (8, 3)]


def compute_accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def prune_weight(weight, sparsity):
    """Return a copy of a weight whose smallest values are zero."""
    values = weight.flatten().clone()
    smallest = sorted(range(len(values)), key=lambda i: abs(float(values[i])))
    values[smallest[: round(sparsity * len(values))]] = 0
    return values.view_as(weight)


def scan_with_copies(model, batches, metric, amounts):
    """Return the scan with a new copy of the model per trial."""
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    samples, values = sum(len(y) for _, y in batches), {}
    for name in ["", *layers]:
        for amount in amounts:
            trial = copy.deepcopy(model).eval()
            if name:
                weight = trial.get_submodule(name).weight
                weight.data = prune_weight(weight.data, amount)
            with torch.no_grad():
                scores = [float(metric(trial(x), y)) * len(y) for x, y in batches]
            values.setdefault(name, {})[amount] = sum(scores) / samples
    return values.pop("")[amounts[0]], values


@pytest.mark.parametrize("metric", [compute_accuracy, nn.functional.cross_entropy])
def test_a_scan_has_the_metric_of_compressed_copies(metric):
    torch.manual_seed(0)
    model = Residual()
    scan = sensitivity(model, draw_batches(), metric, amounts=(0.5, 0.9))
    assert (scan.baseline, scan.values) == scan_with_copies(
        model, draw_batches(), metric, (0.5, 0.9)
    )


def test_batches_of_a_generator_are_read_once():
    model = Residual()
    scan = sensitivity(model, iter(draw_batches()), compute_accuracy, amounts=iter((0.5,)))
    assert scan == sensitivity(model, draw_batches(), compute_accuracy, amounts=(0.5,))
    with pytest.raises(ValueError, match=r"at least one .* batch, got none"):
        sensitivity(model, iter([]), compute_accuracy)


def test_a_scan_over_bits_rounds_a_transposed_layer_as_quantize_does():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model = nn.Sequential(conv1d(16, 8), nn.ReLU(), conv1d(4, 16))
    model[0].weight.data *= 30 * torch.rand(16)
    inputs, targets = torch.randn(5, 8), torch.randn(5, 4)
    loss = nn.functional.mse_loss

    def rounded(weight, bits):
        grid = compute_grid(weight, bits)
        return grid.dequantize(grid.quantize(weight))

    scan = sensitivity(model, [(inputs, targets)], loss, amounts=(2, 3), compress=rounded)
    assert {name: [*values] for name, values in scan.values.items()} == {"0": [2, 3], "2": [2, 3]}
    for name, values in scan.values.items():
        for bits, value in values.items():
            quantized = quantize(model, {name: bits})
            assert value == pytest.approx(loss(quantized(inputs), targets).item())


def test_what_is_compressed_is_scanned():
    torch.manual_seed(0)
    small = kmeans_quantize(Residual(), 2)
    scan = sensitivity(small, draw_batches(), compute_accuracy, amounts=(0.5, 0.9))
    small.eval()
    with torch.no_grad():
        right = [float(compute_accuracy(small(x), y)) * len(y) for x, y in draw_batches()]
    assert scan.baseline == sum(right) / 11
    assert [*scan.values] == ["first", "second", "head"]


def test_the_model_is_as_it_was():
    model = Residual().train()
    model.norm.eval()  # unlike the rest of the model
    before = {name: t.clone() for name, t in model.state_dict().items()}
    sensitivity(model, draw_batches(), compute_accuracy)
    assert model.training
    assert not model.norm.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_compression_may_write_into_the_weight():
    def in_place(weight, amount):
        return weight.mul_(1 - amount)

    def copied(weight, amount):
        return weight * (1 - amount)

    loss = nn.functional.cross_entropy
    scan = sensitivity(Residual(), draw_batches(), loss, amounts=(0.5, 0.9), compress=copied)
    assert (
        sensitivity(Residual(), draw_batches(), loss, amounts=(0.5, 0.9), compress=in_place) == scan
    )
