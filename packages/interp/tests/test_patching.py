import pytest
import torch
from interp import AttentionOnly, patch, record
from interp.patching import (
    AblationResult,
    PatchingResult,
    ablate_parts,
    attribution_patching,
    drop_heads,
    logit_difference,
    patch_streams,
    path_patching,
)
from interp.prompts import mean_over_pairs
from torch import Tensor, nn

CLEAN = torch.tensor([[1, 2, 3, 4, 2, 7]])
CORRUPTED = torch.tensor([[1, 2, 9, 4, 11, 7]])
RIGHT, WRONG = 5, 8


def difference(logits: Tensor) -> Tensor:
    return logits[:, -1, RIGHT] - logits[:, -1, WRONG]


@pytest.mark.parametrize("batch", [64, 4])
def test_patch_streams_equals_one_forward_pass_per_patch(decoder: nn.Module, batch: int) -> None:
    metric = logit_difference(decoder.norm, decoder.head, RIGHT, WRONG)
    scan = patch_streams(decoder, "layers.*", CLEAN, CORRUPTED, metric, batch=batch)
    with record(decoder, "layers.*:input") as clean:
        assert scan.clean == pytest.approx(difference(decoder(CLEAN)).item())
    assert scan.corrupted == pytest.approx(difference(decoder(CORRUPTED)).item())
    for i in range(3):
        for position in range(6):
            site = f"layers.{i}:input"

            def put(x: Tensor, site: str = site, position: int = position) -> Tensor:
                x = x.clone()
                x[:, position] = clean[site][:, position]
                return x

            with patch(decoder, {site: put}):
                expected = difference(decoder(CORRUPTED)).item()
            assert scan.values[i, position].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    # Equal tokens have equal inputs of block 0, so nothing is recovered at their positions.
    assert scan.recovered[0, [0, 1, 3, 5]].abs().max() < 1e-9


def test_blocks_are_replayed_with_their_other_arguments() -> None:
    torch.manual_seed(0)
    model = AttentionOnly(
        vocabulary=17, context=6, d_model=8, layers=2, heads=2, positions="attention"
    ).double()
    metric = logit_difference(None, model.unembed.weight, RIGHT, WRONG)
    scan = patch_streams(model, "blocks.*", CLEAN, CORRUPTED, metric)
    everything = {"blocks.0:input": lambda x: model.embed(CLEAN)}
    with patch(model, everything):
        assert difference(model(CORRUPTED)).item() == pytest.approx(scan.clean)


def test_blocks_that_do_not_feed_each_other_are_refused(decoder: nn.Module) -> None:
    metric = logit_difference(decoder.norm, decoder.head, RIGHT, WRONG)
    with pytest.raises(
        ValueError, match=r"one of layers.0.gate ... layers.2.gate does not feed the next"
    ):
        patch_streams(decoder, "layers.*.gate", CLEAN, CORRUPTED, metric)
    with pytest.raises(ValueError, match=r"both must be \(1, seq\)"):
        patch_streams(decoder, "layers.*", CLEAN, CORRUPTED[:, :4], metric)


def test_attribution_patching_has_second_order_error(decoder: nn.Module) -> None:
    """If the clean stream differs by e from the corrupted stream, the error is of order e^2."""
    model = nn.Sequential(*decoder.layers, decoder.norm, decoder.head).requires_grad_(False)
    torch.manual_seed(1)
    stream, step = torch.randn(2, 1, 6, 12, dtype=torch.float64)
    errors = []
    for size in (1e-2, 1e-3):
        scores = attribution_patching(
            model, ["0:input", "1"], stream + size * step, stream, lambda out: difference(out).sum()
        )
        assert {site: tuple(score.shape) for site, score in scores.items()} == {
            "0:input": (1, 6),
            "1": (1, 6),
        }
        # Patching all positions of either site gives the clean run.
        exact = (difference(model(stream + size * step)) - difference(model(stream))).item()
        errors.append([abs(score.sum().item() - exact) for score in scores.values()])
    for large, small in zip(*errors, strict=True):
        assert small < large / 50


