"""AWQ and SmoothQuant: the same function before rounding, closer after it for uneven inputs."""

import copy

import pytest
import torch
from tinyml import awq, gptq, quantize, smoothquant
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


def test_awq_is_closer_than_rounding_to_the_nearest():
    for seed in range(5):
        model, batches = uneven(seed)
        for size, share in ((None, 0.97), (16, 0.75)):
            plain, ours = (
                quantize(model, 3, group_size=size),
                awq(model, batches, 3, group_size=size),
            )
            assert error(model, ours, batches) < share * error(model, plain, batches)


def test_awq_of_one_step_is_rounding_to_the_nearest():
    model, batches = uneven()
    one, plain = awq(model, batches, 4, steps=1, group_size=16), quantize(model, 4, group_size=16)
    # The embedding kinds that `quantize` also takes are not here: both have the two linear layers.
    for a, b in zip(one.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one[0].weight, plain[0].weight)


def test_awq_takes_the_share_with_the_least_change_of_the_outputs():
    model, batches = uneven()
    tokens = torch.cat(batches).reshape(-1, 64).double()
    layer = nn.Sequential(model[0])
    ours = awq(layer, batches, 3)
    with torch.no_grad():
        weight = model[0].weight.double()
        best = (tokens @ (ours[0].weight.double() - weight).t()).norm()
        size = tokens.square().sum(0).sqrt()
        for step in range(20):
            s = size ** (step / 20)
            s = (s / (s.max() * s.min()).sqrt()).float()
            scaled = nn.Sequential(copy.deepcopy(model[0]))
            scaled[0].weight.data *= s
            rounded = quantize(scaled, 3)[0].weight / s
            assert best <= (tokens @ (rounded.double() - weight).t()).norm() * (1 + 1e-5)


def test_smoothquant_is_closer_than_plain_int8():
    for seed in range(5):
        model, batches = uneven(seed)
        plain, ours = quantize(model, activations="dynamic"), smoothquant(model, batches)
        assert error(model, ours, batches) < 0.7 * error(model, plain, batches)


def test_smoothing_is_the_formula_of_the_paper():
    model, batches = uneven()
    ours = smoothquant(nn.Sequential(model[0]), batches, alpha=0.25)
    largest = torch.cat(batches).reshape(-1, 64).abs().amax(0)
    expected = largest**0.25 / model[0].weight.detach().abs().amax(0) ** 0.75
    torch.testing.assert_close(ours[0].divide, expected)
    torch.testing.assert_close(ours[0].weight, model[0].weight.detach(), rtol=0, atol=0.05)


@pytest.mark.parametrize("way", [gptq, awq, smoothquant])
def test_no_batches_and_bad_numbers_are_refused_and_the_model_is_as_it_was(way):
    model, batches = uneven()
    before = copy.deepcopy(model.state_dict())
    for wrong, match in (
        (lambda: way(model, []), "at least one batch"),
        (lambda: way(model, [batches[0] * float("nan")]), "nan"),
        (lambda: way(model, batches, protect=["3"]), "no layer has a name like '3'"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
