"""Recording and `describe` on every causal language model of transformers.

`describe` must return a correct decoder or raise ValueError. The fields in `SMALL` make the
configurations small; types that fail with them are skipped, and the last test bounds their number.
"""

import contextlib
from typing import Any

import pytest
import torch
from interp import describe, patch, record, record_patterns
from interp.decoder.config_settings import build_settings
from interp.decoder.families import FAMILIES
from interp.tap import expand_sites
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

pytestmark = pytest.mark.exhaustive
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "n_embd": 32, "d_model": 32, "intermediate_size": 48,
    "ffn_dim": 48, "n_inner": 48, "d_inner": 48, "num_hidden_layers": 2, "n_layer": 2,
    "num_layers": 2, "n_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "n_positions": 64, "sliding_window": 8,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "rotary_dim": 4,
    "word_embed_proj_dim": 32, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "layer_types": None,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_types": [[["global"], 2]],
    "window_size": 8, "state_size": 4, "time_step_rank": 4, "mamba_d_state": 4,
}  # fmt: skip
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 58 + 3
SKIPPED: list[str] = []


def build_small_model(kind: str) -> nn.Module:
    """Return a random model of a type, or skip the test."""
    config_class = CONFIG_MAPPING[kind]
    try:
        fields = config_class().to_dict()
        latent = "kv_lora_rank" in fields
        options = {name: value for name, value in SMALL.items() if name in fields}
        if latent:
            options["num_key_value_heads"] = 4
            options.pop("head_dim", None)
        torch.manual_seed(0)
        config = config_class(**options)
        config._attn_implementation = config._experts_implementation = "eager"
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        size = sum(parameter.numel() for parameter in model.parameters())
        if size > 2_000_000:
            raise ValueError(f"{size} parameters")
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            model(TOKENS)
    except Exception as error:  # any error of a configuration with these sizes
        SKIPPED.append(kind)
        assert kind not in FAMILIES
        with pytest.raises(ValueError, match=f"model_type '{kind}' is not one of"):
            build_settings({"model_type": kind})
        pytest.skip(f"not made small: {type(error).__name__} {str(error)[:80]}")
    return model


def find_last_block(model: nn.Module) -> str:
    """Return the name of the last block of the longest list of equal modules."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    name = max(lists, key=lambda name: (len(lists[name]) == 2, -name.count(".")))
    return f"{name}.{len(lists[name]) - 1}"


def check_patterns(model: nn.Module, expected: Tensor) -> None:
    """Fail unless patterns are probabilities and recording does not change the logits."""
    if model.config.model_type == "diffllama":  # two attentions, whose difference is used
        with record_patterns(model), pytest.raises(ValueError, match="got two in one call"):
            model(TOKENS)
        return
    with contextlib.suppress(RuntimeError), record_patterns(model) as patterns:
        assert torch.equal(model(TOKENS).logits, expected)
        for pattern in patterns.values():
            assert pattern.min() >= 0
            assert pattern.sum(-1).max() <= 1 + 1e-4


@torch.no_grad()
@pytest.mark.parametrize("kind", TYPES)
def test_records_and_patches_work_and_descriptions_are_right_or_refused(kind: str) -> None:
    model = build_small_model(kind)
    expected = model(TOKENS).logits
    site = find_last_block(model)
    with record(model, site) as seen:
        assert torch.equal(model(TOKENS).logits, expected)
    assert seen[site].isfinite().all()
    with patch(model, {site: torch.clone}):
        assert torch.equal(model(TOKENS).logits, expected)
    with patch(model, {site: torch.zeros_like}):
        assert not torch.equal(model(TOKENS).logits, expected)
    check_patterns(model, expected)
    assert expand_sites(model, ("**",))
    family = model.config.model_type  # some types share a configuration
    if family not in FAMILIES:
        with pytest.raises(ValueError, match=f"model_type '{family}' is not"):
            describe(model)
        return
    decoder = describe(model)
    tokens = torch.cat([TOKENS, TOKENS.flip(1), TOKENS], 1)
    ours, theirs = decoder(tokens), model(tokens).logits
    assert_close(ours, theirs)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    try:
        theirs = model(tokens, attention_mask=mask, position_ids=positions).logits
    except TypeError:  # models without position_ids
        return
    ours = decoder(tokens, attention_mask=mask, position_ids=positions)
    assert_close(ours[mask.bool()], theirs[mask.bool()])


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_most_types_are_tested() -> None:
    assert len(SKIPPED) <= len(TYPES) // 3, SKIPPED
