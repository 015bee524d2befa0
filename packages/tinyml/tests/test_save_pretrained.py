"""`from_pretrained` restores the files of `save_pretrained`; other models are refused."""

import copy

import pytest
import torch
from tinyml import (
    add_lora,
    convert,
    gptq,
    kmeans_quantize,
    merge,
    merge_and_unload,
    prepare_qat,
    prune,
    quantize,
    unmerge,
)
from tinyml.adapters.lora import LoRA
from torch import nn

TOKENS = torch.arange(16).view(2, 8)


def build_llama(tied=False):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def build_gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=48, n_layer=2, n_head=6, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def build_t5(tied=True):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=97,
        d_model=48,
        d_kv=8,
        d_ff=80,
        num_layers=2,
        num_heads=6,
        tie_word_embeddings=tied,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def adapt_model(model, targets):
    add_lora(model, 4, targets=targets)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model


def compute_logits(model):
    extra = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(TOKENS, **extra).logits


@pytest.mark.parametrize(
    ("make", "targets", "dtype", "merged_before"),
    [
        (build_llama, ["q_proj", "v_proj"], torch.float32, True),
        (build_llama, ["down_proj"], torch.bfloat16, False),
        pytest.param(
            lambda: build_llama(tied=True),
            ["q_proj"],
            torch.float32,
            False,
            marks=pytest.mark.exhaustive,
        ),
        (lambda: build_llama(tied=True), ["lm_head"], torch.bfloat16, True),
        (build_gpt2, ["c_attn", "c_proj"], torch.bfloat16, True),
        (build_gpt2, ["lm_head"], torch.float32, False),
        (build_t5, ["q", "wo"], torch.float32, False),
    ],
)
def test_an_unloaded_model_survives_save_pretrained_bit_for_bit(
    make, targets, dtype, merged_before, tmp_path
):
    make().save_pretrained(tmp_path / "plain")
    plain = type(make()).from_pretrained(tmp_path / "plain", dtype=dtype).eval()
    model = adapt_model(copy.deepcopy(plain), targets)
    apart = compute_logits(model)
    assert not torch.allclose(apart, compute_logits(plain))
    if merged_before:
        merge(model)
    assert merge_and_unload(model) is model
    merged = compute_logits(model)
    loose = 1e-4 if dtype == torch.float32 else 0.1
    assert (merged - apart).norm() < loose * apart.norm()
    assert {n: type(m) for n, m in model.named_modules()} == {
        n: type(m) for n, m in plain.named_modules()
    }
    model.save_pretrained(tmp_path)
    back, report = type(plain).from_pretrained(tmp_path, output_loading_info=True, dtype=dtype)
    assert not any(report.values()), report
    assert torch.equal(compute_logits(back), merged)
    model.tie_weights()  # as resizing the vocabulary does
    assert torch.equal(compute_logits(model), merged)


def test_a_plain_model_is_plain_again():
    layer = nn.Linear(6, 6)
    for plain in (nn.Sequential(layer, nn.ReLU(), layer), layer):
        model = add_lora(nn.Sequential(copy.deepcopy(plain)), 2)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        inputs = torch.randn(5, 6)
        exact = merge(model)(inputs)
        model = merge_and_unload(model)
        other = nn.Sequential(copy.deepcopy(plain))
        other.load_state_dict(model.state_dict())  # all names are the plain model's
        assert torch.equal(other(inputs), exact)
    alone = LoRA(nn.Linear(6, 6), 2)
    assert merge_and_unload(alone) is alone.base
    with pytest.raises(ValueError, match="expected a model with adapters"):
        merge_and_unload(model)


def test_a_bias_that_is_tied_with_the_adapted_weight_is_saved_too(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6}
    config = transformers.BertConfig(vocab_size=97, num_hidden_layers=1, **sizes)
    model = transformers.BertForMaskedLM(config).eval()
    nn.init.normal_(model.cls.predictions.bias)
    adapt_model(model, ["decoder"])
    expected = model(TOKENS).logits
    merge_and_unload(model).save_pretrained(tmp_path)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-4)
    assert torch.equal(type(model).from_pretrained(tmp_path)(TOKENS).logits, model(TOKENS).logits)


