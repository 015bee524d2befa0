"""Tests that compare every family with the module that transformers builds.

Each family is tested with the defaults of its class and with every switch flipped.
"""

import json
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accounting import (
    MLA,
    Plan,
    Transformer,
    Window,
    flops,
    kv_cache,
    parameters,
    plan_for,
    training_memory,
)
from accounting.cli.serving import estimate_serving
from accounting.model.family_tables import ENCODERS, FAMILIES, MULTIMODAL
from accounting.model.records import Compressed, LowRank
from accounting.model.registry import build_transformer_arguments
from accounting.model.transformer import _count_part_sizes
from random_configurations import count_outcomes
from reference import describe_module
from transformers_cache import get_cache_name

# Four layers are enough to tell the kinds of layers apart.
DEPTHS = (*("num_hidden_layers", "n_layer", "n_layers", "num_layers"),)
# Fields without a default, or with a default that the class cannot build.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
    },
    "bailing_hybrid": {"layer_group_size": 2},
    "kimi_linear": {"num_hidden_layers": 6},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    "zamba2": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", *["hybrid"] * 3, "linear_attention"],
        "num_mem_blocks": 2,
    },
}
# Families that this release of transformers does not build by themselves.
UNBUILT = {"chatglm", "dbrx", "internlm2", "kimi_k2", "mimo", "minicpm"}
UNBUILT |= {f"{name}_text" for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")}
NO_SWITCH = ("output_", "is_", "use_cache", "return_", "add_", "use_mamba", "router", "norm_topk")
SIZES = {
    **dict.fromkeys(("intermediate_size", "n_inner", "shared_intermediate_size"), 640),
    **dict.fromkeys(("moe_intermediate_size", "vocab_size"), 640),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "type_vocab_size"), 3),
    **dict.fromkeys(("conv_kernel",), 6),
    **dict.fromkeys(("num_local_experts", "num_experts"), 16),
    **dict.fromkeys(("head_dim",), 64),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
}


def build(family: str, sizes: dict[str, Any]) -> torch.nn.Module:
    """Build the module of transformers on the meta device."""
    import transformers
    from transformers.initialization import no_init_weights

    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(), no_init_weights(), torch.device("meta"):
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(family, **sizes)
        if family == "siglip_text_model":
            module = transformers.SiglipTextModel(config)
        elif family not in ENCODERS:
            module = transformers.AutoModelForCausalLM.from_config(config)
        else:
            module = transformers.AutoModel.from_config(config)
        # Without initialization, transformers does not tie weights either.
        module.tie_weights()
    return module


@cache
def read_defaults(family: str) -> dict[str, Any]:
    from transformers import AutoConfig

    content = AutoConfig.for_model(family).to_dict()
    # Gemma 4 derives it from the layers and the sizes of heads, which the tests change.
    content.pop("per_layer_config", None)
    return content


def make_small(family: str) -> dict[str, Any]:
    depths = {name: 4 for name in DEPTHS if isinstance(read_defaults(family).get(name), int)}
    if family == "nemotron_h":
        depths = {}
    return depths | NEEDED.get(family, {})


def flips(family: str) -> Iterator[dict[str, Any]]:
    """Yield the configuration with one switch or one size changed."""
    for name, value in read_defaults(family).items():
        if name in NEEDED.get(family, {}) or name.startswith(NO_SWITCH):
            continue
        if isinstance(value, bool):
            yield {name: not value}
        elif name in SIZES and isinstance(value, int | None):
            yield {name: SIZES[name]}


def check_size(family: str, sizes: dict[str, Any]) -> None:
    module = build(family, sizes)
    actual = sum(parameter.numel() for parameter in module.parameters())
    content = module.config.to_dict() | {"architectures": None}
    assert Transformer.from_hf(content).size == actual
    # The object itself is read as well as its content, and so is the file that is written of it.
    assert parameters(Transformer.from_hf(module.config)).total == actual
    assert parameters(describe_module(module)).total == actual


# The first family per combination of base tables.
FIRST = {str(table.get("like")): name for name, table in reversed(FAMILIES.items())}
REPRESENTATIVES = sorted(set(FIRST.values()) - UNBUILT)


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_family_has_parameters_of_transformers_module(family: str) -> None:
    check_size(family, make_small(family))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNBUILT - set(REPRESENTATIVES)))
def test_every_family_has_parameters_of_transformers_module(family: str) -> None:
    check_size(family, make_small(family))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNBUILT))
def test_every_switch_of_every_family_changes_counts_like_transformers(family: str) -> None:
    built = refused = 0
    for flip in flips(family):
        try:
            build(family, make_small(family) | flip)
        except Exception:
            continue
        try:
            check_size(family, make_small(family) | flip)
            built += 1
        except ValueError as error:
            # Refused by the name of the field that was changed.
            refused += next(iter(flip)) in str(error)
            if next(iter(flip)) not in str(error):
                raise
    assert built >= refused