def test_path_patching_through_all_receivers_equals_patching_the_sender() -> None:
    """The sender reaches the logits directly and through the second layer, without norms."""
    torch.manual_seed(0)
    model = AttentionOnly(vocabulary=17, context=6, d_model=8, layers=2, heads=2).double()
    sender = "blocks.0.attention"
    with record(model, sender) as seen:
        model(CLEAN)
    with patch(model, {sender: seen[sender]}):
        expected = model(CORRUPTED)
    everything = path_patching(
        model, sender, ["blocks.1.attention:input", "unembed:input"], CLEAN, CORRUPTED
    )
    # The two receivers are the attention of the second block and the unembedding.
    torch.testing.assert_close(everything, expected)
    direct = path_patching(model, sender, ["unembed:input"], CLEAN, CORRUPTED)
    with record(model, sender) as before:
        plain = model(CORRUPTED)
    change = (seen[sender] - before[sender]) @ model.unembed.weight.T
    torch.testing.assert_close(direct, plain + change)
    assert not torch.allclose(direct, everything)


def test_blocks_that_are_called_several_times_are_refused(decoder: nn.Module) -> None:
    """A shared block has one name, and its record would be that of the last call only."""
    metric = logit_difference(decoder.norm, decoder.head, RIGHT, WRONG)
    decoder.layers = nn.ModuleList([decoder.layers[0]] * 3)
    with pytest.raises(ValueError, match="called several times in one run"):
        patch_streams(decoder, "layers.*", CLEAN, CORRUPTED, metric)


def test_blocks_with_state_are_refused() -> None:
    class Counts(nn.Module):
        """A block with state, which adds its number of calls."""

        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + self.calls

    model = nn.Sequential(Counts(), Counts())
    with pytest.raises(ValueError, match=r"called again, .* return another stream"):
        patch_streams(
            model, "*", torch.zeros(1, 2, 3), torch.ones(1, 2, 3), lambda stream: stream.sum((1, 2))
        )


