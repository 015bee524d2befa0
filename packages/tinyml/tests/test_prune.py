"""Exactly the requested number of weights is removed, the least important first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinyml import convert, gptq, kmeans_quantize, prepare_qat, prune, quantize, smoothquant
from tinyml.pruning.magnitude import input_norms, pattern_mask, smallest_mask
from torch import nn


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))


@given(
    values=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    sparsity=st.floats(0, 1),
)
def test_exactly_the_share_goes_even_among_ties(values, sparsity):
    score = torch.tensor(values, dtype=torch.float64)
    mask = smallest_mask(score, sparsity)
    assert int((~mask).sum()) == round(sparsity * len(values))
    if mask.any() and not mask.all():
        assert score[~mask].max() <= score[mask].min()


def test_a_5x5_matrix_by_hand():
    weight = torch.arange(25.0).view(5, 5) - 12
    model = nn.Linear(5, 5, bias=False)
    model.weight.data = weight
    pruned, masks = prune(model, 0.6)
    assert pruned.weight.count_nonzero() == 10
    assert sorted(pruned.weight[masks["weight"]].abs().tolist()) == [
        w for size in range(8, 13) for w in (size, size)
    ]
    assert torch.equal(model.weight, weight)  # the original is as it was


def test_global_pruning_ranks_all_layers_together():
    model = mlp()
    model[2].weight.data.sign_().mul_(10)
    pruned, masks = prune(model, 0.5, scope="global")
    assert masks["2.weight"].all()
    assert masks.sparsity == 0.5
    assert int(masks["0.weight"].sum()) == (12 * 8 + 8 * 4) // 2 - 8 * 4
    assert pruned[0].bias.equal(model[0].bias)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_a_pattern_keeps_the_largest_of_every_group(rows, groups, remaining):
    score = torch.rand(rows, groups * 4)
    mask = pattern_mask(score, f"{remaining}:4", 1 - remaining / 4).view(-1, 4)
    assert (mask.sum(1) == remaining).all()
    for mask_row, score_row in zip(mask, score.view(-1, 4), strict=True):
        assert set(mask_row.nonzero().flatten().tolist()) == set(
            score_row.topk(remaining).indices.tolist()
        )


def test_masks_hold_through_fine_tuning():
    model, masks = prune(mlp(), {"0": 0.75})
    assert set(masks) == {"0.weight"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    masks.keep(model, optimizer)
    before = model[0].weight.clone()
    for _ in range(3):
        model(torch.randn(6, 12)).square().mean().backward()
        optimizer.step()
    assert not model[0].weight[~masks["0.weight"]].any()
    assert (model[0].weight != before)[masks["0.weight"]].all()
    assert prune(mlp(), {}).masks.sparsity == 0
    with pytest.raises(ValueError, match=r"dense weights of the masks, got one without 0.weight"):
        masks.apply(quantize(model, 4))


def test_wanda_weighs_by_the_norm_of_the_inputs():
    model = mlp()
    inputs = torch.randn(2, 5, 12) * torch.linspace(0, 10, 12)
    norms = input_norms(model, list(inputs))
    torch.testing.assert_close(norms["0"], inputs.view(-1, 12).norm(dim=0))
    _, masks = prune(model, 0.5, input_norms=norms)
    expected = smallest_mask(model[0].weight.abs() * norms["0"], 0.5)
    assert torch.equal(masks["0.weight"], expected)
    assert not masks["0.weight"][:, 0].any()  # an input that is always zero does not matter


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.2}, "sparsity <= 1, got 1.2"),
        ({"sparsity": {"9": 0.5}}, r"no such layer: \['9'\]"),
        ({"sparsity": 0.5, "pattern": "2of4"}, "a pattern n:m"),
        ({"sparsity": 0.5, "pattern": "2:5"}, "does not fit 12 inputs"),
        ({"sparsity": 0.9, "pattern": "2:4"}, "sparsity of 0.5.*got 0.9"),
        ({"sparsity": {"0": 0.5, "2": 0.25}, "pattern": "2:4"}, "sparsity of 0.5.*got 0.25"),
        ({"sparsity": 0.5, "scope": "world"}, "'layer' or 'global'"),
        ({"sparsity": {"0": 0.5}, "scope": "global"}, "one sparsity for all"),
    ],
)
def test_bad_requests_say_what_to_ask_for(arguments, message):
    with pytest.raises(ValueError, match=message):
        prune(mlp(), **arguments)


def test_global_pruning_needs_the_input_norms_of_all_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    norms = input_norms(model, [torch.randn(4, 3, 8, 8)])
    with pytest.raises(ValueError, match=r"norms of all layers.*none of \['0'\]; pass layers="):
        prune(model, 0.5, scope="global", input_norms=norms)
    _, masks = prune(model, 0.5, scope="global", input_norms=norms, layers=(nn.Linear,))
    assert list(masks) == ["2.weight"]


@pytest.mark.parametrize(
    "compress",
    [
        lambda m: quantize(m, 4),
        lambda m: kmeans_quantize(m, 2),
        lambda m: prepare_qat(m, 4),
        lambda m: convert(prepare_qat(m, 4)),
        lambda m: gptq(m, [torch.randn(4, 8)]),
    ],
)
def test_frozen_weights_stay_frozen_when_a_compressed_model_is_pruned(compress):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    pruned, _ = prune(compress(model), 0.5)
    assert [p.requires_grad for p in pruned[0].parameters()] == [False, False]
    assert [p.requires_grad for p in pruned[1].parameters()] == [True, True]


@pytest.mark.parametrize(
    "replace",
    [
        lambda m: quantize(m, 8, activations="dynamic"),
        lambda m: smoothquant(m, [torch.arange(9)]),
    ],
)
def test_tied_weights_stay_tied_when_a_model_with_replaced_layers_is_pruned(replace):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.body = nn.Linear(16, 16)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.body(self.embed(tokens)))

    small = replace(Tied())
    pruned, _ = prune(small, 0.5)
    assert pruned.embed.weight is pruned.head.weight
    assert torch.equal(pruned.embed.weight == 0, pruned.head.weight == 0)
    plain, _ = prune(small, 0.0)
    assert torch.equal(plain.embed.weight, small.embed.weight)


def test_masks_refuse_the_optimizer_of_the_model_before_pruning():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruned, masks = prune(model, 0.5)
    with pytest.raises(ValueError, match=r"trains none of the masked weights; create it from"):
        masks.keep(pruned, optimizer)
    masks.keep(pruned, torch.optim.SGD(pruned[0].parameters(), lr=0.1))


class Experts(nn.Module):
    """Two experts, of which the second one is never chosen."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        chosen = torch.zeros(len(x), dtype=torch.long)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(x[chosen == number])
        return out


