"""Integer inference is bit-equal to arithmetic in Python's own integers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinyml import IntegerModel
from tinyml.integer import IntegerProduct, fixed_point
from tinyml.products import WAYS, forget_choices
from torch import nn


def oracle(model, codes):
    """The same network in numpy int64, one output at a time, from the stored integers alone."""
    values = codes.numpy().astype(np.int64)
    for layer in model.layers:
        if isinstance(layer, IntegerProduct):
            values = _product(layer, values)
        elif isinstance(layer, nn.Flatten):
            values = values.reshape(len(values), -1)
        else:
            values = _pool(layer, values)
    return values


def _product(layer, values):
    weight, bias = layer.weight.numpy().astype(np.int64), layer.bias.numpy().astype(np.int64)
    if layer.geometry is None:
        sums = values @ weight.T + bias
        return _requantize(layer, sums, 1)
    g = layer.geometry
    pads = [(0, 0), (0, 0), (g.padding[0],) * 2, (g.padding[1],) * 2]
    values = np.pad(values, pads, constant_values=layer.before.zero)
    height = (values.shape[2] - g.kernel[0]) // g.stride[0] + 1
    width = (values.shape[3] - g.kernel[1]) // g.stride[1] + 1
    sums = np.zeros((len(values), len(weight), height, width), dtype=np.int64)
    inputs = values.shape[1] // g.groups
    for out in range(len(weight)):
        first = out // (len(weight) // g.groups) * inputs
        kernel = weight[out].reshape(inputs, *g.kernel)
        for y in range(height):
            for x in range(width):
                top, left = y * g.stride[0], x * g.stride[1]
                window = values[
                    :, first : first + inputs, top : top + g.kernel[0], left : left + g.kernel[1]
                ]
                sums[:, out, y, x] = (window * kernel).sum((1, 2, 3)) + bias[out]
    return _requantize(layer, sums, 1)


def _requantize(layer, sums, axis):
    out = np.empty_like(sums)
    for channel in range(sums.shape[axis]):
        m, s = int(layer.multiplier[channel]), int(layer.shift[channel])
        index = (slice(None),) * axis + (channel,)
        exact = [(int(v) * m + (1 << (s - 1))) >> s for v in sums[index].flat]
        shifted = np.array(exact, dtype=object) + layer.after.zero
        out[index] = np.clip(shifted, -128, 127).reshape(sums[index].shape)
    return out


def _pool(layer, values):
    if layer.kernel is None:
        values = values.reshape(*values.shape[:2], 1, 1, -1)
    else:
        fill = -128 if layer.largest else layer.scale.zero
        rows, columns = layer.padding
        values = np.pad(values, [(0, 0), (0, 0), (rows,) * 2, (columns,) * 2], constant_values=fill)
        windows = np.lib.stride_tricks.sliding_window_view(values, layer.kernel, (2, 3))
        windows = windows[:, :, :: layer.stride[0], :: layer.stride[1]]
        values = windows.reshape(*windows.shape[:4], -1)
    if layer.largest:
        return values.max(-1)
    return (2 * values.sum(-1) + values.shape[-1]) // (2 * values.shape[-1])


def convnet():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, groups=8, bias=False), nn.ReLU()),
        nn.MaxPool2d(2, stride=1, padding=1),
        nn.Conv2d(8, 6, (1, 3), padding=(0, 1)),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(6 * 4, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 5),
    )
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            layer.weight.data.normal_()
            layer.bias.data.normal_()
    return model.eval()


def pooled():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 7, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 3)
    ).eval()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [convnet, pooled])
def test_every_bit_equals_the_oracle(build, way, monkeypatch):
    # float64 is there for the sizes that a way does not take.
    monkeypatch.setattr("tinyml.products.WAYS", {name: WAYS[name] for name in (way, "float64")})
    forget_choices()
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(16, 2, 9, 9, generator=generator) for _ in range(2)]
    model = IntegerModel(build(), batches)
    for inputs in (batches[0], 30 * batches[1]):  # within the calibrated range, and far outside
        codes = model.quantize(inputs)
        ours = model.integers(codes)
        assert ours.dtype == torch.int8
        assert np.array_equal(ours.numpy(), oracle(model, codes))


def test_it_is_close_to_the_float_model():
    build, generator = convnet(), torch.Generator().manual_seed(2)
    batches = [torch.randn(64, 2, 9, 9, generator=generator)]
    model = IntegerModel(build, batches)
    with torch.no_grad():
        exact = build(batches[0])
    assert (model(batches[0]) - exact).norm() < 0.08 * exact.norm()
    assert (model(batches[0]).argmax(1) == exact.argmax(1)).float().mean() > 0.9


def test_the_float_model_is_as_it_was():
    model = convnet().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    IntegerModel(model, [torch.randn(4, 2, 9, 9)])
    assert all(module.training for module in model.modules())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_clamping_is_the_relu():
    torch.manual_seed(0)
    float_model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    inputs = torch.randn(100, 8)
    model = IntegerModel(float_model, [inputs])
    (layer,) = model.layers
    assert layer.after.zero == -128
    outputs = model(inputs)
    assert (outputs >= 0).all()
    assert (outputs == 0).any()


@given(st.floats(1e-12, 1e6))
def test_a_factor_is_31_bits_and_a_shift(factor):
    multiplier, shift = fixed_point(torch.tensor([factor], dtype=torch.float64))
    assert 2**30 <= int(multiplier) < 2**31
    if int(shift) < 62:
        assert int(multiplier) / 2 ** int(shift) == pytest.approx(factor, rel=2**-30)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.GELU(), "GELU.* has no integer form"),
        (nn.Conv2d(2, 2, 3, dilation=2), "no dilation"),
        (nn.Conv2d(2, 2, 3, padding="same"), "as numbers"),
        (nn.AdaptiveAvgPool2d(2), "1 x 1"),
        (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
        (nn.BatchNorm2d(2), "after the input has no integer form"),
    ],
)
def test_what_has_no_integer_form_says_so(layer, message):
    with pytest.raises(ValueError, match=message):
        IntegerModel(nn.Sequential(layer), [torch.randn(2, 2, 8, 8)])


def test_no_calibration_says_so():
    with pytest.raises(ValueError, match="at least one batch"):
        IntegerModel(nn.Sequential(nn.Linear(2, 2)), [])


def test_a_state_dict_holds_every_grid():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(16, 2, 9, 9, generator=generator)
    for build in (convnet, pooled):
        saved = IntegerModel(build(), [inputs])
        other = IntegerModel(build(), [5 * inputs + 2])  # calibrated on something else
        assert not torch.equal(other(inputs), saved(inputs))
        other.load_state_dict(saved.state_dict())
        assert torch.equal(other(inputs), saved(inputs))
        assert torch.equal(other.half()(inputs), saved(inputs))  # a step is not a weight


def test_batch_normalisation_that_is_not_finite_is_refused():
    model = convnet()
    model[1].bias.data[0] = float("nan")
    with pytest.raises(ValueError, match="nan or inf"):
        IntegerModel(model, [torch.randn(2, 2, 9, 9)])
