"""The scan from cached prefixes gives the numbers of the scan that runs everything."""

import pytest
import torch
from tinyml import sensitivity
from tinyml.quantization.kmeans import kmeans
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


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 5)

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(36, 36), nn.Linear(36, 36)

    def forward(self, x):
        x = self.a(x.flatten(1))
        y = self.b(x)
        return x.add_(y)  # changes the input that b is restarted from


def batches():
    torch.manual_seed(1)
    return [(torch.randn(n, 1, 6, 6), torch.randint(5, (n,))) for n in (8, 3)]


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


@pytest.mark.parametrize("metric", [accuracy, nn.functional.cross_entropy])
def test_the_prefix_scan_is_the_whole_scan_to_the_bit(metric):
    torch.manual_seed(0)
    model = Residual()
    whole = sensitivity(model, batches(), metric, amounts=(0.5, 0.9), method="whole")
    prefix = sensitivity(model, batches(), metric, amounts=(0.5, 0.9), method="prefix")
    assert prefix.values == whole.values
    assert prefix.baseline == whole.baseline
    # 3 layers, 2 amounts, 2 batches: L (L + 1) / 2 a trial, and one pass, against L^2 and one pass.
    assert prefix.layer_calls == 2 * (2 * 6 + 3)
    assert whole.layer_calls == 2 * (2 * 9 + 3)


def test_the_model_is_as_it_was():
    model = Residual().train()
    model.norm.eval()  # a mode of its own
    before = {name: t.clone() for name, t in model.state_dict().items()}
    sensitivity(model, batches(), accuracy)
    assert model.training
    assert not model.norm.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(layer._forward_hooks for layer in model.modules())


@pytest.mark.parametrize("model", [Branching(), InPlace()], ids=["branching", "in_place"])
def test_what_cannot_be_restarted_is_run_whole(model):
    auto = sensitivity(model, batches(), accuracy)
    assert auto.values == sensitivity(model, batches(), accuracy, method="whole").values
    with pytest.raises(ValueError, match="use method='whole'"):
        sensitivity(model, batches(), accuracy, method="prefix")


def test_any_compression_can_be_scanned():
    def palette(weight, bits):
        centroids, codes = kmeans(weight, 2 ** int(bits))
        return centroids.to(weight)[codes.long()]

    torch.manual_seed(0)
    result = sensitivity(
        Residual(), batches(), nn.functional.cross_entropy, amounts=(1, 8), compress=palette
    )
    for values in result.values.values():
        assert abs(values[8] - result.baseline) < abs(values[1] - result.baseline)