def list_random_families() -> list[str]:
    """Return every model type of transformers that this package may read."""
    from transformers import CONFIG_MAPPING

    return sorted(set(CONFIG_MAPPING.keys()) - UNBUILT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", list_random_families())
def test_random_configurations_of_every_type_are_exact_or_refused(family: str) -> None:
    count_outcomes(family, draws=200, needed=NEEDED.get(family, {}))


@pytest.mark.exhaustive
def test_every_causal_type_of_transformers_is_exact_or_refused() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    exact = refused = 0
    wrong = {}
    for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        try:
            with warnings.catch_warnings(), torch.device("meta"):
                warnings.simplefilter("ignore")
                module = getattr(transformers, name)(transformers.AutoConfig.for_model(family))
        except Exception:  # transformers does not build its default.
            continue
        content = module.config.to_dict() | {"architectures": [name]}
        try:
            model = Transformer.from_hf(content)
        except ValueError:
            refused += 1
            continue
        exact += 1
        actual = sum(parameter.numel() for parameter in module.parameters())
        if model.size != actual and "without its other parts" not in model.name:
            wrong[family] = (model.size, actual)
    assert not wrong, wrong
    assert exact > 90, (exact, refused)


@pytest.mark.parametrize("family", ["falcon", "modernbert", "bert", "rwkv", "llama4", "nemotron_h"])
def test_random_configurations_are_exact_or_refused(family: str) -> None:
    counts = count_outcomes(family, draws=8, needed=NEEDED.get(family, {}))
    assert counts["exact"] > 0, counts


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNBUILT - {"lfm2_moe", "ministral"}))
def test_every_family_is_exact_at_default_size(family: str) -> None:
    check_size(family, {} if family == "gpt_neo" else NEEDED.get(family, {}))


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "jamba", "minimax", "falcon_h1"])
def test_recurrent_state_does_not_grow_with_sequence(family: str) -> None:
    model = Transformer.from_hf(read_defaults(family) | {"architectures": None})
    states = [
        sum(p.total for p in kv_cache(model, seq=s) if p.name.startswith("state"))
        for s in (10, 1000)
    ]
    assert states[0] == states[1] > 0
    grows = kv_cache(model, seq=1001).total - kv_cache(model, seq=1000).total
    token = 2 * 2 * len(model.attention_layers) * model.kv_heads * model.head_dim
    assert grows == token


def test_named_class_determines_counted_parts() -> None:
    bert = {
        "model_type": "bert",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
    }
    # bert-base-uncased, bare and with its head.
    assert Transformer.from_hf(bert).size == 109_482_240
    masked = bert | {"architectures": ["BertForMaskedLM"]}
    assert Transformer.from_hf(masked).size == 109_514_298
    # In a pipeline, the last stage has the transform of the head.
    stages = [Plan(pipeline=2).build_stage_model(Transformer.from_hf(masked), s) for s in (0, 1)]
    assert [[m.name for m in stage.extra] for stage in stages] == [
        ["token types", "embedding norm"],
        ["transform", "transform bias", "transform norm"],
    ]
    vit = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    assert Transformer.from_hf(vit | {"num_labels": 1000}).size == 86_567_656
    with pytest.raises(ValueError, match="expected architectures to name a known class of bert"):
        Transformer.from_hf(bert | {"architectures": ["BertForQuestionAnswering"]})


