import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interp import AttentionOnly, detect_heads, record_patterns
from interp.detect import find_target_keys
from scipy import stats


def compute_plain_score(
    pattern: torch.Tensor, tokens: torch.Tensor, kind: str, first_query: int
) -> list[float]:
    """Return the score by its definition, one query at a time."""
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


@settings(max_examples=8, deadline=None)
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
    result = detect_heads(patterns, tokens, queries=slice(first_query, None))
    for kind, scores in result.scores.items():
        for layer in range(2):
            expected = compute_plain_score(patterns[layer], tokens, kind, first_query)
            torch.testing.assert_close(
                scores[layer], torch.tensor(expected, dtype=torch.float64), equal_nan=True
            )
    assert torch.equal(patterns, before)


@pytest.mark.parametrize("kind", ["previous", "duplicate", "induction", "first", "current"])
def test_perfect_heads_score_one_and_uniform_heads_score_chance(kind: str) -> None:
    period = torch.randperm(8)
    tokens = torch.cat([period, period])[None]
    mask = find_target_keys(tokens)[kind][0].double()
    perfect = torch.where(mask.any(-1, keepdim=True), mask, torch.eye(16, dtype=torch.float64))
    perfect = perfect / perfect.sum(-1, keepdim=True)
    evenly = torch.ones(16, 16, dtype=torch.float64).tril()
    evenly = evenly / evenly.sum(-1, keepdim=True)
    result = detect_heads({"layer": torch.stack([evenly, perfect])[None]}, tokens[0])
    best = result.best(kind)
    assert (best.layer, best.head) == (0, 1)
    assert best.score == pytest.approx(1)
    assert result.scores[kind][0, 0].item() == pytest.approx(best.chance)
    assert best.chance < 0.5


def draw_sharp_noise(trial: int, heads: int = 24, length: int = 12) -> torch.Tensor:
    """Return patterns in which each query attends to one random key, or to a few."""
    generator = torch.Generator().manual_seed(trial)
    scores = torch.randn(1, heads, length, length, generator=generator) * (1, 4, 30)[trial % 3]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


def test_best_of_many_random_heads_is_noise() -> None:
    """The best score of many random heads is far above chance, but not significant."""
    named, above = 0, 0
    for trial in range(30):
        tokens = torch.randint(4, (1, 12), generator=torch.Generator().manual_seed(trial))
        result = detect_heads([draw_sharp_noise(trial)], tokens)
        for kind in ("previous", "duplicate", "induction"):
            above += result.best(kind).score > 1.5 * result.chance[kind]
            named += not result.best(kind).is_noise
            assert bool(result.significant(kind)) == (not result.best(kind).is_noise)
    assert above > 40  # of 90 best scores; a level that ignores the number of heads accepts them
    assert named <= 4  # the level is 5 %


def test_p_values_are_at_least_permutation_p_values() -> None:
    tokens = torch.randint(3, (1, 12), generator=torch.Generator().manual_seed(1))
    pattern = draw_sharp_noise(1, heads=3)
    result = detect_heads([pattern], tokens)
    generator = torch.Generator().manual_seed(0)
    for kind in ("previous", "duplicate", "induction"):
        mask = find_target_keys(tokens)[kind][0]
        queries = mask.any(-1).nonzero()[:, 0].tolist()
        sampled = torch.zeros(3, 400)
        for query in queries:
            order = torch.rand(400, query + 1, generator=generator).argsort(-1)
            drawn = order[:, : int(mask[query].sum())]
            sampled += pattern[0, :, query][:, drawn].sum(-1) / len(queries)
        fraction = (sampled >= result.scores[kind][0][:, None] - 1e-6).float().mean(-1)
        assert (result.p_values[kind][0] >= 0.8 * fraction).all()


def test_copies_of_a_prompt_add_no_evidence() -> None:
    tokens = torch.randint(4, (3, 12), generator=torch.Generator().manual_seed(1))
    pattern = torch.cat([draw_sharp_noise(trial) for trial in (1, 2, 4)])
    once = detect_heads([pattern], tokens)
    copies = detect_heads([pattern.repeat(7, 1, 1, 1)], tokens.repeat(7, 1))
    for kind, p_values in once.p_values.items():
        torch.testing.assert_close(copies.p_values[kind], p_values)
        torch.testing.assert_close(copies.scores[kind], once.scores[kind])


