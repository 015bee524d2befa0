"""SmoothQuant: the same function before rounding, closer after it for uneven inputs; padding."""

import copy

import pytest
import torch
from tinyml import gptq, quantize, smoothquant
from tinyml.quantization.calibration import watch_inputs
from torch import nn


def uneven(seed=0):
    """Two layers, and inputs of which a few are a hundred times as large as the rest."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))
    inputs = torch.randn(4, 50, 64)
    inputs[..., ::16] *= 100
    return model, list(inputs)


def error(model, small, batches):
    with torch.no_grad():
        exact = torch.cat([model(batch) for batch in batches])
        return float((torch.cat([small(batch) for batch in batches]) - exact).norm() / exact.norm())


def test_smoothquant_is_closer_than_plain_int8():
    for seed in range(5):
        model, batches = uneven(seed)
        plain, ours = quantize(model, activations="dynamic"), smoothquant(model, batches)
        # Over 20 seeds the ratio is 0.47 with a deviation of 0.02.
        assert error(model, ours, batches) < 0.7 * error(model, plain, batches)


def test_smoothing_is_the_formula_of_the_paper():
    model, batches = uneven()
    ours = smoothquant(nn.Sequential(model[0]), batches, alpha=0.25)
    largest = torch.cat(batches).reshape(-1, 64).abs().amax(0)
    expected = largest**0.25 / model[0].weight.detach().abs().amax(0) ** 0.75
    torch.testing.assert_close(ours[0].divide, expected)
    torch.testing.assert_close(ours[0].weight, model[0].weight.detach(), rtol=0, atol=0.05)


@pytest.mark.parametrize("calibrate", [gptq, smoothquant])
def test_no_batches_and_bad_numbers_are_refused_and_the_model_is_as_it_was(calibrate):
    model, batches = uneven()
    before = copy.deepcopy(model.state_dict())
    for wrong, match in (
        (lambda: calibrate(model, []), "at least one batch"),
        (lambda: calibrate(model, [batches[0] * float("nan")]), "nan"),
        (lambda: calibrate(model, batches, protect=["3"]), "no layer has a name like '3'"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    with pytest.raises(ValueError, match="'dynamic' or 'auto', got 'float'"):
        smoothquant(model, batches, activations="float")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_smoothed_weights_are_those_of_the_paper_and_rounded_once(dtype):
    model, batches = uneven()
    layer, batches = nn.Sequential(model[0]).to(dtype), [batch.to(dtype) for batch in batches]
    weight, tokens = layer[0].weight.detach(), batches[0]
    small = smoothquant(layer, batches)[0]
    scale = small.scale[:, None]
    stored = small.weight_codes.float() * scale
    s = small.divide
    assert s.dtype == dtype
    # With the s that is kept, the float product is the same before rounding but for its last bits,
    # and the codes are those of W s nearest to it.
    exact = torch.nn.functional.linear(tokens.double(), weight.double())
    even = torch.nn.functional.linear(tokens.double() / s.double(), weight.double() * s.double())
    torch.testing.assert_close(even, exact, rtol=1e-12, atol=1e-10)
    assert ((weight.double() * s.double() - stored.double()).abs() <= scale * (0.5 + 1e-5)).all()
    # The weight that is read is the quotient of what is stored, rounded to the type once.
    if dtype is torch.float64:
        torch.testing.assert_close(small.weight.double(), stored.double() / s, rtol=1e-6, atol=0)
    else:
        assert torch.equal(small.weight, (stored / s.float()).to(dtype))


def test_smoothed_inputs_of_16_bits_are_rounded_to_int8_alone():
    model, batches = uneven()
    layer = nn.Sequential(model[0]).bfloat16()
    small, tokens = smoothquant(layer, [b.bfloat16() for b in batches])[0], batches[1].bfloat16()
    even = tokens.float() / small.divide.float()
    scale = even.abs().amax(1, keepdim=True) / 127
    sums = (even / scale).round().double() @ small.weight_codes.double().t()
    outputs = (sums.float() * scale * small.scale + small.bias).bfloat16()
    assert torch.equal(small(tokens), outputs)


class Masked(nn.Module):
    """A model of tokens that is called with keyword arguments, as those of transformers."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, inputs, *, attention_mask=None):
        return self.layers(inputs)


