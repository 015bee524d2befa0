"""The grid's formulas, error bounds, and int8 multiplication."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyml import (
    add_lora,
    convert,
    gptq,
    kmeans_quantize,
    load,
    merge_and_unload,
    prepare_qat,
    prune,
    quantize,
    save,
    size_of,
)
from tinyml.quantization.grid import as_rows, compute_grid
from tinyml.quantization.int4 import Int4Linear
from tinyml.quantization.int8 import Int8Linear
from torch import nn


def test_scale_and_zero_point_by_hand():
    # 2 bits, codes -2..1, range [-0.25, 0.75]: S = 1 / 3, Z = round(-2 + 0.75) = -1.
    grid = compute_grid(torch.tensor([[-0.25, 0.0, 0.4, 0.75]]), 2, symmetric=False)
    assert grid.scale.item() == pytest.approx(1 / 3)
    assert grid.zero.item() == -1
    assert grid.quantize(torch.tensor([[-0.25, 0.0, 0.4, 0.75]])).tolist() == [[-2, -1, 0, 1]]


@settings(max_examples=50)
@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    seed=st.integers(0, 10**6),
    shift=st.floats(-3, 3),
)
def test_the_error_is_at_most_half_a_step_or_one_if_asymmetric(bits, symmetric, seed, shift):
    rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)).double() + shift
    grid = compute_grid(rows, bits, symmetric=symmetric)
    codes = grid.quantize(rows)
    error = (grid.dequantize(codes) - rows).abs()
    # Rounding Z moves an asymmetric grid by half a step more at its ends.
    assert (error <= grid.scale * (0.5 if symmetric else 1.0) * (1 + 1e-9)).all()
    zeros = torch.zeros_like(rows)
    assert torch.equal(grid.dequantize(grid.quantize(zeros)), zeros)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("largest", [1e-7, 4e-6, 1.1e-5, 1e-3, 1.0])
def test_small_rows_of_float16_are_as_close_as_their_scales_allow(largest, symmetric):
    linear = nn.Linear(64, 8, bias=False).half()
    values = torch.linspace(-1, 1, 8 * 64).view(8, 64).sin() * largest
    linear.weight.data.copy_(values)
    weight = linear.weight.detach().float()
    error = (quantize(nn.Sequential(linear), 8, symmetric=symmetric)[0].weight - weight).abs()
    extreme = weight.abs().amax(1, keepdim=True)
    # Half a step; float16 rounds the step and the value, by 2**-24 at least.
    assert (error <= extreme / 127 / 2 + extreme * 2.0**-10 + 2.0**-24).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("largest", [2.0, 130.0, 5e4, 2.0**23, 2.0**29, 2.0**31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_subnormal_numbers_are_as_close_as_their_scales_allow(dtype, largest, symmetric):
    spacing = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    # Multiples of the smallest number, some of which are normal.
    multiples = (
        torch.linspace(-1, 1, 8 * 64, dtype=torch.float64).view(8, 64).sin() * largest
    ).round()
    linear = nn.Linear(64, 8, bias=False, dtype=dtype)
    linear.weight.data.copy_(multiples * spacing)
    small = quantize(nn.Sequential(linear), 8, symmetric=symmetric)[0].weight
    dynamic = quantize(nn.Sequential(linear), 8, activations="dynamic")[0].weight
    extreme = multiples.abs().amax(1, keepdim=True)
    for weight in (small, dynamic):
        error = (weight.double() / spacing - multiples).abs()
        # Half a step, or a step with a zero point; the step is rounded up to a multiple.
        assert (error <= ((extreme / 127).ceil() + 1) * (0.5 if symmetric else 1.0) + 0.5).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_quantized_model_stores_what_it_says(bits, symmetric):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 30))
    quantized = quantize(model, bits, symmetric=symmetric)
    for name in ("0", "1", "3"):
        dense, ours = model.get_submodule(name).weight, quantized.get_submodule(name).weight
        grid = compute_grid(as_rows(dense), bits, symmetric=symmetric)
        expected = grid.dequantize(grid.quantize(dense))
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    weights, rows = 30 * 16 + 16 * 24 + 24 * 30, 30 + 24 + 30
    expected = weights * bits // 8 + rows * (4 if symmetric else 5) + 4 * (24 + 30)
    assert size_of(quantized).bytes == expected
    assert quantized(torch.arange(7)).shape == (7, 30)


def test_a_dynamic_linear_is_within_its_rounding():
    torch.manual_seed(0)
    linear = nn.Linear(256, 64)
    inputs = torch.randn(3, 5, 256)
    ours = Int8Linear(linear)
    exact = linear(inputs)
    assert ours(inputs).shape == exact.shape
    assert (ours(inputs) - exact).norm() < 0.015 * exact.norm()
    scale = inputs.abs().amax(-1, keepdim=True) / 127
    rounded = (inputs / scale).round() * scale
    expected = nn.functional.linear(rounded, ours.weight, linear.bias)
    torch.testing.assert_close(ours(inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_dynamic_linear_follows_conversions_with_the_same_codes_and_scales(dtype):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32)), torch.randn(5, 64)
    small = quantize(model, activations="dynamic")
    weights = [layer.weight for layer in small]
    tiny = torch.finfo(dtype).eps
    for converted in (copy.deepcopy(small).to(dtype), copy.deepcopy(small).to("meta", dtype)):
        for layer, weight, before in zip(converted, weights, small, strict=True):
            assert layer.dtype is layer.weight.dtype is layer.bias.dtype is dtype
            assert layer.scale.dtype is torch.float32
            if not layer.scale.is_meta:
                assert torch.equal(layer.scale, before.scale)
                assert torch.equal(layer.weight, weight.to(dtype)) or dtype is torch.float64
                torch.testing.assert_close(layer.weight.float(), weight, rtol=tiny, atol=1e-6)
    converted = small.to(dtype)
    expected = model.to(dtype)(inputs.to(dtype))
    assert (converted(inputs.to(dtype)) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("size", [1.0, 1e-100, 1e100])
def test_float64_weights_are_rounded_in_float64(size):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(64, 32)).double(), torch.randn(70, 64).double()
    model[0].weight.data *= size
    rows = model[0].weight.detach()
    scale = rows.abs().amax(1, keepdim=True) / 127
    expected = (rows / scale).round() * scale
    dynamic = quantize(model, 8, activations="dynamic")
    for small in (quantize(model, 8), convert(prepare_qat(model, 8)), dynamic):
        assert small[0].weight.dtype == torch.float64
        torch.testing.assert_close(small[0].weight, expected, rtol=1e-15, atol=0)
    converted = copy.deepcopy(dynamic).float().double()
    assert torch.equal(converted[0].weight, dynamic[0].weight)
    for group_size in (None, 16):  # with groups, the scales are fitted to the updated weights
        small = gptq(model, [inputs], 8, group_size=group_size)
        stored = small[0].parametrizations.weight[0]
        assert not torch.equal(stored.scale, stored.scale.float().double())
        error = (small[0].weight - rows).view(len(stored.scale), -1).abs().amax(1, keepdim=True)
        assert (error < 8 * stored.scale).all()
        assert small[0].weight.any()
    large = inputs / size * 1e60  # above the largest float32
    dynamic[0].bias.zero_()
    exact = nn.functional.linear(large, dynamic[0].weight)
    assert (dynamic(large) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_a_dynamic_linear_refuses_integers(dtype):
    layer = quantize(nn.Linear(32, 16), activations="dynamic")
    with pytest.raises(TypeError, match="expected inputs of a floating-point type"):
        layer(torch.ones(3, 32, dtype=dtype))


@pytest.mark.parametrize("convert_first", [False, True])
def test_scales_keep_their_type_in_a_file(convert_first, tmp_path):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(32, 16)), torch.randn(3, 32).double()
    plain = copy.deepcopy(model).double()
    if convert_first:
        model = model.double()
    small = quantize(model, activations="dynamic").double()
    save(small, tmp_path / "small")
    loaded = load(plain, tmp_path / "small")
    assert torch.equal(loaded[0].weight, small[0].weight)
    assert torch.equal(loaded(inputs), small(inputs))


def test_half_precision_weights_lose_no_more_than_their_own_rounding():
    torch.manual_seed(0)
    model = nn.Linear(64, 48).bfloat16()
    rows = model.weight.detach().float()
    for bits in (4, 8):
        quantized = quantize(model, bits)
        assert quantized.weight.dtype == torch.bfloat16
        # Codes are those of the float32 rows; the scale and the result are rounded once each.
        largest = 2 ** (bits - 1) - 1
        scale = (rows.abs().amax(1, keepdim=True) / largest).bfloat16().float()
        codes = (rows / scale).round().clamp(-largest, largest)
        assert torch.equal(quantized.weight, (scale * codes).bfloat16())
    x = torch.randn(5, 64).bfloat16()
    ours, exact = Int8Linear(model)(x), model(x)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() < 0.02 * exact.norm()


def test_dynamic_replaces_the_linears_and_nothing_else():
    model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 9))
    quantized = quantize(model, activations="dynamic")
    assert isinstance(quantized[1], Int8Linear)
    assert isinstance(model[1], nn.Linear)
    assert size_of(quantized).bytes == 9 * 16 * 4 + 9 * 16 + 9 * 4 + 9 * 4
    assert quantized(torch.arange(4)).shape == (4, 9)


def quantize_to_int8(model):
    """Return the model with integer products."""
    return quantize(model, activations="dynamic")


def quantize_to_int4(model):
    """Return the model with 4-bit weights."""
    stored = quantize(model[0], 4, group_size=16).parametrizations.weight[0]
    return nn.Sequential(Int4Linear(stored, model[0].bias))


@pytest.mark.parametrize("replace", [quantize_to_int8, quantize_to_int4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_pass_through_replaced_layers_as_through_their_dense_weight(replace, dtype):
    torch.manual_seed(0)
    replaced = replace(nn.Sequential(nn.Linear(16, 12)))
    inputs = torch.randn(2, 3, 16, dtype=dtype, requires_grad=True)
    outputs = replaced(inputs)
    grad = torch.randn_like(outputs)
    expected = grad @ replaced[0].weight.to(dtype)
    assert torch.equal(torch.autograd.grad(outputs, inputs, grad)[0], expected)
    with torch.no_grad():
        assert torch.equal(replaced(inputs), outputs)


def test_adapters_in_front_of_a_replaced_layer_are_trained():
    torch.manual_seed(0)
    first = add_lora(nn.Sequential(nn.Linear(16, 16)), 2)
    model = nn.Sequential(first, quantize(nn.Linear(16, 4), activations="dynamic"))
    model(torch.randn(5, 16)).square().sum().backward()
    assert model[0][0].lora_B.grad.abs().sum() > 0


def patch_forward(layer):
    """Replace the layer's forward, as libraries that offload weights do."""
    forward = layer.forward
    layer.forward = lambda inputs: 3 * forward(inputs)


