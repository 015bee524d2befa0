"""Integer inference is bit-equal to arithmetic in Python's own integers."""

import itertools
import pickle
import shutil
import subprocess

import numpy as np
import pytest
import torch
from figures import assert_at_least
from hypothesis import given
from hypothesis import strategies as st
from tinyml import IntegerModel, kmeans_quantize
from tinyml.integer.fixed_point import to_fixed_point
from tinyml.integer.layers import (
    IntegerCat,
    IntegerMatMul,
    IntegerMul,
    IntegerPool,
    IntegerReshape,
    IntegerSum,
    IntegerTable,
    compute_exact_sums,
)
from tinyml.integer.steps import Geometry
from tinyml.integer.to_c import to_c
from torch import nn


def compute_in_integers(model, codes):
    """Compute the network in Python's integers, one output at a time, from the stored integers."""
    values = [codes.numpy().astype(np.int64)]
    for layer, sources in zip(model.layers, model.sources, strict=True):
        inputs = [values[source] for source in sources]
        values.append(ORACLES[type(layer)](layer, *inputs))
    return values[-1]


def round_fixed_point(value, multiplier, shift, after):
    exact = (int(value) * int(multiplier) + ((1 << int(shift)) >> 1)) >> int(shift)
    return min(127, max(-128, exact + after.zero))


def _compute_matmul(layer, values):
    weight, bias = layer.weight.numpy().astype(np.int64), layer.bias.numpy().astype(np.int64)
    if layer.geometry is None:
        sums = values @ weight.T + bias
        axis = sums.ndim - 1
    else:
        g = layer.geometry
        pads = [(0, 0), (0, 0), (g.padding[0],) * 2, (g.padding[1],) * 2]
        values = np.pad(values, pads, constant_values=layer.before.zero)
        reach = [d * (k - 1) + 1 for k, d in zip(g.kernel, g.dilation, strict=True)]
        height = (values.shape[2] - reach[0]) // g.stride[0] + 1
        width = (values.shape[3] - reach[1]) // g.stride[1] + 1
        sums = np.zeros((len(values), len(weight), height, width), dtype=np.int64)
        inputs, axis = values.shape[1] // g.groups, 1
        for out, y, x in itertools.product(range(len(weight)), range(height), range(width)):
            first = out // (len(weight) // g.groups) * inputs
            top, left = y * g.stride[0], x * g.stride[1]
            rows = slice(top, top + reach[0], g.dilation[0])
            columns = slice(left, left + reach[1], g.dilation[1])
            window = values[:, first : first + inputs, rows, columns]
            sums[:, out, y, x] = (window * weight[out]).sum((1, 2, 3)) + bias[out]
    out = np.empty_like(sums)
    for channel in range(sums.shape[axis]):
        m, s = layer.multiplier[channel], layer.shift[channel]
        index = (slice(None),) * axis + (channel,)
        flat = [round_fixed_point(v, m, s, layer.after) for v in sums[index].flat]
        out[index] = np.array(flat).reshape(sums[index].shape)
    return out


def _compute_elementwise(layer, shape, terms):
    flat = [round_fixed_point(v, 1, layer.shift, layer.after) for v in terms.flat]
    return np.array(flat).reshape(shape)


def _move_to_common_scale(layer, values):
    parts = zip(values, layer.before, layer.multiplier.tolist(), strict=True)
    return [(value - scale.zero) * m for value, scale, m in parts]


def _compute_sum(layer, *values):
    return _compute_elementwise(layer, values[0].shape, sum(_move_to_common_scale(layer, values)))


def _compute_cat(layer, *values):
    return np.concatenate(
        [_compute_elementwise(layer, t.shape, t) for t in _move_to_common_scale(layer, values)], 1
    )


def _compute_mul(layer, a, b):
    product = (a - layer.before[0].zero) * (b - layer.before[1].zero) * int(layer.multiplier)
    return _compute_elementwise(layer, product.shape, product)


def _look_up(layer, values):
    return np.array([int(layer.table[v + 128]) for v in values.flat]).reshape(values.shape)