@pytest.mark.parametrize(
    "family",
    [
        "vit",
        "siglip_vision_model",
        *(
            pytest.param(family, marks=pytest.mark.exhaustive)
            for family in ("deit", "dinov2", "clip_vision_model")
        ),
    ],
)
def test_image_encoder_flops_equal_torch_counter(family: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {"image_size": 64, "hidden_size": 48, "num_attention_heads": 4}
    module = build(family, make_small(family) | sizes | {"intermediate_size": 96})
    model = describe_module(module)
    pixels = torch.zeros(2, 3, 64, 64, device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(pixel_values=pixels)
    ours = flops(model, seq=model.positions, batch=2, phase="forward", attention="full")
    # The scores and values of SigLIP's probe are not counted.
    probe = 2 * 4 * model.positions * 48 if family == "siglip_vision_model" else 0
    assert ours.total == counter.get_total_flops() - probe


def test_multimodal_config_gives_language_model_and_reports_missing_parts(tmp_path: Path) -> None:
    text = read_defaults("llama4_text")
    whole = {"model_type": "llama4", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    model = Transformer.from_hf(tmp_path)
    assert replace(model, name="llama4_text") == Transformer.from_hf(text)
    assert "the language model of llama4 without its other parts" in str(parameters(model))


TYING = [(outer, inner) for outer in (None, True, False) for inner in (None, True, False)]


def check_tying(family: str, values: Sequence[tuple[bool | None, bool | None]] = TYING) -> None:
    """Check that the head of a multimodal class is tied exactly if transformers ties it."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    whole = read_defaults(family)
    # Bidirectional attention, which PaliGemma's class sets, is refused and does not affect tying.
    removed = ("tie_word_embeddings", "use_bidirectional_attention")
    text = {k: v for k, v in whole["text_config"].items() if k not in removed}
    if family == "ovis2":
        # Its default states two sizes for one head, which is refused.
        text |= {size: whole[size] for size in ("hidden_size", "vocab_size")}
    for outer_value, inner_value in values:
        inner = text if inner_value is None else text | {"tie_word_embeddings": inner_value}
        content = {k: v for k, v in whole.items() if k != "tie_word_embeddings"}
        content |= {"text_config": inner}
        if outer_value is not None:
            content["tie_word_embeddings"] = outer_value
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            config = transformers.AutoConfig.for_model(**content)
            name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family]
            module = getattr(transformers, name)(config)
        has_head = any(name.endswith("lm_head.weight") for name, _ in module.named_parameters())
        assert Transformer.from_hf(content).tied != has_head, (outer_value, inner_value)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    # Gemma 3n is left out, because transformers builds its tower with another package.
    "family",
    sorted(name for names in MULTIMODAL.values() for name in names if name != "gemma3n"),
)
def test_every_multimodal_class_ties_its_language_model_like_transformers(family: str) -> None:
    check_tying(family)


def test_multimodal_class_ties_its_language_model_like_transformers() -> None:
    check_tying("got_ocr2", [(None, False), (False, True)])


def test_unknown_multimodal_class_with_ambiguous_tying_is_refused() -> None:
    text = {k: v for k, v in read_defaults("llama").items() if k != "tie_word_embeddings"}
    whole = {"model_type": "my_vision_model", "text_config": text | {"architectures": None}}
    with pytest.raises(ValueError, match="expected tie_word_embeddings of 'my_vision_model'"):
        Transformer.from_hf(whole)
    both = {"tie_word_embeddings": False}
    assert not Transformer.from_hf(whole | both | {"text_config": text | both}).tied


def test_hub_name_reports_download_command() -> None:
    with pytest.raises(FileNotFoundError, match=r"hf download meta-llama/Llama-3\.1-8B config"):
        Transformer.from_hf("meta-llama/Llama-3.1-8B")
    with pytest.raises(
        TypeError, match=r"expected config to be a folder, a config\.json.*, got int"
    ):
        Transformer.from_hf(3)


@pytest.mark.parametrize(
    ("alias", "like", "biased"), [("kimi_k2", "deepseek_v3", False), ("mimo", "qwen2", True)]
)
def test_family_alias_equals_family(alias: str, like: str, biased: bool) -> None:
    content = read_defaults(like) | {"architectures": None, "attention_bias": biased}
    same = Transformer.from_hf(content)
    assert same == replace(Transformer.from_hf(content | {"model_type": alias}), name=same.name)


# Sizes of published files whose class is not part of transformers. The totals are those of the
# published weights; the layers are those of a class that transformers has.
INTERNLM2 = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 92544, "bias": False},
}
INTERNLM2_SMALL = INTERNLM2 | {
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24},
    **{"num_attention_heads": 16},
}
MINICPM = {
    **{"hidden_size": 2304, "intermediate_size": 5760, "num_hidden_layers": 40},
    **{"num_attention_heads": 36, "num_key_value_heads": 36, "vocab_size": 122753},
}
CHATGLM3 = {
    **{"hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 28, "kv_channels": 128},
    **{"num_attention_heads": 32, "multi_query_attention": True, "multi_query_group_num": 2},
    **{"padded_vocab_size": 65024, "add_qkv_bias": True, "architectures": ["ChatGLMModel"]},
}
GLM = {
    **{"hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 28},
    **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 65024},
}
REMOTE: list[tuple[str, dict[str, Any], int, str, dict[str, Any]]] = [
    ("internlm2", INTERNLM2, 7_737_708_544, "llama", INTERNLM2),
    ("internlm2", INTERNLM2_SMALL, 1_889_110_016, "llama", INTERNLM2_SMALL),
    ("minicpm", MINICPM, 2_724_880_896, "llama", MINICPM | {"tie_word_embeddings": True}),
    ("chatglm", CHATGLM3, 6_243_584_000, "glm", GLM),
]


@pytest.mark.parametrize(("family", "file", "total", "like", "sizes"), REMOTE)
def test_family_outside_transformers_has_published_total_and_known_layers(
    family: str, file: dict[str, Any], total: int, like: str, sizes: dict[str, Any]
) -> None:
    model = Transformer.from_hf(file | {"model_type": family})
    assert model.size == total
    assert replace(model, name="") == replace(
        Transformer.from_hf(sizes | {"model_type": like}), name=""
    )


@pytest.mark.parametrize(
    ("family", "file", "why"),
    [
        ("minicpm", MINICPM | {"num_experts": 8}, "num_experts is set"),
        ("minicpm", MINICPM | {"sparse_config": {"topk": 64}}, "sparse_config is set"),
        ("chatglm", CHATGLM3 | {"vision_config": {"num_layers": 2}}, "vision_config is set"),
        ("chatglm", CHATGLM3 | {"pre_seq_len": 128}, "pre_seq_len is set"),
        ("chatglm", {"inner_hidden_size": 16384} | GLM, "num_layers is missing"),
    ],
)
def test_variant_of_family_outside_transformers_is_refused(
    family: str, file: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Transformer.from_hf(file | {"model_type": family})


# Sizes of published files, as those spell them.
KIMI = {
    **{"hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024},
    **{"num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32},
    **{"num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "head_dim": 72},
    **{"first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840},
    "linear_attn_config": {
        **{"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 28) if i % 4 and i != 27],
    },
}
BASE = {"hidden_size": 768, "embedding_size": 768, "num_attention_heads": 12}
LARGE = {"hidden_size": 1024, "embedding_size": 1024, "num_attention_heads": 16}
SHAPES: list[tuple[str, dict[str, Any], int]] = [
    ("kimi_linear", KIMI, 49_120_000_000),
    ("electra", BASE | {"intermediate_size": 3072}, 108_891_648),
    ("electra", LARGE | {"num_hidden_layers": 24, "intermediate_size": 4096}, 334_092_288),
    ("deepseek_v32", {}, 671_880_000_000),
    ("glm_moe_dsa", {}, 743_000_000_000),
    ("bailing_hybrid", {}, 124_000_000_000),
]


@pytest.mark.parametrize(("family", "file", "about"), SHAPES)
def test_published_shapes_are_counted_from_published_configs(
    family: str, file: dict[str, Any], about: int
) -> None:
    actual = sum(p.numel() for p in build(family, dict(file)).parameters())
    result = Transformer.from_hf({"model_type": family} | file if file else read_defaults(family))
    assert result.size == actual == pytest.approx(about, rel=0.03)


@pytest.mark.parametrize("head", ["ElectraForPreTraining", "ElectraForMaskedLM"])
@pytest.mark.parametrize("narrow", [128, 256])
def test_electras_heads_are_counted(head: str, narrow: int) -> None:
    import transformers

    with torch.device("meta"):
        module = getattr(transformers, head)(transformers.ElectraConfig(embedding_size=narrow))
    assert describe_module(module).size == sum(p.numel() for p in module.parameters())


def test_sparse_index_scores_all_keys_and_selects_some() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 99}
    sizes |= {"num_hidden_layers": 2, "first_k_dense_replace": 2, "num_attention_heads": 4}
    sizes |= {"index_n_heads": 3, "index_head_dim": 64, "index_topk": 4, "q_lora_rank": 24}
    sizes |= {"n_routed_experts": 2, "moe_intermediate_size": 8}
    module = build("deepseek_v32", sizes)
    model = describe_module(module)
    tokens = torch.zeros(2, 10, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module.to_empty(device="cpu")(input_ids=tokens, use_cache=False)
    run: dict[str, Any] = {"seq": 10, "batch": 2, "phase": "forward"}
    assert flops(model, **run, attention="full").total == counter.get_total_flops()
    # Ten queries see 1, 2, 3 and then 4 keys, and weigh 1 to 10.
    result = flops(model, **run)
    assert result["attention/scores"].total == 2 * 2 * 2 * 4 * model.qk_dim * (1 + 2 + 3 + 7 * 4)
    assert result["index"].total == 2 * 2 * 2 * 3 * (64 + 1) * 55
    # The keys of the index are kept beside the latents.
    saved = 2 * 2 * (512 + 64 + 64)
    assert kv_cache(model, seq=10).total == saved * 10


DEEPSEEK_V4 = {
    **{"hidden_size": 24, "moe_intermediate_size": 12, "vocab_size": 40, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 6, "o_groups": 2},
    **{"o_lora_rank": 5, "n_routed_experts": 4, "num_experts_per_tok": 2, "hc_mult": 3},
    **{"index_n_heads": 3, "index_head_dim": 8, "index_topk": 2, "partial_rotary_factor": 0.25},
}
SPARSE = "compressed_sparse_attention"
DENSE_ENTRIES = "heavily_compressed_attention"


def draw_compressed_layers(rng: random.Random) -> dict[str, Any]:
    """Return random kinds of layers, rates, windows and sizes of a small DeepSeek-V4."""
    kinds = [rng.choice((SLIDING, SPARSE, DENSE_ENTRIES)) for _ in range(4)]
    rates = {SPARSE: rng.choice((1, 2, 3, 4)), DENSE_ENTRIES: rng.choice((1, 5, 6, 20))}
    sizes = {"hc_mult": rng.choice((1, 2, 4)), "index_topk": rng.choice((1, 3, 50))}
    sizes |= {"sliding_window": rng.choice((2, 4, 30)), "o_groups": rng.choice((1, 2, 4))}
    sizes |= {"n_shared_experts": rng.choice((0, 2)), "num_key_value_heads": rng.choice((1, 2))}
    switches = {"tie_word_embeddings": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
    return sizes | switches | {"layer_types": kinds, "compress_rates": rates}


def check_compressed_layers(seed: int) -> None:
    """Compare a random DeepSeek-V4 with its module, torch's counter and transformers' cache."""
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    rng = random.Random(seed)
    config = transformers.AutoConfig.for_model(
        "deepseek_v4", **DEEPSEEK_V4 | draw_compressed_layers(rng)
    )
    config._experts_implementation = "eager"
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = describe_module(module)
    assert model.size == sum(parameter.numel() for parameter in module.parameters())
    seq = rng.choice((1, 5, 12, 19))
    tokens = torch.randint(40, (2, seq))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layers = module(input_ids=tokens, use_cache=True).past_key_values.layers
    run: dict[str, Any] = {"seq": seq, "batch": 2, "phase": "forward", "attention": "full"}
    assert flops(model, **run).total == counter.get_total_flops()
    # The first call with a cache keeps all keys of a prompt, and later calls one window.
    stored = [layer.keys[:, :, -config.sliding_window :] for layer in layers]
    for layer in layers:
        # Layers without entries store a second copy, which is not counted.
        assert torch.equal(layer.values, layer.keys)
        for name in ("compressed_kv", "buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate"):
            tensors = getattr(layer, name, {}).values()
            stored += [tensor for tensor in tensors if tensor is not None]
    missing = 0
    if seq >= config.sliding_window:
        # Between two tokens, transformers stores one key less than a window.
        missing = 4 * 2 * config.head_dim * 4
    cached = kv_cache(model, seq=seq, batch=2, dtype="fp32").total
    assert cached == sum(tensor.numel() * 4 for tensor in stored) + missing


@pytest.mark.parametrize(
    "seed",
    [*range(3), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3, 40))],
)
def test_compressed_layers_cost_as_much_as_in_transformers(seed: int) -> None:
    check_compressed_layers(seed)


@pytest.mark.parametrize("seq", [1, 7, 20])
def test_pairs_of_compressed_entries_are_those_of_the_mask(seq: int) -> None:
    kinds = [SPARSE, DENSE_ENTRIES, SLIDING, SPARSE]
    more = {"layer_types": kinds, "compress_rates": {SPARSE: 3, DENSE_ENTRIES: 5}}
    model = Transformer.from_hf({"model_type": "deepseek_v4", **DEEPSEEK_V4, **more})
    visible = {rate: [(token + 1) // rate for token in range(seq)] for rate in (3, 5)}
    sparse = [min(2, entries) for entries in visible[3]]
    per_pair = 2 * 4 * 16
    for phase, first in (("forward", 0), ("decode", seq - 1)):
        attention = flops(model, seq=seq, phase=phase)
        for name, pairs, layers in (("sparse", sparse, 2), ("dense", visible[5], 1)):
            expected = layers * per_pair * sum(pairs[first:])
            for kind in ("scores", "values"):
                part = f"{kind} of {name} entries"
                parts = [p.total for p in attention["attention"] if p.name == part]
                assert sum(parts) == expected
        index = sum(part.total for part in attention if part.name == "index")
        assert index == 2 * 2 * 3 * 8 * sum(visible[3][first:])


def test_published_names_of_compressed_layers_are_read_like_transformers() -> None:
    import transformers

    names: list[dict[str, Any]] = [
        {"compress_ratios": [0, 0, 4, 128, 4, 128, 0, 0]},
        {"compress_ratios": [4, 128, 0, 0, 0, 0], "compress_rate_csa": 2, "compress_rate_hca": 7},
        {"compress_ratios": [0] * 6, "layer_types": [SPARSE] * 6},
        {},
    ]
    for fields in names:
        content = DEEPSEEK_V4 | {"num_hidden_layers": 6, "num_hash_layers": 2} | fields
        config = transformers.AutoConfig.for_model("deepseek_v4", **content)
        model = Transformer.from_hf({"model_type": "deepseek_v4", **content})
        assert model == Transformer.from_hf(config.to_dict() | {"architectures": None})
    with pytest.raises(ValueError, match=r"got compress_ratios=\[2, 2, 2, 2\]"):
        Transformer.from_hf(
            {"model_type": "deepseek_v4", **DEEPSEEK_V4, "compress_ratios": [2] * 4}
        )


def test_serving_reads_selected_entries_and_copies_them_to_every_device() -> None:
    more = {"layer_types": [SPARSE] * 4, "compress_rates": {SPARSE: 4, DENSE_ENTRIES: 8}}
    model = Transformer.from_hf({"model_type": "deepseek_v4", **DEEPSEEK_V4, **more})
    assert kv_cache(model, seq=400, tensor=2).total == kv_cache(model, seq=400).total
    served, other = (estimate_serving(model, seq=seq) for seq in (400, 800))
    # A token reads two entries of 16 values, but all 100 or 200 entries of the index.
    assert other["bytes_per_token"] - served["bytes_per_token"] == 4 * 100 * 8 * 2
    with pytest.raises(ValueError, match=r"tensor to divide low_rank\.out_groups=2, got 4"):
        estimate_serving(model, gpus=4, seq=400)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("diffllama", "twice the width"),
        ("t5", "attends to an encoder"),
        ("bart", "attends to an encoder"),
        ("minimax_m1", "no class of transformers"),
        ("bailing_moe_v2", "no class of transformers"),
    ],
)
def test_refused_family_reports_reason_and_remedy(family: str, why: str) -> None:
    for config in ({"model_type": family}, {"model_type": family, "text_config": {}}):
        with pytest.raises(ValueError, match=rf"{why}.*fits\(module"):
            Transformer.from_hf(config)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("mpt", {"expansion_ratio": 8}),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}),
        ("persimmon", {"num_key_value_heads": 2}),
        ("apertus", {"hidden_act": "silu"}),
        ("electra", {"is_decoder": True}),
    ],
)
def test_only_fields_that_class_reads_count(family: str, changed: dict[str, Any]) -> None:
    check_size(family, make_small(family) | changed)


FULL = "full_attention"
SLIDING = "sliding_attention"
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("cohere2", {"sliding_window_pattern": 3}),
        ("exaone4", {"sliding_window_pattern": 3}),
        ("exaone4", {"sliding_window_pattern": "LFF", "layer_types": [SLIDING, FULL] * 3}),
        ("llama4_text", {"no_rope_layers": [1, 0, 0, 1, 1, 0]}),
        ("llama4_text", {"no_rope_layers": []}),
        ("llama4_text", {"no_rope_layer_interval": 3}),
        ("ministral", {"layer_types": [SLIDING, FULL] * 3}),
        ("ministral", {"layer_types": None}),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 4} | QWEN_EXPERTS),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
        ("smollm3", {"use_sliding_window": False, "sliding_window": 8}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1] * 6}),
    ],
)
def test_layers_with_a_window_are_those_of_the_class(family: str, changed: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
    sizes |= {"intermediate_size": 64, "vocab_size": 99, "num_key_value_heads": 2} | changed
    import transformers

    kinds = transformers.AutoConfig.for_model(family, **sizes).layer_types
    windowed = {layer for layer, kind in enumerate(kinds) if kind != FULL}
    assert Transformer.from_hf({"model_type": family, **sizes}).windowed_layers == windowed


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("qwen2", {"use_sliding_window": False, "layer_types": [SLIDING, FULL]}),
        ("gemma2", {"sliding_window": None, "layer_types": [SLIDING, FULL]}),
        ("recurrent_gemma", {"block_types": ["recurrent", "conv"]}),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}),
    ],
)
def test_layers_that_the_family_does_not_have_are_refused(
    family: str, changed: dict[str, Any]
) -> None:
    content = read_defaults(family) | {"architectures": None, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match="|".join(changed)):
        Transformer.from_hf(content | changed)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNBUILT))
def test_kinds_of_layers_are_checked_in_every_family(family: str) -> None:
    sizes = make_small(family) if family in ("lfm2_moe", "ministral") else NEEDED.get(family, {})
    content = read_defaults(family) | {"layer_types": None, "architectures": None} | sizes
    field = "layers_block_type" if content.get("layers_block_type") else "layer_types"
    layers = Transformer.from_hf(content).layers
    known = {"lfm2": ("conv",), "lfm2_moe": ("conv",), "llama4_text": ("chunked_attention",)}.get(
        family, ()
    )
    wrong = [["ful_attention"] * layers]
    # Kinds of other families.
    wrong += [[kind] * layers for kind in ("conv", "chunked_attention") if kind not in known]
    if family != "nemotron_h":  # It has as many layers as are listed.
        wrong.append(["full_attention"] * (layers + 1))
    for kinds in wrong:
        with pytest.raises(ValueError, match="layer_types"):
            Transformer.from_hf(content | {field: kinds})


@pytest.mark.parametrize("family", ["gpt2", "gpt_bigcode", "bert", "roberta", "camembert"])
def test_attention_to_another_model_is_refused(family: str) -> None:
    content = read_defaults(family) | {"is_decoder": True, "add_cross_attention": True}
    with pytest.raises(ValueError, match="add_cross_attention is true"):
        Transformer.from_hf(content | {"architectures": None})


def test_field_of_another_type_is_reported_by_name_and_value() -> None:
    content = {"model_type": "exaone4", **TINY, "sliding_window_pattern": "LLLG"}
    begin = r"^expected values in this exaone4 config\.json .* got sliding_window_pattern='LLLG'; "
    with pytest.raises(ValueError, match=begin) as caught:
        Transformer.from_hf(content)
    message = str(caught.value)
    assert "kind" not in message
    assert "%" not in message
    content |= {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
    assert Transformer.from_hf(content).windowed_layers == {0}


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "kimi_linear"])
def test_dense_layers_between_experts_are_refused(family: str) -> None:
    content = read_defaults(family) | {"architectures": None, "moe_layer_freq": 1}
    Transformer.from_hf(content)
    with pytest.raises(ValueError, match="moe_layer_freq is not 1"):
        Transformer.from_hf(content | {"moe_layer_freq": 2})


def test_second_name_of_a_field_is_read_like_transformers() -> None:
    import transformers

    tried = 0
    for family in sorted(set(FAMILIES) - UNBUILT):
        config = transformers.AutoConfig.for_model(family, **make_small(family))
        kind = type(config)
        if not kind.attribute_map:
            continue
        full = config.to_dict()
        original = Transformer.from_hf(full)
        for second, first in kind.attribute_map.items():
            value = full.get(first)
            # A GPT-Neo also lists the kinds of its layers.
            if type(value) is not int or not value or (family, first) == ("gpt_neo", "num_layers"):
                continue
            content = {name: field for name, field in full.items() if name != first}
            content |= {second: 2 * value}
            try:
                expected = Transformer.from_hf(kind.from_dict(dict(content)).to_dict())
            except ValueError:
                continue
            tried += 1
            assert Transformer.from_hf(content) == expected, (family, second)
            if expected != original:
                with pytest.raises(ValueError, match=f"{first} and {second}, two names"):
                    Transformer.from_hf(full | {second: 2 * value})
    assert tried > 60, tried


@pytest.mark.parametrize(
    ("family", "field", "other", "expected"),
    [
        ("biogpt", "hidden_act", "relu", "relu"),
        ("clip_text_model", "hidden_act", "relu", "relu"),
        ("vit", "hidden_act", "relu", "relu"),
        ("xglm", "activation_function", "relu", "relu"),
    ],
)
def test_activation_is_the_one_of_the_class(
    family: str, field: str, other: str, expected: str
) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(family, **{field: other})
    model = Transformer.from_hf(config)
    assert model.activation == expected


def test_model_type_that_is_not_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected model_type to be a name, got \['llama'\]"):
        Transformer.from_hf({"model_type": ["llama"]})


def check_empty_fields(family: str) -> None:
    """Check that an explicit 0, null or false is read as by transformers, or refused."""
    base, filled = make_small(family), read_defaults(family)
    compared = 0
    for name, value in filled.items():
        if name.startswith(NO_SWITCH) or isinstance(value, dict | str):
            continue
        for empty in (None, False) if isinstance(value, bool) else (None, 0):
            content = filled | base | {name: empty, "architectures": None}
            try:
                result = Transformer.from_hf(content).size
            except (ValueError, TypeError):
                continue
            try:
                module = build(family, base | {name: empty})
            except Exception:
                # transformers does not build it either.
                continue
            compared += 1
            actual = sum(parameter.numel() for parameter in module.parameters())
            assert result == actual, (name, empty)
    assert compared


class Recorder(dict[str, Any]):
    """A configuration that records the fields that are read."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


# A list per layer is derived by the class from the fields that are tested.
PER_LAYER = dict.fromkeys(("architectures", "layer_types", "mlp_layer_types", "indexer_types"))


def make_other_sizes(family: str) -> dict[str, Any]:
    """Return a configuration in which no default of a class coincides with a derived size."""
    content = read_defaults(family) | make_small(family) | PER_LAYER | NEEDED.get(family, {})
    for name, value in content.items():
        doubled = "heads" in name or name in ("n_head", "hidden_size", "n_embd", "d_model")
        if doubled and isinstance(value, int) and not isinstance(value, bool):
            content[name] = 2 * value
    return content


def get_default(field: "Field[Any]") -> Any:
    factory = field.default_factory
    return field.default if factory is MISSING else factory()


def test_missing_field_is_default_of_its_class_or_refused() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    compared = 0
    for family in sorted(set(FAMILIES) - UNBUILT):
        content = make_other_sizes(family)
        recorder = Recorder(content)
        build_transformer_arguments(recorder, _count_part_sizes)
        fields = CONFIG_MAPPING[family].__dataclass_fields__
        for name in recorder.read & set(fields) & set(content) - set(NEEDED.get(family, {})):
            explicit = content | {name: get_default(fields[name])}
            try:
                expected = Transformer.from_hf(explicit)
                actual = Transformer.from_hf({k: v for k, v in content.items() if k != name})
            except ValueError:
                continue
            compared += 1
            assert actual == expected, (family, name)
    assert compared > 500


@pytest.mark.parametrize(
    ("family", "missing", "expected"),
    [
        # Class defaults that differ from the number of query heads or from a derived width.
        ("qwen2", "num_key_value_heads", 32),
        ("qwen3_moe", "num_key_value_heads", 4),
        ("ernie4_5", "num_key_value_heads", 2),
    ],
)
def test_missing_key_heads_are_those_of_transformers(
    family: str, missing: str, expected: int
) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 64}
    module = build(family, sizes)
    content = module.config.to_dict() | {"architectures": None}
    del content[missing]
    model = Transformer.from_hf(content)
    assert model.kv_heads == expected
    assert model.size == sum(parameter.numel() for parameter in module.parameters())


SOME = ["nemotron_h"]


@pytest.mark.parametrize("family", SOME)
def test_an_explicit_zero_or_null_is_itself_or_refused(family: str) -> None:
    check_empty_fields(family)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNBUILT - set(SOME)))