HOOKS = {
    "forward": lambda layer: layer.register_forward_hook(lambda _, inputs, outputs: 3 * outputs),
    "pre": lambda layer: layer.register_forward_pre_hook(lambda _, inputs: 3 * inputs[0]),
    "backward": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "patched": patch_forward,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_a_replaced_layer_are_never_dropped(hook):
    model = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
    HOOKS[hook](model[2])
    with pytest.raises(ValueError, match=r"without hooks.* on 2"):
        quantize_to_int8(model)
    adapted = add_lora(nn.Sequential(nn.Linear(16, 4)), 2)
    HOOKS[hook](adapted[0])
    with pytest.raises(ValueError, match=r"without hooks.* on 0"):
        merge_and_unload(adapted)
    assert not adapted[0].merged


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 9}, "bits of a grid .* got 9"),
        ({"group_size": 5}, "divides the 16 inputs of an output, got 5"),
        ({"bits": 4, "activations": "dynamic"}, "expected bits=8"),
        (
            {"bits": 5, "activations": "auto"},
            "expected bits=8 .*, or bits=4, for activations=.auto",
        ),
        ({"activations": "static"}, "'float', 'dynamic' or 'auto'"),
        ({"activations": "auto", "layers": [nn.Conv2d]}, "nn.Linear in layers"),
        ({"bits": torch.tensor(4)}, r"got tensor\(4\)"),
    ],
)
def test_bad_requests_say_what_to_ask_for(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize(nn.Linear(16, 4), **arguments)


class Experts(nn.Module):
    """Fused experts, as transformers stores them: matrices that are not weights of layers."""

    def __init__(self):
        super().__init__()
        self.router, self.gate_up_proj = nn.Linear(8, 2), nn.Parameter(torch.randn(2, 8, 16))

    def forward(self, x):
        return torch.einsum("be,bi,eio->bo", self.router(x).softmax(-1), x, self.gate_up_proj)


@pytest.mark.parametrize(
    "compress",
    [
        lambda m, p: prune(m, 0.5, protect=p),
        lambda m, p: quantize(m, 4, protect=p),
        lambda m, p: quantize(m, 8, activations="dynamic", protect=p),
        lambda m, p: gptq(m, [torch.randn(4, 8)], 4, protect=p),
    ],
)
def test_matrices_that_are_not_weights_of_layers_are_named(compress):
    model = nn.Sequential(Experts(), nn.Linear(16, 8), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=r"stay dense, 1 in total: 0.gate_up_proj; protect"):
        compress(model, [])
    compress(model, ["0"])  # no warning
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with pytest.warns(UserWarning, match=r"self_attn\.in_proj_weight"):
        quantize(attention, 4)
    normalized = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    with pytest.warns(UserWarning, match=r"2 in total: 1.*original0, 1.*original1;"):
        compress(nn.Sequential(nn.Linear(8, 16), normalized), [])
    with pytest.raises(ValueError, match="got none; other code computes the weight of the model"):
        compress(normalized, [])


@pytest.mark.filterwarnings("ignore:matrices that are not:UserWarning")
@pytest.mark.parametrize("form", ["loaded", "beside an adapter", "second layer only"])
def test_fused_operators_do_not_bypass_integer_products(form, tmp_path):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    if form == "beside an adapter":
        small = quantize(add_lora(block, 4, targets=["linear1"]), 8, activations="dynamic")
    else:
        protect = ["linear1"] if form == "second layer only" else []
        small = quantize(block, 8, activations="dynamic", protect=protect)
    if form == "loaded":
        save(small, tmp_path / "small.safetensors")
        small = load(block, tmp_path / "small.safetensors")
    inputs = torch.randn(2, 5, 32)
    with_gradients = small(inputs)  # the fused operator has none
    with torch.no_grad():
        torch.testing.assert_close(small(inputs), with_gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:matrices that are not:UserWarning")
@pytest.mark.parametrize("form", ["quantized", "loaded"])
def test_encoders_with_integer_products_accept_padding_masks(form, tmp_path):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    small = quantize(encoder, 8, activations="dynamic")
    if form == "loaded":
        save(small, tmp_path / "small.safetensors")
        small = load(encoder, tmp_path / "small.safetensors")
    inputs = torch.randn(2, 5, 32)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    with_gradients = small(inputs, src_key_padding_mask=padding)
    exact = encoder(inputs, src_key_padding_mask=padding)
    with torch.no_grad():  # torch would pass nested tensors to the layers
        outputs = small(inputs, src_key_padding_mask=padding)
    torch.testing.assert_close(outputs, with_gradients, rtol=1e-5, atol=1e-6)
    assert (outputs - exact)[~padding].norm() < 0.05 * exact[~padding].norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_progress_of_layers_is_reported(bits):
    model, calls = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32)), []
    quantize(model, bits, activations="auto", progress=lambda *call: calls.append(call))
    assert calls == [("0", 1, 2), ("2", 2, 2)]


