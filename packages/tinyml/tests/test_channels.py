"""A pruned model is the dense one with the pruned channels' readers at zero."""

import copy
import dataclasses

import pytest
import torch
from tinyml import IntegerModel, exported, prune_channels, size_of, sort_channels
from tinyml.pruning.channels import _make_ranked_copy
from tinyml.pruning.equality import _is_close
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


def build_network(seed=0):
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


class Composite(nn.Module):
    """A graph with every operator that is not decomposed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.images = nn.Sequential(
            conv(3, 8, 3),
            nn.BatchNorm2d(8).double(),
            nn.ReLU6(),
            nn.GroupNorm(4, 8).double(),
            nn.PReLU().double(),
            nn.ZeroPad2d(1),
            nn.ConvTranspose2d(8, 6, 2).double(),
            nn.SELU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Dropout(),
            nn.Flatten(),
        )
        self.hidden = linear(6, 32)
        self.q, self.k = linear(4, 8), linear(4, 8)
        self.norms = nn.Sequential(nn.LayerNorm(4).double(), nn.RMSNorm(4).double())
        self.w, self.head = nn.Parameter(torch.randn(8, 5).double()), linear(5, 2)

    def forward(self, x):
        a, b = self.hidden(self.images(x).square()).chunk(2, 1)
        x = self.norms((a * nn.functional.relu6(b)).unflatten(1, (4, 4)))
        q, k = (f(x).reshape(len(x), 4, -1, 4).transpose(1, 2) for f in (self.q, self.k))
        pairs = torch.ones(4, 4, dtype=torch.bool)
        near = pairs.tril() & pairs.triu(-2)
        x = nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=near)
        x = x.transpose(1, 2).contiguous()
        return self.head((x.flatten(2) @ self.w).softmax(1).to(torch.float64))


def test_skipped_decompositions_would_change_nothing(monkeypatch):
    model, results = Composite().eval(), []
    graph = exported.export_graph(model, (X,))
    assert {exported.get_operator(node) for node in graph.nodes} >= exported.COMPOSITE
    for is_decomposed in (exported._should_decompose, lambda _: True):
        monkeypatch.setattr(exported, "_should_decompose", is_decomposed)
        groups = [
            (
                [(s.tensor, s.axis, s.start, s.width, s.role) for s in group.slices],
                group.order.tolist(),
            )
            for group in _make_ranked_copy(model, (X,))[2]
        ]
        integer = IntegerModel(model.images[:3] + model.images[8:], [X])
        results.append((groups, integer(X)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


class Halves(nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, 1)
        return a * b.sigmoid()


def test_gated_channels_are_pruned_in_both_halves():
    first, last = conv(3, 8, 3), conv(4, 5, 1)
    small, same = (
        prune_channels(nn.Sequential(first, gate, nn.BatchNorm2d(4).double(), last), 0.5, X)
        for gate in (nn.GLU(1), Halves())
    )
    assert small[0].weight.shape == (4, 3, 3, 3)
    assert torch.equal(small[0].weight, same[0].weight)
    rows = nn.Sequential(first, nn.GLU(2), conv(8, 5, 1))  # the gate is along the rows
    assert prune_channels(rows, 0.5, X)[0].out_channels == 4


def list_readers(group):
    return [(part.layer, part.width) for part in group.slices if part.role == "reader"]


def test_the_graph_says_which_layers_share_channels():
    groups = {tuple(sorted(g.writers)): g for g in _make_ranked_copy(build_network(), (X,))[2]}
    assert set(groups) == {
        ("blocks.0.a",),
        ("blocks.0.b", "blocks.1.b", "stem"),
        ("blocks.1.a",),
        ("hidden",),
    }
    residual = groups["blocks.0.b", "blocks.1.b", "stem"]
    assert sorted(residual.list_layers("passer")) == ["blocks.0.norm_b", "blocks.1.norm_b"]
    assert sorted(list_readers(residual)) == [("blocks.0.a", 1), ("blocks.1.a", 1), ("hidden", 9)]
    assert groups["blocks.0.a",].list_layers("passer") == ["blocks.0.norm_a", "blocks.0.depthwise"]


def record_layer_inputs(model, *inputs):
    """Return the input of every layer without children, by name."""
    inputs_by_name, hooks = {}, []
    names = {layer: name for name, layer in model.named_modules()}

    def record(layer, arguments):
        inputs_by_name[names[layer]] = arguments[0]

    for layer in names:
        if not list(layer.children()):
            hooks.append(layer.register_forward_pre_hook(record))
    with torch.no_grad():
        model(*inputs)
    for hook in hooks:
        hook.remove()
    return inputs_by_name


@pytest.mark.parametrize(
    "sparsity", [0.5, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (0.25, 0.9))]
)
def test_it_equals_the_dense_model_with_readers_at_zero(sparsity):
    model = build_network()
    for block in model.blocks:
        block.norm_a.bias.data.abs_()  # so that no unit is always zero
    small = prune_channels(model, sparsity, X)
    masked = copy.deepcopy(model)
    # By the definition: for each unit the norm of its readers' weights times what arrives there.
    arrives = record_layer_inputs(model, X)
    for group in _make_ranked_copy(model, (X,))[2]:
        power = 0
        for name, _ in list_readers(group):
            weight, x = model.get_submodule(name).weight.data, arrives[name]
            product = weight.transpose(0, 1).flatten(1).square().sum(1)
            product = product * x.transpose(0, 1).flatten(1).square().mean(1)
            power = power + product.view(group.size, -1).sum(1)
        gone = power.argsort()[: round(sparsity * group.size)]
        gone = gone[: group.size - 1]
        for name, repeat in list_readers(group):
            weight = masked.get_submodule(name).weight.data
            weight.view(len(weight), group.size, repeat, *weight.shape[2:])[:, gone] = 0
        for name in group.writers:
            assert len(small.get_submodule(name).weight) == group.size - len(gone)
    with torch.no_grad():
        torch.testing.assert_close(small(X), masked(X), rtol=1e-10, atol=1e-10)
    assert size_of(small).bytes < size_of(model).bytes
    small.train()(X).sum().backward()  # it trains on


def test_sorting_channels_changes_nothing():
    # Six images of 7 x 6 pixels are seven rows of 288 numbers, which mix the channels.
    flat = By(lambda s, x: s.b(s.stem(x).view(-1, 288)), stem=conv(3, 8, 3), b=linear(288, 2))
    for model, inputs in ((build_network(), X), (flat, torch.randn(6, 3, 6, 6).double())):
        ordered = sort_channels(model, inputs)
        with torch.no_grad():
            torch.testing.assert_close(ordered(inputs), model(inputs), rtol=1e-10, atol=1e-10)
        assert not torch.equal(ordered.stem.weight, model.stem.weight)


def test_sorted_channels_are_removed_from_the_end():
    inputs = torch.randn(4, 6)
    model = sort_channels(build_classifier(), inputs)
    small = prune_channels(model, {"2": 0.5}, inputs)
    assert torch.equal(small[4].weight, model[4].weight[:, :4])
    assert torch.equal(small[2].weight, model[2].weight[:4])
    assert small[0].out_features == 8


@torch.no_grad()
def zero_readers(model, groups, sparsity):
    """By the definition: the dense model, what the least important units are multiplied with 0."""
    zeroed = copy.deepcopy(model)
    for group in groups:
        remaining = max(1, group.size - round(sparsity * group.size))
        for part in [part for part in group.slices if part.role == "reader"]:
            for unit in group.order[remaining:].tolist():
                start = part.start + unit * part.width
                zeroed.get_parameter(part.tensor).narrow(part.axis, start, part.width).zero_()
    return zeroed


class By(nn.Module):
    """Layers and a function of them and the input."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def conv(*sizes, **options):
    return nn.Conv2d(*sizes, padding=1, **options).double()


