"""The ONNX file, run by onnxruntime, gives the codes of the integer network."""

import numpy as np
import pytest
import torch
from tinyml import IntegerModel, to_onnx
from torch import nn

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6())
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.side = nn.Conv2d(8, 4, 1, stride=2)
        self.head = nn.Linear(12, 5)
        self.eval()

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + nn.functional.hardswish(self.deep(x)))
        x = torch.cat([nn.functional.max_pool2d(x, 2), self.side(x)], 1)
        gate = torch.sigmoid(x.mean((2, 3), keepdim=True))
        return self.head(nn.functional.avg_pool2d(x * gate, 4).flatten(1))


def test_onnxruntime_returns_the_same_integers_within_one(tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    images = torch.randn(500, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model = IntegerModel(Net(), [images])
    to_onnx(model, tmp_path / "net.onnx")
    codes = model.quantize(images)
    ours = model.integers(codes).numpy().astype(int)
    session = runtime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    theirs = session.run(None, {"input": codes.numpy()})[0].astype(int)
    # Halves are rounded to the even there and up here; each code may carry one such step on.
    assert np.abs(ours - theirs).max() <= 1
    assert (ours == theirs).mean() > 0.99


@pytest.mark.parametrize("layer", [nn.Identity(), nn.Dropout(), nn.Flatten(), nn.ReLU()])
def test_networks_without_arithmetic_are_exported(layer, tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    images = torch.randn(9, 3, 4, generator=torch.Generator().manual_seed(1))
    model = IntegerModel(nn.Sequential(layer).eval(), [images])
    to_onnx(model, tmp_path / "net.onnx")
    codes = model.quantize(images)
    session = runtime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    theirs = session.run(None, {"input": codes.numpy()})[0]
    assert np.array_equal(model.integers(codes).numpy(), theirs)


def test_a_single_product_differs_at_halves_alone(tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    torch.manual_seed(0)
    inputs = torch.randn(2000, 16)
    model = IntegerModel(nn.Sequential(nn.Linear(16, 24), nn.ReLU()), [inputs])
    to_onnx(model, tmp_path / "net.onnx")
    codes = model.quantize(inputs)
    session = runtime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    theirs = session.run(None, {"input": codes.numpy()})[0]
    assert (model.integers(codes).numpy() == theirs).mean() > 0.9999


def test_a_summand_of_a_small_scale_is_exported(tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")

    class Scaled(nn.Sequential):
        def forward(self, x):
            return x + 1e-5 * super().forward(x)

    to_onnx(IntegerModel(Scaled(nn.Conv2d(2, 2, 1)), [torch.randn(9, 2, 4, 4)]), tmp_path / "net")


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(80_000, 2), (80_000,)), (nn.Conv2d(800, 2, 10), (800, 10, 10))]
)
def test_sums_above_int32_are_limited(tmp_path, layer, shape):
    pytest.importorskip("onnx", reason="onnx is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -1.0]).view(2, *[1] * len(shape)))
    images = torch.linspace(0, 1, 9).view(9, *[1] * len(shape)).expand(9, *shape).contiguous()
    model = IntegerModel(nn.Sequential(layer), [images])
    to_onnx(model, tmp_path / "net.onnx")
    codes = model.quantize(images)
    ours = model.integers(codes).numpy().astype(int)
    assert (ours[-1] == ours[-2]).all()  # both sums are above the limit
    session = runtime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    theirs = session.run(None, {"input": codes.numpy()})[0].astype(int)
    assert np.abs(ours - theirs).max() <= 1