def _compute_pool(layer, values):
    g = layer.geometry
    fill = -128 if layer.is_maximum else layer.scale.zero
    pads = [(0, 0), (0, 0), (g.padding[0],) * 2, (g.padding[1],) * 2]
    values = np.pad(values, pads, constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(values, g.kernel, (2, 3))
    windows = windows[:, :, :: g.stride[0], :: g.stride[1]]
    values = windows.reshape(*windows.shape[:4], -1)
    if layer.is_maximum:
        return values.max(-1)
    return (2 * values.sum(-1) + values.shape[-1]) // (2 * values.shape[-1])


ORACLES = {
    IntegerMatMul: _compute_matmul,
    IntegerSum: _compute_sum,
    IntegerCat: _compute_cat,
    IntegerMul: _compute_mul,
    IntegerTable: _look_up,
    IntegerPool: _compute_pool,
    IntegerReshape: lambda layer, values: values.reshape(len(values), *layer.shape),
}


class Block(nn.Module):
    """A residual block with squeeze and excitation, by modules, functions and operators."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=2, dilation=2, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding="same", groups=channels)
        self.squeeze = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        y = self.depthwise(nn.functional.relu6(self.norm(self.conv(x))))
        gate = torch.sigmoid(self.squeeze(y.mean((2, 3), keepdim=True)))
        return torch.relu(x - nn.functional.hardswish(y * gate))


class Wrapper(nn.Module):
    """A class around a network, with sums, concatenation and several kinds of pooling."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.first, self.second = Block(8), Block(8)
        self.side = nn.Conv2d(8, 4, 1)
        self.last, self.spatial = nn.BatchNorm2d(12), nn.Conv2d(12, 1, 1)
        self.size = nn.Parameter(torch.full((1, 1, 1, 1), 1.5))
        self.head = nn.Linear(12 * 4, 5)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2)
        self.eval()

    def forward(self, x):
        x = self.first(self.stem(x))
        x = nn.functional.max_pool2d(x + self.second(x), 2)
        x = self.last(torch.cat([x, self.side(x)], dim=1))
        # Two gates that broadcast to each other, and a number in a tensor of four dimensions.
        x = x * (torch.sigmoid(x.mean((2, 3), keepdim=True)) * self.spatial(x)) * self.size
        x = nn.functional.gelu(nn.functional.adaptive_avg_pool2d(x, 2))
        return self.head(x.view(x.size(0), -1)) * 0.5 + 1


def build_convnet():
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


def build_pooled():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 7, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 3)
    ).eval()


BUILDS = {"chain": build_convnet, "pooled": build_pooled, "graph": Wrapper}


@pytest.mark.parametrize("build", BUILDS)
def test_every_bit_equals_the_oracle(build):
    generator = torch.Generator().manual_seed(2)
    size = 9 if build == "chain" else 8
    batches = [torch.randn(3, 2, size, size, generator=generator) for _ in range(2)]
    model = IntegerModel(BUILDS[build](), batches)
    for inputs in (batches[0], 30 * batches[1]):  # within the calibrated range, and far outside
        codes = model.quantize(inputs)
        ours = model.integers(codes)
        assert ours.dtype == torch.int8
        assert np.array_equal(ours.numpy(), compute_in_integers(model, codes))