def test_the_configuration_is_untied_after_one_of_two_tied_parameters_was_adapted(tmp_path):
    model = build_llama(tied=True)
    add_lora(model, 2, parameters=["embed_tokens.weight"])
    nn.init.normal_(model.model.embed_tokens.parametrizations.weight[0].lora_B)
    merge_and_unload(model)
    assert model.config.tie_word_embeddings is False
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("tied", [False, True])  # T5 ties its embeddings in both cases
@pytest.mark.parametrize("options", [{}, {"parameters": ["shared.weight"]}])
def test_weights_that_no_configuration_unties_take_no_adapters(tied, options):
    model = build_t5(tied)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"'lm_head.weight'\] share"):
        add_lora(model, 2, **options)
    assert {n: type(m) for n, m in model.named_modules()} == {
        n: type(m) for n, m in before.named_modules()
    }
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_weights_that_code_of_a_user_ties_take_no_adapters():
    model = build_llama(tied=True)
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"1.mlp.up_proj.weight'\] share"):
        add_lora(model, 2, targets=["up_proj"])
    add_lora(model, 2, targets=["q_proj", "lm_head"])


class Wrapper(nn.Module):
    """A model in a module with `save_pretrained`, such as the value head of trl."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def save_pretrained(self, folder):
        self.model.save_pretrained(folder)


class WrapperWithoutEmbeddings(Wrapper):
    def get_input_embeddings(self):
        raise NotImplementedError

    get_output_embeddings = get_input_embeddings


@pytest.mark.parametrize("wrapper", [Wrapper, WrapperWithoutEmbeddings])
def test_the_head_of_a_tied_model_in_a_wrapper_takes_an_adapter(wrapper, tmp_path):
    model = build_llama(tied=True)
    wrapped = adapt_model(wrapper(model), ["lm_head"])
    merge_and_unload(wrapped).save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(TOKENS).logits, model(TOKENS).logits)


def test_the_head_of_a_tied_decoder_takes_an_adapter(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 80}
    config = transformers.BertConfig(vocab_size=97, num_hidden_layers=1, **sizes)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(config, config)
    model = transformers.EncoderDecoderModel(config).eval()
    adapt_model(model, ["cls.predictions.decoder"])
    merge_and_unload(model).save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path)
    batch = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    assert torch.equal(saved(**batch).logits, model(**batch).logits)


def test_an_adapter_of_a_compressed_weight_is_not_unloaded():
    coarse = add_lora(quantize(nn.Sequential(nn.Linear(32, 32)), 4), 2)
    with pytest.raises(RuntimeError, match="compressed"):
        merge_and_unload(coarse)
    assert isinstance(coarse[0], LoRA)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("state", [lambda m: m, merge, lambda m: unmerge(merge(m))])
def test_saving_a_model_with_adapters_is_refused(state, inside, tmp_path):
    model = build_llama()
    state(adapt_model(model.model if inside else model, ["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    unmerge(model)
    assert "model.layers.0.self_attn.q_proj.lora_A" in model.state_dict()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        build_llama().load_state_dict(model.state_dict())


COMPRESSED = {
    "palettes": lambda m: kmeans_quantize(m, {"model.layers.0.mlp.up_proj": 4}),
    "4 bits": lambda m: quantize(m, 4),
    "int8": lambda m: quantize(m, activations="dynamic"),
    "gptq": lambda m: gptq(m, [TOKENS], 4),
    "in training": lambda m: prepare_qat(m, 4),
    "trained": lambda m: convert(prepare_qat(m, 4)),
}


@pytest.mark.parametrize("method", COMPRESSED)
def test_saving_a_compressed_model_is_refused(method, tmp_path):
    small = COMPRESSED[method](build_llama(tied=True))
    with pytest.raises(ValueError, match=r"tinyml\.save"):
        small.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_pruned_model_survives_save_pretrained(tmp_path):
    small = prune(build_llama(), 0.5).model
    small.save_pretrained(tmp_path)
    assert torch.equal(compute_logits(type(small).from_pretrained(tmp_path)), compute_logits(small))
