"""The minimal implementation is the specification: the package computes the same numbers."""

import ast
from pathlib import Path

import torch
import torch.nn.functional as F
from tinyml import IntegerModel, LoRA, kmeans, kmeans_quantize, plain, prune, prune_channels
from tinyml.quantization.grid import compute_grid
from tinyml.quantization.rounded_weight import round_through
from torch import nn

SOURCE = Path(plain.__file__).read_text()


def draw_weights(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def test_plain_has_at_most_120_lines_and_imports_only_torch_and_numpy():
    assert len(SOURCE.splitlines()) <= 120
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported <= {"__future__", "torch", "numpy"}


def test_kmeans_ends_where_lloyd_ends_and_starts_no_worse():
    values = draw_weights(500)
    centroids, codes = plain.kmeans(values, 3)
    ours, our_codes = kmeans(values, 8)
    nearest = (values[:, None] - ours).abs().argmin(1)
    assert torch.equal(our_codes.long(), nearest)
    means = torch.stack([values[nearest == number].mean() for number in range(8)])
    torch.testing.assert_close(ours, means)  # another iteration changes nothing
    error = (values - centroids[codes]).square().sum()
    assert (values - ours[nearest]).square().sum() <= error * (1 + 1e-12)


def test_a_palettes_gradient():
    layer = kmeans_quantize(nn.Linear(9, 7).double(), 2)
    inputs, stored = draw_weights(5, 9), layer.parametrizations.weight
    layer(inputs).square().sum().backward()
    dense = layer.weight.detach().requires_grad_()
    F.linear(inputs, dense, layer.bias).square().sum().backward()
    codes = (dense.detach()[..., None] == stored.original).long().argmax(-1)
    expected = plain.compute_centroid_gradient(dense.grad, codes, 4)
    torch.testing.assert_close(stored.original.grad, expected)


def test_the_grid():
    values = draw_weights(1, 300) + 0.7
    for bits in (2, 4, 8):
        step, zero = plain.choose_grid(float(values.min()), float(values.max()), bits)
        ours = compute_grid(values, bits, symmetric=False)
        assert float(ours.zero) == zero
        codes = plain.quantize(values, step, zero, bits)
        assert torch.equal(ours.quantize(values).long(), codes)
        torch.testing.assert_close(
            ours.dequantize(codes), plain.dequantize(codes.double(), step, zero)
        )


def test_the_grid_of_zeros_has_a_code_for_zero():
    for maximum in (0.0, 5e-324):  # a step of the second range would round to zero
        step, zero = plain.choose_grid(0.0, maximum, 4)
        assert step > 0
    assert plain.dequantize(plain.quantize(torch.zeros(3), step, zero, 4), step, zero).eq(0).all()


def test_an_integer_layer():
    torch.manual_seed(0)
    inputs = torch.randn(50, 8)
    model = IntegerModel(nn.Sequential(nn.Linear(8, 6), nn.ReLU()), [inputs])
    (layer,) = model.layers
    codes = model.quantize(inputs)
    ours = model.integers(codes)
    without = layer.bias.long() + layer.before.zero * layer.weight.long().sum(1)
    for n in range(6):
        expected = plain.compute_integer_linear(
            codes,
            layer.weight[n : n + 1],
            without[n],
            layer.before.zero,
            int(layer.multiplier[n]),
            int(layer.shift[n]),
            layer.after.zero,
        )
        assert torch.equal(ours[:, n].long(), expected[:, 0])


def test_training_with_rounding():
    values = (3 * draw_weights(40)).requires_grad_()
    plain.fake_quantize(values, 0.5, 3).square().sum().backward()
    expected = values.grad.clone()
    values.grad = None
    round_through(values[None], torch.tensor([[0.5]]).double(), -3, 3).square().sum().backward()
    torch.testing.assert_close(values.grad, expected)


def test_magnitude_and_channels():
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4)).double()
    masks = prune(model, 0.35).masks
    for name, mask in masks.items():
        assert torch.equal(mask, plain.compute_magnitude_mask(model.get_parameter(name), 0.35))
    inputs = draw_weights(200, 6)
    small = prune_channels(model, 0.4, inputs)
    values = torch.relu(model[0](inputs))
    first, second = plain.remove_channels(values, model[0].weight, model[2].weight, 6)
    assert torch.equal(small[0].weight, first)
    assert torch.equal(small[2].weight, second)


def test_low_rank():
    layer = LoRA(nn.Linear(9, 7, bias=False).double(), 3, alpha=5)
    layer.lora_B.data.normal_()
    inputs, parts = draw_weights(4, 9), (layer.base.weight.clone(), layer.lora_A, layer.lora_B, 5)
    torch.testing.assert_close(layer(inputs), plain.apply_lora(inputs, *parts))
    layer.merge()
    torch.testing.assert_close(layer.base.weight, plain.merge_lora(*parts).detach())
