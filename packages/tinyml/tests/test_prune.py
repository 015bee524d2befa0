"""Exactly the requested number of weights is removed, the least important first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinyml import Masks, convert, gptq, kmeans_quantize, prepare_qat, prune, quantize
from tinyml.pruning.magnitude import mask_smallest
from torch import nn


def build_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))


@given(
    values=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    sparsity=st.floats(0, 1),
)
def test_exactly_the_fraction_is_removed_even_among_ties(values, sparsity):
    score = torch.tensor(values, dtype=torch.float64)
    mask = mask_smallest(score, sparsity)
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


def test_masks_hold_through_fine_tuning(tmp_path):
    model, masks = prune(build_mlp(), {"0": 0.75})
    assert set(masks) == {"0.weight"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.save(dict(masks), tmp_path / "masks.pt")
    Masks(torch.load(tmp_path / "masks.pt")).keep(model, optimizer)
    before = model[0].weight.clone()
    for _ in range(3):
        model(torch.randn(6, 12)).square().mean().backward()
        optimizer.step()
    assert not model[0].weight[~masks["0.weight"]].any()
    assert (model[0].weight != before)[masks["0.weight"]].all()
    assert not prune(build_mlp(), {}).masks
    with pytest.raises(ValueError, match=r"dense weights of the masks, got one without 0.weight"):
        masks.apply(quantize(model, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.2}, "sparsity <= 1, got 1.2"),
        ({"sparsity": {"9": 0.5}}, r"expected layer names among .*, got '9'"),
    ],
)
def test_bad_requests_say_what_to_ask_for(arguments, message):
    with pytest.raises(ValueError, match=message):
        prune(build_mlp(), **arguments)


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


def test_masks_refuse_the_optimizer_of_the_model_before_pruning():
    model = build_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruned, masks = prune(model, 0.5)
    with pytest.raises(ValueError, match=r"trains none of the masked weights; create it from"):
        masks.keep(pruned, optimizer)
    masks.keep(pruned, torch.optim.SGD(pruned[0].parameters(), lr=0.1))
