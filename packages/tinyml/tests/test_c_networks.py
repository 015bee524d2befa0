"""C programs of random networks, by two compilers and with sanitizers, have torch's bits."""

import importlib.util
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from tinyml import IntegerModel, to_c
from torch import nn

NETWORKS, CASES = 500, 20
SANITIZED = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# The clang of the wheel ziglang has no library for the address sanitizer.
ZIG = [sys.executable, "-m", "ziglang", "cc", "-O1", "-fsanitize=undefined"]
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.Sigmoid, nn.Tanh)


class Joined(nn.Module):
    """A branch that is added to its input, multiplied by it, or concatenated with it."""

    def __init__(self, join, body):
        super().__init__()
        self.join, self.body = join, body

    def forward(self, x):
        branch = self.body(x)
        if self.join == "sum":
            return x - branch
        if self.join == "gate":
            return x * torch.sigmoid(branch.mean((2, 3), keepdim=True))
        return torch.cat([branch, x], 1)


def draw_layer(choose, channels):
    kind = choose.choice(["conv", "conv", "groups", "norm", "pool", "join", "activation"])

    def pair(low, high):
        return choose.randint(low, high), choose.randint(low, high)

    if kind in ("conv", "groups"):
        groups = channels if kind == "groups" else 1
        outputs = channels * choose.randint(1, 2) if kind == "groups" else choose.randint(1, 6)
        options = {"stride": pair(1, 2), "padding": pair(0, 2), "dilation": pair(1, 2)}
        bias = choose.random() < 0.5
        return nn.Conv2d(channels, outputs, pair(1, 3), groups=groups, bias=bias, **options)
    if kind == "norm":
        norm = nn.BatchNorm2d(channels)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.2, 3)
        return norm
    if kind == "pool":
        return choose.choice([nn.MaxPool2d, nn.AvgPool2d])(2, stride=pair(1, 2), padding=pair(0, 1))
    if kind == "join":
        body = nn.Conv2d(channels, channels, 3, padding=1)
        return Joined(choose.choice(["sum", "gate", "cat"]), body)
    return choose.choice(ACTIVATIONS)()


def draw_network(seed):
    """Return a network and the shape of its input."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    shape = choose.randint(1, 4), choose.randint(5, 11), choose.randint(5, 11)
    layers, x = [], torch.randn(2, *shape)
    for _ in range(choose.randint(2, 7)):
        layer = draw_layer(choose, x.shape[1]).eval()
        try:
            x = layer(x).detach()
        except RuntimeError:  # the window is larger than the image
            continue
        layers.append(layer)
    width = x[0].numel()
    layers += [nn.Flatten(), nn.Linear(width, choose.randint(1, 5))]
    return nn.Sequential(*layers).eval(), shape


def check_network(seed, command, folder):
    network, shape = draw_network(seed)
    images = torch.randn(12, *shape) * 10 ** random.Random(seed).uniform(-3, 3)
    integer = IntegerModel(network, [images])
    to_c(integer).save(folder / "network.c")
    strict = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    files = ["-o", folder / "network", folder / "network.c"]
    subprocess.run([*command, *strict, *files], check=True, capture_output=True)
    codes = integer.quantize(3 * images)
    run = subprocess.run(
        [folder / "network"], input=codes.numpy().tobytes(), capture_output=True, check=True
    )
    assert not run.stderr
    outputs = np.frombuffer(run.stdout, dtype=np.int8).reshape(len(codes), -1)
    assert np.array_equal(outputs, integer.integers(codes).flatten(1).numpy()), seed


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("case", range(CASES))
def test_random_networks_have_the_same_bits_without_a_report_of_sanitizers(
    compiler, case, tmp_path
):
    command = [compiler, *SANITIZED]
    if compiler == "clang" and importlib.util.find_spec("ziglang") is not None:
        command = ZIG
    elif shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    for seed in range(case, NETWORKS, CASES):
        check_network(seed, command, tmp_path)
