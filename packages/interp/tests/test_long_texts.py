"""Windows that exceed the context, and rotary angles that depend on the length of a text."""

from typing import Any

import pytest
import torch
from interp import Cache, describe, load_decoder, patch, record
from interp.patching import logit_difference, patch_streams
from small_models import COMMON, FAMILIES
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")

#: The families whose layers may have a window, with a window larger than the context of 64.
WINDOWED = {
    "MistralForCausalLM": COMMON | {"sliding_window": 4096},
    "MixtralForCausalLM": FAMILIES["MixtralForCausalLM"] | {"sliding_window": 4096},
    "Qwen2ForCausalLM": COMMON
    | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
    "Qwen3ForCausalLM": COMMON
    | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
    "Qwen3MoeForCausalLM": FAMILIES["Qwen3MoeForCausalLM"]
    | {"use_sliding_window": True, "sliding_window": 4096},
    "Gemma2ForCausalLM": COMMON | {"head_dim": 8},
    "Gemma3ForCausalLM": COMMON | {"head_dim": 8},
    "Phi3ForCausalLM": COMMON | {"sliding_window": 2047},
    "Olmo3ForCausalLM": COMMON,
    "Starcoder2ForCausalLM": COMMON | {"sliding_window": 4096},
    "Cohere2ForCausalLM": COMMON | {"head_dim": 8},
    "GptOssForCausalLM": FAMILIES["GptOssForCausalLM"] | {"sliding_window": 128},
}  # fmt: skip


def build_random_model(name: str, options: dict[str, Any]) -> nn.Module:
    """Return a model whose attention is far from uniform."""
    model_class = getattr(transformers, name)
    config = model_class.config_class(**options)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    torch.manual_seed(0)
    model = model_class(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.4)
    return model


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("MistralForCausalLM", "Gemma3ForCausalLM")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in WINDOWED
    ],
)
def test_windows_larger_than_the_context_are_compared_reduced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_random_model(name, WINDOWED[name])
    window = model.config.sliding_window
    decoder = describe(model)
    lengths = {comparison.name: comparison.length for comparison in decoder.comparisons}
    assert lengths["window"] > 5  # the reduced window
    assert model.config.sliding_window == window > decoder.settings.context
    assert set(decoder.settings.windows) <= {None, window}
    # A window that also contains the token at its distance.
    monkeypatch.setattr(
        transformers.masking_utils,
        "sliding_window_overlay",
        lambda size: lambda batch, head, query, key: key >= query - size,
    )
    with pytest.raises(ValueError, match=f"no description of this {name} .* window comparison"):
        describe(model)
    assert model.config.sliding_window == window


#: Models whose rotary angles depend on the length, with their original length.
STRETCHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "dynamic": ("LlamaForCausalLM", FAMILIES["LlamaForCausalLM dynamic"], 64),
    "longrope": ("Phi3ForCausalLM", FAMILIES["Phi3ForCausalLM longrope"], 32),
    "dynamic in some layers": (
        "Olmo3ForCausalLM",
        FAMILIES["Olmo3ForCausalLM"]
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        64,
    ),
    "dynamic, partly rotated": (
        "GPTNeoXForCausalLM",
        FAMILIES["GPTNeoXForCausalLM"]
        | {"hidden_size": 64, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.5,
        }},
        64,
    ),
}  # fmt: skip


def draw_tokens(length: int) -> Tensor:
    return torch.randint(37, (2, length), generator=torch.Generator().manual_seed(1))


def compute_fresh_logits(model: nn.Module, tokens: Tensor, **arguments: Tensor) -> Tensor:
    """Return the logits after a short text, which resets the angles of dynamic scaling."""
    model(tokens[:, :1])
    return model(tokens, **arguments, use_cache=False).logits


