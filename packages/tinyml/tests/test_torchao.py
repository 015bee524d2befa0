"""torchao as the judge of integers, where the processor adds them without clipping."""

import copy

import pytest
import torch
from tinyml import quantize
from tinyml.quantization.products import is_int8_exact
from torch import nn

pytestmark = pytest.mark.exhaustive
library = pytest.importorskip("torchao.quantization", reason="torchao is not installed")


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 1024, 1024), (32, 512, 2048)])
def test_dynamic_int8_is_torchaos_but_for_the_rounding_of_scales(tokens, inputs, outputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs)).requires_grad_(False)
    peer = copy.deepcopy(model)
    library.quantize_(peer, library.Int8DynamicActivationInt8WeightConfig())
    ours, x = quantize(model, activations="dynamic"), torch.randn(tokens, inputs)
    exact = model(x)
    error = (ours(x) - exact).norm() / exact.norm()
    assert error < 0.011
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    if not is_int8_exact(codes, x):
        assert (peer(x) - exact).norm() > 5 * error * exact.norm()  # its sums are clipped here
    else:
        assert (peer(x) - ours(x)).norm() < 0.013 * exact.norm()


def test_weights_alone_are_torchaos_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128)).requires_grad_(False)
    peer = copy.deepcopy(model)
    library.quantize_(peer, library.Int8WeightOnlyConfig())
    x = torch.randn(8, 256)
    ours = quantize(model, 8)(x)
    assert (peer(x) - ours).norm() < 0.01 * ours.norm()
