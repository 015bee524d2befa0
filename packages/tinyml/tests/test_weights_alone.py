"""Weights of 8 and 4 bits that are read as they are stored, where that is faster than float."""

import pytest
import torch
from figures import assert_at_least
from tinyml import Int4Linear, load, quantize, save
from tinyml.quantization import fastest_linear
from tinyml.timing import Timing
from torch import nn


@pytest.fixture(autouse=True)
def _kernel_wins(monkeypatch):
    """Make both implementations available, because the choice depends on the machine."""

    def kernel(implementations, inputs, is_correct, reference):
        try:
            uses_kernel = "weights alone" in implementations and is_correct()
        except RuntimeError:  # the kernel does not support the shape
            uses_kernel = False
        return Timing("weights alone" if uses_kernel else reference, {reference: 1.0}, {})

    monkeypatch.setattr(fastest_linear, "_timings", {})
    monkeypatch.setattr(fastest_linear, "measure", kernel)


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


def test_what_the_kernel_cannot_take_is_computed_in_float(monkeypatch):
    monkeypatch.setattr(
        fastest_linear.FastestLinear, "has_faster_implementation", lambda layer: True
    )
    model = nn.Sequential(nn.Linear(64, 24), nn.Linear(24, 64), nn.Linear(64, 32))
    assert type(quantize(model, 4, activations="auto")[1]) is nn.Linear
    with pytest.raises(ValueError, match="divides the 24 inputs of an output, got 32"):
        quantize(model, 4, activations="auto", group_size=32)
    packed, dense = (quantize(model, 4, group_size=8, activations=a) for a in ("auto", "float"))
    assert all(layer.explain([1])[0].startswith("1 tokens: computed in float") for layer in packed)
    inputs = torch.randn(3, 64)
    assert torch.equal(packed(inputs), dense(inputs))


def test_files_and_state_dicts_restore_the_outputs(tmp_path):
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


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
@pytest.mark.parametrize(("bits", "activations"), [(4, "auto"), (8, "dynamic")])
def test_exported_and_traced_graphs_compute_the_same(bits, activations):
    torch.manual_seed(0)
    small = quantize(nn.Sequential(nn.Linear(64, 32)), bits, activations=activations)
    inputs = torch.randn(3, 5, 64, requires_grad=True)
    graph = torch.export.export(small, (inputs,)).module()
    torch.testing.assert_close(graph(inputs), small(inputs), rtol=0.02, atol=0.02)
    # With "auto", a trace computes in float, and the check would warn of the other rounding.
    traced = torch.jit.trace(small, inputs.detach(), check_trace=activations == "dynamic")
    more = torch.randn(7, 5, 64)
    torch.testing.assert_close(traced(more), small(more), rtol=0.02, atol=0.02)
    gradient = torch.autograd.grad(small(inputs).sum(), inputs)[0]
    torch.testing.assert_close(gradient, small[0].weight.sum(0).expand_as(inputs))


@pytest.mark.timing
@pytest.mark.parametrize(
    "processor", ["as it is", "AVX2", pytest.param("plain", marks=pytest.mark.exhaustive)]
)
def test_one_token_is_about_as_fast_as_in_float(processor, times_of_float):
    cases = [(bits, 1, size, size) for bits in (4, 8) for size in (1024, 4096)]
    ratios = times_of_float(processor, cases, 0.95)
    figure = f"tinyml: float over auto for one token, {processor}"
    assert_at_least(figure, 0.95, min(ratios), margin=0)
