"""Vision-language models, compared with the modules that transformers builds."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accounting import Plan, Transformer, flops, parameters, training_memory
from accounting.model.family_tables import NESTED_SIZES, TOWERS

TEXT: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"num_local_experts": 4, "intermediate_size_mlp": 80},
}
# Fields of a tower or of a projector, and the values that tests draw for them.
DRAWN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size"), (32, 64)),
    **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), (24, 40)),
    **dict.fromkeys(("depth", "num_hidden_layers"), (1, 3)),
    **dict.fromkeys(("num_heads", "num_attention_heads"), (2, 4)),
    **{"intermediate_size": (48, 80), "mlp_ratio": (2, 3), "num_position_embeddings": (16, 25)},
    **dict.fromkeys(("in_channels", "num_channels"), (1, 3)),
    **{"patch_size": (7, 8), "image_size": (56, 112), "deepstack_visual_indexes": ([0], [0, 1])},
    **dict.fromkeys(("spatial_merge_size", "temporal_patch_size"), (2, 3)),
    **{"vision_use_head": (True, False), "multimodal_projector_bias": (True, False)},
    **{"vision_feature_layer": (-1, [-1, -2])},
}


def build(content: dict[str, Any], base: bool) -> torch.nn.Module:
    """Build the multimodal module of transformers on the meta device, with or without its head."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(content)))
        name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[content["model_type"]]
        if base:
            name = name.replace("ForConditionalGeneration", "Model")
        module: torch.nn.Module = getattr(transformers, name)(config)
    return module


def draw_fields(rng: random.Random, known: dict[str, Any]) -> dict[str, Any]:
    """Return half of the known fields with random values."""
    names = [name for name in DRAWN if name in known]
    return {name: rng.choice(DRAWN[name]) for name in names if rng.random() < 0.5}


def check_tower(family: str, kind: str, draws: int) -> None:
    from transformers import AutoConfig

    rng = random.Random(f"{family} {kind}")
    outer = AutoConfig.for_model(family).to_dict()
    compared = 0
    for _ in range(draws):
        tower = AutoConfig.for_model(kind).to_dict() if kind else outer["vision_config"]
        vision = {"model_type": kind} if kind else {}
        vision |= draw_fields(rng, tower)
        # A tower without any field is that of the class, which is not part of the file.
        vision.setdefault("patch_size", 8)
        text = {name: value for name, value in TEXT.items() if name in outer["text_config"]}
        text["model_type"] = outer["text_config"]["model_type"]
        content = {"model_type": family, "vision_config": vision, "text_config": text}
        content |= draw_fields(rng, outer) | {"tie_word_embeddings": rng.random() < 0.5}
        text["tie_word_embeddings"] = content["tie_word_embeddings"]
        base = rng.random() < 0.3 and family != "llama4"
        try:
            module = build(content, base)
        except Exception:  # transformers does not build it.
            continue
        compared += 1
        named = {"architectures": [type(module).__name__]}
        actual = sum(parameter.numel() for parameter in module.parameters())
        assert Transformer.from_hf(content | named).size == actual, content
        # The object and the file that is written of it agree.
        assert Transformer.from_hf(module.config.to_dict() | named).size == actual, content
    assert compared >= draws / 3


CASES = [
    (family, kind) for family, table in sorted(TOWERS.items()) for kind in table.get("kinds", ("",))
]
FEW = [("gemma3", "siglip_vision_model"), ("qwen2_5_vl", "")]