def linear(*sizes):
    return nn.Linear(*sizes).double()


def run_squeezed(s, x):
    y = s.a(x)
    return s.d(y * torch.sigmoid(s.c(torch.relu(s.b(y.mean((2, 3), keepdim=True))))))


def run_dense(s, x):
    y = s.a(x)
    return s.c(torch.cat([x, y, nn.functional.relu6(s.b(y))], dim=1))


def attention(s, x):
    x = s.a(x.flatten(2).mT)
    x = x + s.attention(x, x, x, need_weights=False)[0]
    return s.d(x + s.c(torch.relu(s.b(x))))


# The number of removable units of each graph, and the graph.
GRAPHS = {
    "concatenation": (14, By(run_dense, a=conv(3, 8, 3), b=conv(8, 6, 3), c=conv(17, 4, 3))),
    "gate": (
        12,
        By(run_squeezed, a=conv(3, 8, 3), b=conv(8, 4, 3), c=conv(4, 8, 3), d=conv(8, 2, 3)),
    ),
    "filters": (8, nn.Sequential(conv(3, 8, 3), conv(8, 16, 3, groups=8), conv(16, 2, 3))),
    "groups": (
        4, nn.Sequential(conv(3, 8, 3), conv(8, 12, 3, groups=4), nn.ReLU(), conv(12, 2, 3))
    ),
    "transposed groups": (
        2,
        nn.Sequential(
            conv(3, 8, 3), nn.ConvTranspose2d(8, 6, 2, groups=2).double(), conv(6, 2, 3)
        ),
    ),
    "group normalization": (
        4, nn.Sequential(conv(3, 8, 3), nn.GroupNorm(4, 8).double(), nn.ReLU(), conv(8, 2, 3))
    ),
    "transposed": (
        14, nn.Sequential(conv(3, 8, 3), nn.ConvTranspose2d(8, 6, 2).double(), conv(6, 2, 3))
    ),
    "activations": (
        8,
        nn.Sequential(
            conv(3, 8, 3), nn.Hardswish(), nn.PReLU(8).double(), nn.AvgPool2d(2), nn.ReLU6(),
            conv(8, 2, 3),
        ),
    ),
    "scale": (
        8, By(lambda s, x: s.b(1 - s.a(x) * s.scale), a=conv(3, 8, 3), b=conv(8, 2, 3),
              scale=nn.Parameter(torch.rand(8, 1, 1).double())),
    ),
    "channels last": (
        8, By(lambda s, x: s.b(s.a(x).permute(0, 2, 3, 1)), a=conv(3, 8, 3), b=linear(8, 2))
    ),
    "flattened": (
        8, By(lambda s, x: s.b(s.a(x).view(x.shape[0], -1)), a=conv(3, 8, 3), b=linear(288, 2))
    ),
    "attention without a norm": (  # the module checks the width of its queries
        6,
        By(
            attention, a=linear(3, 8), b=linear(8, 6), c=linear(6, 8), d=linear(8, 2),
            attention=nn.MultiheadAttention(8, 2, batch_first=True).double(),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_equals_itself_with_readers_at_zero(name):
    units, model = GRAPHS[name]
    groups = _make_ranked_copy(model, (X,))[2]
    assert sum(group.size for group in groups) == units
    small = prune_channels(model, 0.5, X)
    with torch.no_grad():
        exact = zero_readers(model, groups, 0.5)(X)
        torch.testing.assert_close(small(X), exact, rtol=1e-10, atol=1e-10)
    assert size_of(small).bytes < size_of(model).bytes
    smaller = prune_channels(small, 0.5, X)  # its sizes are true
    assert size_of(smaller).bytes < size_of(small).bytes


def run_scaled_by_mean(model, x):
    x = model.a(x)
    return model.b(x * x.mean())  # over all dimensions


def split_and_read(model, x):
    b = model.b(x)
    left, right = (model.a(x) + b).split(4, -1)
    return model.d(left * right) + model.c(b)


@pytest.mark.parametrize(
    ("model", "node"),
    [
        (
            nn.Sequential(conv(3, 8, 3), nn.GroupNorm(1, 8).double(), conv(8, 2, 3)),
            "group_norm",
        ),
        (
            By(
                lambda s, x: s.b(s.a(x[:2, 0, :2])[0]),
                a=nn.LSTM(6, 8).double(),
                b=linear(8, 2),
            ),
            "got none in",
        ),
        (
            By(
                lambda s, x: s.c(s.b(s.a(x[:2, 0, :2]))[0]),
                a=linear(6, 8),
                b=nn.LSTM(8, 5).double(),
                c=linear(5, 2),
            ),
            "a: .*(lstm|rnn)",
        ),
        (nn.Sequential(conv(3, 8, 3), nn.Softmax(1), conv(8, 2, 3)), "softmax"),
        (By(run_scaled_by_mean, a=conv(3, 8, 3), b=conv(8, 2, 3)), "mean"),
        (
            By(
                lambda s, x: s.b(s.pool(s.a(x[:, 0]).transpose(1, 2)).transpose(1, 2)),
                a=linear(6, 8),
                pool=nn.MaxPool2d((2, 1)),
                b=linear(4, 2),
            ),
            "max_pool2d",
        ),
        (
            By(
                split_and_read,
                a=linear(6, 8),
                b=linear(6, 8),
                c=linear(8, 2),
                d=linear(4, 2),
            ),
            "a: split",
        ),
        (nn.Sequential(conv(3, 3, 3)), "0: the model returns them"),
    ],
)
def test_units_that_stay_are_named_with_the_node_that_blocks_them(model, node):
    with pytest.raises(ValueError, match=node):
        prune_channels(model, 0.5, X)


def test_outputs_whose_norm_overflows_in_float16_are_compared():
    outputs = torch.full((100_000,), 300.0).half()
    assert _is_close(outputs, outputs, is_double=False)
    assert not _is_close(0 * outputs, outputs, is_double=False)


def test_normalization_without_weights_says_its_size():
    model = nn.Sequential(conv(3, 8, 3), nn.BatchNorm2d(8, affine=False).double(), conv(8, 2, 3))
    small = prune_channels(model.eval(), 0.5, X)
    assert (small[0].out_channels, small[1].num_features, small[2].in_channels) == (4, 4, 4)


def test_an_attribute_that_is_not_the_size_of_a_replaced_tensor_stays():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].num_features = 4
    assert prune_channels(model, 0.25, torch.randn(3, 4))[0].num_features == 4


def test_a_weight_that_is_read_twice_stays():
    twice = By(
        lambda s, x: s.c(torch.relu(s.b(torch.relu(s.b(s.a(x)))))),
        a=conv(3, 4, 3),
        b=conv(4, 4, 3),
        c=conv(4, 2, 3),
    )
    tied = By(
        lambda s, x: s.c(s.b(s.a(x))),
        a=conv(3, 3, 3),
        b=conv(3, 3, 3),
        c=conv(3, 3, 3),
    )
    tied.b.weight = tied.a.weight
    for model in (twice, tied):
        with pytest.raises(ValueError, match="its weight or bias is used several times"):
            prune_channels(model, 0.5, X)


@dataclasses.dataclass
class Outputs:
    logits: torch.Tensor
    hidden: torch.Tensor


class Results:
    def __init__(self, logits):
        self.logits = logits


def test_outputs_in_a_dataclass_are_compared_and_other_objects_refused():
    class Model(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.first, self.second, self.head = (nn.Linear(8, 8) for _ in range(3))
            self.kind = kind

        def forward(self, x):
            hidden = self.first(x).relu()
            logits = self.head(self.second(hidden).relu())
            return Outputs(logits, hidden) if self.kind is Outputs else Results(logits)

    x = torch.randn(3, 8)
    small = prune_channels(Model(Outputs), 0.5, x)
    assert small.second.weight.shape == (4, 8)
    assert small(x).hidden.shape == (3, 8)  # the model returns these units, so they stay
    with pytest.raises(ValueError, match="contain no tensors in tuples, mappings or dataclasses"):
        prune_channels(Model(Results), 0.5, x)


def test_what_is_protected_keeps_its_sizes():
    model = build_network()
    small = prune_channels(model, 0.5, X, protect=["blocks.0", "hidden"])
    assert small.blocks[0].a.weight.shape == model.blocks[0].a.weight.shape
    assert small.hidden.weight.shape == model.hidden.weight.shape
    assert small.blocks[1].a.out_channels == 5
    with pytest.raises(ValueError, match="did you mean 'hidden'"):
        prune_channels(model, 0.5, X, protect=["hiden"])


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
    (group,) = _make_ranked_copy(model, (tokens,))[2]
    assert (group.writers, list_readers(group)) == (["up"], [("down", 1)])
    small = prune_channels(model, 0.75, tokens)
    assert small.up.out_features == small.down.in_features == 6
    masked = copy.deepcopy(model)
    arrives = record_layer_inputs(model, tokens)["down"].flatten(0, 1).norm(dim=0)
    masked.down.weight.data[:, (model.down.weight.norm(dim=0) * arrives).argsort()[:18]] = 0
    torch.testing.assert_close(small(tokens), masked(tokens), rtol=1e-12, atol=1e-12)


def zero_units(layers, *, units=slice(None, None, 2)):
    """Make every second unit of `layers[0]`, or of the norm after it, always zero."""
    with torch.no_grad():
        for layer in layers:
            layer.weight[units] = 0
            layer.bias[units] = 0
    return units


def build_classifier():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Gated(nn.Module):
    """The units of a gated layer are dead if their gates or their values are."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 8)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 16)
        self.k = nn.Linear(8, 16)
        self.v = nn.Linear(8, 16)
        self.out = nn.Linear(16, 3, bias=False)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def build_pooled():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


# A model, the layers whose units are made constant, an input, and the layer whose units go.
DEAD = {
    "filters": (build_pooled, lambda m: [m[0]], (3, 6, 6), "0"),
    "normalization": (build_pooled, lambda m: [m[1]], (3, 6, 6), "0"),
    "last filters": (build_pooled, lambda m: [m[3]], (3, 6, 6), "3"),
    "hidden": (build_classifier, lambda m: [m[0]], (6,), "0"),
    "last hidden": (build_classifier, lambda m: [m[2]], (6,), "2"),
    "gates": (Gated, lambda m: [m.gate, m.up], (6,), "up"),
}


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *((name, 1) for name in ("filters", "normalization", "gates")),
        ("hidden", 4),
        *(
            pytest.param(name, 1, marks=pytest.mark.exhaustive)
            for name in ("last filters", "hidden", "last hidden")
        ),
    ],
)
def test_units_that_are_always_zero_go_first_and_change_nothing(name, batch):
    torch.manual_seed(0)
    make, layers, size, writer = DEAD[name]
    model = make().eval()
    units = zero_units(layers(model))
    with torch.no_grad():  # what reads the dead units is large, what reads the others small
        for layer in model.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d) and layer not in layers(model):
                layer.weight[:, units] *= 10
    small = prune_channels(model, {writer: 0.5}, torch.randn(batch, *size))
    inputs = torch.randn(16, *size)
    assert len(small.get_submodule(writer).weight) == len(model.get_submodule(writer).weight) // 2
    with torch.no_grad():
        torch.testing.assert_close(small(inputs), model(inputs), rtol=1e-4, atol=1e-5)


def test_heads_whose_values_are_zero_go_first():
    torch.manual_seed(0)
    model = Heads()
    with torch.no_grad():
        for head in (0, 2):
            model.v.weight[4 * head : 4 * head + 4] = 0
            model.v.bias[4 * head : 4 * head + 4] = 0
            model.out.weight[:, 4 * head : 4 * head + 4] *= 10
    small, inputs = prune_channels(model, 0.5, torch.randn(1, 3, 8)), torch.randn(4, 9, 8)
    assert small.v.out_features == 8
    with torch.no_grad():
        torch.testing.assert_close(small(inputs), model(inputs), rtol=1e-4, atol=1e-5)


def test_units_that_the_example_does_not_excite_are_not_dead():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.zero_()
        zero_units([model[0]], units=slice(3))
    small = prune_channels(model, 4 / 8, -torch.ones(1, 4))  # no unit with a weight is positive
    exact = copy.deepcopy(model)
    exact[2].weight.data[:, 3:][:, model[2].weight[:, 3:].norm(dim=0).argmin()] = 0
    inputs = torch.randn(50, 4)
    with torch.no_grad():
        torch.testing.assert_close(small(inputs), exact(inputs))


@pytest.mark.parametrize("largest", [4e5, 0.9e5])  # with and without an example above the bias
def test_units_that_only_large_inputs_excite_are_not_dead(largest):
    model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [1.0], [0.001], [0.001]]))
        model[0].bias.copy_(torch.tensor([-1e5, -2e5, 0.0, 0.0]))
    (group,) = _make_ranked_copy(model, (torch.rand(32, 1) * largest,))[2]
    assert (group.scores >= 0).all()
    if largest > 2e5:
        assert set(group.order[:2].tolist()) == {0, 1}


def test_units_that_produce_little_go_before_units_that_are_read_little():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.diag(torch.tensor([1e-3, 1.0, 1e-2, 1.0])))
        model[0].bias.zero_()
        model[1].weight.copy_(torch.tensor([[5.0, 1.0, 5.0, 1.0]] * 2))
    small = prune_channels(model, 0.5, torch.eye(4))
    assert torch.equal(small[0].weight, model[0].weight[1::2])


def test_bad_requests_say_what_to_ask_for():
    with pytest.raises(ValueError, match="sparsity < 1, got 1"):
        prune_channels(build_classifier(), 1.0, torch.randn(2, 6))
    with pytest.raises(ValueError, match="got '4', whose channels cannot be removed"):
        prune_channels(build_classifier(), {"4": 0.5}, torch.randn(2, 6))
    unbatched = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)), 0.5, torch.randn(3, 9, 9)
    with pytest.raises(ValueError, match="got none in Sequential"):
        prune_channels(*unbatched)
    weight_norm = nn.utils.parametrizations.weight_norm
    computed = nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.Linear(8, 3), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"0: its weight or bias is not a param.* weight_norm"):
        prune_channels(computed[:2], 0.5, torch.randn(2, 6))
    for name, reason in (
        ("0", "its weight or bias is not a parameter"),
        ("2", "the model returns them"),
    ):
        with pytest.raises(ValueError, match=rf"got '{name}', whose channels .*: {reason}"):
            prune_channels(computed, {name: 0.5}, torch.randn(2, 6))
    single = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(1, 3))
    with pytest.raises(ValueError, match=r"got .1., whose channels .*: only one unit is left"):
        prune_channels(single, {"1": 0.5}, torch.randn(2, 6))
    pair = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="they are shared with a layer in protect"):
        prune_channels(pair, {"0": 0.5}, torch.randn(2, 6), protect=["1"])
    with pytest.raises(ValueError, match=r"got none in Sequential \(0: the model returns them"):
        prune_channels(nn.Sequential(nn.Linear(4, 4)), 0.5, torch.randn(2, 4))
    fixed = By(lambda s, x: s.b(s.a(x).view(-1, 8)), a=nn.Linear(6, 8), b=nn.Linear(8, 3))
    with pytest.raises(ValueError, match="does not compute the same after pruning"):
        prune_channels(fixed, 0.5, torch.randn(2, 6))
    with pytest.raises(ValueError, match="cannot be exported"):
        prune_channels(
            By(lambda s, x: s.a(x) if x.sum() > 0 else x, a=nn.Linear(4, 4)), 0.5, torch.randn(2, 4)
        )
    with pytest.raises(ValueError, match="pass the values of a mapping in the order of `forward`"):
        prune_channels(pair, 0.5, {"input": torch.randn(2, 6)})


def test_the_example_may_be_a_vector():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    assert prune_channels(model, 0.5, torch.randn(8))[0].out_features == 8


def test_models_are_pruned_on_their_device_if_another_one_is_the_default():
    model, inputs = build_classifier(), torch.randn(4, 6)
    options = {"criterion": "taylor", "loss": lambda m: m(inputs).square().sum()}
    with torch.device("meta"):
        pruned = prune_channels(model, 0.5, inputs, **options)
        ordered = sort_channels(model, inputs)
    assert torch.equal(pruned(inputs), prune_channels(model, 0.5, inputs, **options)(inputs))
    torch.testing.assert_close(ordered(inputs), model(inputs))
    assert torch.equal(ordered[0].weight, sort_channels(model, inputs)[0].weight)
    assert not torch.equal(ordered[0].weight, model[0].weight)


@pytest.mark.exhaustive
def test_segmentation_models_and_backbones_of_detection_models_are_pruned():
    vision = pytest.importorskip("torchvision", reason="torchvision is not installed").models
    torch.manual_seed(0)
    options = {"weights": None, "weights_backbone": None, "num_classes": 5}
    model = vision.segmentation.lraspp_mobilenet_v3_large(**options).eval()
    images = torch.randn(2, 3, 64, 64)
    small = prune_channels(model, 0.5, images)
    assert size_of(small).bytes < size_of(model).bytes / 3
    assert small(images)["out"].shape == (2, 5, 64, 64)
    model = vision.detection.fasterrcnn_mobilenet_v3_large_320_fpn(**options).eval()
    with pytest.raises(ValueError, match="FasterRCNN cannot be exported"):
        prune_channels(model, 0.5, [torch.rand(3, 96, 96)])
    before = size_of(model.backbone).bytes
    model.backbone = prune_channels(model.backbone, 0.5, torch.rand(1, 3, 96, 96))
    assert size_of(model.backbone).bytes < before / 2
    assert model([torch.rand(3, 96, 96)])[0].keys() == {"boxes", "labels", "scores"}