@pytest.mark.parametrize(
    ("method", "dtype"),
    [*((method, torch.float32) for method in STRETCHED), ("longrope", torch.bfloat16)],
)
def test_texts_on_both_sides_of_the_original_length_are_described(
    method: str, dtype: torch.dtype
) -> None:
    name, options, original = STRETCHED[method]
    model = build_random_model(name, options).to(dtype)
    model(draw_tokens(2 * original))  # An earlier long text must not change the description.
    decoder = describe(model, context=3 * original)
    names = [comparison.name for comparison in decoder.comparisons]
    assert names.count("rotation") == 3
    if dtype == torch.bfloat16:  # logits of half precision are not precise enough to compare
        return
    close = {"rtol": 1e-3, "atol": 1e-3}
    for length in (original - 1, original, original + 1, 2 * original, 3 * original):
        tokens = draw_tokens(length)
        torch.testing.assert_close(decoder(tokens), compute_fresh_logits(model, tokens), **close)
    tokens = draw_tokens(9)
    positions = torch.arange(original - 8, original + 1)[None]
    expected = compute_fresh_logits(model, tokens, position_ids=positions)
    torch.testing.assert_close(decoder(tokens, position_ids=positions), expected, **close)
    assert (decoder(tokens) - expected).abs().max() > 0.01  # Other angles change the logits.


@pytest.mark.parametrize("method", ["dynamic", "longrope"])
def test_other_angles_of_long_texts_are_refused(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, options, original = STRETCHED[method]
    model = build_random_model(name, options)
    functions = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    compute = functions[method]

    def scaled(*args: Any, **kwargs: Any) -> tuple[Tensor, float]:
        angles, scale = compute(*args, **kwargs)
        return angles * 1.01, scale

    monkeypatch.setitem(functions, method, scaled)
    message = f"no description of this {name} reproduces its logits: in the rotation comparison"
    with pytest.raises(ValueError, match=message):
        describe(model, context=original)


@pytest.mark.parametrize("method", ["dynamic", "longrope"])
def test_long_texts_are_patched_cached_and_loaded(method: str, tmp_path: Any) -> None:
    name, options, original = STRETCHED[method]
    model = build_random_model(name, options).double()
    decoder = describe(model, context=2 * original)
    tokens = draw_tokens(original + 3)
    expected = compute_fresh_logits(model, tokens)
    cache = Cache()
    short = decoder(tokens[:, :original], cache=cache)
    torch.testing.assert_close(short, decoder(tokens[:, :original]))
    with pytest.raises(ValueError, match=f"{original + 1} tokens have other angles than .* cache"):
        decoder(tokens[:, original : original + 1], cache=cache)
    assert cache.get_seq_length() == original
    if method == "longrope":  # All long texts have the same angles.
        cache = Cache()
        decoder(tokens[:, : original + 1], cache=cache)
        cached = decoder(tokens[:, original + 1 :], cache=cache)
        torch.testing.assert_close(cached, expected[:, original + 1 :], rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = load_decoder(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(loaded(tokens), expected, rtol=1e-4, atol=1e-4)
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 8)
    scan = patch_streams(decoder, tokens[:1], tokens[1:], metric)
    with record(decoder, "blocks.1:input") as seen:
        decoder(tokens[:1])

    def restore(stream: Tensor) -> Tensor:
        stream[:, original - 2] = seen["blocks.1:input"][:, original - 2]
        return stream

    with patch(decoder, {"blocks.1:input": restore}), record(decoder, "norm:input") as last:
        decoder(tokens[1:])
    torch.testing.assert_close(scan.values[1, original - 2], metric(last["norm:input"])[0])


@pytest.mark.parametrize("method", ["dynamic", "longrope"])
def test_changes_by_calls_and_of_training_options_are_accepted(method: str) -> None:
    tokens = torch.arange(6)[None]
    name, options, original = STRETCHED[method]
    model = build_random_model(name, options)
    model.model.layers[0].last_score = float("nan")
    decoder = describe(model)
    model(tokens.repeat(1, original))
    model.config.use_cache = False
    model.config.attention_dropout = 0.5
    torch.testing.assert_close(decoder(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)
