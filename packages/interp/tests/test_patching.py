import itertools
from collections.abc import Mapping

import pytest
import torch
from interp import AttentionOnly, describe, patch, record
from interp.patching import (
    PatchingResult,
    attribution_patching,
    drop_heads,
    logit_difference,
    patch_streams,
)
from interp.prompts import average_over_pairs
from torch import Tensor, nn

CLEAN = torch.tensor([[1, 2, 3, 4, 2, 7]])
CORRUPTED = torch.tensor([[1, 2, 9, 4, 11, 7]])
RIGHT, WRONG = 5, 8


def compute_difference(logits: Tensor) -> Tensor:
    return logits[:, -1, RIGHT] - logits[:, -1, WRONG]


def patch_by_hand(model: nn.Module, clean: Mapping[str, Tensor], site: str, position: int) -> float:
    """Return the difference after a whole forward pass in which one position of a site is clean."""

    def put(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, position] = clean[site][:, position]
        return x

    with patch(model, {site: put}):
        return compute_difference(model(CORRUPTED)).item()


@pytest.mark.parametrize("batch", [64, 4])
def test_patch_streams_equals_one_forward_pass_per_patch(decoder: nn.Module, batch: int) -> None:
    described = describe(decoder, rope_theta=100.0, context=6)
    metric = logit_difference(decoder.norm, decoder.head, RIGHT, WRONG)
    scan = patch_streams(described, CLEAN, CORRUPTED, metric, batch=batch)
    with record(decoder, "layers.*:input") as clean:
        assert scan.clean == pytest.approx(compute_difference(decoder(CLEAN)).item())
    assert scan.corrupted == pytest.approx(compute_difference(decoder(CORRUPTED)).item())
    for i in range(3):
        for position in range(6):
            expected = patch_by_hand(decoder, clean, f"layers.{i}:input", position)
            assert scan.values[i, position].item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    # Equal tokens have equal inputs of block 0, so nothing is recovered at their positions.
    assert scan.recovered[0, [0, 1, 3, 5]].abs().max() < 1e-9
    with pytest.raises(TypeError, match="expected a Decoder, got a Sequential"):
        patch_streams(nn.Sequential(), CLEAN, CORRUPTED, metric)
    with pytest.raises(ValueError, match=r"both must be \(1, seq\)"):
        patch_streams(described, CLEAN, CORRUPTED[:, :4], metric)


def test_patching_is_refused_inside_contexts_that_read_whole_rows() -> None:
    model = AttentionOnly(vocabulary=17, context=6, d_model=8, layers=2, heads=2)
    metric = logit_difference(None, model.unembed.weight, RIGHT, WRONG)
    contexts = []
    for site in ("blocks.1", "blocks.1:input"):
        contexts += [record(model, site), patch(model, {site: torch.clone})]
    for context in contexts:
        with context:
            model(CLEAN)  # A patch that never runs is another error.
            with pytest.raises(ValueError, match=r"'blocks\.1' has a hook, as inside patch\(\)"):
                patch_streams(model, CLEAN, CORRUPTED, metric)
    model.blocks[0].mlp = Reversed()
    with pytest.raises(ValueError, match=r"'blocks\.0\.mlp' .* is a module of another library"):
        patch_streams(model, CLEAN, CORRUPTED, metric)


