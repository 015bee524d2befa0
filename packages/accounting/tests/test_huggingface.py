"""Tests that compare counts with modules that transformers builds on the meta device."""

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accounting import Transformer, kv_cache, parameters
from figures import assert_at_most
from published_models import PUBLISHED, make_llama, tie_embeddings
from reference import describe_module

SMALL = make_llama(48, 80, 4, 6, 2, 101)
DEEPSEEK = SMALL | {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_group": 2,
    "topk_group": 1,
}
QWEN_MOE = SMALL | {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 56,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 32}
OPT = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "ffn_dim": 80,
    "vocab_size": 101,
    "max_position_embeddings": 32,
}
PADDED = {"pad_token_id": 0}

# Families with switches that change a count; test_families.py builds their defaults.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", GPT2 | {"vocab_size": 101, "n_inner": 77, "tie_word_embeddings": False}),
    ("gpt_neox", tie_embeddings(SMALL) | {"attention_bias": False, "use_parallel_residual": False}),
    ("opt", OPT | {"word_embed_proj_dim": 20, "do_layer_norm_before": False}),
    ("opt", OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("phi", SMALL | {"qk_layernorm": True}),
    ("llama", tie_embeddings(SMALL) | {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    ("mistral", SMALL | {"head_dim": 14, "sliding_window": None}),
    ("qwen2", tie_embeddings(SMALL) | {"use_sliding_window": True, "max_window_layers": 3}),
    ("qwen2_moe", QWEN_MOE | {"qkv_bias": False, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("qwen3", SMALL | {"head_dim": 12, "attention_bias": True}),
    ("qwen3_moe", QWEN_MOE | {"head_dim": 20, "mlp_only_layers": [0, 2]}),
    ("gemma2", tie_embeddings(SMALL) | PADDED | {"head_dim": 20}),
    ("gemma3_text", tie_embeddings(SMALL) | PADDED | {"head_dim": 12}),
    ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None, "attention_bias": True}),
    (
        "gpt_oss",
        SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": False},
    ),
]


def build(family: str, sizes: dict[str, Any]) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        sizes = {k: v for k, v in sizes.items() if k != "model_type"}
        with no_init_weights(), torch.device("meta"):
            module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        # Without initialization, transformers does not tie weights either.
        module.tie_weights()
        return module


@pytest.mark.parametrize(
    ("family", "sizes"), CASES, ids=lambda case: case if isinstance(case, str) else ""
)
def test_every_family_has_parameters_of_transformers_module(
    family: str, sizes: dict[str, Any]
) -> None:
    module = build(family, sizes)
    ours = Transformer.from_hf(sizes | {"model_type": family})
    assert parameters(ours).total == sum(p.numel() for p in module.parameters())
    # The file that transformers writes and the module give the same count.
    written = json.loads(module.config.to_json_string(use_diff=False))
    assert parameters(Transformer.from_hf(written)).total == parameters(ours).total
    assert parameters(describe_module(module)).total == parameters(ours).total
    types = getattr(module.config, "layer_types", None)
    if types is not None:
        windowed = {i for i, kind in enumerate(types) if kind == "sliding_attention"}
        assert ours.windowed_layers == windowed


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3",
        "gemma2-27b",
        pytest.param("qwen3-30b-a3b", marks=pytest.mark.exhaustive),
        pytest.param("gpt-oss-120b", marks=pytest.mark.exhaustive),
    ],
)
def test_large_models_have_parameters_of_transformers_module(name: str) -> None:
    config = PUBLISHED[name].config
    module = build(config["model_type"], config)
    assert sum(p.numel() for p in module.parameters()) == PUBLISHED[name].total


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts_are_exact(name: str) -> None:
    expected = PUBLISHED[name]
    model = Transformer.from_hf(expected.config)
    assert parameters(model).total == expected.total
    assert parameters(model, active=True).total == (expected.active or expected.total)
    assert kv_cache(model).total == expected.kv_bytes


@pytest.mark.timing
def test_all_published_models_are_counted_in_ten_milliseconds() -> None:
    def count() -> float:
        start = time.perf_counter()
        for expected in PUBLISHED.values():
            assert parameters(Transformer.from_hf(expected.config)).total == expected.total
        return time.perf_counter() - start

    assert len(PUBLISHED) == 29
    milliseconds = 1000 * min(count() for _ in range(20))
    assert_at_most("accounting: all published models counted", 10, milliseconds, "ms")


def test_path_folder_and_dict_give_equal_models(tmp_path: Path) -> None:
    config = PUBLISHED["qwen3-8b"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = Transformer.from_hf(config)
    assert Transformer.from_hf(tmp_path) == expected
    assert Transformer.from_hf(str(tmp_path / "config.json")) == expected


def test_config_with_byte_order_mark_is_read(tmp_path: Path) -> None:
    config = PUBLISHED["deepseek-v3"].config
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8-sig")
    assert Transformer.from_hf(file) == Transformer.from_hf(config)


def test_gemma_3_fills_in_missing_fields() -> None:
    # google/gemma-3-1b-pt: 999,885,952 parameters.
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    }
    model = Transformer.from_hf(text)
    assert parameters(model).total == 999_885_952
    assert len(model.windowed_layers) == 22
