"""Models as transformers builds them: Conv1D, tied heads, grouped queries; and GPTQ's cost."""

import copy

import pytest
import torch
from tinyml import (
    add_lora,
    convert,
    gptq,
    kmeans_quantize,
    load,
    merge,
    prepare_qat,
    prune,
    prune_channels,
    quantize,
    save,
    size_of,
    unmerge,
)
from tinyml.pruning.channels import _make_ranked_copy
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TOKENS = torch.arange(40).view(2, 20)


def build_gpt2(n_layer=2):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97,
        n_positions=32,
        n_embd=32,
        n_layer=n_layer,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def build_llama(num_attention_heads=4, num_key_value_heads=2):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
    )
    return transformers.LlamaForCausalLM(config).eval()


def build_qwen():
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.Qwen2ForCausalLM(config).eval()


def build_phi():
    """Return a model that rotates as many dimensions of a head as it has heads."""
    torch.manual_seed(0)
    config = transformers.PhiConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        partial_rotary_factor=0.5,
    )
    return transformers.PhiForCausalLM(config).eval()


MODELS = {"gpt2": build_gpt2, "llama": build_llama, "qwen": build_qwen, "phi": build_phi}
DECODERS = [
    "gpt2",
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama", "qwen")),
]
# The least factor by which each method has to reduce the bytes of a model of this size.
SMALLER = {
    "palettes": (lambda m: kmeans_quantize(m, 4), 6.5),
    "4 bits": (lambda m: quantize(m, 4), 5.0),
    "int8": (lambda m: quantize(m, activations="dynamic"), 2.2),
    "gptq": (lambda m: gptq(m, [TOKENS], 4), 2.2),
    "trained": (lambda m: convert(prepare_qat(m, 4)), 5.0),
    "half": (lambda m: prune(m, 0.5).model, 1.5),
}


@pytest.mark.parametrize("model", DECODERS)
@pytest.mark.parametrize("method", SMALLER)
def test_every_method_compresses_every_weight(model, method):
    dense = MODELS[model]()
    compress, least = SMALLER[method]
    small = compress(dense)
    assert size_of(dense).bytes > least * size_of(small).sparse_bytes
    with torch.no_grad():
        exact, ours = dense(TOKENS).logits, small(TOKENS).logits
    assert (ours - exact).norm() < 0.6 * exact.norm()


@pytest.mark.parametrize(
    "method", ["palettes", pytest.param("4 bits", marks=pytest.mark.exhaustive), "trained"]
)
@pytest.mark.parametrize("model", [DECODERS[0], DECODERS[2]])
def test_a_tied_head_stays_tied(model, method, tmp_path):
    dense = MODELS[model]()
    small = SMALLER[method][0](dense)
    embedding, head = small.get_input_embeddings(), small.get_output_embeddings()
    assert torch.equal(embedding.weight, head.weight)
    untied = copy.deepcopy(dense)
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
    assert size_of(small).bytes < size_of(SMALLER[method][0](untied)).bytes
    save(small, tmp_path / "small.safetensors")
    back = load(MODELS[model](), tmp_path / "small.safetensors")
    with torch.no_grad():
        assert torch.equal(back(TOKENS).logits, small(TOKENS).logits)
    assert size_of(back).bytes == size_of(small).bytes


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_belong_to_outputs_however_a_weight_is_stored(symmetric):
    torch.manual_seed(0)
    linear = nn.Linear(16, 24)
    conv = transformers.pytorch_utils.Conv1D(24, 16)
    conv.weight.data, conv.bias.data = linear.weight.detach().t().clone(), linear.bias.detach()
    inputs = torch.randn(5, 16)

    def both(compress):
        linear_copy, other = (compress(nn.Sequential(layer)) for layer in (linear, conv))
        torch.testing.assert_close(linear_copy(inputs), other(inputs))
        assert torch.equal(linear_copy[0].weight, other[0].weight.t()) or "Int8" in str(linear_copy)

    both(lambda m: quantize(m, 3, symmetric=symmetric))
    both(lambda m: quantize(m, 3, symmetric=symmetric, group_size=8))
    both(lambda m: quantize(m, activations="dynamic"))
    both(lambda m: prune(m, 0.5).model)
    both(lambda m: gptq(m, [torch.randn(64, 16, generator=torch.Generator().manual_seed(1))], 3))
    both(lambda m: convert(prepare_qat(m, 3, learn_scale=True)))