def test_subclasses_of_linear_layers_that_are_not_replaced_are_named():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Doubled(8, 8))
    with pytest.warns(UserWarning, match=r"linear layers, .* stay dense, 1 in total: 1.weight;"):
        small = quantize(model, 8, activations="dynamic")
    assert small[1].weight.dtype == torch.float32
    assert quantize(model, 8, activations="dynamic", protect=["1"])[1].weight.shape == (8, 8)
    assert torch.equal(quantize(model, 8)[1].bias, model[1].bias)  # its weight is compressed


class Linear(nn.Linear):
    """A subclass with the name of its base, as in models with equalized learning rates."""

    def forward(self, x):
        return 2 * super().forward(x)


class Conv1D(nn.Module):
    """A layer with the name and the attributes of transformers' `Conv1D`, and other outputs."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight).relu()


@pytest.mark.parametrize(
    "layer", [Conv1D(8, 8), Linear(8, 8), quantize(Linear(8, 8), 8), quantize(Conv1D(8, 8), 8)]
)
def test_a_layer_is_not_replaced_because_of_its_name(layer):
    model = nn.Sequential(nn.Linear(8, 8), layer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* stay dense, .*: 1.weight")
        small = quantize(model, 8, activations="dynamic")
    assert isinstance(small[0], Int8Linear)
    x = torch.randn(5, 8)
    assert torch.equal(small[1](x), layer(x))


@pytest.mark.parametrize(
    "compress",
    [
        lambda model, **options: quantize(model, 8, activations="dynamic", **options),
        lambda model, **options: quantize(model, 4, **options),
        lambda model, **options: prune(model, 0.5, **options).model,
    ],
)
@pytest.mark.parametrize("protected", ["0", "3", "second_name"])
def test_layers_that_share_a_protected_weight_are_unchanged(compress, protected):
    model = nn.Sequential(
        nn.Embedding(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8)
    )
    model[1].weight = model[3].weight = model[0].weight
    model.second_name = model[1]
    small = compress(model, protect=[protected])
    for number in (0, 1, 3):
        assert type(small[number]) is type(model[number])
        assert torch.equal(small[number].weight, model[number].weight)
    assert not torch.equal(small[4].weight, model[4].weight)


@pytest.mark.parametrize(
    "compress",
    [
        lambda model: quantize(model, 4),
        lambda model: quantize(model, 8, activations="dynamic"),
        lambda model: gptq(model, [torch.randn(4, 8)]),
    ],
)
def test_empty_weights_are_refused(compress):
    empty = nn.Sequential(nn.Linear(8, 8))
    empty[0].weight = nn.Parameter(torch.empty(8, 0))
    with pytest.raises(ValueError, match=r"with elements, got 0.weight of shape \(8, 0\)"):
        compress(empty)


@pytest.mark.parametrize("compress", [lambda m: quantize(m, 4), lambda m: prepare_qat(m, 4)])
def test_layer_with_another_parametrization_is_refused_and_unchanged(compress):
    model = nn.Sequential(nn.Linear(8, 8))
    nn.utils.parametrize.register_parametrization(model[0], "bias", nn.Softplus())
    before = model(torch.ones(1, 8))
    with pytest.raises(ValueError, match=r"without parametrizations, .* one of \['bias'\]"):
        compress(model)
    assert torch.equal(model(torch.ones(1, 8)), before)


def test_the_range_of_large_weights_does_not_overflow():
    layer = nn.Linear(8, 2)
    layer.weight.data.uniform_(-1, 1).mul_(2e38)  # the difference of the extremes exceeds float32
    stored = quantize(layer, 8, symmetric=False).weight
    assert (stored - layer.weight).abs().max() <= 0.51 * 4e38 / 255


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_weights_whose_grid_does_not_fit_in_their_type_are_refused(bits):
    layer = nn.Linear(64, 64).half()
    layer.weight.data[:, :2] = torch.tensor([65000, -65000])
    with pytest.raises(ValueError, match=rf"{bits}-bit grid fits in torch.float16"):
        quantize(layer, bits, symmetric=False)


@pytest.mark.parametrize(
    "compress",
    [
        lambda model: kmeans_quantize(model, 3),
        lambda model: quantize(model, 3),
        lambda model: quantize(model, 8, activations="dynamic"),
    ],
)
def test_models_are_not_on_the_default_device(compress, tmp_path):
    model = nn.Sequential(nn.Linear(64, 32))
    with torch.device("meta"):
        compressed = compress(model)
        assert compressed[0].weight.device.type == "cpu"
        save(compressed, tmp_path / "model.safetensors")
        loaded = load(model, tmp_path / "model.safetensors")
    assert torch.equal(compressed[0].weight, compress(model)[0].weight)
    assert torch.equal(compressed[0].weight, loaded[0].weight)
