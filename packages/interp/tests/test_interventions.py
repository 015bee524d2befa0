"""Steering vectors, attention knockout and sparse autoencoders."""

from dataclasses import replace

import pytest
import torch
from interp import (
    AttentionOnly,
    SparseAutoencoder,
    describe,
    knock_out_attention,
    patch,
    record,
    steer,
    steering_vector,
)
from interp.decoder.modules.cache import Cache
from torch import Tensor, nn

POSITIVE = torch.tensor([[1, 2, 3, 4], [5, 6, 3, 1]])
NEGATIVE = torch.tensor([[2, 2, 6, 5, 4]])
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 2]])
WEIGHTS = ("w_enc", "w_dec", "b_enc", "b_dec")


@pytest.fixture
def model() -> AttentionOnly:
    torch.manual_seed(0)
    return AttentionOnly(vocabulary=7, context=6, d_model=8, layers=2, heads=2).double()


@torch.no_grad()
def test_steering_vector_is_the_mean_difference_of_activations(model: AttentionOnly) -> None:
    vector = steering_vector(model, "blocks.0", POSITIVE, {"input_ids": NEGATIVE})
    streams = {}
    for name, prompts in (("positive", POSITIVE), ("negative", NEGATIVE)):
        x = model.embed(prompts) + model.position.weight[: prompts.shape[1]]
        streams[name] = x + model.layers[0].attention(x)
    expected = streams["positive"][:, -1].mean(0) - streams["negative"][:, -1].mean(0)
    torch.testing.assert_close(vector, expected)
    padded = {"input_ids": POSITIVE, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}
    with pytest.raises(ValueError, match="position -1 of a prompt is padding"):
        steering_vector(model, "blocks.0", padded, NEGATIVE)


@torch.no_grad()
def test_steering_the_last_layer_adds_the_vector_to_the_logits(model: AttentionOnly) -> None:
    vector = torch.randn(8, dtype=torch.float64)
    before = model(TOKENS)
    with patch(model, {"blocks.1": steer(vector, scale=3.0)}):
        after = model(TOKENS)
    torch.testing.assert_close(after, before + 3.0 * model.unembed.weight @ vector)


