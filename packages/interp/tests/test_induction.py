import functools
import itertools
import math

import pytest
import torch
from induction_checks import find_circuit, is_textbook_circuit
from interp import composition_scores, detect_heads, induction_circuit, patch, record
from interp.circuits.induction import repeated_tokens, train_induction
from torch import Tensor

# All sequences of BOS and six of four tokens.
UNIVERSE = torch.tensor([(0, *words) for words in itertools.product(range(1, 5), repeat=6)])


def compute_induction_reference(
    tokens: Tensor, vocabulary: int, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the mean of one-hot successors of all earlier occurrences of each token, or 0.

    `tokens` (batch, seq) start with BOS; the result is (batch, seq, vocabulary).
    """
    batch, length = tokens.shape
    result = torch.zeros(batch, length, vocabulary, dtype=dtype)
    for b, row in enumerate(tokens.tolist()):
        for i in range(1, length):
            successors = [row[j + 1] for j in range(1, i) if row[j] == row[i]]
            for token in successors:
                result[b, i, token] += 1 / len(successors)
    return result


@functools.cache
def get_reference_of_universe(dtype: torch.dtype = torch.float32) -> Tensor:
    return compute_induction_reference(UNIVERSE, 5, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_circuit_is_bit_equal_to_its_specification_on_every_sequence(
    dtype: torch.dtype,
) -> None:
    assert len(UNIVERSE) == 4096
    model = induction_circuit(5, 7, dtype=dtype)
    with record(model, "blocks.0.attention.pattern") as seen:
        logits = model(UNIVERSE)
    assert torch.equal(logits, get_reference_of_universe(dtype))
    shift = torch.zeros(7, 7, dtype=dtype)
    shift[range(1, 7), range(6)] = 1
    shift[0, 0] = 1
    assert torch.equal(seen["blocks.0.attention.pattern"], shift.expand(4096, 1, 7, 7))


@pytest.mark.parametrize(("sharpness", "largest"), [(10.0, 0.1), (50.0, 1e-9)])
def test_error_of_a_softer_circuit_is_bounded_by_the_softmax(
    sharpness: float, largest: float
) -> None:
    """In each layer at most 6 other keys have a weight of exp(-sharpness / 2)."""
    logits = induction_circuit(5, 7, sharpness=sharpness)(UNIVERSE)
    error = (logits - get_reference_of_universe()).abs().max().item()
    assert 1e-13 < error < largest
    assert error < 12 * math.exp(-sharpness / 2) * 2


def test_circuits_of_other_sizes_are_exact() -> None:
    torch.manual_seed(0)
    for vocabulary, context in ((3, 30), (40, 9)):
        tokens = torch.randint(1, vocabulary, (50, context))
        tokens[:, 0] = 0
        logits = induction_circuit(vocabulary, context, dtype=torch.float64)(tokens)
        torch.testing.assert_close(
            logits,
            compute_induction_reference(tokens, vocabulary, dtype=torch.float64),
            atol=1e-15,
            rtol=0,
        )


def test_k_composition_is_the_only_path() -> None:
    model = induction_circuit()
    scores = {
        kind: composition_scores(model.ov(), model.qk(), kind=kind) for kind in ("q", "k", "v")
    }
    assert {kind for kind, score in scores.items() if score[0, 0, 1, 0] > 0} == {"k"}
    with patch(model, {"blocks.0.attention.o": torch.zeros_like}):
        assert model(UNIVERSE).abs().max() == 0


def test_both_heads_are_detected() -> None:
    model = induction_circuit(12, 21)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tokens, repeated = repeated_tokens(8, 21, 12, periods=(5, 9), generator=generator)
        with record(model, "blocks.*.attention.pattern") as seen:
            model(tokens)
        result = detect_heads(seen, tokens, queries=repeated)
        for kind, layer in (("previous", 0), ("induction", 1)):
            best = result.best(kind)
            assert (best.layer, best.head) == (layer, 0)
            assert best.score == pytest.approx(1)


def test_repeated_tokens_repeat_with_distinct_tokens_and_mixed_periods() -> None:
    tokens, repeated = repeated_tokens(64, 33, 20, periods=(4, 11))
    assert (tokens[:, 0] == 0).all()
    assert (tokens[:, 1:] > 0).all()
    periods = (~repeated).sum(1) - 1
    assert set(periods.tolist()) == set(range(4, 12))
    for row, period in zip(tokens[:, 1:].tolist(), periods.tolist(), strict=True):
        assert len(set(row[:period])) == period
        assert row[period:] == row[:-period]


def grows_a_textbook_circuit(seed: int) -> bool:
    """Train one model; return True if it has one circuit and needs its previous-token head."""
    model, losses = train_induction(seed=seed)
    assert losses[0] == pytest.approx(math.log(48), abs=0.2)
    assert sum(losses[-20:]) / 20 < 0.5
    fresh = torch.Generator().manual_seed(seed + 1)
    tokens, repeated = repeated_tokens(128, 48, 48, periods=(12, 23), generator=fresh)
    result = find_circuit(model, tokens, repeated)
    return (
        result.accuracy > 0.95
        and is_textbook_circuit(result)
        and result.previous.score > 0.6 > result.previous.chance * 2
        and result.induction.score > 0.6 > result.induction.chance * 2
        and result.k_composition > 1.5 / 8
    )


@pytest.mark.exhaustive  # the quick start of the README is tested in every run
def test_a_trained_model_grows_the_circuit_and_needs_it() -> None:
    """Training finds both heads, and the model fails without the previous-token head.

    About a quarter of the seeds spread the circuit over more heads, so several may be trained.
    """
    assert any(grows_a_textbook_circuit(seed) for seed in range(5))


def test_training_is_reproducible_and_leaves_the_global_seed_alone() -> None:
    before = torch.random.get_rng_state()
    assert train_induction(steps=3)[1] == train_induction(steps=3)[1]
    induction_circuit()
    assert torch.equal(torch.random.get_rng_state(), before)