class Reversed(nn.Module):
    """A module that mixes positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


@pytest.mark.parametrize("shape", [None, (12,), (2, 5, 12)])
def test_dropped_heads_are_zero_or_have_the_values_of_another_tensor(
    shape: tuple[int, ...] | None,
) -> None:
    torch.manual_seed(0)
    mixed = torch.randn(2, 5, 12)
    other = None if shape is None else torch.randn(shape)
    values = torch.zeros(12) if other is None else other
    expected = mixed.clone()
    expected[..., :4] = values[..., :4]
    expected[..., 8:] = values[..., 8:]
    assert torch.equal(drop_heads(0, 2, heads=3, to=other)(mixed), expected)


def test_blocks_are_replayed_with_their_other_arguments() -> None:
    torch.manual_seed(0)
    model = AttentionOnly(
        vocabulary=17, context=6, d_model=8, layers=2, heads=2, positions="attention"
    ).double()
    metric = logit_difference(None, model.unembed.weight, RIGHT, WRONG)
    scan = patch_streams(model, CLEAN, CORRUPTED, metric)
    everything = {"blocks.0:input": lambda x: model.embed(CLEAN)}
    with patch(model, everything):
        assert compute_difference(model(CORRUPTED)).item() == pytest.approx(scan.clean)
    with record(model, "blocks.*:input") as clean:
        model(CLEAN)
    for layer, position in itertools.product(range(2), range(6)):
        expected = patch_by_hand(model, clean, f"blocks.{layer}:input", position)
        assert scan.values[layer, position].item() == pytest.approx(expected)


def test_attribution_patching_has_second_order_error() -> None:
    """If the clean embeddings differ by e from the corrupted ones, the error is of order e^2."""
    torch.manual_seed(1)
    model = AttentionOnly(vocabulary=17, context=6, d_model=8, layers=2, heads=2).double()
    step = torch.randn(2, 8, dtype=torch.float64)
    errors = []
    for size in (1e-2, 1e-3):
        with torch.no_grad():
            model.embed.weight[[9, 11]] = model.embed.weight[[3, 2]] + size * step
        scores = attribution_patching(
            model,
            ["blocks.0:input", "blocks.0"],
            CLEAN,
            CORRUPTED,
            lambda logits: compute_difference(logits).sum(),
        )
        assert {tuple(score.shape) for score in scores.values()} == {(1, 6)}
        # Patching all positions of either site gives the clean run.
        exact = (compute_difference(model(CLEAN)) - compute_difference(model(CORRUPTED))).item()
        errors.append([abs(score.sum().item() - exact) for score in scores.values()])
    for large, small in zip(*errors, strict=True):
        assert small < large / 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_standard_errors_in_half_precision_are_not_rounded_beside_a_large_mean(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    values = (100 + torch.randn(64, 5)).to(dtype)
    result = average_over_pairs([PatchingResult(row, 1.0, 0.0) for row in values])
    wide = values.double()
    torch.testing.assert_close(result.values.double(), wide.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(result.standard_error.double(), wide.std(0) / 8, rtol=1e-2, atol=0)


def test_standard_errors_equal_the_spread_over_samples_of_prompts() -> None:
    """The metrics of a prompt vary together, so a difference or a ratio varies less than values."""
    torch.manual_seed(0)
    difficulty = 5 * torch.randn(200, 12, 1, 1)
    noise = 0.3 * torch.randn(200, 12, 2, 3)
    quantities = {
        "values": lambda result: result.values,
        "recovered": lambda result: result.recovered,
    }
    means = {name: [] for name in quantities}
    errors = {name: [] for name in quantities}
    for sample, of_sample in zip(difficulty, noise, strict=True):
        rows = [(float(x), x + 0.5 + y) for x, y in zip(sample, of_sample, strict=True)]
        result = average_over_pairs([PatchingResult(values, x + 1, x) for x, values in rows])
        for name, quantity in quantities.items():
            means[name].append(quantity(result))
            errors[name].append(result.standard_error_of(quantity))
        usual = torch.stack([values for _, values in rows]).std(0) / 12**0.5
        torch.testing.assert_close(result.standard_error, usual, rtol=1e-3, atol=1e-3)
    spread = {name: torch.stack(samples).std(0).mean() for name, samples in means.items()}
    for name, samples in errors.items():
        torch.testing.assert_close(torch.stack(samples).mean(), spread[name], rtol=0.1, atol=0)
    assert spread["recovered"] < 0.1 * spread["values"]


def test_metrics_that_return_booleans_or_integers_are_averaged() -> None:
    torch.manual_seed(0)
    model = AttentionOnly(vocabulary=17, context=6, d_model=8, layers=2, heads=2)
    clean, corrupted = torch.randint(17, (2, 8, 6))

    def rank(stream: Tensor) -> Tensor:
        return model.unembed(stream[:, -1]).argsort(-1)[:, 3]

    for metric in (rank, lambda stream: rank(stream) > 8):
        scan = patch_streams(model, clean, corrupted, metric)
        assert scan.values.dtype == torch.float32
        assert torch.equal(scan.values, torch.stack([pair.values for pair in scan.pairs]).mean(0))
        assert scan.standard_error.isfinite().all()
        assert scan.standard_error.any()


def test_recovered_without_a_gap_raises() -> None:
    model = AttentionOnly(vocabulary=17, context=6, d_model=8, layers=2, heads=2)
    metric = logit_difference(None, model.unembed, RIGHT, WRONG)
    scan = patch_streams(model, CLEAN, CLEAN, metric)
    with pytest.raises(ValueError, match="there is no gap to recover"):
        scan.recovered  # noqa: B018
