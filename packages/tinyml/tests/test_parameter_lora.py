"""Adapters of single parameters, such as fused experts, and their files in peft's format."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from tinyml import (
    add_lora,
    load_lora,
    merge,
    merge_and_unload,
    prune_channels,
    save_awq,
    save_gguf,
    save_lora,
)
from tinyml.adapters.parameter_lora import find_parameter_adapters
from torch import nn

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
NAMES = ["experts.up", "experts.down", "table.rows"]


class Experts(nn.Module):
    """Three experts with one matrix per expert; each token uses all of them."""

    def __init__(self, is_transposed):
        super().__init__()
        self.is_transposed = is_transposed
        shape = (3, 8, 12) if is_transposed else (3, 12, 8)
        self.up = nn.Parameter(torch.randn(shape))
        self.down = nn.Parameter(torch.randn(3, 12, 8) if is_transposed else torch.randn(3, 8, 12))

    def forward(self, x):
        outputs = []
        for expert in range(3):  # each expert reads the parameters again
            up, down = self.up[expert], self.down[expert]
            if not self.is_transposed:
                up, down = up.t(), down.t()
            outputs.append(torch.relu(x @ up) @ down)
        return sum(outputs)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return x @ self.rows.t()


class Block(nn.Module):
    def __init__(self, is_transposed):
        super().__init__()
        self.experts = Experts(is_transposed)
        self.table = Table()
        self.gate = nn.Linear(8, 8)

    def forward(self, x):
        return self.table(self.experts(self.gate(x)))


class Model(nn.Module):
    def __init__(self, is_transposed=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(is_transposed)])

    def forward(self, x):
        return self.blocks[0](x)


def build_adapted(is_transposed=False, targets=None):
    model = add_lora(Model(is_transposed), 2, alpha=3.0, parameters=NAMES, targets=targets)
    generator = torch.Generator().manual_seed(1)
    for tensor in model.parameters():
        if tensor.requires_grad:
            tensor.data = torch.randn(tensor.shape, generator=generator)
    return model


@pytest.mark.parametrize("is_transposed", [False, True])
def test_update_is_one_product_per_expert(is_transposed):
    model, plain = build_adapted(is_transposed), Model(is_transposed)
    assert torch.equal(add_lora(Model(is_transposed), 2, parameters=NAMES)(X), plain(X))
    for name, adapter in find_parameter_adapters(model).items():
        weight = plain.get_parameter(name).detach()
        stack = weight if weight.dim() == 3 else weight[None]
        updated = stack.clone()
        for expert in range(len(stack)):
            a = adapter.lora_A[2 * expert : 2 * expert + 2]
            b = adapter.lora_B[:, [expert, len(stack) + expert]]
            update = 1.5 * b @ a
            updated[expert] += (
                update.t() if is_transposed and weight.dim() == 3 else update
            ).detach()
        plain.get_parameter(name).data = updated.view_as(weight)
    torch.testing.assert_close(model(X), plain(X), rtol=1e-5, atol=1e-4)


def test_only_the_factors_are_trained_and_each_call_uses_their_values():
    model = build_adapted()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 6
    before = model(X)
    before.square().sum().backward()
    for name in trained:
        assert model.get_parameter(name).grad.any(), name
    torch.optim.SGD([model.get_parameter(name) for name in trained], 1e-4).step()
    assert not torch.equal(model(X), before)


def test_copies_have_separate_adapters():
    model = build_adapted()
    other = copy.deepcopy(model)
    assert torch.equal(other(X), model(X))
    other.load_state_dict(add_lora(Model(), 2, parameters=NAMES).state_dict())
    assert torch.equal(other(X), Model()(X))
    assert not torch.equal(model(X), Model()(X))


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupt_leaves_no_updated_parameter_behind():
    model = build_adapted()
    handle = model.blocks[0].experts.register_forward_hook(interrupt, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    with torch.no_grad():
        for adapter in find_parameter_adapters(model).values():
            adapter.lora_B.mul_(2)
    expected = copy.deepcopy(model)(X)
    torch.testing.assert_close(merge_and_unload(model)(X), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_an_unloaded_model_has_plain_parameters_with_the_updates(is_transposed):
    model = build_adapted(is_transposed, targets=["gate"])
    expected, other = model(X), copy.deepcopy(model)
    with pytest.raises(ValueError, match="merge_and_unload"):
        merge(model)
    plain = merge_and_unload(model)
    torch.testing.assert_close(plain(X), expected, rtol=1e-5, atol=1e-4)
    assert plain.state_dict().keys() == Model().state_dict().keys()
    assert type(plain.blocks[0].experts) is Experts
    assert not plain.blocks[0].experts._forward_pre_hooks
    assert torch.equal(other(X), expected)  # a copy keeps its adapters


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_folder_restores_the_adapters(is_transposed, tmp_path):
    model = build_adapted(is_transposed, targets=["gate"])
    save_lora(model, tmp_path)
    back = load_lora(Model(is_transposed), tmp_path)
    assert torch.equal(back(X), model(X))
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"target_parameters": ["experts.up"]}))
    with pytest.raises(ValueError, match="another model"):
        load_lora(Model(is_transposed), tmp_path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"parameters": ["experts.upp"]}, "did you mean 'blocks.0.experts.up'"),
        (
            {"parameters": ["table.rows"], "rank": 0},
            "blocks.0.table.rows: expected rank >= 1, got 0",
        ),
        ({"parameters": ["gate.bias"]}, "2 or 3 dimensions, got 1"),
        ({"parameters": ["table.rows"], "rank": 2, "alpha": float("nan")}, "finite alpha, got nan"),
    ],
)
def test_parameters_that_cannot_be_adapted_are_refused(options, match):
    model = Model()
    with pytest.raises(ValueError, match=match):
        add_lora(model, **options)
    assert str(model) == str(Model())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_second_adapter_is_refused(tmp_path):
    model = build_adapted()
    save_lora(model, tmp_path)
    for options in ({"parameters": ["experts.up"]}, {"targets": ["gate"]}):
        with pytest.raises(
            ValueError, match=r"without adapters, got an adapter of .*experts.down;"
        ):
            add_lora(model, 2, **options)
    with pytest.raises(ValueError, match=r"without adapters, got an adapter of .*experts.down;"):
        load_lora(model, tmp_path)
    assert all(adapter.lora_A.requires_grad for adapter in find_parameter_adapters(model).values())
    layers = add_lora(Model(), 2, targets=["gate"])
    with pytest.raises(ValueError, match=r"without adapters, got an adapter of blocks.0.gate;"):
        add_lora(layers, 2, parameters=["experts.up"])
    assert layers.blocks[0].gate.lora_A.requires_grad
    plain = Model()
    with pytest.raises(ValueError, match="expected one adapter per weight"):
        add_lora(plain, 2, parameters=["gate.weight"], targets=["gate"])
    assert str(plain) == str(Model())


def test_models_with_adapters_of_parameters_are_not_exported_or_pruned(tmp_path):
    model = build_adapted()
    with pytest.raises(ValueError, match="without adapters"):
        save_gguf(model, tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(ValueError, match="without adapters"):
        prune_channels(model, 0.5, X)
    model.config = SimpleNamespace(save_pretrained=None)
    with pytest.raises(ValueError, match=r"blocks.0.experts.down with an adapter"):
        save_awq(model, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_transposed", [False, True])
def test_peft_reads_and_writes_adapters_of_parameters(is_transposed, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    ours = build_adapted(is_transposed, targets=["gate"])
    save_lora(ours, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(Model(is_transposed), tmp_path / "ours").eval()
    torch.testing.assert_close(theirs(X), ours(X), rtol=1e-5, atol=1e-4)
    settings = {"target_modules": ["gate"], "target_parameters": NAMES, "use_rslora": True}
    settings |= {"init_lora_weights": False, "rank_pattern": {"experts.down": 3}}
    config = peft.LoraConfig(r=2, lora_alpha=3, **settings)
    theirs = peft.get_peft_model(Model(is_transposed), config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_lora(Model(is_transposed), tmp_path / "theirs")
    torch.testing.assert_close(back(X), theirs(X), rtol=1e-5, atol=1e-4)
    assert find_parameter_adapters(back)["blocks.0.experts.down"].rank == 3


@pytest.mark.parametrize("key", ["lora_A", "lora_B"])
@pytest.mark.parametrize("bad", [float("nan"), torch.finfo().max])
def test_updates_that_are_not_finite_are_refused_and_nothing_changes(key, bad):
    model = build_adapted()
    adapters = find_parameter_adapters(model)
    name = list(adapters)[-1]
    with torch.no_grad():
        getattr(adapters[name], key).fill_(bad)
    layers = list(model.modules())
    with pytest.raises(ValueError, match=rf"finite values in {name}"):
        merge_and_unload(model)
    assert list(model.modules()) == layers