@pytest.mark.parametrize(("family", "kind"), FEW)
def test_vision_tower_has_parameters_of_transformers_module(family: str, kind: str) -> None:
    check_tower(family, kind, draws=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_every_vision_tower_has_parameters_of_transformers_module(family: str, kind: str) -> None:
    check_tower(family, kind, draws=40)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_flat_file_of_qwen_is_read_like_transformers(family: str, tmp_path: Path) -> None:
    # The files on the hub have the fields of the language model at the top.
    content = TEXT | {"model_type": family, "tie_word_embeddings": True, "num_experts": 0}
    content |= {"vision_config": {"model_type": family, "depth": 2, "patch_size": 14}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    actual = sum(parameter.numel() for parameter in build(content, base=False).parameters())
    model = Transformer.from_hf(tmp_path)
    assert model.size == actual
    assert model.tied


# Sizes of the files on the hub, and the number of parameters that their model pages state.
QWEN_2B = {
    **{"model_type": "qwen2_vl", "hidden_size": 1536, "intermediate_size": 8960},
    **{"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2},
    **{"vocab_size": 151936, "tie_word_embeddings": True},
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "in_chans": 3},
}
QWEN_7B = {
    **{"model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944},
    **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    **{"vocab_size": 152064, "tie_word_embeddings": False},
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "in_chans": 3},
}
LLAVA_7B = {
    "model_type": "llava",
    "text_config": {
        **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32064},
    },
    "vision_config": {
        **{"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096},
        **{"num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336, "patch_size": 14},
    },
}


# The file on the hub omits the sizes that are the defaults of LlamaConfig.
LLAVA_7B_FILE = LLAVA_7B | {"text_config": {"model_type": "llama", "vocab_size": 32064}}
# The text configuration omits the number of heads, and the vision configuration all sizes.
PIXTRAL = {
    "model_type": "llava",
    "text_config": {
        **{"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "vocab_size": 131072},
        **{"num_hidden_layers": 40, "num_key_value_heads": 8},
    },
    "vision_config": {"model_type": "pixtral", "image_size": 1024, "patch_size": 16},
    "vision_feature_layer": -1,
}


@pytest.mark.parametrize(
    ("config", "published"),
    [
        *((QWEN_2B, 2_208_985_600), (QWEN_7B, 8_292_166_656), (LLAVA_7B, 7_063_427_072)),
        *((LLAVA_7B_FILE, 7_063_427_072), (PIXTRAL, 12_682_739_712)),
    ],
    ids=["Qwen2-VL-2B", "Qwen2.5-VL-7B", "llava-1.5-7b", "its file", "Pixtral-12B"],
)
def test_vision_models_have_published_parameters(config: dict[str, Any], published: int) -> None:
    assert parameters(Transformer.from_hf(config)).total == published


@pytest.mark.parametrize("family", sorted(NESTED_SIZES))
def test_omitted_sizes_of_a_language_model_are_the_defaults_of_transformers(family: str) -> None:
    from transformers import AutoConfig

    text = AutoConfig.for_model(family).to_dict()
    assert {name: text[name] for name in NESTED_SIZES[family]} == NESTED_SIZES[family]
    short = Transformer.from_hf({"model_type": "llava_next", "text_config": {"model_type": family}})
    assert short.size == Transformer.from_hf(text).size
    with pytest.raises(ValueError, match="is missing from this"):
        Transformer.from_hf({"model_type": family})


def test_gemma_3_has_published_parameters() -> None:
    # google/gemma-3-4b-it has 4,300,079,472 parameters.
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"model_type": "gemma3_text", "vocab_size": 262208}
    vision = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304}
    vision |= {"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}
    vision |= {"model_type": "siglip_vision_model", "vision_use_head": False}
    model = Transformer.from_hf(
        {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    )
    assert parameters(model).total == 4_300_079_472
    assert parameters(model)["vision tower"].total == 416_866_032 + 1152 * 2560 + 1152


def test_tower_counts_in_memory_and_not_in_flops_of_text() -> None:
    text = {"model_type": "gemma3_text", **TEXT}
    vision = {"model_type": "siglip_vision_model", "patch_size": 16, "hidden_size": 48}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    model, alone = Transformer.from_hf(whole), Transformer.from_hf(text)
    tower = parameters(model)["vision tower"].total
    assert tower == model.size - alone.size > 0
    assert flops(model, seq=64).total == flops(alone, seq=64).total
    assert "vision tower; FLOPs and activations are of text" in str(parameters(model))
    # Weights, gradients and Adam's moments; tensor-parallel ranks store copies. With ZeRO-3, the
    # outermost unit contains the tower and gathers its weights.
    plans = [(Plan(), 16), (Plan(tensor=2), 16), (Plan(data=2, zero=3), 8 + 4)]
    for plan, size in plans:
        work: dict[str, Any] = {"batch": 2, "seq": 8, "precision": "fp32"}
        both = [training_memory(shape, plan, **work).total for shape in (model, alone)]
        assert both[0] - both[1] == pytest.approx(size * tower, rel=1e-3)


@pytest.mark.parametrize("family", sorted(TOWERS))
def test_positions_of_a_tower_do_not_limit_the_sequence_of_text(family: str) -> None:
    from transformers import AutoConfig

    whole = AutoConfig.for_model(family).to_dict()
    model = Transformer.from_hf(whole)
    alone = Transformer.from_hf(whole["text_config"])
    assert flops(model, seq=64).total == flops(alone, seq=64).total


def test_tower_of_unknown_kind_is_reported_as_missing() -> None:
    text = {"model_type": "gemma3_text", **TEXT}
    for vision in ({}, {"model_type": "my_tower"}, {"hidden_size": 8}):
        whole = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
        model = Transformer.from_hf(whole)
        assert model.size == Transformer.from_hf(text).size
        assert "the language model of gemma3 without its other parts" in str(parameters(model))


def test_class_of_a_multimodal_file_decides_whether_it_has_a_head() -> None:
    text = {"model_type": "llama", "architectures": ["LlamaModel"], **TEXT}
    whole = {"model_type": "llava", "text_config": text | {"tie_word_embeddings": False}}
    assert Transformer.from_hf(whole).lm_head
    for name, has_head in (("LlavaForConditionalGeneration", True), ("LlavaModel", False)):
        assert Transformer.from_hf(whole | {"architectures": [name]}).lm_head == has_head
    # The first class has no language model. The other two have a head although they are called
    # models.
    other = [("blip-2", "Blip2ForImageTextRetrieval"), ("blip-2", "Blip2Model"), ("my", "MyModel")]
    with pytest.raises(ValueError, match="json with model_type"):
        Transformer.from_hf({"text_config": text})
    for family, name in other:
        content = whole | {"model_type": family, "architectures": [name]}
        with pytest.raises(ValueError, match=f"{name}.*omit it for the language model"):
            Transformer.from_hf(content | {"tie_word_embeddings": False})


def test_head_with_other_sizes_than_the_language_model_is_refused() -> None:
    whole = {"model_type": "ovis2", "text_config": {"model_type": "qwen2", **TEXT}}
    sizes = {"hidden_size": TEXT["hidden_size"], "vocab_size": TEXT["vocab_size"]}
    assert Transformer.from_hf(whole | sizes).vocab_size == TEXT["vocab_size"]
    with pytest.raises(ValueError, match="expected one vocab_size of 'ovis2', got 7 in the file"):
        Transformer.from_hf(whole | sizes | {"vocab_size": 7})


def test_base_model_of_a_narrow_opt_projects_its_output() -> None:
    text = {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 16, "hidden_size": 32}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
    text |= {"max_position_embeddings": 64, "tie_word_embeddings": True}
    whole = {"model_type": "llava", "text_config": text, "tie_word_embeddings": True}
    base = Transformer.from_hf(whole | {"architectures": ["LlavaModel"]})
    assert base.size == Transformer.from_hf(text | {"architectures": ["OPTModel"]}).size
    assert base.size == Transformer.from_hf(text).size