@pytest.mark.parametrize("calibrate", [gptq, smoothquant])
def test_keyword_batches_are_calibrated_on_without_their_padding(calibrate):
    model, batches = uneven()
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, 30:] = 0
    padded = torch.stack(batches[:2])
    padded[mask == 0] = 1e4
    exact = calibrate(model, [padded[mask == 1]])
    batch = {"inputs": padded, "attention_mask": mask}
    masked = calibrate(Masked(model), [batch])
    assert torch.equal(masked.layers(padded), exact(padded))
    unmasked = calibrate(Masked(model), [{"inputs": padded}])
    assert torch.equal(unmasked.layers(padded), calibrate(model, [padded])(padded))
    assert not torch.equal(unmasked.layers(padded), masked.layers(padded))


class Flattening(nn.Module):
    """A model whose inner layers receive the tokens of all sequences in one dimension."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, inputs, *, attention_mask=None):
        return self.layers(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])


def test_padding_does_not_count_after_sequences_are_joined():
    model, batches = uneven()
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, 30:] = 0
    padded = torch.stack(batches[:2])
    exact = gptq(model, [padded[mask == 1]])
    masked = gptq(Flattening(model), [{"inputs": padded, "attention_mask": mask}])
    assert torch.equal(masked.layers(padded), exact(padded))


def test_padding_of_an_encoder_is_not_that_of_its_decoder():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 1,
        "num_heads": 4,
    }
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    tokens, counts = torch.arange(16).view(2, 8), {}

    def note(name, inputs):
        counts[name] = len(inputs)

    mask = (torch.arange(8) < 5).long().expand(2, 8)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens[:, :6]}
    watch_inputs(model, [batch], layers, note)
    attention = "decoder.block.0.layer.1.EncDecAttention"
    assert counts["encoder.block.0.layer.0.SelfAttention.q"] == counts[f"{attention}.k"] == 10
    assert counts["decoder.block.0.layer.0.SelfAttention.q"] == counts[f"{attention}.q"] == 12
    batch["decoder_attention_mask"] = mask[:, 1:7]
    watch_inputs(model, [batch], layers, note)
    assert counts[f"{attention}.k"] == 10
    assert counts[f"{attention}.q"] == counts["lm_head"] == 8
    for decoder in ("labels", "decoder_input_ids"):
        with pytest.raises(ValueError, match="another length"):
            gptq(model, [{"input_ids": tokens, "attention_mask": mask, decoder: tokens}])


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.75])
def test_inputs_that_are_zero_in_calibration_are_right_when_they_are_not(alpha):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12))
    tokens = torch.randn(64, 16)
    calibration = tokens.clone()
    calibration[:, [3, 7]] = 0
    assert error(model, smoothquant(model, [calibration], alpha=alpha), [tokens]) < 0.02


@pytest.mark.parametrize("weight", [1e-6, 1e4])
def test_smoothing_stays_in_the_range_of_half(weight):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(32, 16)).half()
    with torch.no_grad():
        layer[0].weight.mul_(weight)
    inputs = torch.randn(20, 32).half()
    for alpha in (0.0, 0.5, 1.0):
        small = smoothquant(layer, [inputs], alpha=alpha)
        assert torch.isfinite(small(inputs)).all()
        assert torch.isfinite(small[0].weight).all()


def test_a_state_dict_goes_from_one_smoothed_model_into_another():
    (first, batches), (other, _) = uneven(0), uneven(1)
    smooth = smoothquant(first, batches), quantize(other, activations="dynamic")
    for saved, target in (smooth, smooth[::-1]):
        target = copy.deepcopy(target)
        target.load_state_dict(saved.state_dict())
        assert torch.equal(target(batches[0]), saved(batches[0]))


@pytest.mark.parametrize("padding", [float("-inf"), -1e9, 0.0])
def test_additive_masks_are_refused(padding):
    model, inputs = Masked(nn.Linear(16, 8)), torch.randn(2, 6, 16)
    additive = torch.zeros(2, 6)
    additive[:, 4:] = padding
    with pytest.raises(ValueError, match=r"attention_mask to be 1 at tokens.*\(mask == 0\)"):
        gptq(model, [{"inputs": inputs, "attention_mask": additive}])


@pytest.mark.parametrize("shape", [(2, 1, 1, 3), (6,), (2, 1, 6, 6)])
@pytest.mark.parametrize("wrapper", [Masked, Flattening])
@pytest.mark.parametrize("calibrate", [gptq, smoothquant])
def test_masks_of_other_shapes_leave_out_no_token(shape, wrapper, calibrate):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(16, 8)), torch.randn(2, 3, 16)
    batch = {"inputs": inputs, "attention_mask": torch.zeros(shape)}
    masked = calibrate(wrapper(model), [batch])
    assert torch.equal(masked.layers(inputs), calibrate(model, [inputs])(inputs))
