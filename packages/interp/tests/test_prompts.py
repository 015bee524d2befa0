"""Prompts with padding, in parts or as texts have the results of single whole prompts."""

import copy
import functools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interp import (
    Cache,
    Decoder,
    describe,
    detect_heads,
    logit_lens,
    patch,
    record,
    record_patterns,
    view,
)
from interp.interventions import steering_vector
from interp.patching import (
    Node,
    attribution_patching,
    edge_attribution,
    logit_difference,
    pairs_of,
    patch_edges,
    patch_parts,
    patch_streams,
)
from interp.text import encode
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")

SIZES = {
    "vocab_size": 37, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 20, "max_position_embeddings": 40, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "GPT2LMHeadModel": {},
    "LlamaForCausalLM": {"num_key_value_heads": 2},
    "MistralForCausalLM": {"num_key_value_heads": 2, "sliding_window": 4},
    "BloomForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 20, "word_embed_proj_dim": 24},
    "DeepseekV3ForCausalLM": {
        "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 14, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6, "v_head_dim": 10, "first_k_dense_replace": 2,
    },
}  # fmt: skip


def build_peer(name: str) -> nn.Module:
    """Return a random model in which every parameter affects the logits."""
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    config = model_class.config_class(**SIZES, **FAMILIES[name])
    config._attn_implementation = "eager"
    model = model_class(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@functools.cache
def get_description(name: str) -> Decoder:
    """Return a description that several tests read and none changes."""
    return describe(build_peer(name))


TOKENS = torch.arange(24).reshape(2, 12) * 7 % 36
MASK = torch.ones_like(TOKENS)
MASK[0, :3] = 0
POSITIONS = (MASK.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_cached_calls_have_the_logits_of_one_call(name: str) -> None:
    decoder = get_description(name)
    whole = decoder(TOKENS)
    torch.testing.assert_close(whole, build_peer(name)(TOKENS).logits, rtol=1e-4, atol=1e-4)
    cache = Cache()
    parts = [decoder(part, cache=cache) for part in TOKENS.split([5, 1, 4, 2], dim=1)]
    assert cache.get_seq_length() == 12
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    # A padded prompt, with the mask of all tokens.
    padded = decoder(TOKENS, attention_mask=MASK, position_ids=POSITIONS)
    for last in (POSITIONS[:, 8:], None):
        cache = Cache()
        first = decoder(TOKENS[:, :8], MASK[:, :8], POSITIONS[:, :8], cache=cache)
        ours = torch.cat([first, decoder(TOKENS[:, 8:], MASK, last, cache=cache)], 1)
        torch.testing.assert_close(ours[MASK.bool()], padded[MASK.bool()], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_failed_call_leaves_the_cache_and_wrong_masks_are_refused() -> None:
    decoder = get_description("LlamaForCausalLM")
    cache = Cache()
    decoder(TOKENS[:, :5], cache=cache)

    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), patch(decoder, {"blocks.1": fail}):
        decoder(TOKENS[:, 5:9], cache=cache)
    expected = decoder(TOKENS)[:, 5:]
    torch.testing.assert_close(decoder(TOKENS[:, 5:], cache=cache), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"attention_mask is \(2, 2\); pass \(2, 14\), .* cache"):
        decoder(TOKENS[:, :2], attention_mask=MASK[:, :2], cache=cache)
    with pytest.raises(ValueError, match="up to 40 tokens, got 41"):
        decoder(torch.zeros(2, 29, dtype=torch.long), cache=cache)
    other = get_description("MistralForCausalLM")
    with pytest.raises(ValueError, match="keys and values of another decoder"):
        other(TOKENS[:, 5:], cache=cache)
    with pytest.raises(TypeError, match=r"expected an interp\.Cache, got a DynamicCache"):
        decoder(TOKENS, cache=transformers.DynamicCache())
    for rows in (TOKENS[:1], TOKENS.repeat(2, 1)):
        with pytest.raises(ValueError, match=rf"expected 2 rows .* got {len(rows)}"):
            decoder(rows[:, 5:6], cache=cache)
    for tokens in (TOKENS[0, 0], TOKENS[0]):
        with pytest.raises(ValueError, match=r"integers \(batch, seq\)"):
            decoder(tokens, cache=cache)
    assert copy.deepcopy(cache).decoder() is decoder
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 8)
    prompt = {"input_ids": TOKENS[:1], "cache": cache}
    with pytest.raises(ValueError, match="pass the whole text"):
        patch_streams(decoder, prompt, prompt, metric)
    prompt = {"input_ids": TOKENS, "scale": torch.tensor(2.0)}
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        patch_streams(decoder, prompt, prompt, metric)


def test_additive_masks_are_refused() -> None:
    decoder = get_description("LlamaForCausalLM")
    additive = torch.zeros(2, 12)
    with pytest.raises(ValueError, match=r"from 0 to 0; each row must be 1.*\(mask == 0\)"):
        decoder(TOKENS, attention_mask=additive)
    additive[0, :3] = float("-inf")
    with pytest.raises(ValueError, match=r"from -inf to 0; each row must be 1"):
        decoder(TOKENS, attention_mask=additive)
    expected = decoder(TOKENS, attention_mask=MASK)
    assert torch.equal(decoder(TOKENS, attention_mask=(additive == 0).long()), expected)


def test_a_cache_with_padding_needs_the_mask_of_all_tokens() -> None:
    decoder = get_description("LlamaForCausalLM")
    cache = Cache()
    decoder(TOKENS[:, :8], MASK[:, :8], POSITIONS[:, :8], cache=cache)
    with pytest.raises(ValueError, match=r"cache contains padding.*attention_mask \(2, 9\)"):
        decoder(TOKENS[:, 8:9], cache=cache)
    assert cache.get_seq_length() == 8
    bare = Cache()
    decoder(TOKENS[:, :8], cache=bare)
    for earlier, mask in ((cache, MASK.flip(0)), (cache, torch.ones_like(MASK)), (bare, MASK)):
        with pytest.raises(ValueError, match="differs from that of the earlier calls"):
            decoder(TOKENS[:, 8:], mask, cache=earlier)
    assert cache.get_seq_length() == bare.get_seq_length() == 8


@torch.no_grad()
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_components_of_padded_prompts_sum_to_the_final_stream(name: str) -> None:
    decoder = get_description(name)
    prompt = {"input_ids": TOKENS, "attention_mask": MASK, "position_ids": POSITIONS}
    with record(decoder, "norm:input") as seen:
        decoder(**prompt)
    total = sum(decoder.components(prompt).values())
    torch.testing.assert_close(total, seen["norm:input"], rtol=1e-4, atol=1e-5)
    alone = decoder.components(TOKENS[:1, 3:])
    for part, value in decoder.components(prompt).items():
        row = value[:1, 3:] if value.shape[1] > 1 else value
        torch.testing.assert_close(row, alone[part], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_components_are_refused_inside_a_patch_of_the_stream() -> None:
    decoder = get_description("LlamaForCausalLM")
    for site in ("blocks.0", "blocks.0.attention_out"):
        with (
            patch(decoder, {site: torch.zeros_like}),
            pytest.raises(ValueError, match=r"expected components that sum to .*a patch changes"),
        ):
            decoder.components(TOKENS)
    # A patch of what a head reads or writes changes its component.
    with patch(decoder, {"blocks.0.attention.o:input": torch.zeros_like}):
        assert not decoder.components(TOKENS)["head 0.0"].any()


LEFT, MIDDLE = slice(0, 3), slice(4, 7)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("GPT2LMHeadModel", LEFT),
        ("LlamaForCausalLM", MIDDLE),
        ("BloomForCausalLM", LEFT),
        pytest.param("GPT2LMHeadModel", MIDDLE, marks=pytest.mark.exhaustive),
        pytest.param("LlamaForCausalLM", LEFT, marks=pytest.mark.exhaustive),
        pytest.param("BloomForCausalLM", MIDDLE, marks=pytest.mark.exhaustive),
    ],
)
def test_equal_prompts_have_no_effects_under_any_padding(name: str, hidden: slice) -> None:
    """The estimate compares recorded and recomputed patterns, which must use the same positions."""
    decoder = get_description(name)
    mask = torch.ones_like(TOKENS[:1])
    mask[:, hidden] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 8)
    prompt = {"input_ids": TOKENS[:1], "attention_mask": mask}
    options = [{"position_ids": positions}]
    if name == "BloomForCausalLM":  # its default positions do not count padding
        options.append({})
    for option in options:
        edges = edge_attribution(decoder, prompt | option, prompt | option, metric, exact=None)
        assert edges.values.abs().max() < 1e-5
        assert edges.exact.abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_scores_of_heads_do_not_depend_on_padding(attention: str) -> None:
    """Padding with the id of the first token is neither an occurrence of it nor a first token."""
    model = build_peer("GPT2LMHeadModel")
    model.config._attn_implementation = attention
    text = torch.tensor([[2, 5, 9, 4, 2, 5, 9, 4, 2]])
    prompt = {"input_ids": nn.functional.pad(text, (4, 0), value=2)}
    prompt["attention_mask"] = nn.functional.pad(torch.ones_like(text), (4, 0))
    prompt["position_ids"] = (prompt["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    with record_patterns(model) as bare:
        model(text)
    with record_patterns(model) as padded:
        model(**prompt)
    expected = detect_heads(bare, text)
    masked = detect_heads(padded, prompt["input_ids"], queries=prompt["attention_mask"])
    for scores in (detect_heads(padded, prompt), masked):
        for kind, values in expected.scores.items():
            torch.testing.assert_close(scores.scores[kind], values, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(scores.p_values[kind], expected.p_values[kind])
            assert scores.chance[kind] == pytest.approx(expected.chance[kind])
    some = detect_heads(bare, text, queries=slice(6, None)).scores["induction"]
    ours = detect_heads(padded, prompt, queries=slice(10, None)).scores["induction"]
    torch.testing.assert_close(ours, some, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "scan",
    [patch_streams, pytest.param(patch_edges, marks=pytest.mark.exhaustive), edge_attribution],
)
def test_metrics_that_read_padding_are_refused(scan: Callable[..., Any]) -> None:
    decoder = get_description("LlamaForCausalLM")
    mask = torch.ones_like(TOKENS)
    mask[1, 9:] = 0
    clean, corrupted = ({"input_ids": x, "attention_mask": mask} for x in (TOKENS, TOKENS.flip(1)))
    metrics = [
        logit_difference(decoder.norm, decoder.unembed, 5, 8, position=position)
        for position in (11, 8)
    ]
    for wrong in (metrics[0], lambda streams: decoder.decode(streams)[:, -1].argmax(-1) == 5):
        with pytest.raises(ValueError, match=r"ends with padding.*pass one metric per pair"):
            scan(decoder, clean, corrupted, wrong)
    for second in (metrics[0], lambda streams: streams.mean((1, 2))):
        with pytest.raises(ValueError, match=r"the metric reads padding.*of its own prompt"):
            scan(decoder, clean, corrupted, [metrics[0], second])
    # Position 2 of a text that is padded on the left.
    third = logit_difference(decoder.norm, decoder.unembed, 5, 8, position=2)
    with pytest.raises(ValueError, match="the metric reads padding"):
        scan(decoder, CLEAN, CORRUPTED, third, tokenizer=tokenize_words)
    both = scan(decoder, clean, corrupted, metrics)
    bare = scan(decoder, TOKENS[1:, :9], TOKENS.flip(1)[1:, :9], metrics[1])
    of_padded = both.pairs[1].values
    if of_padded.shape != bare.values.shape:
        of_padded = of_padded[..., :9]
    torch.testing.assert_close(of_padded, bare.values, rtol=1e-3, atol=1e-4)


def test_attribution_patching_refuses_metrics_that_read_padding() -> None:
    decoder = get_description("LlamaForCausalLM")
    mask = torch.ones_like(TOKENS)
    mask[1, 9:] = 0
    clean, corrupted = ({"input_ids": x, "attention_mask": mask} for x in (TOKENS, TOKENS.flip(1)))
    with pytest.raises(ValueError, match="the metric reads padding"):
        attribution_patching(
            decoder, ["blocks.0"], clean, corrupted, lambda logits: logits[:, -1, 5].sum()
        )
    estimates = attribution_patching(
        decoder, ["blocks.0"], clean, corrupted, lambda logits: logits[[0, 1], [11, 8], 5].sum()
    )
    bare = attribution_patching(
        decoder,
        ["blocks.0"],
        TOKENS[1:, :9],
        TOKENS.flip(1)[1:, :9],
        lambda logits: logits[:, -1, 5].sum(),
    )
    torch.testing.assert_close(
        estimates["blocks.0"][1, :9], bare["blocks.0"][0], rtol=1e-3, atol=1e-5
    )


def tokenize_words(text: str) -> list[int]:
    """Tokenize by words: a hash of each word, after a token for the start of the text."""
    return [1, *(2 + sum(map(ord, word)) % 34 for word in text.split())]


def tokenize_and_pad_words(text: str) -> dict[str, list[int]]:
    """Tokenize as `words` and pad, as `partial(tokenizer, padding="max_length")` does."""
    ids = tokenize_words(text)
    return {"input_ids": [*ids, 9, 9], "attention_mask": [1] * len(ids) + [0, 0]}


CLEAN = ["a b c d a", "a b c d e f a b"]
CORRUPTED = ["a b x d a", "a b c d e y a b"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_prompts_as_text_equal_one_call_per_text(name: str, tmp_path: Path) -> None:
    model = build_peer(name)
    decoder = get_description(name)
    prompt = encode(tokenize_words, CLEAN)
    expected = [model(torch.tensor([tokenize_words(text)])).logits[0] for text in CLEAN]
    for padded in (decoder(**prompt), model(**prompt).logits):
        for row, logits in zip(padded, expected, strict=True):
            torch.testing.assert_close(row[-len(logits) :], logits, rtol=1e-4, atol=1e-4)
    assert list(encode(tokenize_words, CLEAN[0])) == ["input_ids"]
    with pytest.raises(ValueError, match="each of at least one token"):
        encode(lambda text: [], "")
    pads = encode(tokenize_and_pad_words, CLEAN)
    assert all(torch.equal(pads[name], value) for name, value in prompt.items())
    # The columns of a DataFrame.
    table = {"clean": CLEAN, "corrupted": CORRUPTED, "right": ["b", 5], "wrong": [8, 9]}
    with pytest.raises(ValueError, match="the answer 'b' is 2 tokens"):
        pairs_of(table, tokenize_words, decoder.norm, decoder.unembed)
    table["right"] = [7, 5]
    clean, corrupted, metrics = pairs_of(table, tokenize_words, decoder.norm, decoder.unembed)
    scan = patch_streams(decoder, clean, corrupted, metrics)
    for row in range(2):
        alone = [torch.tensor([tokenize_words(texts[row])]) for texts in (CLEAN, CORRUPTED)]
        metric = logit_difference(
            decoder.norm, decoder.unembed, table["right"][row], table["wrong"][row]
        )
        bare = patch_streams(decoder, *alone, metric)
        length = alone[0].shape[1]
        torch.testing.assert_close(
            scan.pairs[row].values[:, -length:], bare.values, rtol=1e-3, atol=1e-4
        )


#: All functions that compare a clean and a corrupted prompt.
SCANS: dict[str, Callable[..., Any]] = {
    "patch_streams": patch_streams,
    "patch_parts": lambda model, *rest, **options: patch_parts(model, "mlp_out", *rest, **options),
    "patch_edges": partial(patch_edges, receivers=[Node("final"), Node("k", 1)]),
    "edge_attribution": partial(edge_attribution, receivers=[Node("final"), Node("k", 1)]),
    "attribution_patching": lambda model, *rest, **options: attribution_patching(
        model, ["blocks.0", "blocks.1.mlp_out"], *rest, **options
    ),
}


@pytest.mark.parametrize("scan", SCANS)
def test_texts_are_patched_as_their_encoded_prompts(scan: str) -> None:
    """Several texts of different lengths, and a single text, equal the result of `encode`."""
    decoder = get_description("LlamaForCausalLM")
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 8)
    if scan == "attribution_patching":
        metric = lambda logits: logits[:, -1, 5].sum()  # noqa: E731
    run = SCANS[scan]
    for clean, corrupted in ((CLEAN, CORRUPTED), (CLEAN[0], CORRUPTED[0])):
        texts = run(decoder, clean, corrupted, metric, tokenizer=tokenize_words)
        prompts = run(
            decoder, encode(tokenize_words, clean), encode(tokenize_words, corrupted), metric
        )
        if scan == "attribution_patching":
            torch.testing.assert_close(texts, prompts, rtol=0, atol=0)
        else:
            torch.testing.assert_close(texts.values, prompts.values, rtol=0, atol=0)
            assert texts.values.any()
    one_mask = encode(tokenize_words, CLEAN) | {
        "attention_mask": torch.ones(1, 9, dtype=torch.long)
    }
    with pytest.raises(ValueError, match=r"attention_mask is \(1, 9\)"):
        run(decoder, one_mask, one_mask, metric)
    # In the first pair, the padding differs, although both columns have a longest text of 3 tokens.
    for clean, corrupted in ((["a", "a b"], ["a b", "a c"]), ("a b", "a")):
        with pytest.raises(ValueError, match="pass prompts with equal numbers of tokens"):
            run(decoder, clean, corrupted, metric, tokenizer=tokenize_words)


@torch.no_grad()
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_heads_are_detected_and_shown_for_texts(name: str, tmp_path: Path) -> None:
    model = build_peer(name)
    with record_patterns(model) as patterns:
        model(**encode(tokenize_words, CLEAN))
    heads = detect_heads(patterns, CLEAN, tokenizer=tokenize_words)
    expected = detect_heads(patterns, encode(tokenize_words, CLEAN))
    for kind, scores in expected.scores.items():
        assert torch.equal(heads.scores[kind], scores)
        assert torch.equal(heads.p_values[kind], expected.p_values[kind])
    page = tmp_path / "page.html"
    view(page, tokens=CLEAN, tokenizer=tokenize_words, patterns=patterns, heads=heads)
    assert f'"tokens":["","","","1","{tokenize_words("a")[1]}"' in page.read_text()
    view(page, tokens=CLEAN, tokenizer=tokenize_words, example=1, vocabulary="0123456789" * 4)
    assert '"tokens":["1",' in page.read_text()
    view(page, tokens=encode(tokenize_words, CLEAN), patterns=patterns)
    assert '"tokens":["","","","1",' in page.read_text()
    # Padding on the right gives patterns of the same shape.
    rows = [tokenize_words(text) for text in CLEAN]
    mask = torch.tensor([[1] * 6 + [0] * 3, [1] * 9])
    ids = torch.tensor([rows[0] + [0] * 3, rows[1]])
    with record_patterns(model) as right:
        model(input_ids=ids, attention_mask=mask)
    with record_patterns(model) as unmasked:
        model(input_ids=encode(tokenize_words, CLEAN)["input_ids"])
    for wrong in (right, unmasked):
        for call in (
            lambda wrong=wrong: detect_heads(wrong, CLEAN, tokenizer=tokenize_words),
            lambda wrong=wrong: view(page, tokens=CLEAN, tokenizer=tokenize_words, patterns=wrong),
        ):
            with pytest.raises(ValueError, match=r"attend to padding.*call model\(\*\*prompt\)"):
                call()


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("clean", "a b", r"same number of rows, got \{'clean': 3, .* not single strings"),
        ("right", ["x"], "same number of rows, got .*'right': 1"),
        ("clean", ["a b", None], "expected a string, got None"),
        ("right", [3, float("nan")], "expected a text or a token id as an answer, got nan"),
    ],
)
def test_incomplete_tables_are_refused(column: str, values: object, message: str) -> None:
    table = {"clean": ["a b", "c d"], "corrupted": ["a x", "c y"], "right": [1, 2], "wrong": [3, 4]}
    with pytest.raises((TypeError, ValueError), match=message):
        pairs_of({**table, column: values}, tokenize_words, None, torch.eye(40))


def test_example_of_texts_in_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (snippet,) = re.findall(r"\*\*Texts\.\*\*.*?```python\n(.*?)```", readme, re.DOTALL)
    model = build_peer("LlamaForCausalLM")
    decoder = get_description("LlamaForCausalLM")
    names: dict[str, Any] = {
        "detect_heads": detect_heads, "encode": encode, "patch_streams": patch_streams,
        "record_patterns": record_patterns, "view": view,
        "model": model, "decoder": decoder, "texts": CLEAN, "tokenizer": tokenize_words,
        "metric": logit_difference(decoder.norm, decoder.unembed, 5, 8),
    }  # fmt: skip
    exec(snippet, names)
    assert (tmp_path / "heads.html").is_file()
    assert names["result"].values.shape == (2, 6)


def test_texts_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    decoder = get_description("LlamaForCausalLM")
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 8)
    patterns = torch.eye(4)[None, None]
    calls: list[Callable[[Any], Any]] = [
        *(lambda text, scan=scan: scan(decoder, text, text, metric) for scan in SCANS.values()),
        lambda text: detect_heads([patterns], text),
        lambda text: decoder.components(text),
        lambda text: steering_vector(decoder, "blocks.0", text, text),
        lambda text: view(tmp_path / "page.html", tokens=text, patterns=[patterns]),
    ]
    for call in calls:
        with pytest.raises(
            TypeError, match=r"got a str; .*encode\(tokenizer, texts\), or tokenizer="
        ):
            call("word")
    for call in calls[:-1]:  # view accepts the strings of the tokens
        with pytest.raises(TypeError, match=r"got a list; .*pass torch\.tensor\(ids\)"):
            call(["a", "b"])


