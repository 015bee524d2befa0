"""A pruned model is the dense one with the pruned channels' readers at zero."""

import copy

import pytest
import torch
from tinyml import prune_channels, size_of, sort_channels
from tinyml.pruning.channels import channel_groups
from torch import nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.a = nn.Conv2d(channels, 10, 3, padding=1, bias=False)
        self.norm_a = nn.BatchNorm2d(10)
        self.depthwise = nn.Conv2d(10, 10, 3, padding=1, groups=10)
        self.b = nn.Conv2d(10, channels, 1)
        self.norm_b = nn.BatchNorm2d(channels)

    def forward(self, x):
        inside = self.depthwise(torch.relu(self.norm_a(self.a(x))))
        return torch.relu(x + self.norm_b(self.b(inside)))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(8 * 9, 20)
        self.head = nn.Linear(20, 5)

    def forward(self, x):
        x = self.pool(self.blocks(self.stem(x)))
        return self.head(torch.relu(self.hidden(x.flatten(1))))


def network(seed=0):
    torch.manual_seed(seed)
    model = Residual().double()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            layer.weight.data.normal_()
            layer.bias.data.normal_()
    return model.eval()


X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_the_graph_says_which_layers_share_channels():
    groups = {tuple(sorted(g.writers)): g for g in channel_groups(network(), X)}
    assert set(groups) == {
        ("blocks.0.a",),
        ("blocks.0.b", "blocks.1.b", "stem"),
        ("blocks.1.a",),
        ("hidden",),
    }
    residual = groups["blocks.0.b", "blocks.1.b", "stem"]
    assert sorted(residual.passers) == ["blocks.0.norm_b", "blocks.1.norm_b"]
    assert sorted(residual.readers) == [("blocks.0.a", 1), ("blocks.1.a", 1), ("hidden", 9)]
    assert groups["blocks.0.a",].passers == ["blocks.0.norm_a", "blocks.0.depthwise"]


@pytest.mark.parametrize("sparsity", [0.25, 0.5, 0.9])
def test_it_equals_the_dense_model_with_readers_at_zero(sparsity):
    model = network()
    small = prune_channels(model, sparsity, X)
    masked = copy.deepcopy(model)
    # Which channels stayed is read off the sizes and off the importance, not off the pruner.
    for group in channel_groups(model, X):
        norm = sum(
            model.get_submodule(name).weight.data.transpose(0, 1)
            .reshape(group.size, -1).square().sum(1)
            for name, _ in group.readers
        )  # fmt: skip
        gone = norm.argsort()[: round(sparsity * group.size)]
        gone = gone[: group.size - 1]
        for name, repeat in group.readers:
            weight = masked.get_submodule(name).weight.data
            weight.view(len(weight), group.size, repeat, *weight.shape[2:])[:, gone] = 0
        for name in group.writers:
            assert len(small.get_submodule(name).weight) == group.size - len(gone)
    with torch.no_grad():
        torch.testing.assert_close(small(X), masked(X), rtol=1e-10, atol=1e-10)
    assert size_of(small, X).macs < size_of(model, X).macs
    assert size_of(small).bytes < size_of(model).bytes
    small.train()(X).sum().backward()  # it trains on


def test_sorting_channels_changes_nothing():
    model = network()
    ordered = sort_channels(model, X)
    with torch.no_grad():
        torch.testing.assert_close(ordered(X), model(X), rtol=1e-10, atol=1e-10)
    assert not torch.equal(ordered.stem.weight, model.stem.weight)


def test_sorted_channels_are_removed_from_the_end():
    model = sort_channels(network(), X)
    small = prune_channels(model, {"hidden": 0.5}, X)
    assert torch.equal(small.head.weight, model.head.weight[:, :10])
    assert torch.equal(small.hidden.weight, model.hidden.weight[:10])
    assert small.stem.out_channels == 8


class Concatenating(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)
        self.c, self.d = nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.d(torch.relu(self.c(torch.cat([self.a(x), self.b(x)], dim=1))))


def test_what_enters_an_unknown_operation_stays():
    small = prune_channels(Concatenating(), 0.5, torch.randn(2, 6))
    assert (small.a.out_features, small.b.out_features) == (8, 8)
    assert small.c.out_features == small.d.in_features == 6


class Decoder(nn.Module):
    """A feed-forward block of a transformer on (batch, seq, width)."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


def test_the_hidden_channels_of_a_transformer_go_and_its_residual_stays():
    torch.manual_seed(0)
    model, tokens = Decoder().double(), torch.randint(11, (2, 5))
    (group,) = channel_groups(model, tokens)
    assert (group.writers, group.readers) == (["up"], [("down", 1)])
    small = prune_channels(model, 0.75, tokens)
    assert small.up.out_features == small.down.in_features == 6
    masked = copy.deepcopy(model)
    masked.down.weight.data[:, model.down.weight.norm(dim=0).argsort()[:18]] = 0
    torch.testing.assert_close(small(tokens), masked(tokens), rtol=1e-12, atol=1e-12)


class SizeInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        # The trace follows the channels through relu and cannot see what the hook adds.
        return self.b(torch.relu(self.a(x)))


def test_bad_requests_say_what_to_ask_for():
    with pytest.raises(ValueError, match="sparsity is 1"):
        prune_channels(network(), 1.0, X)
    with pytest.raises(ValueError, match=r"channels of \['head'\] cannot go"):
        prune_channels(network(), {"head": 0.5}, X)
    with pytest.raises(ValueError, match="no channels between two layers"):
        prune_channels(nn.Sequential(nn.Linear(4, 4)), 0.5, torch.randn(2, 4))
    fixed = SizeInside()
    fixed.a.register_forward_hook(lambda *args: args[2] + torch.zeros(8))
    with pytest.raises(ValueError, match="a size written into its forward"):
        prune_channels(fixed, 0.5, torch.randn(2, 6))
    with pytest.raises(ValueError, match="cannot be traced"):
        prune_channels(nn.LSTM(4, 4), 0.5, torch.randn(2, 4))