@pytest.fixture(params=["none", "bf16"])
def _precision(request):
    """Set the precision of float32 convolutions."""
    torch.backends.mkldnn.conv.fp32_precision = request.param
    yield
    torch.backends.mkldnn.conv.fp32_precision = "none"


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize("groups", [1, 2])
def test_sums_are_exact_where_they_are_odd_and_above_24_bits(groups):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(100, 128, (32, 256 // groups, 3, 3), generator=generator).to(torch.int8)
    images = torch.randint(90, 128, (2, 256, 5, 5), generator=generator).to(torch.int8)
    geometry = Geometry((3, 3), groups=groups)
    for small in (1, 16):  # sums that need float64, and sums that fit in float32
        weight = weight // small
        exact = nn.functional.conv2d(images.double(), weight.double(), groups=groups)
        assert float((exact % 2).mean()) > 0.3
        with torch.autocast("cpu", torch.bfloat16):
            sums = compute_exact_sums(images, weight, geometry)
        assert torch.equal(sums.double(), exact)


@pytest.mark.parametrize(
    ("kernel", "stride", "width"), [((2, 3), (1, 3), 5), ((3, 3), (1, 2), 3), ((3, 2), (1, 3), 4)]
)
def test_sums_of_one_channel_are_exact_if_the_result_has_one_column(kernel, stride, width):
    torch.manual_seed(0)
    images = torch.randint(-128, 128, (2, 1, 7, width), dtype=torch.int8)
    weight = torch.randint(-127, 128, (4, 1, *kernel), dtype=torch.int8)
    exact = nn.functional.conv2d(images.double(), weight.double(), stride=stride)
    for layout in (torch.contiguous_format, torch.channels_last):
        sums = compute_exact_sums(
            images.contiguous(memory_format=layout), weight, Geometry(kernel, stride)
        )
        assert torch.equal(sums.double(), exact)


def compile_program(program, folder, *options):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here")
    program.save(folder / "network.c")
    strict = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", *(options or ["-O2"])]
    command = [compiler, *strict, "-o", folder / "network", folder / "network.c"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "network"


@pytest.mark.parametrize(
    "build",
    ["graph", *(pytest.param(b, marks=pytest.mark.exhaustive) for b in ("chain", "pooled"))],
)
def test_the_c_program_has_the_same_bits_on_1000_images(build, tmp_path):
    size = 9 if build == "chain" else 8
    images = torch.randn(1000, 2, size, size, generator=torch.Generator().manual_seed(4))
    model = IntegerModel(BUILDS[build](), [images[:64]])
    program = to_c(model)
    codes = model.quantize(3 * images)
    run = subprocess.run(
        [compile_program(program, tmp_path)],
        input=codes.numpy().tobytes(),
        capture_output=True,
        check=True,
    )
    outputs = np.frombuffer(run.stdout, dtype=np.int8).reshape(1000, -1)
    assert np.array_equal(outputs, model.integers(codes).numpy())


def test_sums_beyond_int32_saturate_as_in_the_c_program(tmp_path):
    layer = nn.Linear(100_000, 2, bias=False)
    nn.init.ones_(layer.weight)
    inputs = torch.ones(1, 100_000)
    model = IntegerModel(nn.Sequential(layer), [inputs])
    codes = model.quantize(inputs)
    program = compile_program(to_c(model), tmp_path)
    run = subprocess.run([program], input=codes.numpy().tobytes(), capture_output=True, check=True)
    outputs = np.frombuffer(run.stdout, dtype=np.int8)
    assert outputs.max() < 127  # the largest code, of a sum that does not saturate
    assert np.array_equal(outputs, model.integers(codes).numpy().reshape(-1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "options",
    [
        ["-O0"],
        ["-O3", "-march=native"],
        ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover"],
    ],
)
def test_the_c_program_is_the_same_however_it_is_compiled(build, options, tmp_path):
    size = 9 if build == "chain" else 8
    images = torch.randn(20, 2, size, size, generator=torch.Generator().manual_seed(5))
    model = IntegerModel(BUILDS[build](), [images])
    codes = model.quantize(10 * images)
    program = compile_program(to_c(model), tmp_path, *options)
    run = subprocess.run([program], input=codes.numpy().tobytes(), capture_output=True, check=True)
    outputs = np.frombuffer(run.stdout, dtype=np.int8).reshape(20, -1)
    assert np.array_equal(outputs, model.integers(codes).numpy())


VGG = """
import statistics, time, torch
from torch import nn
from tinyml import IntegerModel
torch.manual_seed(0)
torch.set_num_threads(1)
layers, channels = [], 3
for width in (32, 64, 128):
    layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(2))
    channels = width
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10)).eval().requires_grad_(False)
images = torch.randn(16, 3, 32, 32)
integer = IntegerModel(model, [images])
def seconds(call):
    start = time.process_time()
    call(images)
    return time.process_time() - start
seconds(integer)
print(statistics.median(seconds(model) / seconds(integer) for _ in range(31)))
"""


@pytest.mark.timing
@pytest.mark.parametrize("processor", ["as it is", "AVX2"])
def test_a_network_of_integers_is_about_as_fast_as_float(processor, run_on):
    ratio = float(run_on(processor, VGG)[-1])
    assert_at_least(f"tinyml: float over a network of integers, {processor}", 1, ratio)


def test_views_that_are_changed_in_place_are_followed():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            y = self.conv(x)
            y.view(len(y), -1).relu_()
            y.add_(1)
            return y

    torch.manual_seed(0)
    model, inputs = InPlace().eval(), torch.randn(8, 3, 6, 6)
    with torch.no_grad():
        exact = model(inputs)
    assert (IntegerModel(model, [inputs])(inputs) - exact).norm() < 0.02 * exact.norm()


def test_what_a_c_program_takes_is_counted():
    model = IntegerModel(build_pooled(), [torch.randn(4, 2, 9, 9)])
    program = to_c(model)
    # 7 filters of 2 x 3 x 3 and 3 rows of 7; bias and multiplier 4 bytes, shift 1.
    assert program.flash_bytes == 7 * 18 + 3 * 7 + (7 + 3) * 9
    # The first convolution's input and output live together; 2 * 81 is padded to 16 bytes.
    assert program.ram_bytes == 176 + 7 * 49
    assert "float" not in program.source
    assert "double" not in program.source
    for name in ("a-b", "1a", "\xe9"):
        with pytest.raises(ValueError, match="expected a C identifier"):
            to_c(model, name=name)
    with pytest.raises(TypeError, match="got Linear"):
        to_c(nn.Linear(2, 2))


def test_it_is_close_to_the_float_model():
    build, generator = build_convnet(), torch.Generator().manual_seed(2)
    batches = [torch.randn(64, 2, 9, 9, generator=generator)]
    model = IntegerModel(build, batches)
    with torch.no_grad():
        exact = build(batches[0])
    assert (model(batches[0]) - exact).norm() < 0.08 * exact.norm()
    assert (model(batches[0]).argmax(1) == exact.argmax(1)).float().mean() > 0.9


def test_the_float_model_is_as_it_was():
    model = build_convnet().train()
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
    multiplier, shift = to_fixed_point(torch.tensor([factor], dtype=torch.float64))
    assert int(multiplier) < 2**31
    assert int(multiplier) >= 2**30 or factor < 2**-14
    assert int(shift) <= 44
    assert int(multiplier) / 2 ** int(shift) == pytest.approx(factor, rel=2**-30, abs=2**-45)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Softmax(1), r"softmax.* has no integer form"),
        (nn.Conv2d(2, 2, 4, padding="same"), "same"),
        (nn.AdaptiveAvgPool2d(3), "does not divide"),
        (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
        (nn.AvgPool2d(2, padding=1, count_include_pad=False), "count_include_pad"),
        (nn.BatchNorm2d(2, track_running_stats=False), "no running statistics"),
        (nn.LayerNorm(8), r"layer_norm.* has no integer form"),
    ],
)
def test_what_has_no_integer_form_says_so(layer, message):
    with pytest.raises(ValueError, match=message):
        IntegerModel(nn.Sequential(layer), [torch.randn(2, 2, 8, 8)])


@pytest.mark.parametrize("batches", [[], torch.zeros(4, 2), [torch.zeros(0, 2)]])
def test_no_calibration_says_so(batches):
    with pytest.raises(ValueError, match=r"at least one"):
        IntegerModel(nn.Sequential(nn.Linear(2, 2)), batches)
    with pytest.raises(TypeError, match=r"got a list; if batches are pairs .* only the inputs"):
        IntegerModel(nn.Sequential(nn.Linear(2, 2)), [[torch.ones(4, 2), torch.ones(4)]])


def test_compressed_weights_become_integers_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    palettes, inputs = kmeans_quantize(model, 3), torch.randn(50, 8)
    integer = IntegerModel(palettes, [inputs])
    with torch.no_grad():
        exact = palettes(inputs)
    assert (integer(inputs) - exact).norm() < 0.05 * exact.norm()


def test_an_activation_that_is_read_before_and_after_is_not_folded():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            return y + torch.relu(y)

    torch.manual_seed(0)
    model, inputs = Both().eval(), torch.randn(50, 8)
    with torch.no_grad():
        exact = model(inputs)
    assert (IntegerModel(model, [inputs])(inputs) - exact).norm() < 0.02 * exact.norm()


class Normalized(nn.Module):
    """A wrapper that normalizes its input by channel, with scales and shifts further on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mean", torch.tensor([0.4, -0.2]).view(1, 2, 1, 1))
        self.register_buffer("std", torch.tensor([[[0.5]], [[0.9]]]))
        self.inside, self.scale = nn.Conv2d(2, 4, 3), nn.Parameter(torch.randn(4, 1, 1))
        self.head, self.shift = nn.Linear(4, 6), nn.Parameter(torch.randn(6))

    def forward(self, x):
        x = self.inside((x - self.mean) / self.std) * self.scale
        return self.shift - torch.relu(self.head(x.mean((2, 3))) * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constants_of_each_channel_are_integers_too(dtype):
    inputs = torch.randn(50, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)
    model = Normalized().eval().to(dtype)
    integer = IntegerModel(model, [inputs])
    with torch.no_grad():
        exact = model(inputs)
    assert (integer(inputs) - exact).norm() < 0.03 * exact.norm()
    codes = integer.quantize(inputs)
    assert np.array_equal(integer.integers(codes).numpy(), compute_in_integers(integer, codes))


def test_normalization_of_other_channels_than_those_of_a_linear_layer_is_not_folded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm2d(4)).eval()  # of dimension 1, not the last
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.1, 9)
    inputs = torch.randn(8, 4, 5, 4)
    exact = model(inputs).detach()
    assert (IntegerModel(model, [inputs])(inputs) - exact).norm() < 0.05 * exact.norm()


def test_constant_that_varies_by_pixel_is_refused():
    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.randn(2, 6, 6))

        def forward(self, x):
            return x + self.places

    with pytest.raises(ValueError, match="not one number per channel"):
        IntegerModel(Places(), [torch.randn(2, 2, 6, 6)])


class By(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Linear(6, 4)

    def forward(self, x):
        return self.function(self.layer, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda layer, x: layer(x).int().float(),
        lambda layer, x: layer(x).unsqueeze(1) * torch.arange(3.0).view(1, 3, 1),
        lambda layer, x: layer(x) + torch.randn(x.shape[0], 4),
        lambda layer, x: layer(x) + torch.rand(4),
        lambda layer, x: nn.functional.max_pool2d(
            layer(x).view(-1, 1, 2, 2), 2, return_indices=True
        )[1].float(),
    ],
)
def test_operator_without_integer_form_is_refused(function):
    with pytest.raises(ValueError, match="no integer form"):
        IntegerModel(By(function), [torch.randn(8, 6)])


def test_batch_size_in_the_code_is_refused():
    model = By(lambda layer, x: layer(x.view(2, -1)))
    with pytest.raises(ValueError, match="cannot be exported"):
        IntegerModel(model, [torch.randn(2, 6)])
    with pytest.raises(ValueError, match="its first dimension is not the batch"):
        IntegerModel(By(lambda layer, x: layer(x).view(2, -1)), [torch.randn(2, 6)])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda layer, x: (layer(x), x), "returns one value, got 2"),
        (lambda layer, x: layer.bias.expand(3, 4), "depends on the input"),
    ],
)
def test_outputs_that_are_not_one_value_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        IntegerModel(By(function), [torch.randn(8, 6)])


def test_a_part_that_the_output_does_not_need_is_left_out():
    def function(layer, x):
        hidden = layer(x)
        nn.functional.dropout(torch.tanh(hidden), training=False)  # as of an auxiliary head
        return hidden

    model, inputs = By(function), torch.randn(8, 6)
    integer = IntegerModel(model, [inputs])
    assert len(integer.layers) == 1
    assert (integer(inputs) - model(inputs)).norm() < 0.02 * model(inputs).norm()


def test_images_may_be_bytes():
    model = By(lambda layer, x: torch.relu(layer(x.float() / 255 - 0.5))).eval()
    images = torch.randint(256, (40, 6), dtype=torch.uint8)
    integer = IntegerModel(model, [images])
    with torch.no_grad():
        assert (integer(images) - model(images)).abs().max() < 4 * integer.output.scale


def test_a_filter_of_zeros_keeps_its_bias():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 5)).eval()
    with torch.no_grad():
        model[0].weight[1:3] = 0
        model[2].weight[1:] = 0
        model[2].bias.copy_(torch.tensor([0.0, 0.3, -0.4, 0.01, 0.2]))
    inputs = torch.randn(20, 2, 6, 6)
    integer = IntegerModel(model, [inputs])
    with torch.no_grad():
        # The output's own rounding is half a step.
        error = (integer(inputs) - model(inputs)).abs()[:, 1:]
    assert error.max() < 0.6 * integer.output.scale


@pytest.mark.parametrize("size", [1e-3, 1e-9, 1e-30])
def test_a_bias_far_above_its_products_is_kept(size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        model[0].weight.mul_(size)
        model[0].bias.mul_(size)
    inputs = torch.randn(20, 8)
    integer = IntegerModel(model, [inputs])
    with torch.no_grad():
        assert (integer(inputs) - model(inputs)).abs().max() < 2 * integer.output.scale


def test_inputs_that_do_not_fit_are_refused():
    model = IntegerModel(build_pooled(), [torch.randn(4, 2, 9, 9)])
    assert model(torch.zeros(0, 2, 9, 9)).shape == (0, 3)
    with pytest.raises(ValueError, match=r"\(batch, 2, 9, 9\), got \(1, 2, 8, 8\)"):
        model(torch.zeros(1, 2, 8, 8))
    with pytest.raises(ValueError, match=r"\(batch, 2, 9, 9\), got \(1, 2, 8, 8\)"):
        model.integers(torch.zeros(1, 2, 8, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match="nan"):
        model(torch.full((1, 2, 9, 9), float("nan")))
    with pytest.raises(TypeError, match=r"int8 codes from quantize.inputs., got torch.float32"):
        model.integers(torch.zeros(1, 2, 9, 9))


def test_a_state_dict_contains_every_grid():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(16, 2, 9, 9, generator=generator)
    for build in (build_convnet, build_pooled):
        saved = IntegerModel(build(), [inputs])
        other = IntegerModel(build(), [5 * inputs + 2])  # calibrated on something else
        assert not torch.equal(other(inputs), saved(inputs))
        other.load_state_dict(saved.state_dict())
        assert torch.equal(other(inputs), saved(inputs))
        assert torch.equal(other.half()(inputs), saved(inputs))  # a step is not a weight


def test_batch_normalization_that_is_not_finite_is_refused():
    model = build_convnet()
    model[1].bias.data[0] = float("nan")
    with pytest.raises(ValueError, match="nan or inf"):
        IntegerModel(model, [torch.randn(2, 2, 9, 9)])


class Products(nn.Module):
    """A product that is written in the forward, not a layer."""

    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.b = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))
        self.last, self.compute = nn.Linear(6, 3), compute

    def forward(self, x):
        return self.last(torch.relu(self.compute(self, x)))


@pytest.mark.parametrize(
    "compute",
    [
        lambda m, x: x @ m.w,
        lambda m, x: x @ m.w + m.b,
        lambda m, x: nn.functional.alpha_dropout(x, 0.5, m.training) @ m.w,
    ],
)
def test_a_matrix_product_is_the_linear_layer_of_it(compute):
    model, inputs = Products(compute).eval(), torch.randn(40, 8)
    layer = nn.Linear(8, 6)
    with torch.no_grad():
        zero, unit = compute(model, torch.zeros(1, 8)), compute(model, torch.eye(8))
        layer.bias.copy_(zero[0])
        layer.weight.copy_((unit - zero).t())
        linear = nn.Sequential(layer, nn.ReLU(), model.last)
        exact = model(inputs)
    small, same = IntegerModel(model, [inputs]), IntegerModel(linear, [inputs])
    assert len(small.layers) == 2  # the sum is in the product's bias
    assert (small(inputs) - same(inputs)).abs().max() <= 2 * small.output.scale
    assert (small(inputs) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda m, x: x @ x.t() @ x[:, :6], r"t \(aten.t"),
        (
            lambda m, x: (x @ m.w[:, 0])[:, None].expand(-1, 6),
            r"matmul \(.*constant matrix",
        ),
        (lambda m, x: torch.addmm(m.b, x, m.w), r"addmm \(aten.addmm.* has no integer form"),
        (lambda m, x: nn.functional.dropout(x) @ m.w, r"dropout \(.*in evaluation mode too"),
        (lambda m, x: torch.add(x @ m.w, x @ m.w, alpha=2), "alpha=2 is not supported"),
    ],
)
def test_a_product_that_is_no_layer_is_refused_with_its_node(compute, message):
    model, inputs = Products(compute).eval(), torch.randn(40, 8)
    with pytest.raises(ValueError, match=message):
        IntegerModel(model, [inputs])


def test_a_pickled_network_has_the_same_bits():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU6(),
        nn.Dropout(),
        nn.MaxPool2d(2),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Linear(64, 10),
        nn.GELU(),
        nn.Linear(10, 10),
    ).eval()
    inputs = torch.randn(20, 1, 8, 8)
    integer = IntegerModel(model, [inputs])
    integer(inputs)
    assert torch.equal(pickle.loads(pickle.dumps(integer))(inputs), integer(inputs))


def test_a_network_is_on_the_device_of_its_model_if_another_one_is_the_default():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(128, 4)]
    model, images = nn.Sequential(*layers).eval(), torch.randn(8, 3, 6, 6)
    with torch.device("meta"):
        integer = IntegerModel(model, [images])
        outputs, program = integer(images), to_c(integer)
    expected = IntegerModel(model, [images])
    assert torch.equal(outputs, expected(images))
    assert program == to_c(expected)
