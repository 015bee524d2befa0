"""Weights of 8 and 4 bits that are read as they are stored, where that is faster than float."""

import pytest
import torch
from tinyml import Int4Linear, load, quantize, save
from tinyml.quantization import int8
from tinyml.quantization.int8 import Int8Linear
from torch import nn


@pytest.fixture(autouse=True)
def _kernel_wins(monkeypatch):
    """What is chosen depends on the machine; what is computed does not."""
    favored = {"weights alone": 1.0, "a dense weight made anew": 2.0, "float": 2.0, "int8": 3.0}
    monkeypatch.setattr(int8, "_times", {})
    monkeypatch.setattr(int8, "fastest", lambda ways: {name: favored[name] for name in ways})


def has_kernel():
    try:
        torch._convert_weight_to_int4pack_for_cpu(torch.zeros(16, 32, dtype=torch.int32), 1)
    except (RuntimeError, AttributeError):
        return False
    return True


pytestmark = pytest.mark.skipif(not has_kernel(), reason="this torch has no 4-bit product")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("tokens", [(1,), (3, 5), ()])
def test_four_bits_are_the_dense_product_but_for_the_rounding_of_bfloat16(
    symmetric, group_size, tokens
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 96))
    options = {"group_size": group_size, "symmetric": symmetric}
    packed, dense = (quantize(model, 4, activations=a, **options) for a in ("auto", "float"))
    assert isinstance(packed[0], Int4Linear)
    assert torch.equal(packed[0].weight, dense[0].weight)
    inputs = torch.randn(*tokens, 256)
    exact = nn.functional.linear(
        inputs.bfloat16().double(), dense[0].weight.double(), model[0].bias.double()
    )
    ours = packed(inputs)
    assert ours.dtype == inputs.dtype
    assert (ours - exact).norm() < 4e-3 * exact.norm()
    assert packed(inputs[:0]).shape == dense(inputs[:0]).shape if tokens else True


def test_eight_bits_too():
    torch.manual_seed(0)
    layer = Int8Linear(nn.Linear(256, 96), may_stay_float=True)
    inputs = torch.randn(4, 256)
    exact = nn.functional.linear(inputs.double(), layer.weight.double(), layer.bias.double())
    assert (layer(inputs) - exact).norm() < 6e-3 * exact.norm()
    assert "computed in weights alone" in layer.explain([4])[0]


def test_a_kernel_that_computes_something_else_is_left_out(monkeypatch):
    monkeypatch.setattr(torch, "_weight_int8pack_mm", lambda x, w, s: x @ w.t().bfloat16() * 2)
    layer = Int8Linear(nn.Linear(64, 32), may_stay_float=True)
    assert "weights alone" not in layer.explain([4])[0]


def test_what_the_kernel_cannot_take_keeps_its_packed_weight():
    model = nn.Sequential(nn.Linear(64, 24), nn.Linear(24, 64), nn.Linear(64, 32))
    with pytest.raises(ValueError, match="groups of 32 do not divide rows of 24"):
        quantize(model, 4, activations="auto")
    packed = quantize(model, 4, group_size=8, activations="auto")
    assert not any(isinstance(layer, Int4Linear) for layer in packed)
    assert torch.equal(packed[0].weight, quantize(model, 4, group_size=8)[0].weight)


def test_files_state_dicts_and_copies_hold_all(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
    inputs = torch.randn(2, 64)
    for make in (
        lambda m: quantize(m, 4, activations="auto", symmetric=False),
        lambda m: quantize(m, activations="auto"),
    ):
        small = make(model)
        expected = small(inputs)
        save(small, tmp_path / "small.safetensors")
        assert torch.equal(load(model, tmp_path / "small.safetensors")(inputs), expected)
        other = make(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32)))
        other(inputs)  # what it keeps for speed is of the old weights
        other.load_state_dict(small.state_dict())
        assert torch.equal(other(inputs), expected)
        torch.testing.assert_close(make(small)(inputs), expected, rtol=0.02, atol=0.02)  # twice


@pytest.mark.timing
@pytest.mark.parametrize("processor", ["as it is", "AVX2", "plain"])
def test_one_token_is_faster_than_float_where_the_kernel_is_taken(processor, times_of_float):
    cases = [(bits, 1, size, size) for bits in (4, 8) for size in (1024, 4096)]
    ratios = times_of_float(processor, cases)
    assert min(ratios) >= 1, ratios