def test_an_explicit_zero_or_null_of_every_family_is_itself_or_refused(family: str) -> None:
    check_empty_fields(family)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("llama", "num_key_value_heads"),
        ("llama", "head_dim"),
        ("llama", "intermediate_size"),
        ("gpt2", "n_inner"),
        ("mistral", "sliding_window"),
        ("mixtral", "sliding_window"),
        ("falcon", "ffn_hidden_size"),
        ("deepseek_v3", "q_lora_rank"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("bloom", "n_head"),
    ],
)
def test_size_of_zero_is_not_a_missing_size(family: str, field: str) -> None:
    content = read_defaults(family) | {"architectures": None, field: 0}
    with pytest.raises(ValueError, match=r"is 0|>= 1|1 <="):
        Transformer.from_hf(content)


def list_classes(family: str) -> set[str]:
    """Return the classes that transformers maps to a family, for all tasks."""
    from transformers.models.auto import modeling_auto

    result: set[str] = set()
    for name in dir(modeling_auto):
        if name.endswith("_MAPPING_NAMES"):
            listed = getattr(modeling_auto, name).get(family, ())
            result |= {listed} if isinstance(listed, str) else set(listed)
    return {name for name in result if not name.endswith("Config")}


def check_classes(family: str) -> None:
    """Check that a class is counted as transformers builds it, or refused."""
    import transformers

    names = list_classes(family)
    compared = 0
    for name in sorted(names):
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            config = transformers.AutoConfig.for_model(family, **make_small(family))
            if hasattr(config, "is_decoder") and "LM" in name:
                config.is_decoder = True
            try:
                module = getattr(transformers, name)(config)
            except Exception:
                continue
        content = module.config.to_dict() | {"architectures": [name]}
        actual = sum(parameter.numel() for parameter in module.parameters())
        try:
            result = Transformer.from_hf(content).size
        except ValueError as error:
            refused = str(error)
        else:
            refused = ""
            assert result == actual, name
        assert not refused or "architectures" in refused
        for other in ("My" + name, name + "Plus", name.replace("For", "ForNo")):
            if other not in names:
                with pytest.raises(ValueError, match="architectures"):
                    Transformer.from_hf(content | {"architectures": [other]})
        compared += 1
    assert compared


