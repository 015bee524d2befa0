"""Bad input and misuse: each error states the problem, the value and the remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from interp import (
    AttentionOnly,
    LowRank,
    attribution,
    composition_scores,
    detect_heads,
    knock_out_attention,
    logit_lens,
    ov_circuit,
    patch,
    qk_circuit,
    record,
    view,
)
from interp.bench import build_random_decoder
from interp.circuits.induction import repeated_tokens
from interp.circuits.vocabulary import copying_scores
from interp.decoder.neurons import neuron_attribution
from interp.lens import compute_head_outputs
from interp.patching import drop_heads, edge_attribution, logit_difference, patch_streams
from torch import Tensor, nn

TOKENS = torch.tensor([[1, 2, 3, 4]])
EVEN = torch.full((1, 2, 4, 4), 0.25)
PAIR = LowRank(torch.ones(2, 3, 6, 2), torch.ones(2, 3, 2, 6))
DECODER = build_random_decoder("gpt2", vocabulary=5, d_model=6, layers=1, heads=2, context=4)
INFINITE = LowRank(torch.full((2, 3, 6, 2), torch.inf), torch.ones(2, 3, 2, 6))
WIDE = LowRank(torch.ones(2, 3, 6, 2), torch.ones(2, 3, 2, 5))


@pytest.fixture
def model() -> AttentionOnly:
    torch.manual_seed(0)
    return AttentionOnly(vocabulary=7, context=6, d_model=8, layers=2, heads=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: LowRank(torch.ones(3, 2), torch.ones(3, 4)),
            r"\(3, 2\) and \(3, 4\) do not multiply",
        ),
        (lambda: WIDE.eigenvalues(), "expected square matrices for eigenvalues"),
        (lambda: INFINITE.eigenvalues(), "expected finite factors .* nan or inf"),
        (
            lambda: copying_scores(INFINITE, torch.ones(7, 6), torch.ones(7, 6)),
            "expected finite factors .* nan or inf",
        ),
        (
            lambda: qk_circuit(torch.ones(6, 8), torch.ones(6, 8), heads=4),
            "6 rows.* multiple of 4 heads",
        ),
        (
            lambda: ov_circuit(torch.ones(4, 8), torch.ones(8, 6), heads=3, kv_heads=2),
            "3 query heads cannot share 2 key-value heads evenly; check kv_heads=",
        ),
        (
            lambda: qk_circuit(torch.ones(6, 8), torch.ones(6, 8), heads=2, kv_heads=0),
            "w_k has 6 rows.* multiple of 0 heads",
        ),
        (
            lambda: composition_scores(PAIR, PAIR, kind="x"),
            "expected kind 'q', 'k' or 'v', got 'x'",
        ),
        (lambda: composition_scores(PAIR, kind="k"), "pass qk="),
        (lambda: composition_scores(PAIR, PAIR[0], kind="k"), r"\(2, 3\) and \(3,\); both must be"),
        (lambda: composition_scores(PAIR, WIDE, kind="k"), "write 6 dimensions, .* read 5"),
        (lambda: detect_heads([], TOKENS), "expected attention patterns .* got none"),
        (lambda: detect_heads([EVEN[:, 0]], TOKENS), r"torch.float32 \(1, 4, 4\)"),
        (lambda: detect_heads([EVEN, EVEN[:, :1]], TOKENS), "pattern of layer 1"),
        (
            lambda: detect_heads([EVEN, 2 * EVEN], TOKENS),
            "layer 1's pattern sum to 2 ... 2, .* softmax",
        ),
        (lambda: detect_heads([EVEN * float("nan")], TOKENS), "pattern sum to nan"),
        (lambda: detect_heads([EVEN], TOKENS[None]), r"tokens have shape \(1, 1, 4\)"),
        (
            lambda: detect_heads([EVEN], TOKENS).best("copy"),
            "expected kind to be one of .'previous', .*, got 'copy'",
        ),
        (
            lambda: logit_lens(torch.ones(2, 4, 3), None, torch.ones(5, 3)),
            r"\(layers, batch, seq, d_model\), got \(2, 4, 3\); pass a single stream as \[stream\]",
        ),
        (lambda: logit_lens([], None, torch.ones(5, 3)), "at least one residual stream"),
        (
            lambda: logit_lens([torch.ones(1, 4, 3)], None, torch.ones(5, 3), targets=TOKENS[0]),
            r"expected targets of shape \(1, 4\), got \(4,\)",
        ),
        (
            lambda: edge_attribution(DECODER, TOKENS, TOKENS, torch.sum, exact=-1),
            "expected exact >= 0, got -1",
        ),
        (
            lambda: patch_streams(DECODER, TOKENS, TOKENS, torch.sum, batch=0),
            "expected batch >= 1, .* got 0",
        ),
        (lambda: neuron_attribution(DECODER, TOKENS, -TOKENS), "at least 0 in targets, got -4"),
        (
            lambda: neuron_attribution(DECODER, TOKENS, TOKENS[:, 0]),
            r"expected token ids \(1, 4\) as targets, got \(1,\)",
        ),
        (
            lambda: logit_difference(None, torch.ones(5, 3), 4, -1),
            "expected a token id from 0 to 4 as wrong, got -1",
        ),
        (
            lambda: patch_streams(DECODER, TOKENS[0], TOKENS[0], torch.sum),
            r"prompts are \(4,\) and \(4,\); both must be \(1, seq\) or \(pairs, seq\)",
        ),
        (lambda: knock_out_attention([False, True], [0]), "indices of queries, got torch.bool"),
        (lambda: knock_out_attention([1], 3), r"a sequence of keys, got 3; pass \[3\]"),
        (
            lambda: detect_heads([EVEN], {"input_ids": TOKENS, "attention_mask": TOKENS - 4}),
            "attention_mask has values from -3 to 0; each row must be 1",
        ),
        (
            lambda: detect_heads([EVEN], {"input_ids": TOKENS, "attention_mask": EVEN}),
            r"attention_mask is \(1, 2, 4, 4\); pass the mask of the tokens, \(n, seq\)",
        ),
        (
            lambda: attribution({"a": torch.randn(1, 4, 3)}, torch.tanh, torch.ones(5, 3), TOKENS),
            r"not of the form g \* x",
        ),
        (
            lambda: attribution({"a": torch.ones(4, 3)}, None, torch.ones(5, 3), TOKENS),
            r"expected token ids \(4,\) as targets, got \(1, 4\)",
        ),
        (lambda: attribution({}, None, torch.ones(5, 3), TOKENS), "at least one component"),
        (lambda: drop_heads(0, 2, heads=2), r"expected heads from 0 to 1, got \(0, 2\)"),
        (lambda: drop_heads(-1, heads=2), r"expected heads from 0 to 1, got \(-1,\)"),
        (
            lambda: drop_heads(0, heads=3)(torch.ones(1, 4, 8)),
            "expected 8 features to be a multiple of heads, got heads=3",
        ),
        (
            lambda: compute_head_outputs(torch.ones(1, 4, 30), torch.ones(8, 30), heads=4),
            "expected 30 features to be a multiple of heads, got heads=4",
        ),
        (
            lambda: detect_heads([EVEN], TOKENS, queries=torch.tensor([3])),
            r"queries are torch.int64 \(1,\); pass a slice, or booleans \(4,\) or \(1, 4\)",
        ),
        (
            lambda: detect_heads([EVEN], TOKENS, queries=torch.tensor([0, 1, 2, 3])),
            r"queries are torch.int64 \(4,\); pass a slice, or booleans",
        ),
        (lambda: repeated_tokens(1, 9, 5, periods=(3, 5)), r"low <= high <= 4, got \(3, 5\)"),
        (
            lambda: AttentionOnly(vocabulary=3, context=3, d_model=5, layers=1, heads=2),
            "d_model 5 is not a multiple of 2 heads; pass d_head",
        ),
    ],
)
def test_bad_values_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


def test_unknown_sites_are_refused_with_similar_names(model: AttentionOnly) -> None:
    with (
        pytest.raises(ValueError, match=r"named 'block\.0'; similar names: blocks\.0"),
        record(model, "block.0"),
    ):
        pass
    with pytest.raises(ValueError, match="ends in 'output'"), record(model, "blocks.0:output"):
        pass
    with record(model, "unembed") as seen:
        model(TOKENS)
    assert list(seen) == ["unembed"]


def test_patches_of_wrong_shape_or_type_are_refused_and_leave_no_hook(
    model: AttentionOnly,
) -> None:
    wrong = {"blocks.0": torch.ones(3, 3)}
    with (
        pytest.raises(ValueError, match=r"shape \(1, 4, 8\), got \(3, 3\)"),
        patch(model, wrong),
    ):
        model(TOKENS)
    with (
        pytest.raises(TypeError, match="returned a NoneType"),
        patch(model, {"blocks.0": lambda x: None}),
    ):  # type: ignore[dict-item,return-value]
        model(TOKENS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("patterns", [("blocks.0", "blocks.*"), ("**", "blocks.0")])
def test_two_patches_of_one_site_are_refused(
    model: AttentionOnly, patterns: tuple[str, str]
) -> None:
    with (
        pytest.raises(ValueError, match=r"both replace '[\w.]+'; pass one replacement per site"),
        patch(model, dict.fromkeys(patterns, torch.zeros_like)),
    ):
        model(TOKENS)


def test_a_patch_that_never_ran_is_an_error(model: AttentionOnly) -> None:
    with (
        pytest.raises(RuntimeError, match=r"patch of blocks\.1 never ran"),
        patch(model, {"blocks.1": torch.zeros_like}),
    ):
        model.blocks[0](torch.ones(1, 4, 8))


def test_models_compiled_earlier_are_patched_or_refused(model: AttentionOnly) -> None:
    compiled = torch.compile(model, backend="eager")
    expected = out = compiled(TOKENS)
    refusal = ""
    try:
        with patch(model, {"blocks.0": torch.zeros_like}):
            out = compiled(TOKENS)
    except RuntimeError as error:
        refusal = str(error)
    assert "patch of blocks.0 never ran" in refusal or not torch.allclose(out, expected)


def test_modules_without_tensors_are_refused() -> None:
    class Text(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "text"

    module = Text()
    with pytest.raises(TypeError, match="is a str without a tensor"), record(module, ""):
        module(torch.ones(1))
    with pytest.raises(TypeError, match="expected a tensor in ':input'"), record(module, ":input"):
        module("words")


def test_view_refuses_results_of_other_lengths(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with pytest.raises(ValueError, match=r"layer 0 is \(1, 2, 4, 4\); for 3 tokens"):
        view(path, tokens=["a", "b", "c"], patterns=[EVEN])
    with pytest.raises(ValueError, match="not within 0 and 1"):
        view(path, tokens=list("abcd"), patterns=[EVEN - 1])
    lens = logit_lens([torch.ones(1, 4, 3)], None, torch.ones(5, 3))
    with pytest.raises(ValueError, match="expected lens for 2 tokens, got 4 positions"):
        view(path, tokens=["a", "b"], lens=lens)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; create it"):
        view(tmp_path / "nowhere" / "page.html", tokens=["a"])
    assert not path.exists()