def test_batches_of_token_ids_from_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token ids of one text, \(seq,\), got \(1, 3\)"):
        encode(lambda text: {"input_ids": torch.tensor([tokenize_words(text)])}, "a b")


def test_pairs_of_a_data_frame_are_those_of_its_rows() -> None:
    pandas = pytest.importorskip("pandas", reason="any mapping of columns is accepted")
    frame = pandas.DataFrame(
        {"clean": CLEAN, "corrupted": CORRUPTED, "right": [7, 5], "wrong": [8, 9]}
    )
    clean, corrupted, metrics = pairs_of(frame[::-1], tokenize_words, None, torch.eye(40))
    assert torch.equal(clean["input_ids"], encode(tokenize_words, CLEAN[::-1])["input_ids"])
    assert torch.equal(corrupted["input_ids"], encode(tokenize_words, CORRUPTED[::-1])["input_ids"])
    assert metrics[0](torch.arange(40.0).reshape(1, 1, 40)).tolist() == [5.0 - 9.0]


def test_tokenizers_of_transformers_are_accepted(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    vocabulary = {"<s>": 0, "Paris": 1, "is": 2, "in": 3, "France": 4, "?": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    prompt = encode(tokenizer, ["Paris is in France", "Paris is"])
    assert prompt["input_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]
    assert prompt["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    view(tmp_path / "page.html", tokens=["Paris is", "Paris"], tokenizer=tokenizer, example=1)
    assert '"tokens":["","\\u003cs>","Paris"]' in (tmp_path / "page.html").read_text()
    table = {
        "clean": ["Paris is"], "corrupted": ["France is"], "right": ["Paris"], "wrong": ["France"],
    }  # fmt: skip
    metric = pairs_of(table, tokenizer, None, torch.eye(6))[2][0]
    assert metric(torch.arange(6.0).reshape(1, 1, 6)).tolist() == [1.0 - 4.0]
    tokenizer.unk_token = "?"
    for answer, message in (("Rome", "not in the vocabulary"), (2.5, "a token id .* got 2.5")):
        with pytest.raises(ValueError, match=message):
            pairs_of({**table, "wrong": [answer]}, tokenizer, None, torch.eye(6))
    assert pairs_of({**table, "wrong": ["?"]}, tokenizer, None, torch.eye(6))


@torch.no_grad()
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_hidden_states_behind_the_final_norm_are_refused(name: str) -> None:
    model = build_peer(name)
    hidden = model(TOKENS, output_hidden_states=True).hidden_states
    norm = model.transformer.ln_f if name.startswith("GPT2") else model.model.norm
    with pytest.raises(ValueError, match=r"output of the norm.*hidden_states"):
        logit_lens(hidden, norm, model.lm_head)
    site = "transformer.ln_f:input" if name.startswith("GPT2") else "model.norm:input"
    with record(model, site) as seen:
        logits = model(TOKENS).logits
    lens = logit_lens([*hidden[:-1], seen[site]], norm, model.lm_head)
    torch.testing.assert_close(lens.top_probabilities[-1], logits.softmax(-1).topk(5).values)
