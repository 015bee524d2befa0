"""Criteria of importance, against their formulas."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tinyml import prune_channels
from tinyml.pruning import importance, units
from tinyml.pruning.rules import RULES
from torch import nn

X = torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.arange(16) % 4


def build_network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 4),
    ).double()
    with torch.no_grad():
        model[1].weight.uniform_(0.2, 2)
        model[1].running_var.uniform_(0.5, 2)
    return model.eval()


def compute_loss(model):
    return F.cross_entropy(model(X), LABELS)


def compute_magnitude(model, writer, reader):
    power = writer.weight.flatten(1).square().sum(1) + writer.bias.square()
    return power + reader.weight.transpose(0, 1).flatten(1).square().sum(1)


def compute_taylor(model, writer, reader):
    model.zero_grad()
    compute_loss(model).backward()
    pairs = [(writer.weight, writer.weight.grad), (writer.bias, writer.bias.grad)]
    return sum((w * g).reshape(len(w), -1).sum(1) for w, g in pairs).square()


def compute_wanda(model, writer, reader):
    with torch.no_grad():
        inputs = model[: list(model).index(reader)](X)
    powers = reader.weight.square().transpose(0, 1).flatten(1).sum(1)
    return powers * inputs.square().movedim(1, 0).flatten(1).mean(1)


FORMULAS = {
    "wanda": compute_wanda,
    "magnitude": compute_magnitude,
    "taylor": compute_taylor,
    "bn_scale": lambda model, *_: model[1].weight.abs(),
}


@pytest.mark.parametrize("criterion", FORMULAS)
def test_units_of_least_importance_go(criterion):
    options = {"loss": compute_loss} if criterion == "taylor" else {}
    model = build_network()
    model[0].weight.requires_grad_(False)
    small = prune_channels(model, 0.5, X, criterion=criterion, **options)
    assert not small[0].weight.requires_grad
    assert small[3].weight.requires_grad
    model[0].weight.requires_grad_()
    order = FORMULAS[criterion](model, model[0], model[3]).argsort(descending=True)
    assert torch.equal(small[0].weight, model[0].weight[order[:4].sort().values])
    if criterion == "bn_scale":
        assert small[3].out_channels == 12  # it has no batch normalization
    else:
        order = FORMULAS[criterion](model, model[3], model[7]).argsort(descending=True)
        assert torch.equal(small[7].weight, model[7].weight[:, order[:6].sort().values])


@pytest.mark.parametrize(
    ("criterion", "scope"),
    [
        ("wanda", "global"),
        ("bn_scale", "group"),
        ("magnitude", "group"),
        ("taylor", "global"),
        *(
            pytest.param(criterion, scope, marks=pytest.mark.exhaustive)
            for criterion, scope in (
                ("wanda", "group"),
                ("bn_scale", "global"),
                ("magnitude", "global"),
                ("taylor", "group"),
            )
        ),
    ],
)
def test_dead_units_go_first_by_every_criterion(criterion, scope):
    options = {"loss": compute_loss} if criterion == "taylor" else {}
    model = build_network()
    with torch.no_grad():  # always 0 after the activation, with large weights that read it
        model[1].weight[[1, 5]], model[1].bias[[1, 5]] = 0, -1.0
        model[0].weight[[1, 5]] *= 100
        model[3].weight[:, [1, 5]] *= 100
    count = 8 if criterion == "bn_scale" else 20
    sparsity = 2 / 8 if scope == "group" else 2 / count
    small = prune_channels(model, sparsity, X, criterion=criterion, scope=scope, **options)
    assert torch.equal(small[0].weight, model[0].weight[[0, 2, 3, 4, 6, 7]])
    if scope == "global":
        with torch.no_grad():
            torch.testing.assert_close(small(X), model(X))


def test_global_ranking_removes_more_where_scores_are_small():
    model = build_network()
    with torch.no_grad():
        model[3].weight[:9] *= 1e-3
        model[3].bias[:9] *= 1e-3
        model[7].weight[:, :9] *= 1e-3
    small = prune_channels(model, 9 / 20, X, criterion="magnitude", scope="global")
    assert (small[0].out_channels, small[3].out_channels) == (8, 3)
    smallest = prune_channels(model, 0.99, X, scope="global")
    assert (smallest[0].out_channels, smallest[3].out_channels) == (1, 1)


def test_bad_criteria_are_refused():
    for options, match in (
        ({"criterion": "random"}, "expected criterion 'wanda'"),
        ({"criterion": "taylor"}, "expected loss"),
        ({"loss": compute_loss}, "for criterion='taylor' and no other"),
        ({"scope": "layer"}, "expected scope 'group' or 'global'"),
    ):
        with pytest.raises(ValueError, match=match):
            prune_channels(build_network(), 0.5, X, **options)
    with pytest.raises(ValueError, match="one sparsity for scope='global'"):
        prune_channels(build_network(), {"0": 0.5}, X, scope="global")
    linear = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(ValueError, match="expected a batch normalization with nonzero scales"):
        prune_channels(linear, 0.5, torch.randn(2, 4), criterion="bn_scale")
    with pytest.raises(ValueError, match=r"after \['3'\]"):
        prune_channels(build_network(), {"3": 0.5}, X, criterion="bn_scale")


@pytest.mark.parametrize("factor", [1e-3, 2e3])
@pytest.mark.parametrize("criterion", ["magnitude", "taylor", "bn_scale"])
def test_scores_of_16_bit_weights_neither_vanish_nor_overflow(criterion, factor):
    model = build_network().half()
    with torch.no_grad():
        if criterion == "bn_scale":
            model[1].weight.mul_(min(factor, 200.0))
        else:
            model[0].weight.mul_(factor)
            model[1].weight.mul_(min(1.0, 20 / factor))  # later activations do not overflow
        model[1].bias.fill_(0.5)  # no unit is dead
    exact = copy.deepcopy(model).double()
    order = FORMULAS[criterion](exact, exact[0], exact[3]).argsort(descending=True)
    options = {"loss": lambda m: compute_loss(m.double())} if criterion == "taylor" else {}
    small = prune_channels(model, 0.5, X.half(), criterion=criterion, **options)
    assert torch.equal(small[0].weight, model[0].weight[order[:4].sort().values])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_squares_of_the_noise_do_not_overflow(dtype):
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)).to(dtype)
    inputs = (torch.randn(64, 4, dtype=dtype) * 1e4,)
    walk = units.Walk(model, inputs, RULES)
    probe = importance._Probe(walk)
    probe.run(*walk.graph.list_arguments(inputs))
    probe.noise = torch.Generator().manual_seed(0)
    value = torch.zeros(2**12, 64, dtype=dtype)
    for name in probe.squares:
        noise = probe._draw_noise(value, 1, probe._compute_noise_scale(name, value))
        assert noise.square().isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_refused(value):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="expected finite values in the scores of units"):
        prune_channels(model, 0.5, x, criterion="taylor", loss=lambda m: m(x).sum() * value)
    with pytest.raises(ValueError, match="expected finite values in"):
        prune_channels(model, 0.5, torch.full((3, 4), value))
