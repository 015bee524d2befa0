"""Adapters go to peft and come from it without a difference."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tinyml import LoRA, add_lora, load_lora, merge, save_lora
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.q_proj, self.v_proj = nn.Linear(16, 24), nn.Linear(16, 24, bias=False)
        self.head = nn.Sequential(nn.Linear(24, 20))

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(torch.tanh(self.q_proj(x)) * self.v_proj(x))


TOKENS = torch.arange(20)


def build_adapted(rank=4, alpha=10.0, targets=("q_proj", "head.0")):
    model = add_lora(Model(), rank, alpha=alpha, dropout=0.5, targets=targets)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.2)
    return model.eval()


@pytest.mark.parametrize("rank", [4, 18])  # peft also writes ranks above the sizes of a layer
def test_loaded_adapters_equal_the_saved_ones(rank, tmp_path):
    saved = build_adapted(rank)
    save_lora(saved, tmp_path)
    back = load_lora(Model().eval(), tmp_path)  # the adapters have the mode of their layers
    assert torch.equal(back(TOKENS), saved(TOKENS))
    assert {p.name for p in tmp_path.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    assert not any(p.requires_grad for n, p in back.named_parameters() if "lora_" not in n)
    expected = saved(TOKENS)
    save_lora(merge(saved), tmp_path)  # merged or not, the factors are the same
    assert torch.equal(load_lora(Model(), tmp_path).eval()(TOKENS), expected)


def test_ranks_and_alphas_of_their_own(tmp_path):
    saved = build_adapted()
    saved.v_proj = add_lora(nn.Sequential(saved.v_proj), 2, alpha=6)[0]
    saved.v_proj.lora_B.data.normal_()
    save_lora(saved, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"v_proj": 2}
    assert config["alpha_pattern"] == {"v_proj": 6.0}
    assert torch.equal(load_lora(Model(), tmp_path).eval()(TOKENS), saved(TOKENS))


def build_nested():
    """Return a model in which names end with other names or are patterns, with different ranks."""
    torch.manual_seed(0)
    sizes = {"block.v": (2, 6.0), "v": (2, 6.0), "a.block.v": (3, 6.0), "blocksv": (4, 10.0)}
    sizes |= {"w(1": (3, 5.0)}
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("v", "blocksv", "w(1")})
    model["block"] = nn.ModuleDict({"v": nn.Linear(8, 8)})
    model["a"] = nn.ModuleDict({"block": nn.ModuleDict({"v": nn.Linear(8, 8)})})
    model["u"] = nn.Linear(8, 8)
    plain = copy.deepcopy(model)
    add_lora(model, 4, alpha=10.0, targets=["u"])
    for name, (rank, alpha) in sizes.items():
        adapter = LoRA(model.get_submodule(name), rank, alpha=alpha)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, adapter)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.2)
    return plain, model


def test_a_name_that_is_the_end_of_another_has_its_own_settings(tmp_path):
    plain, saved = build_nested()
    save_lora(saved, tmp_path)
    back = load_lora(plain, tmp_path)
    for name in ("v", "block.v", "a.block.v", "u", "blocksv", "w(1"):
        ours, theirs = back.get_submodule(name), saved.get_submodule(name)
        assert (ours.rank, ours.scaling) == (theirs.rank, theirs.scaling)
        assert torch.equal(ours.update, theirs.update)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_peft_finds_the_settings_of_every_name(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain, saved = build_nested()
    save_lora(saved, tmp_path)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path).base_model.model
    for name in ("v", "block.v", "a.block.v", "u", "blocksv", "w(1"):
        layer = theirs.get_submodule(name)
        assert layer.scaling["default"] == saved.get_submodule(name).scaling
        assert torch.equal(layer.get_delta_weight("default"), saved.get_submodule(name).update)


def test_two_adapters_of_a_layer_with_two_names_are_refused(tmp_path):
    layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    saved = add_lora(copy.deepcopy(layers), 2)
    save_lora(saved, tmp_path)
    shared = nn.ModuleDict({"a": layers["a"], "b": layers["a"]})
    with pytest.raises(ValueError, match="got adapters of a and b, which are one layer"):
        load_lora(shared, tmp_path)


def change(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "expected use_dora=False .* got True.* merge with peft"),
        ({"init_lora_weights": "pissa_niter_4"}, "change the base .*pissa_niter_4"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"bias": "all"}, "expected bias='none' .* got 'all'"),
        ({"target_parameters": ["experts.down_proj"]}, "parameters, got 'experts.down_proj'"),
        ({"modules_to_save": ["head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 5}, "for rank 5, got"),
    ],
)
def test_adapter_file_with_unsupported_or_wrong_settings_is_refused(settings, message, tmp_path):
    save_lora(build_adapted(), tmp_path)
    change(tmp_path, **settings)
    model = Model()
    with pytest.raises(ValueError, match=message):
        load_lora(model, tmp_path)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_adapters_of_another_model_change_nothing(tmp_path):
    save_lora(build_adapted(), tmp_path)
    for wrong in (nn.Sequential(nn.Linear(16, 24)), Model()):
        if isinstance(wrong, Model):
            wrong.head[0] = nn.Linear(7, 20)  # the last one that is looked at
        before = str(wrong)
        with pytest.raises(ValueError, match="of this model"):
            load_lora(wrong, tmp_path)
        assert str(wrong) == before
        assert all(parameter.requires_grad for parameter in wrong.parameters())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="expected the factors A and B"):
        load_lora(Model(), tmp_path)
    with pytest.raises(ValueError, match="expected a model without adapters"):
        load_lora(build_adapted(), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_peft_reads_and_writes_the_same_function(rslora, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    ours = build_adapted()
    save_lora(ours, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(Model(), tmp_path / "ours").eval()
    assert torch.equal(theirs(TOKENS), ours(TOKENS))
    config = peft.LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=["v_proj", "head.0"],
        use_rslora=rslora,
        rank_pattern={"v_proj": 2},
        alpha_pattern={"head.0": 5},
    )
    theirs = peft.get_peft_model(copy.deepcopy(Model()), config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_lora(Model(), tmp_path / "theirs").eval()
    assert float((back(TOKENS) - theirs(TOKENS)).abs().max()) == 0.0


def test_weights_of_the_base_in_a_file_have_to_be_the_models(tmp_path):
    saved = build_adapted()
    save_lora(saved, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors, weight = load_file(path), Model().q_proj.weight.detach()
    key = "base_model.model.q_proj.base_layer.weight"
    save_file(tensors | {key: weight}, path)
    assert torch.equal(load_lora(Model(), tmp_path).eval()(TOKENS), saved(TOKENS))
    save_file(tensors | {key: weight + 1}, path)
    model = Model()
    with pytest.raises(
        ValueError, match=r"'base_model.model.q_proj.base_layer.weight'.*another value"
    ):
        load_lora(model, tmp_path)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore")
def test_peft_computes_the_same_beside_bases_of_16_bits(dtype, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain = Model().to(dtype).eval()
    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets)
    theirs = peft.get_peft_model(copy.deepcopy(plain), config).eval()
    ours = add_lora(copy.deepcopy(plain), 3, alpha=7, targets=targets)
    types = {name.rpartition("lora_")[2][:1]: p.dtype for name, p in theirs.named_parameters()}
    assert (ours.q_proj.lora_A.dtype, ours.q_proj.lora_B.dtype) == (types["A"], types["B"])
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_lora(copy.deepcopy(plain), tmp_path / "theirs").eval()
    assert ours(TOKENS).dtype == dtype
    assert torch.equal(ours(TOKENS), theirs(TOKENS))
    save_lora(ours, tmp_path / "ours")
    back = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "ours").eval()
    assert torch.equal(back(TOKENS), ours(TOKENS))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["embed_tokens", "q_proj"]])
def test_a_head_that_peft_wrote_with_its_base_is_read_and_an_embedding_refused(targets, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=40, num_attention_heads=2, num_key_value_heads=1, **sizes)
    plain = LlamaForCausalLM(config).eval()
    theirs = peft.get_peft_model(
        copy.deepcopy(plain), peft.LoraConfig(r=2, target_modules=targets)
    ).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2)
    theirs.save_pretrained(tmp_path)
    assert any("base_layer" in key for key in load_file(tmp_path / "adapter_model.safetensors"))
    tokens = torch.arange(40).view(2, 20)
    if "embed_tokens" in targets:
        with pytest.raises(
            ValueError, match=r"got '.*embed_tokens\.lora_embedding_[AB]'; merge with"
        ):
            load_lora(plain, tmp_path)
    else:
        ours = load_lora(copy.deepcopy(plain), tmp_path).eval()
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_adapters_of_embeddings_are_refused_by_name(tmp_path):
    save_lora(build_adapted(), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    factors = {f"base_model.model.embed.lora_embedding_{key}": torch.ones(2, 2) for key in "AB"}
    save_file(load_file(path) | factors, path)
    with pytest.raises(ValueError, match=r"got '.*embed\.lora_embedding_[AB]'; merge with peft"):
        load_lora(Model(), tmp_path)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.convolution = nn.Conv1d(8, 8, 1)

    def forward(self, x):
        return self.convolution(self.attention(x, x, x)[0].mT)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("attention", "attention.base_layer.out_proj"), "attention, a MultiheadAttention"),
        (("convolution",), "convolution, a Conv1d"),
    ],
)
def test_adapters_of_layers_that_are_not_linear_are_refused_by_name(names, kind, tmp_path):
    save_lora(add_lora(Attending(), 2), tmp_path)
    path = tmp_path / "adapter_model.safetensors"  # with the names that peft writes
    factors = [f"base_model.model.{name}.lora_{key}.weight" for name in names for key in "AB"]
    save_file(load_file(path) | {name: torch.ones(2, 2) for name in factors}, path)
    model = Attending()
    with pytest.raises(TypeError, match=f"expected adapters of linear layers .* {kind}; merge"):
        load_lora(model, tmp_path)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize("targets", [["attention"], ["convolution"]])
def test_peft_names_layers_that_are_not_linear_so(targets, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=targets)
    peft.get_peft_model(Attending(), config).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=f"expected adapters of linear layers .* {targets[0]}, a "):
        load_lora(Attending(), tmp_path)


@pytest.mark.exhaustive
def test_peft_ignores_adapters_of_the_output_layer_of_attention(tmp_path):
    # nn.MultiheadAttention reads the weight of out_proj, and peft adds the update in its forward.
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    model, x = Attending().eval(), torch.randn(2, 3, 8)
    adapted = add_lora(copy.deepcopy(model), 2)
    nn.init.normal_(adapted.attention.out_proj.lora_B)
    save_lora(adapted, tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
    assert torch.equal(theirs(x), model(x))
    assert torch.equal(load_lora(copy.deepcopy(model), tmp_path)(x), adapted(x))
    assert not torch.allclose(adapted(x), model(x), atol=0.01)
