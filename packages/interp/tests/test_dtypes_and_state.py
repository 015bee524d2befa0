"""Half precision, and metrics of wrong shapes."""

import pytest
import torch
from interp import AttentionOnly, LowRank, composition_scores
from interp.circuits.vocabulary import copying_eigenvalues, copying_scores
from interp.patching import attribution_patching, patch_streams

CLEAN = torch.tensor([[1, 2, 3, 4, 2, 7]])
CORRUPTED = torch.tensor([[1, 2, 9, 4, 11, 7]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_decomposed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    half = LowRank(torch.randn(2, 3, 8, 2).to(dtype), torch.randn(2, 3, 2, 8).to(dtype))
    full = LowRank(half.a.float(), half.b.float())
    for name in ("norm", "eigenvalues"):
        ours, expected = getattr(half, name)(), getattr(full, name)()
        assert ours.dtype in (torch.float32, torch.complex64)
        torch.testing.assert_close(ours, expected)
    for ours, expected in zip(half.svd(), full.svd(), strict=True):
        torch.testing.assert_close(ours, expected)
    for kind in ("q", "k", "v"):
        torch.testing.assert_close(
            composition_scores(half, half, kind=kind), composition_scores(full, full, kind=kind)
        )
    embed, unembed = torch.randn(2, 5, 8).to(dtype)
    for function in (copying_eigenvalues, copying_scores):
        torch.testing.assert_close(
            function(half, embed, unembed), function(full, embed.float(), unembed.float())
        )


def test_metrics_of_another_shape_are_refused() -> None:
    torch.manual_seed(0)
    model = AttentionOnly(vocabulary=12, context=6, d_model=8, layers=2, heads=2)
    with pytest.raises(ValueError, match=r"the metric returned \(\) for 12 streams"):
        patch_streams(model, CLEAN, CORRUPTED, lambda x: x.sum())
    with pytest.raises(
        ValueError, match=r"the metric returned \(1, 6\); it must return one number"
    ):
        attribution_patching(model, ["blocks.0"], CLEAN, CORRUPTED, lambda out: out.sum(-1))
    with pytest.raises(ValueError, match="pass prompts with equal numbers of tokens"):
        attribution_patching(model, ["blocks.0"], CLEAN, CORRUPTED[:, :4], lambda out: out.sum())