def test_adapters_on_conv1d_are_merged_and_unmerged():
    model = add_lora(build_gpt2(), 4, alpha=8, targets=["c_attn", "c_proj"])
    before = model.transformer.h[0].attn.c_attn.base.weight.clone()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.05)
    apart = model(TOKENS).logits
    torch.testing.assert_close(merge(model)(TOKENS).logits, apart, rtol=1e-4, atol=1e-5)
    unmerge(model)
    assert torch.equal(model.transformer.h[0].attn.c_attn.base.weight, before)


def test_gptq_sees_what_the_rounded_layers_before_make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    batches = [torch.randn(20, 12) for _ in range(3)]
    ours = gptq(model, batches, 2)
    # By the definition: the first layer on the inputs, the second on what the first one gives now.
    first = gptq(nn.Sequential(model[0]), [torch.cat(batches)], 2)
    with torch.no_grad():
        between = torch.tanh(first(torch.cat(batches)))
    second = gptq(nn.Sequential(model[2]), [between], 2)
    assert torch.equal(ours[0].weight, first[0].weight)
    assert torch.equal(ours[2].weight, second[0].weight)


def build_decoder():
    suite = pytest.importorskip("llmsys_suite.model", reason="the suite is not installed")
    torch.manual_seed(0)
    return suite.Decoder(
        suite.ModelConfig(d_model=32, d_ff=64, num_layers=2, num_heads=4, context=32, vocabulary=97)
    ).eval()


# Each layer's units and the parts of its attention: with grouped queries a unit is a pair of heads.
UNITS = {
    "gpt2": (4, "transformer.h.{}.attn", ["c_attn"]),
    "llama": (2, "model.layers.{}.self_attn", ["q_proj", "k_proj", "v_proj"]),
    "qwen": (2, "model.layers.{}.self_attn", ["q_proj", "k_proj", "v_proj"]),
    "phi": (4, "model.layers.{}.self_attn", ["q_proj", "k_proj", "v_proj"]),
    "decoder": (4, "blocks.{}.attention", ["q", "k", "v"]),
}


@pytest.mark.parametrize(
    "model",
    ["decoder", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS)],
)
def test_heads_and_hidden_units_of_a_decoder_can_be_removed(model):
    dense = (MODELS | {"decoder": build_decoder})[model]()
    heads, position, parts = UNITS[model]
    groups = _make_ranked_copy(dense, (TOKENS,))[2]
    attentions = [
        g
        for g in groups
        if ".attn" in g.writers[0] or "attention" in g.writers[0] or "self_attn" in g.writers[0]
    ]
    assert len(groups) == 4
    assert [g.writers for g in attentions] == [
        [f"{position.format(layer)}.{part}" for part in parts] for layer in range(2)
    ]
    assert {g.size for g in attentions} == {heads}
    small, zeroed = prune_channels(dense, 0.5, TOKENS), copy.deepcopy(dense)
    with torch.no_grad():
        for group in groups:
            for part in [part for part in group.slices if part.role == "reader"]:
                for unit in group.order[group.size // 2 :].tolist():
                    weight = zeroed.get_parameter(part.tensor)
                    weight.narrow(part.axis, unit * part.width, part.width).zero_()
        ours, exact = small(TOKENS + 1), zeroed(TOKENS + 1)
        if model != "decoder":
            ours, exact = ours.logits, exact.logits
            small.generate(TOKENS, max_new_tokens=2, do_sample=False)  # with a cache
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)
    assert size_of(small).bytes < 0.8 * size_of(dense).bytes


def build_opt():
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=97,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    )
    return transformers.OPTForCausalLM(config).eval()


# The configuration of a pruned model: the sizes that change if half of the units are removed.
SIZES = {
    "llama": ((), {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}),
    "qwen": ((), {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}),
    "gpt2": (["attn"], {"n_inner": 64}),
    "opt": (["self_attn"], {"ffn_dim": 24}),
}


