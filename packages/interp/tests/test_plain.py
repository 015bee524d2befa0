"""The package, which computes with thin factors, equals the minimal implementation."""

from pathlib import Path

import pytest
import torch
from interp import AttentionOnly, composition_scores, logit_lens, patch, plain, record
from interp.circuits.vocabulary import copying_scores
from interp.patching import drop_heads

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


@pytest.fixture
def model() -> AttentionOnly:
    torch.manual_seed(0)
    return AttentionOnly(vocabulary=11, context=9, d_model=12, layers=2, heads=3).double()


@pytest.fixture
def weights(model: AttentionOnly) -> plain.Weights:
    attentions = [block.attention for block in model.layers]
    q, k, v = (
        torch.stack([getattr(a, name).weight.unflatten(0, (3, -1)) for a in attentions])
        for name in "qkv"
    )
    o = torch.stack([a.o.weight.unflatten(1, (3, -1)).transpose(0, 1) for a in attentions])
    embed, position = model.embed.weight, model.position.weight
    return plain.Weights(embed, position, q, k, v, o, model.unembed.weight)


@torch.no_grad()
def test_circuits_streams_and_logits_equal_the_plain_ones(
    model: AttentionOnly, weights: plain.Weights
) -> None:
    torch.testing.assert_close(model.qk().dense(), plain.compute_qk_circuits(weights))
    torch.testing.assert_close(model.ov().dense(), plain.compute_ov_circuits(weights))
    with record(model, "blocks.0:input", "blocks.*") as seen:
        logits = model(TOKENS[None])
    torch.testing.assert_close(logits[0], plain.compute_logits(weights, TOKENS))
    streams = [seen[site] for site in ("blocks.0:input", "blocks.0", "blocks.1")]
    for ours, expected in zip(
        streams, plain.compute_residual_streams(weights, TOKENS), strict=True
    ):
        torch.testing.assert_close(ours[0], expected)
    expected = plain.logit_lens(weights, TOKENS).softmax(-1)
    lens = logit_lens(streams, None, model.unembed, top=expected.shape[-1])
    probabilities = torch.zeros_like(expected)
    probabilities.scatter_(-1, lens.top_tokens[:, 0], lens.top_probabilities[:, 0])
    torch.testing.assert_close(probabilities, expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_composition_and_copying_equal_the_plain_ones(
    model: AttentionOnly, weights: plain.Weights, kind: str
) -> None:
    scores = composition_scores(model.ov(), model.qk(), kind=kind)
    torch.testing.assert_close(scores[0, :, 1], plain.composition_scores(weights, kind))
    copying = copying_scores(model.ov(), model.embed.weight, model.unembed.weight)
    torch.testing.assert_close(copying, plain.copying_scores(weights))


@torch.no_grad()
def test_ablation_equals_the_plain_one(model: AttentionOnly, weights: plain.Weights) -> None:
    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(TOKENS[None])[0, :-1], TOKENS[1:])

    whole, rises = loss(), torch.empty(2, 3, dtype=torch.float64)
    for layer in range(2):
        for head in range(3):
            with patch(model, {f"blocks.{layer}.attention.o:input": drop_heads(head, heads=3)}):
                rises[layer, head] = loss() - whole
    torch.testing.assert_close(rises, plain.compute_ablation_effects(weights, TOKENS))


def test_the_plain_file_is_short_and_imports_torch_alone() -> None:
    lines = Path(plain.__file__).read_text().splitlines()
    assert len(lines) <= 120
    imports = {line for line in lines if line.startswith(("import", "from"))}
    assert imports == {
        "from __future__ import annotations",
        "from dataclasses import dataclass",
        "import torch",
        "from torch import Tensor",
    }
