"""Comparisons with other libraries, each in a separate environment because of conflicting pins.

uv venv lens && uv pip install --python lens/bin/python transformer-lens pytest safetensors
PYTHONPATH=src lens/bin/python -m pytest -m exhaustive --noconftest tests/test_oracles.py
"""

import pytest
import torch
from figures import assert_at_least
from interp import AttentionOnly, LowRank, composition_scores, detect_heads, patch, record
from interp.bench import beside_transformer_lens
from interp.patching import attribution_patching
from torch import nn

pytestmark = pytest.mark.exhaustive


def small_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="models of each family")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_factored_matrices_and_composition_equal_transformer_lens() -> None:
    pytest.importorskip("transformer_lens", reason="tried with transformer-lens 4.3.0")
    from transformer_lens.FactoredMatrix import FactoredMatrix
    from transformer_lens.utilities.matrix import composition_scores as theirs

    torch.manual_seed(0)
    ov, qk = (LowRank(torch.randn(3, 4, 10, 3), torch.randn(3, 4, 3, 10)) for _ in range(2))
    # TransformerLens multiplies row vectors.
    their_ov, their_qk = FactoredMatrix(ov.b.mT, ov.a.mT), FactoredMatrix(qk.a, qk.b)
    torch.testing.assert_close(their_ov.norm(), ov.norm())
    torch.testing.assert_close(their_ov.svd()[1], ov.svd()[1])
    ours, other = ov.eigenvalues(), their_ov.eigenvalues
    torch.testing.assert_close(ours.abs().sort(-1)[0], other.abs().sort(-1)[0])
    later = torch.ones(3, 3).triu(1)[:, None, :, None]
    for kind, reader in (("q", their_qk), ("k", their_qk.T), ("v", their_ov)):
        expected = theirs(their_ov, reader) * later
        torch.testing.assert_close(composition_scores(ov, qk, kind=kind), expected)


def test_head_scores_equal_transformer_lens() -> None:
    pytest.importorskip("transformer_lens", reason="tried with transformer-lens 4.3.0")
    from transformer_lens import head_detector as theirs

    torch.manual_seed(0)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 3, 1, 4]])
    future = torch.ones(8, 8).triu(1).bool()
    pattern = torch.randn(1, 5, 8, 8).masked_fill(future, float("-inf")).softmax(-1)
    expected_kinds = detect_heads([pattern], tokens)
    masks = {
        "previous": theirs.get_previous_token_head_detection_pattern(tokens),
        "duplicate": theirs.get_duplicate_token_head_detection_pattern(tokens),
        "induction": theirs.get_induction_head_detection_pattern(tokens),
    }
    for kind, mask in masks.items():
        # TransformerLens divides by all attention, this package by the queries with a target key.
        queries = mask.bool().any(-1).sum()
        for head in range(5):
            fraction = theirs.compute_head_attention_similarity_score(
                pattern[0, head],
                mask,
                exclude_bos=False,
                exclude_current_token=False,
                error_measure="mul",
            )
            expected = fraction * 8 / queries
            assert expected_kinds.scores[kind][0, head].item() == pytest.approx(
                float(expected), rel=1e-4
            )


def test_records_and_patches_equal_nnsight() -> None:
    nnsight = pytest.importorskip("nnsight", reason="tried with nnsight 0.8.1")
    model = small_llama()
    traced = nnsight.NNsight(model)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with traced.trace(tokens):
        theirs = traced.model.layers[0].self_attn.output[0].save()
    with torch.no_grad(), record(model, "model.layers.0.self_attn") as seen:
        model(tokens)
    torch.testing.assert_close(seen["model.layers.0.self_attn"], theirs.detach())
    with traced.trace(tokens):
        traced.model.layers[0].mlp.output[:] = 0
        logits = traced.lm_head.output.save()
    with torch.no_grad(), patch(model, {"model.layers.0.mlp": torch.zeros_like}):
        ours = model(tokens).logits
    torch.testing.assert_close(ours, logits.detach())


def test_attribution_patching_equals_captum() -> None:
    captum = pytest.importorskip("captum.attr", reason="tried with captum 0.9.0")
    torch.manual_seed(0)
    model = AttentionOnly(vocabulary=9, context=4, d_model=6, layers=2, heads=2).double()
    clean, corrupted = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 5, 3, 4]])
    for layer in range(2):
        site = f"blocks.{layer}"
        theirs = captum.LayerGradientXActivation(
            lambda tokens: model(tokens)[:, -1, 0], model.blocks[layer]
        ).attribute(corrupted)
        with record(model, site) as seen:
            model(clean)
            before = seen[site]
            model(corrupted)
        expected = (theirs / seen[site] * (before - seen[site])).sum(-1)
        ours = attribution_patching(
            model, [site], clean, corrupted, lambda out: out[:, -1, 0].sum()
        )
        torch.testing.assert_close(ours[site], expected)


@pytest.mark.timing
def test_composition_is_15_times_faster_with_a_hundredth_of_the_memory() -> None:
    pytest.importorskip("transformer_lens", reason="tried with transformer-lens 4.3.0")
    row = beside_transformer_lens()
    assert row["error"] < 1e-4
    assert_at_least("interp: TransformerLens over composition", 15, row["ratio_p50"])
    memory = row["peer_mib"] / row["ours_mib"]
    assert_at_least("interp: memory of TransformerLens over composition", 100, memory)