@pytest.mark.parametrize(
    "model",
    ["llama", *(pytest.param(m, marks=pytest.mark.exhaustive) for m in ("qwen", "gpt2", "opt"))],
)
def test_a_pruned_model_is_loaded_by_from_pretrained(model, tmp_path):
    dense = (MODELS | {"opt": build_opt})[model]()
    protect, sizes = SIZES[model]
    before = copy.deepcopy(dense.config)
    small = prune_channels(dense, 0.5, TOKENS, protect=protect)
    assert {key: getattr(small.config, key) for key in sizes} == sizes
    assert dense.config.to_dict() == before.to_dict()
    changed = {k for k, v in small.config.to_dict().items() if before.to_dict().get(k) != v}
    assert changed <= {*sizes, "head_dim"}
    small.save_pretrained(tmp_path)
    back = type(dense).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(back(TOKENS + 1).logits, small(TOKENS + 1).logits)
        tokens = [m.generate(TOKENS, max_new_tokens=4, do_sample=False) for m in (back, small)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    ("model", "sparsity"),
    [
        ("gpt2", 0.5),  # the width of all heads is the width of the model
        # 6 heads do not divide the hidden size
        pytest.param("llama8", 0.25, marks=pytest.mark.exhaustive),
    ],
)
def test_a_pruned_model_that_no_configuration_describes_is_not_saved(model, sparsity, tmp_path):
    dense = build_gpt2(n_layer=1) if model == "gpt2" else build_llama(8, 4)
    small = copy.deepcopy(prune_channels(dense, sparsity, TOKENS))
    with pytest.raises(ValueError, match="prune all layers alike"):
        small.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert small.state_dict()


def test_the_heads_of_one_layer_can_be_named(tmp_path):
    dense = build_llama()
    small = prune_channels(dense, {"model.layers.1.self_attn.k_proj": 0.5}, TOKENS)
    assert small.model.layers[1].self_attn.q_proj.weight.shape == (16, 32)
    assert small.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)
    assert small.model.layers[1].mlp.up_proj.weight.shape == (64, 32)
    with pytest.raises(ValueError, match="prune all layers alike"):
        small.save_pretrained(tmp_path)


@pytest.mark.parametrize("method", [method for method in SMALLER if method != "int8"])
def test_what_is_protected_stays_as_it_is(method):
    protected = {
        "palettes": lambda m, p: kmeans_quantize(m, 4, protect=p),
        "4 bits": lambda m, p: quantize(m, 4, protect=p),
        "gptq": lambda m, p: gptq(m, [TOKENS], 4, protect=p),
        "trained": lambda m, p: convert(prepare_qat(m, 4, protect=p)),
        "half": lambda m, p: prune(m, 0.5, protect=p).model,
    }[method]
    dense = build_gpt2()
    small = protected(dense, ["lm_head", "h.0.attn"])
    for name, parameter in dense.named_parameters():
        is_protected = "wte" in name or "h.0.attn" in name or "ln" in name or "bias" in name
        if "wpe" not in name:
            layer, _, key = name.rpartition(".")
            now = getattr(small.get_submodule(layer), key)
            assert torch.equal(now, parameter) == is_protected, name
    with pytest.raises(ValueError, match="did you mean 'lm_head'"):
        protected(dense, ["lm_haed"])


def test_layers_that_are_called_by_keyword_are_seen():
    class Named(nn.Sequential):
        def forward(self, x):
            return self[1](input=torch.relu(self[0](input=x)))

    torch.manual_seed(0)
    named, batch = Named(nn.Linear(32, 32), nn.Linear(32, 16)), torch.randn(40, 32)
    assert torch.equal(
        gptq(named, [batch])(batch),
        gptq(nn.Sequential(named[0], nn.ReLU(), named[1]), [batch])(batch),
    )


def test_an_error_in_the_model_ends_every_batch():
    class Failing(nn.Sequential):
        def forward(self, x):
            x = super().forward(x)
            if len(x) == 3:
                raise KeyError("this batch")
            return x

    model = Failing(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(KeyError, match="this batch"):
        gptq(model, [torch.randn(n, 4) for n in (2, 3, 4)], 4)


def test_what_is_compressed_can_be_compressed_again():
    model = build_gpt2(n_layer=1)
    once = quantize(model, 8)
    before = once.transformer.h[0].mlp.c_fc.weight.clone()
    recompressed = kmeans_quantize(once, {"transformer.h.0.mlp.c_fc": 2})
    assert len(recompressed.transformer.h[0].mlp.c_fc.weight.unique()) == 4
    assert torch.equal(
        recompressed.transformer.h[0].mlp.c_proj.weight, once.transformer.h[0].mlp.c_proj.weight
    )
    assert torch.equal(once.transformer.h[0].mlp.c_fc.weight, before)
    starts = [once, kmeans_quantize(model, 4), prune(model, 0.5).model]
    for (compress, _), start in zip(SMALLER.values(), 2 * starts, strict=True):
        small = compress(start)
        with torch.no_grad():
            assert torch.isfinite(small(TOKENS).logits).all()
