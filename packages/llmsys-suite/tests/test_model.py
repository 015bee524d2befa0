"""The model computes the formulas of the papers, and its sizes are those of the benchmarks."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from llmsys_suite.config import SIZES, RunConfig
from llmsys_suite.model import Decoder, ModelConfig, compute_rotary_table, plain_attention, rotate
from llmsys_suite.variants.initial_weights import build_seeded_model, draw

CONFIG = ModelConfig(d_model=24, d_ff=40, num_layers=2, num_heads=3, vocabulary=11, context=9)


def compute_reference_logits(model, tokens):
    """Compute the logits one token and one head at a time, in float64."""
    weights = {name: w.double() for name, w in model.state_dict().items()}
    config = model.config
    head_dim = config.d_model // config.num_heads

    def norm(x, weight):
        return x / (x.square().mean() + 1e-5).sqrt() * weight

    def turn(x, position):
        half, out = head_dim // 2, x.clone()
        for i in range(half):
            angle = position * 10_000.0 ** (-2 * i / head_dim)
            out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
            out[half + i] = x[i] * math.sin(angle) + x[half + i] * math.cos(angle)
        return out

    stream = [weights["embedding.weight"][t] for t in tokens]
    for layer in range(config.num_layers):
        w = {
            k.split(f"blocks.{layer}.")[1]: v for k, v in weights.items() if f"blocks.{layer}." in k
        }
        normed = [norm(x, w["attention_norm.weight"]) for x in stream]
        mixed = [torch.zeros(config.d_model, dtype=torch.float64) for _ in stream]
        for head in range(config.num_heads):
            rows = slice(head * head_dim, (head + 1) * head_dim)
            q = [turn(w["attention.q.weight"][rows] @ x, t) for t, x in enumerate(normed)]
            k = [turn(w["attention.k.weight"][rows] @ x, t) for t, x in enumerate(normed)]
            v = [w["attention.v.weight"][rows] @ x for x in normed]
            for t in range(len(stream)):
                scores = torch.stack([q[t] @ k[s] for s in range(t + 1)]) / head_dim**0.5
                for s, weight in enumerate(scores.softmax(0)):
                    mixed[t][rows] += weight * v[s]
        stream = [x + w["attention.out.weight"] @ m for x, m in zip(stream, mixed, strict=True)]
        for t, x in enumerate(stream):
            y = norm(x, w["ffn_norm.weight"])
            gate = w["ffn.gate.weight"] @ y
            hidden = gate * torch.sigmoid(gate) * (w["ffn.up.weight"] @ y)
            stream[t] = x + w["ffn.down.weight"] @ hidden
    return torch.stack([weights["head.weight"] @ norm(x, weights["norm.weight"]) for x in stream])


def test_logits_equal_a_reference_written_token_by_token():
    torch.manual_seed(0)
    model = Decoder(CONFIG, plain_attention)
    tokens = torch.randint(0, 11, (1, 7))
    expected = compute_reference_logits(model, tokens[0])
    torch.testing.assert_close(model(tokens)[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_token_changes_nothing_before_it():
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    tokens = torch.randint(0, 11, (1, 9))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    rope = compute_rotary_table(8, 32).double()
    x, y = torch.randn(2, 8, dtype=torch.float64)
    at = [rotate(torch.stack([x] * 32), rope), rotate(torch.stack([y] * 32), rope)]
    torch.testing.assert_close(at[0].norm(dim=-1), x.norm().expand(32))
    torch.testing.assert_close(at[0][5] @ at[1][2], at[0][25] @ at[1][22], rtol=1e-5, atol=1e-6)
    assert abs(at[0][5] @ at[1][2] - at[0][5] @ at[1][3]) > 1e-3


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"d_model": 6, "num_heads": 2}, "twice the number of heads, got"),
        ({"d_model": 24, "num_heads": 5}, "d_model to be a multiple of 10, twice .*, got 24"),
        ({"num_heads": 0}, "num_heads to be an integer >= 1, got 0"),
        ({"context": -1}, "context to be an integer >= 1, got -1"),
        ({"d_ff": 2.5}, r"d_ff to be an integer >= 1, got 2\.5"),
        ({"vocabulary": True}, "vocabulary to be an integer >= 1, got True"),
    ],
)
def test_a_shape_that_no_model_can_have_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        ModelConfig(**{**vars(CONFIG), **change})


@pytest.mark.parametrize(
    ("x", "table"),
    [((7, 3), (4, 7)), ((7, 4), (6, 7)), ((7, 4), (4, 1)), ((7, 4), (4, 6)), ((1, 4), (4, 7))],
)
def test_a_rotation_never_broadcasts(x, table):
    with pytest.raises(ValueError, match="expected rope of shape"):
        rotate(torch.ones(x), compute_rotary_table(*table))


@pytest.mark.parametrize("context", [1, 9])
def test_more_tokens_than_the_context_are_refused(context):
    model = Decoder(ModelConfig(**{**vars(CONFIG), "context": context}))
    assert model(torch.zeros(2, context, dtype=torch.long)).shape == (2, context, 11)
    with pytest.raises(ValueError, match=rf"expected at most {context} tokens"):
        model(torch.zeros(2, context + 1, dtype=torch.long))


def test_checkpointing_gives_the_same_gradients():
    tokens = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(1))
    gradients = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        config = ModelConfig(**{**vars(CONFIG), "checkpoint": checkpoint})
        model = Decoder(config, plain_attention)
        model.compute_loss(tokens, tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("small", 128.6),
        ("medium", 423.2),
        ("large", 969.4),
        ("xl", 1998.2),
        ("2.7B", 3406.8),
        ("10B", 12832.8),
    ],
)
def test_named_sizes_hold_the_parameters_of_their_closed_form(size, millions):
    shape = SIZES[size]
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_size(size, vocabulary=10_000))
    d, ff = shape.d_model, shape.d_ff
    layers = shape.num_layers
    closed_form = layers * (4 * d * d + 3 * d * ff + 2 * d) + 2 * 10_000 * d + d
    assert sum(p.numel() for p in model.parameters()) == closed_form
    assert closed_form / 1e6 == pytest.approx(millions, abs=0.06)


def test_the_tiny_model_has_about_a_million_parameters():
    model = Decoder(ModelConfig.from_size("tiny"))
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.2e6


def test_initial_weights_are_drawn_once_and_each_model_has_a_copy():
    run = SimpleNamespace(config=RunConfig(size="mini", seed=7), device=torch.device("cpu"))
    config = ModelConfig.from_size("mini")
    torch.manual_seed(7)
    expected = Decoder(config).state_dict()
    draw.cache_clear()
    for checkpoint in (False, True, False):
        model = build_seeded_model(
            run, replace(config, checkpoint=checkpoint), attention=plain_attention
        )
        assert model.config.checkpoint is checkpoint
        assert all(block.attention.attend is plain_attention for block in model.list_blocks())
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, expected[name])
        with torch.no_grad():
            model.embedding.weight.zero_()
    assert draw.cache_info().misses == 1
    assert not torch.equal(
        build_seeded_model(run, config, seed=8).head.weight, expected["head.weight"]
    )
