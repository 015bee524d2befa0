"""Torch-Pruning as the judge: at most its size, and at most its error.

Its criterion is its default, the magnitude of the weights. Ours also reads the example.
"""

import copy

import pytest
import torch
from tinyml import prune_channels, size_of
from torch import nn

pytestmark = pytest.mark.exhaustive
library = pytest.importorskip("torch_pruning", reason="torch-pruning is not installed")


def build_norm_relu(channels):
    return [nn.BatchNorm2d(channels), nn.ReLU()]


def build_plain(**options):
    layers = [nn.Conv2d(3, 16, 3, padding=1), *build_norm_relu(16)]
    layers += [nn.Conv2d(16, 32, 3, padding=1, stride=2, **options), *build_norm_relu(32)]
    layers += [nn.Conv2d(32, 32, 3, padding=1), *build_norm_relu(32)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def build_perceptron():
    layers = [nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 48), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(48, 10))


def build_flattened():
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16 * 9, 40), nn.GELU(), nn.Linear(40, 10))


class Summed(nn.Module):
    """A residual network; `gate` multiplies each branch by a squeeze-and-excitation gate."""

    def __init__(self, gate=False, depthwise=False):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *build_norm_relu(16))
        self.up = nn.Sequential(nn.Conv2d(16, 32, 1), *build_norm_relu(32))
        groups = 32 if depthwise else 1
        middle = nn.Conv2d(32, 32, 3, padding=1, groups=groups)
        self.middle = nn.Sequential(middle, *build_norm_relu(32))
        self.down = nn.Sequential(nn.Conv2d(32, 16, 1), nn.BatchNorm2d(16))
        squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 8, 1), nn.ReLU())
        excite = nn.Sequential(nn.Conv2d(8, 32, 1), nn.Sigmoid())
        self.gate = nn.Sequential(squeeze, excite) if gate else None
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        y = self.middle(self.up(x))
        if self.gate is not None:
            y = y * self.gate(y)
        return self.head(torch.relu(x + self.down(y)).mean((2, 3)))


class Joined(nn.Module):
    """Two branches that are concatenated, as in Inception and DenseNet."""

    def __init__(self, dense=False):
        super().__init__()
        self.dense = dense
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *build_norm_relu(16))
        self.a = nn.Sequential(nn.Conv2d(16, 16, 1), *build_norm_relu(16))
        self.b = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), *build_norm_relu(16))
        self.last = nn.Conv2d(48 if dense else 32, 24, 1)
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        x = self.stem(x)
        parts = [x, self.a(x), self.b(x)] if self.dense else [self.a(x), self.b(x)]
        return self.head(torch.relu(self.last(torch.cat(parts, 1))).mean((2, 3)))


def make_builder(package, name, **options):
    def build():
        module = pytest.importorskip(package, reason=f"{package} is not installed")
        create = module.create_model if package == "timm" else module.models.get_model
        return create(name, num_classes=10, **options)

    return build


# The model and the size of its images.
MODELS = {
    "plain": (build_plain, 8),
    "perceptron": (build_perceptron, 8),
    "flattened": (build_flattened, 8),
    "residual": (Summed, 8),
    "gated": (lambda: Summed(gate=True), 8),
    "depthwise": (lambda: Summed(depthwise=True), 8),
    "inception": (Joined, 8),
    "dense": (lambda: Joined(dense=True), 8),
    **{
        name: (make_builder("torchvision", name), 64)
        for name in (
            "resnet18", "resnet50", "vgg11_bn", "mobilenet_v2", "mobilenet_v3_small", "densenet121",
            "squeezenet1_1", "mnasnet0_5", "resnext50_32x4d", "regnet_y_400mf",
            "efficientnet_b0", "googlenet",
        )
    },
    **{
        name: (make_builder("timm", name), 64)
        for name in ("resnet10t", "mobilenetv3_small_050")
    },
}  # fmt: skip


def randomize_model(model):
    """Make running statistics and scales of normalizations differ, as in a trained model."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(std=0.3)
            layer.running_var.uniform_(0.5, 2)
            layer.weight.data.uniform_(0.3, 1.7)
            layer.bias.data.normal_(std=0.3)
    return model.eval()


@pytest.mark.filterwarnings("ignore::FutureWarning:torchvision")
@pytest.mark.parametrize("name", MODELS)
def test_error_is_not_larger_than_torch_prunings(name):
    build, size = MODELS[name]
    ratios = []
    for seed in range(3 if size < 64 else 1):
        torch.manual_seed(seed)
        model, x = randomize_model(build()), torch.randn(4, 3, size, size)
        peer = copy.deepcopy(model)
        ignored = [m for m in peer.modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]
        library.pruner.MagnitudePruner(
            peer,
            x,
            importance=library.importance.MagnitudeImportance(p=2),
            pruning_ratio=0.5,
            ignored_layers=[ignored],
        ).step()
        # A unit may be a group of channels, so that half of the units is rounded to more channels.
        for sparsity in (0.5, 0.51, 0.53, 0.56, 0.6):
            ours = prune_channels(model, sparsity, x)
            if size_of(ours).bytes <= size_of(peer).bytes:
                break
        assert size_of(ours).bytes <= size_of(peer).bytes
        with torch.no_grad():
            exact = model(x)
            ratios.append(float((ours(x) - exact).norm() / (peer(x) - exact).norm()))
    assert max(ratios) <= 1, ratios
