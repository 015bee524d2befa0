"""Half precision, and mixed dtypes, devices and shapes."""

from collections.abc import Callable

import pytest
import torch
from interp import AttentionOnly, LowRank, composition_scores, logit_lens, ov_circuit, qk_circuit
from interp.circuits.heads import circuit_pattern
from interp.circuits.vocabulary import copying_eigenvalues, copying_scores
from interp.patching import attribution_patching, patch_streams
from torch import Tensor

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


def thin(dtype: torch.dtype = torch.float32, device: str = "cpu") -> LowRank:
    return LowRank(
        torch.ones(2, 3, 6, 2, dtype=dtype, device=device),
        torch.ones(2, 3, 2, 6, dtype=dtype, device=device),
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda x: LowRank(torch.ones(6, 2), x.new_ones(2, 6)),
        lambda x: thin() @ x,
        lambda x: x @ thin(),
        lambda x: thin() @ LowRank(x, x),
        lambda x: thin().apply(x),
        lambda x: qk_circuit(torch.ones(6, 6), x, heads=2),
        lambda x: ov_circuit(torch.ones(6, 6), x, heads=2),
        lambda x: composition_scores(thin(), thin(x.dtype, str(x.device)), kind="k"),
        lambda x: copying_eigenvalues(thin(), x, x),
        lambda x: circuit_pattern(x, thin()),
        lambda x: logit_lens([torch.ones(1, 6, 6)], None, x),
    ],
)
def test_mixed_dtypes_and_devices_are_refused_with_a_remedy(
    call: Callable[[Tensor], object],
) -> None:
    with pytest.raises(
        TypeError, match=r"torch\.float\d+ and torch\.float\d+.*convert them to one dtype"
    ):
        call(torch.ones(6, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"(cpu|meta) and .*move them to one device"):
        call(torch.ones(6, 6, device="meta"))


@pytest.mark.parametrize(
    "call",
    [
        lambda: thin() @ torch.ones(5, 6),
        lambda: torch.ones(6, 5) @ thin(),
        lambda: thin().apply(torch.ones(4, 5)),
    ],
)
def test_products_of_mismatched_shapes_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="do not multiply; the columns"):
        call()
    with pytest.raises(ValueError, match="shape mismatch"):
        LowRank(torch.ones(2, 6, 2), torch.ones(3, 2, 6))


def test_metrics_of_another_shape_are_refused() -> None:
    torch.manual_seed(0)
    model = AttentionOnly(vocabulary=12, context=6, d_model=8, layers=2, heads=2)
    with pytest.raises(ValueError, match=r"the metric returned \(\) for 12 streams"):
        patch_streams(model, CLEAN, CORRUPTED, lambda x: x.sum())
    with pytest.raises(ValueError, match="expected batch >= 1, got 0"):
        patch_streams(model, CLEAN, CORRUPTED, lambda x: x.sum((1, 2)), batch=0)
    with pytest.raises(
        ValueError, match=r"the metric returned \(1, 6\); it must return one number"
    ):
        attribution_patching(model, ["blocks.0"], CLEAN, CORRUPTED, lambda out: out.sum(-1))
    with pytest.raises(ValueError, match="pass equal numbers and lengths"):
        attribution_patching(model, ["blocks.0"], CLEAN, CORRUPTED[:, :4], lambda out: out.sum())