def draw_prompts_of_every_kind() -> dict[str, torch.Tensor]:
    """Return prompts with copies, common prefixes, first tokens, periods or a small vocabulary."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 97, (8, 12), generator=generator)
    tokens[:, 8] = tokens[:, 3]
    same_start = torch.cat([torch.zeros(8, 1, dtype=torch.long), tokens], 1)
    same_prefix = tokens[:1].repeat(32, 1)
    same_prefix[:, -1] = torch.randint(97, (32,), generator=generator)
    return {
        "one prompt": tokens[:1],
        "copies": tokens[:1].expand(64, -1),
        "copies of two": tokens[:2].repeat(32, 1),
        "same start": same_start,
        "same prefix": same_prefix,
        "repeated": torch.cat([tokens, tokens], 1),
        "few tokens": torch.randint(5, (8, 24), generator=generator),
        "one other token": draw_template(generator),
    }


def draw_template(generator: torch.Generator) -> torch.Tensor:
    """Return copies of one prompt in which one token, at two positions, differs."""
    tokens = torch.randint(97, (1, 24), generator=generator).repeat(12, 1)
    tokens[:, 7] = tokens[:, 18] = torch.randperm(97, generator=generator)[:12]
    return tokens


def draw_random_patterns(tokens: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Return the patterns of a model with sharp random heads, some of which attend by position."""
    torch.manual_seed(seed)
    model = AttentionOnly(vocabulary=97, context=24, d_model=48, layers=2, heads=8)
    for name, parameter in model.named_parameters():
        embeds = name.startswith(("embed", "position"))
        torch.nn.init.normal_(parameter, std=(1.0, 2.0)[seed % 2] if embeds else 1.5 * 48**-0.5)
    with record_patterns(model) as patterns:
        model(tokens)
    return patterns


def compute_largest_count(trials: int) -> int:
    """Return the number of errors that 5 % exceed in 2 % of all cases."""
    return int(stats.binom(trials, 0.05).ppf(0.98))


@torch.no_grad()
@pytest.mark.parametrize(
    ("prompts", "models"),
    [
        pytest.param(name, models, marks=[] if is_fast else pytest.mark.exhaustive)
        for name in draw_prompts_of_every_kind()
        for models, is_fast in ((6, name in ("same prefix", "one other token")), (200, False))
    ],
)
def test_one_random_model_in_twenty_has_a_significant_head(prompts: str, models: int) -> None:
    """The rate is family-wise: over all heads of a model, for each kind."""
    tokens = draw_prompts_of_every_kind()[prompts]
    named = dict.fromkeys(find_target_keys(tokens), 0)
    for seed in range(models):
        scores = detect_heads(draw_random_patterns(tokens, seed), tokens)
        for kind in named:
            named[kind] += bool(scores.significant(kind))
    assert all(count <= compute_largest_count(models) for count in named.values()), named


@torch.no_grad()
def test_windows_and_padding_add_no_false_positives() -> None:
    """If few keys are visible, attention to them is not a choice of the head."""
    tokens = torch.randint(97, (8, 24), generator=torch.Generator().manual_seed(0))
    padding = torch.zeros(8, 40, dtype=torch.long)
    mask = torch.cat([padding, torch.ones_like(tokens)], 1)
    result = dict.fromkeys(find_target_keys(tokens), 0)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(8, 32, 24, 24, generator=generator)
        index = torch.arange(24)
        distance = index[:, None] - index
        hidden = (distance < 0) | (distance >= 4)
        window = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        padded = torch.nn.functional.pad(window, (40, 0, 40, 0))
        first = detect_heads([window], tokens)
        second = detect_heads([padded], torch.cat([padding, tokens], 1), queries=mask)
        for kind in result:
            result[kind] += len(first.significant(kind)) + len(second.significant(kind))
    assert not any(result.values()), result


def test_strong_heads_are_significant_and_weak_heads_are_not() -> None:
    period = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([period, period])[None].expand(4, -1)
    mask = find_target_keys(tokens[:1])["induction"][0].float()
    perfect = torch.where(mask.any(-1, keepdim=True), mask, torch.eye(24))
    perfect = perfect / perfect.sum(-1, keepdim=True)
    evenly = torch.ones(24, 24).tril()
    evenly = evenly / evenly.sum(-1, keepdim=True)
    heads = [fraction * perfect + (1 - fraction) * evenly for fraction in (0.0, 1.0, 0.5, 0.02)]
    result = detect_heads([torch.stack(heads).expand(4, -1, -1, -1)], tokens)
    assert [(h.layer, h.head) for h in result.significant("induction")] == [(0, 1), (0, 2)]
    assert result.best("duplicate").is_noise
    # Without a repeated token the scores are nan, and no head is significant.
    none = detect_heads([torch.stack(heads)[None, :, :12, :12].softmax(-1)], period)
    assert none.best("induction").is_noise
    assert none.significant("induction") == []


def test_heads_of_models_with_other_layers_between_are_named() -> None:
    """Layers without attention patterns (state-space layers) are counted in the names only."""
    torch.manual_seed(0)
    tokens = torch.randint(20, (3, 12))
    shift = torch.eye(12).roll(-1, 1).tril()
    shift[0, 0] = 1
    uniform = torch.ones(12, 12).tril() / torch.arange(1, 13)[:, None]
    patterns = {
        "model.layers.1.self_attn": uniform.expand(3, 2, 12, 12),
        "model.layers.5.self_attn": torch.stack([uniform, shift]).expand(3, 2, 12, 12),
    }
    best = detect_heads(patterns, tokens).best("previous")
    assert (best.name, best.layer, best.head) == ("model.layers.5.self_attn", 1, 1)
    assert detect_heads(list(patterns.values()), tokens).best("previous").name == "1"