FEW = ["electra"]


@pytest.mark.parametrize("family", FEW)
def test_class_is_matched_by_whole_name(family: str) -> None:
    check_classes(family)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNBUILT - set(FEW)))
def test_class_of_every_family_is_matched_by_whole_name(family: str) -> None:
    check_classes(family)


def test_bert_with_head_flops_equal_torch_counter() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import BertConfig, BertLMHeadModel

    with torch.device("meta"):
        module = BertLMHeadModel(BertConfig(is_decoder=True, num_hidden_layers=2))
    model = Transformer.from_hf(module.config.to_dict() | {"architectures": ["BertLMHeadModel"]})
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(input_ids=torch.zeros(1, 64, dtype=torch.long, device="meta"), use_cache=False)
    assert model.size == sum(parameter.numel() for parameter in module.parameters())
    assert model.causal
    result = flops(model, seq=64, phase="forward", attention="full").total
    assert result == counter.get_total_flops()


TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "n_embed"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "dff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99, "max_position_embeddings": 64},
    **{"n_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 8},
    **{"moe_intermediate_size": 48, "num_experts_per_tok": 3},
}
DENSE = (
    *("apertus", "arcee", "biogpt", "bitnet", "cohere", "cohere2", "ctrl", "cwm", "ernie4_5"),
    *("exaone4", "falcon", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox"),
    *("granite", "helium", "hunyuan_v1_dense", "iquestcoder", "jais2", "llama", "ministral"),
    *("ministral3", "mistral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "opt"),
    *("persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm"),
    *("starcoder2", "bloom", "codegen", "gemma2", "gptj", "vaultgemma", "xglm"),
)
MOE = (
    *("ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "granitemoeshared"),
    *("minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open"),
)


ALTERNATING = [SLIDING, FULL, SLIDING, FULL]
LAYER_INPUTS = {
    **{"num_hidden_layers": 4, "layer_types": ALTERNATING, "num_kv_shared_layers": 2},
    **{"vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 8},
}
ZAMBA = {"n_mamba_heads": 4, "mamba_d_state": 8, "adapter_rank": 4, "num_key_value_heads": 4}
# Families whose layers share keys, values or blocks, or have heads of two widths.
SHARING: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": ("gemma3n_text", {"altup_num_inputs": 3, "laurel_rank": 4}),
    "gemma4": ("gemma4_text", {"global_head_dim": 32, "use_double_wide_mlp": True}),
    "gemma4 with experts": (
        "gemma4_text",
        {
            **{"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
            **{"moe_intermediate_size": 24, "num_kv_shared_layers": 0},
            **{"hidden_size_per_layer_input": 0},
        },
    ),
    "zamba2": ("zamba2", ZAMBA),
    "zamba2 with adapters": ("zamba2", ZAMBA | {"use_shared_attention_adapter": True}),
}


def check_forward(family: str, more: Mapping[str, Any] = {}) -> None:
    """Compare FLOPs with those that torch counts, and the cache with that of transformers.

    Recurrent layers are left out, because torch counts the operations of their eager scan.
    """
    import transformers
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {name: size for name, size in TINY.items() if name in read_defaults(family)} | dict(
        more
    )
    config = transformers.AutoConfig.for_model(family, **sizes)
    # torch's counter has no formula for the grouped matrix product of experts.
    config._experts_implementation = "eager"
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(3, 23).view(2, 10)
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        layers = getattr(module(input_ids=tokens, use_cache=True), get_cache_name(module)).layers
    model = describe_module(module)
    assert model.size == sum(parameter.numel() for parameter in module.parameters())
    by_module = counter.get_flop_counts().items()
    recurrent = sum(sum(n.values()) for name, n in by_module if name.endswith(".mamba"))
    ours = flops(model, seq=10, batch=2, phase="forward", attention="full")
    ours_recurrent = ours["mamba2"].total if "mamba2" in ours else 0
    assert ours.total - ours_recurrent == counter.get_total_flops() - recurrent
    with_keys = [layer for layer in layers if getattr(layer, "keys", None) is not None]
    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in with_keys)
    ours_cached = kv_cache(model, seq=10, batch=2, dtype="fp32")
    assert cached == sum(part.total for part in ours_cached if not part.name.startswith("state"))


@pytest.mark.parametrize("case", SHARING)
def test_forward_and_cache_of_sharing_layers_equal_torch(case: str) -> None:
    family, sizes = SHARING[case]
    check_forward(family, (NEEDED[family] if family == "zamba2" else LAYER_INPUTS) | sizes)


def test_training_step_of_sharing_layers_is_refused() -> None:
    reasons = {"gemma3n_text": "share keys and values", "gemma4_text": "share|several sizes"}
    reasons["zamba2"] = "its layers share blocks"
    reasons["deepseek_v32"] = "its attention selects keys by an index"
    reasons["deepseek_v4"] = "its queries and outputs have a low rank"
    for family, sizes in (*SHARING.values(), ("deepseek_v32", {}), ("deepseek_v4", {})):
        content = read_defaults(family) | NEEDED.get(family, {}) | PER_LAYER | sizes
        model = Transformer.from_hf(content)
        reason = f"a model whose training step is modeled, .*({reasons[family]})"
        with pytest.raises(ValueError, match=reason):
            training_memory(model, Plan(), batch=1, seq=8)
        with pytest.raises(ValueError, match=reason):
            plan_for(model, gpus=8, tokens=1e9, seq=64, batch=8)
        served = estimate_serving(model, gpus=1, seq=64)
        assert served["cache_bytes_per_sequence"] == kv_cache(model, seq=64).total


@pytest.mark.parametrize(
    "fields",
    [
        {"shared_kv_layers": (0,)},
        {"shared_kv_layers": (0, 1, 2, 3)},
        {"shared_kv_layers": (3,), "attention_layers": (0, 1)},
        {"shared_kv_layers": (3,), "mla": MLA(kv_rank=8, rope_head_dim=4)},
        {"attention_width": 128, "mla": MLA(kv_rank=8, rope_head_dim=4)},
        {"window": Window(size=4, head_dim=8), "mla": MLA(kv_rank=8, rope_head_dim=4)},
        {"window": Window(size=4, kv_heads=3)},
    ],
)
def test_keys_that_no_layer_has_are_refused(fields: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"layers": 4, "d_model": 64, "heads": 4, "vocab_size": 100}
    Transformer(**sizes, shared_kv_layers=(2, 3), window=Window(size=4, head_dim=8, kv_heads=2))
    with pytest.raises(ValueError, match=r"shared_kv_layers|window\.kv_heads"):
        Transformer(**sizes, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low_rank": None}, "expected low_rank with compressed entries, got None"),
        ({"kv_heads": 2}, "expected kv_heads=1 and v_head_dim=head_dim=16 with low_rank"),
        ({"v_head_dim": 8}, "expected kv_heads=1 and v_head_dim=head_dim=16 with low_rank"),
        ({"mla": MLA(kv_rank=8, rope_head_dim=4)}, "expected low_rank=None with mla"),
        ({"attention_width": 48}, "expected low_rank=None with mla, .*attention_width"),
        ({"low_rank": LowRank(q_rank=6, out_groups=3, out_rank=5)}, "heads x head_dim = 64, got 3"),
    ],
)
def test_inconsistent_low_rank_attention_is_refused(fields: dict[str, Any], message: str) -> None:
    model = Transformer.from_hf({"model_type": "deepseek_v4", **DEEPSEEK_V4})
    with pytest.raises(ValueError, match=message):
        replace(model, **fields)
    with pytest.raises(ValueError, match="index_heads, index_head_dim and index_top together"):
        Compressed(rate=4, index_heads=2, index_head_dim=8)


def test_tensor_parallel_cache_of_two_kinds_of_heads_is_counted_by_hand() -> None:
    family, sizes = SHARING["gemma4 with experts"]
    content = {"model_type": family, **TINY, **LAYER_INPUTS, **sizes}
    # Two layers with 2 key heads of width 16 in a window, and two with 1 key head of width 32.
    cached = kv_cache(Transformer.from_hf(content), seq=10, tensor=2, dtype="int8")
    assert cached.total == 2 * 2 * 10 * (1 * 16) + 2 * 2 * 10 * (1 * 32)


def test_forward_and_cache_of_dense_family_equal_torch() -> None:
    check_forward("cohere2")


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", DENSE)
def test_forward_and_cache_of_every_dense_family_equal_torch(family: str) -> None:
    check_forward(family)


def test_forward_and_cache_of_moe_family_equal_torch() -> None:
    # The router of Phi-MoE always chooses two experts.
    check_forward("phimoe")


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", MOE)
def test_forward_and_cache_of_every_moe_family_equal_torch(family: str) -> None:
    check_forward(family)


def test_list_with_one_value_per_layer_is_refused_if_values_differ() -> None:
    sizes = {name: size for name, size in TINY.items() if name != "num_experts_per_tok"}
    sizes |= {"model_type": "hunyuan_v1_moe", "num_experts": 4}
    model = Transformer.from_hf(sizes | {"moe_topk": [2, 2]})
    assert model == Transformer.from_hf(sizes | {"moe_topk": 2})
    with pytest.raises(ValueError, match=r"the same value for all layers, got \[1, 2\]"):
        Transformer.from_hf(sizes | {"moe_topk": [1, 2]})