def test_an_expert_without_tokens_is_pruned_by_magnitude():
    torch.manual_seed(0)
    model = Experts()
    norms = input_norms(model, [torch.randn(16, 8)])
    assert list(norms) == ["experts.0"]
    _, masks = prune(model, 0.5, input_norms=norms)
    by_magnitude = smallest_mask(model.experts[1].weight.abs(), 0.5)
    assert torch.equal(masks["experts.1.weight"], by_magnitude)


def test_a_pattern_counts_input_channels_of_a_convolution():
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 6, 3)
    _, masks = prune(layer, 0.5, pattern="2:4")
    remaining = masks["weight"].view(6, 2, 4, 3, 3)
    assert (remaining.sum(2) == 2).all()
    magnitudes = layer.weight.detach().abs().view(6, 2, 4, 3, 3)
    smallest = magnitudes.where(remaining, torch.inf).amin(2)
    assert (smallest >= magnitudes.where(~remaining, 0).amax(2)).all()
    with pytest.raises(ValueError, match=r"2:4 does not fit 1 inputs; .*protect"):
        prune(nn.Conv2d(8, 8, 2, groups=8), 0.5, pattern="2:4")


def test_norms_of_a_shared_weight_count_the_inputs_of_every_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(10 * torch.relu(self.a(x)))

    model, x = Twice(), torch.randn(5, 4)
    inputs = torch.cat([x, 10 * torch.relu(model.a(x))])
    norms = input_norms(model, [x])
    assert list(norms) == ["a"]
    torch.testing.assert_close(norms["a"], inputs.norm(dim=0).detach())
