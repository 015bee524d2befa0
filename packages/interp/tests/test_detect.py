import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interp import detect_heads
from interp.detect import targets


def plain_score(
    pattern: torch.Tensor, tokens: torch.Tensor, kind: str, first_query: int
) -> list[float]:
    """The definition, one query at a time."""
    batch, heads, length, _ = pattern.shape
    weights = pattern.tolist()
    scores = []
    for head in range(heads):
        masses = []
        for b in range(batch):
            row = tokens[b].tolist()
            for q in range(first_query, length):
                keys = {
                    "previous": [q - 1] if q else [],
                    "duplicate": [k for k in range(q) if row[k] == row[q]],
                    "induction": [k + 1 for k in range(q) if row[k] == row[q]],
                    "first": [0] if q else [],
                    "current": [q],
                }[kind]
                if keys:
                    masses.append(sum(weights[b][head][q][k] for k in keys))
        scores.append(sum(masses) / len(masses) if masses else float("nan"))
    return scores


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    length=st.integers(1, 9),
    words=st.integers(1, 5),
    first_query=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_scores_equal_the_definition_query_by_query(
    batch: int, heads: int, length: int, words: int, first_query: int, seed: int
) -> None:
    torch.manual_seed(seed)
    tokens = torch.randint(words, (batch, length))
    patterns = torch.randn(2, batch, heads, length, length, dtype=torch.float64).softmax(-1)
    before = patterns.clone()
    found = detect_heads(patterns, tokens, queries=slice(first_query, None))
    for kind, scores in found.scores.items():
        for layer in range(2):
            expected = plain_score(patterns[layer], tokens, kind, first_query)
            torch.testing.assert_close(
                scores[layer], torch.tensor(expected, dtype=torch.float64), equal_nan=True
            )
    assert torch.equal(patterns, before)


def test_half_precision_patterns_are_averaged_in_single_precision() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(50, (2, 600))
    pattern = torch.randn(2, 1, 600, 600, requires_grad=True).softmax(-1).bfloat16()
    single = detect_heads([pattern.float()], tokens).scores
    for kind, score in detect_heads([pattern], tokens).scores.items():
        assert not score.requires_grad
        torch.testing.assert_close(score, single[kind])


@pytest.mark.parametrize("kind", ["previous", "duplicate", "induction", "first", "current"])
def test_a_perfect_head_scores_one_and_an_even_one_scores_chance(kind: str) -> None:
    period = torch.randperm(8)
    tokens = torch.cat([period, period])[None]
    mask = targets(tokens)[kind][0].double()
    perfect = torch.where(mask.any(-1, keepdim=True), mask, torch.eye(16, dtype=torch.float64))
    perfect = perfect / perfect.sum(-1, keepdim=True)
    evenly = torch.ones(16, 16, dtype=torch.float64).tril()
    evenly = evenly / evenly.sum(-1, keepdim=True)
    found = detect_heads({"layer": torch.stack([evenly, perfect])[None]}, tokens[0])
    best = found.best(kind)
    assert (best.layer, best.head) == (0, 1)
    assert best.score == pytest.approx(1)
    assert found.scores[kind][0, 0].item() == pytest.approx(best.chance)
    assert best.chance < 0.5


def test_without_tokens_only_the_positional_kinds_have_a_score() -> None:
    torch.manual_seed(0)
    patterns = [torch.randn(2, 3, 6, 6).softmax(-1)]
    scores = detect_heads(patterns).scores
    by_tokens = detect_heads(patterns, torch.randint(3, (2, 6))).scores
    for kind in ("previous", "first", "current"):
        assert torch.equal(scores[kind], by_tokens[kind])
    assert scores["duplicate"].isnan().all()
    assert scores["induction"].isnan().all()