@torch.no_grad()
def test_ablations_equal_one_forward_pass_each() -> None:
    torch.manual_seed(0)
    model = AttentionOnly(vocabulary=17, context=6, d_model=8, layers=2, heads=2).double()
    metric = logit_difference(None, model.unembed, RIGHT, WRONG)
    site, reference = "attention.o:input", torch.randint(17, (3, 6))
    with record(model, f"blocks.*.{site}") as there:
        model(reference)
    others = {
        "zero": lambda z: [torch.zeros_like(z[:1])],
        "mean": lambda z: [z.mean((0, 1), keepdim=True)],
        "resample": lambda z: list(z.split(1)),
    }
    for how, sources in others.items():
        reference_tokens = None if how == "zero" else reference
        result = ablate_parts(
            model,
            "blocks.*",
            site,
            CLEAN,
            metric,
            how=how,
            reference=reference_tokens,
            heads=2,
            batch=1,
        )
        assert result.baseline == pytest.approx(difference(model(CLEAN)).item())
        for layer in range(2):
            for head in range(2):
                without = []
                for source in sources(there[f"blocks.{layer}.{site}"]):
                    put = drop_heads(head, heads=2, to=source)
                    with patch(model, {f"blocks.{layer}.{site}": put}):
                        without.append(difference(model(CLEAN)).item())
                expected = sum(without) / len(without)
                assert result.values[layer, head].item() == pytest.approx(expected, rel=1e-9)
                effect = result.baseline - expected
                assert result.effect[layer, head].item() == pytest.approx(effect, abs=1e-12)
    whole = ablate_parts(model, "blocks.*", "attention", CLEAN, metric)
    with patch(model, {"blocks.1.attention": torch.zeros_like}):
        assert whole.values[1, 0].item() == pytest.approx(difference(model(CLEAN)).item())
    for wrong, message in (
        ({"how": "median"}, "how 'median' is not one of"),
        ({"how": "mean"}, "how='mean' needs a reference="),
        ({"reference": reference}, "how='zero' takes no reference="),
        ({"how": "resample", "reference": reference[:, :4]}, r"pass \(n, 6\) tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            ablate_parts(model, "blocks.*", "attention", CLEAN, metric, **wrong)


def test_standard_errors_equal_the_spread_over_samples_of_prompts() -> None:
    """The metrics of a prompt vary together, so a difference or a ratio varies less than values."""
    torch.manual_seed(0)
    difficulty = 5 * torch.randn(200, 12, 1, 1)
    noise = 0.3 * torch.randn(200, 12, 2, 3)
    quantities = {
        "values": lambda result: result.values,
        "recovered": lambda result: result.recovered,
        "effect": lambda result: result.effect,
    }
    means = {name: [] for name in quantities}
    errors = {name: [] for name in quantities}
    for sample, of_sample in zip(difficulty, noise, strict=True):
        rows = [(float(x), x + 0.5 + y) for x, y in zip(sample, of_sample, strict=True)]
        patched = [PatchingResult(("0", "1"), values, x + 1, x) for x, values in rows]
        ablated = [AblationResult(("0", "1"), values, x) for x, values in rows]
        results = {"values": mean_over_pairs(patched), "effect": mean_over_pairs(ablated)}
        results["recovered"] = results["values"]
        for name, quantity in quantities.items():
            means[name].append(quantity(results[name]))
            errors[name].append(results[name].standard_error_of(quantity))
        usual = torch.stack([values for _, values in rows]).std(0) / 12**0.5
        torch.testing.assert_close(results["values"].standard_error, usual, rtol=1e-3, atol=1e-3)
    spread = {name: torch.stack(samples).std(0).mean() for name, samples in means.items()}
    for name, samples in errors.items():
        torch.testing.assert_close(torch.stack(samples).mean(), spread[name], rtol=0.1, atol=0)
    assert spread["effect"] < 0.1 * spread["values"]
    assert spread["recovered"] < 0.1 * spread["values"]


def test_metrics_that_return_booleans_or_integers_are_averaged() -> None:
    torch.manual_seed(0)
    model = AttentionOnly(vocabulary=17, context=6, d_model=8, layers=2, heads=2)
    clean, corrupted = torch.randint(17, (2, 8, 6))

    def rank(stream: Tensor) -> Tensor:
        return model.unembed(stream[:, -1]).argsort(-1)[:, 3]

    for metric in (rank, lambda stream: rank(stream) > 8):
        scan = patch_streams(model, "blocks.*", clean, corrupted, metric)
        assert scan.values.dtype == torch.float32
        assert torch.equal(scan.values, scan.per_pair.mean(0))
        assert scan.standard_error.isfinite().all()
        assert scan.standard_error.any()


def test_recovered_without_a_gap_raises() -> None:
    model = AttentionOnly(vocabulary=17, context=6, d_model=8, layers=2, heads=2)
    metric = logit_difference(None, model.unembed, RIGHT, WRONG)
    scan = patch_streams(model, "blocks.*", CLEAN, CLEAN, metric)
    with pytest.raises(ValueError, match="there is no gap to recover"):
        scan.recovered  # noqa: B018


class Masked(nn.Module):
    """Logits of which one is masked, after a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(12, 8), nn.Dropout(0.5)
        self.unembed, self.scores = nn.Linear(8, 10), nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.unembed(self.dropout(self.embed(tokens)))
        return self.scores(logits.masked_fill(torch.arange(10) == 0, -torch.inf))


def test_masked_scores_neither_hide_dropout_nor_give_nan() -> None:
    model = Masked()
    with pytest.raises(ValueError, match="differs when the corrupted run is repeated"):
        attribution_patching(model.train(), ["embed"], CLEAN, CORRUPTED, difference)
    effects = attribution_patching(
        model.eval(), ["scores"], CLEAN, CORRUPTED, lambda out: difference(out.softmax(-1))
    )
    assert effects["scores"].isfinite().all()
