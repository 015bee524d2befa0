"""Every option of every family: a checkpoint has the logits of transformers, or is refused.

`load_decoder` has no model to compare its result with, so an option that it overlooks would change
the logits silently. One option of the configuration is changed or omitted at a time.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from interp.decoder import config_settings, constants, families
from interp.decoder.checkpoint import load_decoder
from interp.decoder.fold import fold_decoder
from interp.decoder.rotary import build_scaled_rotary
from interp.decoder.source import collect_weights
from small_models import FAMILIES, TOKENS
from torch import nn

transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

pytestmark = pytest.mark.exhaustive
#: Sizes of all tensors, and options that do not change the function of a decoder.
UNCHANGED = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "dtype",
    "chunk_size_feed_forward", "output_hidden_states", "output_attentions", "return_dict",
    "is_encoder_decoder", "use_cache", "problem_type", "initializer_range", "is_decoder",
    "architectures", "id2label", "label2id", "_name_or_path",
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
ROTARY: list[dict[str, Any]] = [
    {"partial_rotary_factor": 0.5},
    {"rope_theta": 50.0},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    YARN,
    YARN | {"attention_factor": 0.7},
    YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    YARN | {"mscale_all_dim": 0.4},
    # The factors of three rotated pairs; other models refuse them.
    {
        "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 9.0],
        "original_max_position_embeddings": 8, "factor": 4.0,
    },
]  # fmt: skip
#: The first configuration of each model class.
BASES = {name.split()[0]: options for name, options in reversed(FAMILIES.items())}


def iter_changes(options: Mapping[str, Any], sizes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each option with another value of its type."""
    for name, value in options.items():
        if name in UNCHANGED or "dropout" in name or "token_id" in name or name.endswith("drop"):
            continue
        values: list[Any] = []
        if isinstance(value, bool):
            values = [not value]
        elif isinstance(value, float):
            values = [0.37 * value or 0.31]
        elif isinstance(value, int):
            values = [max(1, value // 2)] if name in sizes else [value + 1, max(1, value // 2)]
        elif value is None:
            values = [2, 0.4, True]
        elif name == "rope_parameters" and "rope_theta" in value:
            values = [value | rotary for rotary in ROTARY]
        elif isinstance(value, str) and "act" in name:
            values = ["relu", "gelu", "gelu_new", "quick_gelu"]
        for changed in values:
            yield {name: changed}


def build_random_model(name: str, options: Mapping[str, Any]) -> nn.Module | None:
    """Return a random model, or None if transformers has none with these options."""
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    try:
        config = model_class.config_class(**options)
        config._attn_implementation = config._experts_implementation = "eager"
        model = model_class(config).double().eval()
        for tensor in collect_weights(model).values():
            tensor.add_(torch.randn_like(tensor) * 0.2)
        is_usable = bool(model(TOKENS).logits.isfinite().all())
    except Exception:  # any error of a configuration or model of transformers
        return None
    return model if is_usable else None


@torch.no_grad()
@pytest.mark.parametrize("name", BASES)
def test_changed_options_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    options = getattr(transformers, name).config_class(**BASES[name]).to_dict()
    compared = 0
    for change in iter_changes(options, BASES[name]):
        model = build_random_model(name, {**BASES[name], **change})
        if model is None:
            continue
        model.save_pretrained(tmp_path)
        try:
            decoder = load_decoder(tmp_path, dtype=torch.float64)
        except ValueError:  # refused
            continue
        tokens = TOKENS[:, : decoder.settings.context]
        expected, ours = model(tokens).logits, decoder(tokens)
        close = {"rtol": 1e-5, "atol": 1e-5 * float(expected.abs().max())}
        torch.testing.assert_close(ours, expected, **close, msg=lambda m, c=change: f"{c}: {m}")
        folded = fold_decoder(decoder)(tokens).log_softmax(-1)
        torch.testing.assert_close(folded, ours.log_softmax(-1), rtol=1e-5, atol=1e-5)
        compared += 1
    assert compared >= 5


@pytest.mark.parametrize("name", families.FAMILIES)
def test_omitted_options_have_the_defaults_of_transformers(name: str) -> None:
    config_class = CONFIG_MAPPING[name]
    assert config_class().tie_word_embeddings == families.FAMILIES[name].tied
    whole = config_class(num_experts_per_tok=2).to_dict()  # DeepSeek V2 has no default
    config_settings.build_settings(whole)
    for option in whole.keys() - {"model_type"}:
        partial = {key: value for key, value in whole.items() if key != option}
        try:
            filled = config_class.from_dict(partial).to_dict()
            settings = config_settings.build_settings(partial)
        except ValueError:  # refused by this package or by transformers
            continue
        assert settings == config_settings.build_settings(filled), option
        folded = constants.build_constants(None, partial)
        assert repr(folded) == repr(constants.build_constants(None, filled)), option


def test_yarn_of_an_odd_number_of_dimensions_is_refused() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    with pytest.raises(ValueError, match=r"even number of rotated dimensions .* got 3"):
        build_scaled_rotary(rope, dims=3, original_length=8, max_length=64)