@torch.no_grad()
def test_knockout_equals_a_mask_before_the_softmax() -> None:
    transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 37}
    sizes |= {"max_position_embeddings": 9}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, attn_implementation="eager")
    torch.manual_seed(0)
    peer = transformers.LlamaForCausalLM(config).eval()
    for parameter in peer.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    queries, keys = [4, 5], [0, 3]
    mask = torch.full((6, 6), float("-inf")).triu(1)
    mask[torch.tensor(queries)[:, None], torch.tensor(keys)] = float("-inf")
    expected = peer(TOKENS, attention_mask=mask[None, None]).logits
    decoder = describe(peer)
    site = "blocks.*.attention.pattern"
    with patch(decoder, {site: knock_out_attention(queries, keys)}):
        logits = decoder(TOKENS)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(decoder(TOKENS), expected, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sink", [False, True])
def test_weight_of_a_sink_is_kept_by_a_knockout(dtype: torch.dtype, has_sink: bool) -> None:
    """The expected pattern has a score of -inf at the blocked keys, before the softmax."""
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    masked = scores.clone()
    masked[:, :, 6:, 2:4] = float("-inf")
    sink = torch.full((2, 3, 9, 1), -1.0 if has_sink else float("-inf"), dtype=torch.float64)
    pattern, expected = (
        torch.cat([x, sink], -1).softmax(-1)[..., :-1].to(dtype) for x in (scores, masked)
    )
    after = knock_out_attention([6, 7, 8], [2, 3])(pattern)
    torch.testing.assert_close(after, expected)
    alone = knock_out_attention([6], range(7))
    if has_sink:
        assert not alone(pattern)[:, :, 6].any()
    else:
        with pytest.raises(ValueError, match="would attend to nothing"):
            alone(pattern)


def test_rounding_errors_of_long_rows_are_not_sinks() -> None:
    length = 256
    eps = torch.finfo(torch.float32).eps  # sums of 4,096 weights are off by up to 6 units
    pattern = torch.full((1, 1, length, length), 1 / length - 8 * eps / length)
    with pytest.raises(ValueError, match="would attend to nothing"):
        knock_out_attention([1], range(length))(pattern)


@torch.no_grad()
def test_knockout_of_chosen_heads_leaves_other_heads_and_queries(model: AttentionOnly) -> None:
    site = "blocks.0.attention.pattern"
    with record(model, site) as before:
        model(TOKENS)
    with (
        patch(model, {site: knock_out_attention([3], [1], heads=[1])}),
        record(model, site) as after,
    ):
        model(TOKENS)
    change = (after[site] - before[site]).abs().sum(-1)
    assert change[0, 1, 3] > 1e-3
    change[0, 1, 3] = 0
    assert not change.any()
    assert after[site][0, 1, 3, 1] == 0
    torch.testing.assert_close(after[site].sum(-1), torch.ones(1, 2, 6, dtype=torch.float64))
    with (
        pytest.raises(ValueError, match="would attend to nothing"),
        patch(model, {site: knock_out_attention([0], [0])}),
    ):
        model(TOKENS)


def build_autoencoder(**options: object) -> SparseAutoencoder:
    torch.manual_seed(1)
    return SparseAutoencoder(
        w_enc=torch.randn(8, 20, dtype=torch.float64),
        w_dec=torch.randn(20, 8, dtype=torch.float64),
        b_enc=torch.randn(20, dtype=torch.float64),
        b_dec=torch.randn(8, dtype=torch.float64),
        **options,
    )


@torch.no_grad()
@pytest.mark.parametrize("subtracts", [True, False])
@pytest.mark.parametrize("jump", [True, False])
def test_autoencoder_equals_its_formula_position_by_position(subtracts: bool, jump: bool) -> None:
    threshold = torch.full((20,), 0.7, dtype=torch.float64) if jump else None
    sae = build_autoencoder(subtracts_b_dec=subtracts, threshold=threshold)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    reconstruction = torch.empty_like(x)
    for row in range(2):
        for position in range(3):
            centered = x[row, position] - (sae.b_dec if subtracts else 0)
            output = sae.b_dec.clone()
            for feature in range(20):
                score = centered @ sae.w_enc[:, feature] + sae.b_enc[feature]
                if score > (0.7 if jump else 0.0):
                    output += score * sae.w_dec[feature]
            reconstruction[row, position] = output
    torch.testing.assert_close(sae.decode(sae.encode(x)), reconstruction)
    torch.testing.assert_close(sae.replace(keep_error=False)(x), reconstruction)
    flat = x.flatten(0, 1)
    error = (flat - reconstruction.flatten(0, 1)).square().sum()
    variance = flat.var(0, correction=0).sum() * 6
    torch.testing.assert_close(sae.unexplained_variance(x), error / variance)


@torch.no_grad()
def test_ablated_features_alone_have_an_effect_if_the_error_is_kept(model: AttentionOnly) -> None:
    sae = build_autoencoder()
    with record(model, "blocks.1") as seen:
        before = model(TOKENS)
    with patch(model, {"blocks.1": sae.replace()}):
        assert torch.equal(model(TOKENS), before)
    features: Tensor = sae.encode(seen["blocks.1"])
    chosen = features.flatten(0, 1).sum(0).topk(2).indices.tolist()
    with patch(model, {"blocks.1": sae.replace(ablate=chosen)}):
        after = model(TOKENS)
    removed = features[..., chosen] @ sae.w_dec[chosen]
    torch.testing.assert_close(after, before - removed @ model.unembed.weight.T)


@pytest.mark.parametrize("subtracts", [True, False])
def test_autoencoder_accepts_activations_of_another_dtype(subtracts: bool) -> None:
    sae = build_autoencoder(subtracts_b_dec=subtracts)
    x = 200 * torch.randn(4, 8).half()
    assert torch.equal(sae.encode(x), sae.encode(x.double()))
    # The squares exceed the largest number of float16.
    half = replace(sae, **{name: getattr(sae, name).half() for name in WEIGHTS})
    expected = sae.unexplained_variance(x.double()).item()
    assert half.unexplained_variance(x).item() == pytest.approx(expected, rel=0.05)


def test_masks_of_features_are_refused() -> None:
    autoencoder = SparseAutoencoder(
        w_enc=torch.randn(4, 6), w_dec=torch.randn(6, 4), b_enc=torch.ones(6), b_dec=torch.ones(4)
    )
    mask = torch.zeros(6, dtype=torch.bool)
    mask[3] = True
    for wrong in (mask, mask.tolist()):
        with pytest.raises(ValueError, match=r"got torch.bool; for a mask pass mask.nonzero"):
            autoencoder.replace(ablate=wrong)
    x = torch.randn(2, 4)
    by_index = autoencoder.replace(ablate=mask.nonzero()[:, 0])(x)
    assert torch.equal(by_index, autoencoder.replace(ablate=[3])(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_steering_vectors_are_not_rounded_beside_a_large_mean(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(60, 8)).to(dtype)
    with torch.no_grad():
        model[0].weight.add_(100)
    positive, negative = torch.arange(30)[:, None], torch.arange(30, 60)[:, None]
    vector = steering_vector(model, "0", positive, negative)
    activations = model[0].weight.detach().double()
    assert vector.dtype == dtype
    torch.testing.assert_close(
        vector.double(), activations[:30].mean(0) - activations[30:].mean(0), rtol=1e-2, atol=1e-3
    )


def test_steering_vectors_with_dropout_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"'2' differs when the run is repeated; call model"):
        steering_vector(model, "2", POSITIVE, NEGATIVE)
    assert steering_vector(model.eval(), "2", POSITIVE, NEGATIVE).shape == (8,)


@torch.no_grad()
def test_knockout_of_a_call_with_a_cache_is_refused(model: AttentionOnly) -> None:
    cache = Cache()
    model(TOKENS[:, :4], cache=cache)
    site = "blocks.0.attention.pattern"
    with (
        pytest.raises(ValueError, match="1 queries and 5 keys, as with a cache"),
        patch(model, {site: knock_out_attention([0], [0])}),
    ):
        model(TOKENS[:, 4:5], cache=cache)
