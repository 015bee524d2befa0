import copy
from dataclasses import replace

import pytest
import torch
from interp import Decoder, record
from interp.bench import build_random_decoder
from interp.decoder.fold import fold_decoder

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 30]])


def build_random_gpt2(dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    model = build_random_decoder(
        "gpt2", vocabulary=31, context=9, d_model=12, layers=3, heads=3
    ).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_folded_gpt2_gives_the_same_log_probabilities_and_patterns(
    dtype: torch.dtype, tolerance: float
) -> None:
    model = build_random_gpt2(dtype)
    before = copy.deepcopy(model.state_dict())
    folded = fold_decoder(model)
    with record(model, "**.pattern") as seen:
        expected = model(TOKENS).log_softmax(-1)
    with record(folded, "**.pattern", "norm:input") as after:
        logits = folded(TOKENS)
    torch.testing.assert_close(
        logits.log_softmax(-1), expected, atol=tolerance * 10, rtol=tolerance
    )
    for site in seen:
        torch.testing.assert_close(after[site], seen[site], atol=tolerance, rtol=tolerance)
    # No gains, biases of norms or components that norms and softmax ignore remain.
    for norm in (folded.norm, *(n for b in folded.blocks for n in (b.norm1, b.norm2))):
        assert (norm.weight == 1).all()
        assert (norm.bias == 0).all()
    assert after["norm:input"].mean(-1).abs().max() < tolerance * 10
    assert logits.mean(-1).abs().max() < tolerance * 10
    assert all((b.attention.v.bias == 0).all() for b in folded.blocks)
    # The original is unchanged, and unchanged parameters are shared.
    assert all(
        torch.equal(old, new)
        for old, new in zip(before.values(), model.state_dict().values(), strict=True)
    )
    assert model.unembed.weight is model.embed.weight
    assert folded.blocks[0].mlp.down.weight is not model.blocks[0].mlp.down.weight
    refolded = fold_decoder(folded)(TOKENS)
    torch.testing.assert_close(refolded, logits, atol=tolerance * 10, rtol=tolerance)


def test_readers_of_layer_norms_have_rows_of_mean_zero() -> None:
    """The mean of a row has an effect if the row reads an RMS norm, so folding preserves it."""
    model = build_random_gpt2(torch.float64)
    folded = fold_decoder(model)
    for block in folded.layers:
        for reader in (block.attention.q, block.attention.k, block.attention.v, block.mlp.up):
            assert reader.weight.mean(1).abs().max() < 1e-12
    assert folded.unembed.weight.mean(1).abs().max() < 1e-12
    torch.manual_seed(0)
    llama = build_random_decoder("llama", vocabulary=31, d_model=12, layers=1, heads=3).double()
    torch.nn.init.ones_(llama.layers[0].norm1.weight)
    torch.testing.assert_close(
        fold_decoder(llama).layers[0].attention.q.weight, llama.layers[0].attention.q.weight
    )


def test_converting_a_folded_copy_keeps_the_original() -> None:
    model = build_random_gpt2(torch.float32)
    expected = model(TOKENS)
    folded = fold_decoder(model)
    for parameter in model.parameters():
        assert all(parameter is not other for other in folded.parameters())
    folded.bfloat16().float()
    assert torch.equal(model(TOKENS), expected)


@pytest.mark.parametrize(
    "option",
    [
        {"clip": 0.3},
        {"parallel": True},
        {"score_cap": 0.5},
        {"logit_cap": 2.0},
        {"windows": (2, None, 3)},
        {"alibi_slopes": (0.5, 0.25, 0.1)},
        {"activation": "relu"},
        {"positions_in_attention": True},
    ],
    ids=lambda option: next(iter(option)),
)
@torch.no_grad()
def test_folding_keeps_the_function_under_every_setting(option: dict[str, object]) -> None:
    plain = build_random_gpt2(torch.float64)
    model = Decoder(dict(plain.state_dict()), replace(plain.settings, **option))
    expected = model(TOKENS).log_softmax(-1)
    assert not torch.allclose(plain(TOKENS).log_softmax(-1), expected)
    torch.testing.assert_close(fold_decoder(model)(TOKENS).log_softmax(-1), expected)
