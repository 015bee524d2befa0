"""The interface of TransformerLens's model over a `Decoder`."""

import copy
import itertools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interp import describe, record
from interp.bench import build_random_decoder
from interp.decoder.fold import fold_decoder
from interp.hook_points import HookPoint
from interp.transformer_lens import (
    ActivationCache,
    FactoredMatrix,
    HookedDecoder,
    get_act_name,
    patching,
    utils,
)
from torch import Tensor, nn

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 37
CLEAN = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
CORRUPTED = torch.tensor([[2, 7, 1, 8, 2, 8, 1], [8, 2, 8, 4, 5, 9, 0]])
SIZES = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 6, "max_position_embeddings": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "vocab_size": 31,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 6,
        "n_positions": 32,
    },
    "GPTNeoXForCausalLM": SIZES,
    "LlamaForCausalLM": SIZES | {"num_key_value_heads": 2},
}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def build_pair(family: str, is_processed: bool) -> tuple[Any, HookedDecoder]:
    """Return the model of TransformerLens, and ours, with the same random weights."""
    pytest.importorskip("transformer_lens", reason="tried with transformer-lens 4.3.0")
    transformers = pytest.importorskip("transformers", reason="models of each family")
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    def build() -> nn.Module:
        torch.manual_seed(0)
        config_class = getattr(transformers, family).config_class
        options = {"bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager"}
        model = getattr(transformers, family)(config_class(**FAMILIES[family], **options)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        return model

    model = build()
    bridge = build_bridge_from_module(model, family, hf_config=model.config)
    bridge.enable_compatibility_mode(no_processing=not is_processed)
    decoder = describe(build())
    models = bridge, HookedDecoder(fold_decoder(decoder) if is_processed else decoder)
    for hooked in models:
        hooked.set_use_attn_result(True)
    return models


def build_random_model(heads: int) -> HookedDecoder:
    torch.manual_seed(0)
    decoder = build_random_decoder(
        "gpt2", vocabulary=37, d_model=24, layers=2, heads=heads
    ).double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return HookedDecoder(decoder, Tokenizer())


@pytest.fixture
def model() -> HookedDecoder:
    return build_random_model(heads=6)


class Tokenizer:
    """Tokens are single letters, which follow the BOS token 0."""

    bos_token_id = 0
    pad_token_id = eos_token_id = 36

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [ord(letter) - ord("a") + 1 for letter in text]
        return {"input_ids": [0, *ids] if add_special_tokens else ids}

    def decode(self, ids: list[int], **options: bool) -> str:
        assert not options.get("clean_up_tokenization_spaces", False)
        special = {0: "<s>", 36: "<e>"}
        skipped = special if options.get("skip_special_tokens", False) else {}
        return "".join(special.get(i, chr(i - 1 + ord("a"))) for i in ids if i not in skipped)


class TokenizerWithoutPadding(Tokenizer):
    pad_token_id = eos_token_id = None  # type: ignore[assignment]


@torch.no_grad()
def test_activations_stacks_and_losses_are_those_of_the_decoder(model: HookedDecoder) -> None:
    """All numbers are recomputed from recorded sites and weights of the decoder."""
    decoder = model.decoder
    with record(decoder, "embed", "position", "norm:input", "blocks.**") as seen:
        logits = decoder(TOKENS)
    with record(decoder, "blocks.1:input", "blocks.1.attention.o:input") as inputs:
        decoder(TOKENS)
    (result, loss), cache = model.run_with_cache(TOKENS, return_type="both")
    assert torch.equal(result, logits)
    expected = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), TOKENS[:, 1:])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model(TOKENS, return_type="loss"), expected)
    assert model(TOKENS, return_type=None) is None
    assert torch.equal(model(TOKENS[1]), logits[1:])
    assert set(cache) == {name for name in model.hook_dict if "result" not in name}
    assert torch.equal(cache["pattern", -1], seen["blocks.1.attention.pattern"])
    assert torch.equal(cache["attn", 1, "attn"], cache["pattern1"])
    assert torch.equal(cache["resid_pre", 1], inputs["blocks.1:input"])
    stream = seen["norm:input"]
    scale = (stream.var(-1, correction=0, keepdim=True) + decoder.settings.eps).sqrt()
    torch.testing.assert_close(cache["scale"], scale)

    parts, labels = cache.decompose_resid(return_labels=True)
    names = ["0_attn_out", "0_mlp_out", "1_attn_out", "1_mlp_out"]
    assert labels == ["embed", "pos_embed", *names]
    torch.testing.assert_close(parts.sum(0), stream)
    assert torch.equal(cache.accumulated_resid(pos_slice=-1)[-1], stream[:, -1])
    lens = cache.accumulated_resid(apply_ln=True, pos_slice=(1, 3))
    torch.testing.assert_close(lens[-1] @ model.W_U + model.b_U, logits[:, 1:3])
    heads, labels = cache.stack_head_results(return_labels=True, apply_ln=True)
    assert labels == [f"L{layer}H{head}" for layer in range(2) for head in range(6)]
    assert cache.stack_head_results(0, pos_slice=-1).shape == (0, 2, 24)
    z = inputs["blocks.1.attention.o:input"][..., 12:16]
    head = z @ decoder.layers[1].attention.o.weight[:, 12:16].T
    centered = head - head.mean(-1, keepdim=True)
    torch.testing.assert_close(heads[6 + 3], centered / scale)

    # A model of two matrices: the attention of head 3 from its weights.
    normed = decoder.layers[1].norm1(inputs["blocks.1:input"])
    q = normed @ model.W_Q[1, 3] + model.b_Q[1, 3]
    k = normed @ model.blocks[1].attn.W_K[3] + model.b_K[1, 3]
    scores = (q @ k.mT / 2).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(scores.softmax(-1), cache["pattern", 1][:, 3])
    post = decoder.layers[0].norm2(seen["blocks.0.mid"]) @ model.W_in[0] + model.b_in[0]
    torch.testing.assert_close(post, cache["pre", 0])
    torch.testing.assert_close(
        cache["post", 0] @ model.W_out[0] + model.b_out[0], cache["mlp_out", 0]
    )
    torch.testing.assert_close(model.W_E[TOKENS] + model.W_pos[:12], cache["resid_pre", 0])
    assert torch.equal(model.unembed.W_U, decoder.unembed.weight.T)


@torch.no_grad()
def test_hooks_select_replace_and_record(model: HookedDecoder) -> None:
    calls: list[str] = []

    def note(value: Tensor, hook: HookPoint) -> None:
        calls.append(hook.name)

    def zero_head(value: Tensor, hook: HookPoint, head: int) -> Tensor:
        value[:, :, head] = 0
        return value

    expected = model(TOKENS)
    patterns = [f"blocks.{i}.attn.hook_pattern" for i in range(2)]
    hooks = [(lambda name: name.endswith("hook_pattern"), note)]
    assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=hooks), expected)
    assert calls == patterns
    stopped = model.run_with_hooks(TOKENS, fwd_hooks=hooks, stop_at_layer=1)
    assert calls == [*patterns, patterns[0]]
    _, cache = model.run_with_cache(TOKENS, names_filter="blocks.1.hook_resid_pre")
    assert torch.equal(stopped, cache["resid_pre", 1])
    assert list(cache) == ["blocks.1.hook_resid_pre"]
    stream, cache = model.run_with_cache(TOKENS[:1], stop_at_layer=2, remove_batch_dim=True)
    assert torch.equal(cache["resid_post", -1], stream[0])
    assert torch.equal(model(TOKENS, stop_at_layer=-1), stopped)
    assert cache["pattern", 0].shape == (6, 12, 12)

    # The outputs of two heads are zero, in three ways.
    z, result = "blocks.0.attn.hook_z", "blocks.0.attn.hook_result"
    heads = [partial(zero_head, head=head) for head in (1, 4)]
    ablated = model.run_with_hooks(TOKENS, fwd_hooks=[(z, head) for head in heads])
    assert not torch.allclose(ablated, expected)
    model.set_use_attn_result(True)
    with model.hooks([(result, head) for head in heads]):
        by_result, cache = model.run_with_cache(TOKENS, names_filter=[result, z])
    torch.testing.assert_close(by_result, ablated)
    assert not cache["result", 0][:, :, [1, 4]].any()
    assert cache["z", 0][:, :, [1, 4]].all()
    for head in heads:
        model.blocks[0].attn.hook_z.add_hook(head)
    assert torch.equal(model(TOKENS), ablated)
    model.hook_dict[z].ctx["value"] = 1
    model.reset_hooks()
    assert torch.equal(model(TOKENS), expected)
    assert not model.blocks[0].attn.hook_z.ctx

    # Scales can be seen, and not changed.
    scale = "blocks.1.ln1.hook_scale"
    assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[(scale, note)]), expected)
    with pytest.raises(ValueError, match=r"reads 'blocks.1.norm1:input' cannot be changed"):
        model.run_with_hooks(TOKENS, fwd_hooks=[(scale, lambda value, hook: 2 * value)])


def test_a_wrong_hook_leaves_no_other_hook_behind(model: HookedDecoder) -> None:
    expected = model(TOKENS)
    hooks = [("hook_embed", lambda value, hook: 0 * value), ("hook_other", print)]
    with pytest.raises(ValueError, match="no hook is named 'hook_other'"):
        model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    assert torch.equal(model(TOKENS), expected)


def test_texts_are_converted_with_a_bos_token(model: HookedDecoder) -> None:
    assert model.to_tokens("cab").tolist() == [[0, 3, 1, 2]]
    assert model.to_tokens(["ab", "ba"], prepend_bos=False).tolist() == [[1, 2], [2, 1]]
    assert torch.equal(model("cab"), model(torch.tensor([0, 3, 1, 2])))
    # The BOS token may also be the padding token, as in GPT-2.
    model.tokenizer.pad_token_id = 0
    assert torch.equal(model(model.to_tokens("")), model(""))
    assert model.to_string(model.to_tokens("cab")) == ["<s>cab"]
    assert model.to_string([3, 1]) == "ca"
    assert model.to_string(2) == "b"
    assert model.to_str_tokens("ab") == ["<s>", "a", "b"]
    assert model.to_str_tokens(["a", "b"], prepend_bos=False) == [["a"], ["b"]]
    assert model.to_str_tokens(np.array([[1, 2]])) == ["a", "b"]
    assert model.to_str_tokens(np.array(["a", "b"]), prepend_bos=False) == [["a"], ["b"]]
    for call in (model, model.to_tokens, model.to_str_tokens):
        with pytest.raises(TypeError, match=r"got 1; .* pass token ids as a tensor"):
            call([1, 2])
    assert model.to_single_token("c") == 3
    assert torch.equal(model.tokens_to_residual_directions("c"), model.W_U[:, 3])
    without = HookedDecoder(model.decoder, Tokenizer(), default_prepend_bos=False)
    assert without.to_str_tokens("ab") == ["a", "b"]


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_texts_have_the_results_of_single_texts(model: HookedDecoder, side: str) -> None:
    texts = ["abcabc", "ca"]
    tokens = model.to_tokens(texts, padding_side=side)
    assert (tokens[1] == 36).sum() == 4
    mask = (tokens != 36).long()
    (logits, losses), cache = model.run_with_cache(
        texts, return_type="both", loss_per_token=True, padding_side=side
    )
    torch.testing.assert_close(model(tokens, attention_mask=mask)[mask > 0], logits[mask > 0])
    for row, text in enumerate(texts):
        is_token = mask[row].bool()
        expected, single = model.run_with_cache(text, return_type="both")
        torch.testing.assert_close(logits[row, is_token], expected[0][0])
        torch.testing.assert_close(losses[row].sum(), expected[1] * len(text))
        torch.testing.assert_close(
            cache["resid_post", 1][row, is_token], single["resid_post", 1][0]
        )
        pattern = cache["pattern", 1][row][:, is_token][:, :, is_token]
        torch.testing.assert_close(pattern, single["pattern", 1][0])
    mean = model(texts, return_type="loss", padding_side=side)
    torch.testing.assert_close(mean, losses.sum() / 8)
    # One mask for all rows.
    loss = model.loss_fn(logits, tokens, mask[:1])
    torch.testing.assert_close(loss, model.loss_fn(logits, tokens))


@torch.no_grad()
def test_generation_continues_each_text_as_if_it_were_alone(model: HookedDecoder) -> None:
    expected = []
    for text in ("abcabc", "ca"):
        tokens = model.to_tokens(text)
        for _ in range(4):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        expected.append(tokens[0, -4:].tolist())
    options: dict[str, Any] = {"max_new_tokens": 4, "return_type": "tokens"}
    greedy = model.generate(["abcabc", "ca"], do_sample=False, stop_at_eos=False, **options)
    assert greedy[:, -4:].tolist() == expected
    # The most likely token alone is sampled in three ways.
    for choice in ({"top_k": 1}, {"temperature": 0.0}, {"temperature": 1e-6}):
        sampled = model.generate(["abcabc", "ca"], stop_at_eos=False, **choice, **options)
        assert torch.equal(sampled, greedy)
    # The first chosen token ends the first text, which is filled with it.
    eos = expected[0][0]
    ended = model.generate(["abcabc", "ca"], do_sample=False, eos_token_id=eos, **options)
    assert set(ended[0, 7:].tolist()) == {eos}
    alone = model.generate("abcabc", do_sample=False, eos_token_id=eos, **options)
    assert alone.tolist() == [[*model.to_tokens("abcabc")[0].tolist(), eos]]
    text = model.generate("abcabc", 1, do_sample=False, eos_token_id=eos)
    assert text == "abcabc" + model.to_string([eos])


def test_backward_hooks_receive_and_replace_gradients(model: HookedDecoder) -> None:
    """The gradients are those of zeros that are added to the activations."""
    names = ["blocks.0.hook_resid_pre", "blocks.1.attn.hook_z", "blocks.1.attn.hook_pattern"]
    zeros = {}

    def add_zeros(value: Tensor, hook: HookPoint) -> Tensor:
        zeros[hook.name] = torch.zeros_like(value, requires_grad=True)
        return value + zeros[hook.name]

    metric = lambda logits: logits[:, -1, 5].sum()  # noqa: E731
    metric(model.run_with_hooks(TOKENS, fwd_hooks=[(name, add_zeros) for name in names])).backward()
    seen: dict[str, Tensor] = {}

    def store(gradient: Tensor, hook: HookPoint) -> None:
        seen[hook.name] = gradient.clone()

    model.set_use_attn_result(True)
    loss = metric(model(TOKENS))
    assert not loss.requires_grad
    with model.hooks(bwd_hooks=[(lambda name: True, store)]):
        metric(model(TOKENS)).backward()
    assert set(seen) == {name for name in model.hook_dict if not name.endswith("scale")}
    for name in names:
        torch.testing.assert_close(seen[name], zeros[name].grad)
    torch.testing.assert_close(
        torch.einsum("bphm,hdm->bphd", seen["blocks.1.attn.hook_result"], model.W_O[1]),
        seen["blocks.1.attn.hook_z"],
    )

    def cut(gradient: Tensor, hook: HookPoint) -> Tensor:
        return torch.zeros_like(gradient)

    # Without the gradients of a block's outputs, only the direct path remains.
    model.blocks[1].hook_attn_out.add_hook(cut, dir="bwd")
    model.add_hook("blocks.1.hook_mlp_out", cut, "bwd")
    both = ["blocks.1.hook_resid_pre", "blocks.1.hook_resid_post"]
    seen.clear()
    logits = model.run_with_hooks(
        TOKENS, bwd_hooks=[(name, store) for name in both], reset_hooks_end=False
    )
    metric(logits).backward()
    assert torch.equal(seen[both[0]], seen[both[1]])
    # Removed hooks are not called, also if the graph was built before.
    seen.clear()
    loss = metric(model(TOKENS))
    model.reset_hooks()
    loss.backward()
    assert not seen


@torch.no_grad()
def test_patching_functions_equal_a_loop_over_all_patches() -> None:
    model = build_random_model(heads=3)
    clean, corrupted = TOKENS[:, :2], TOKENS[:, 4:6]
    _, cache = model.run_with_cache(clean)
    metric = lambda logits: logits[:, -1, 5].sum()  # noqa: E731
    functions = [name for name in dir(patching) if name.startswith("get_act_patch")]
    assert len(functions) == 18
    results = {name: getattr(patching, name)(model, corrupted, cache, metric) for name in functions}
    every = slice(None)
    indices: dict[str, tuple[str, tuple[int, ...], Callable[..., tuple[Any, ...]]]] = {
        "resid_pre": ("resid_pre", (2, 2), lambda p: (every, p)),
        "resid_mid": ("resid_mid", (2, 2), lambda p: (every, p)),
        "attn_out": ("attn_out", (2, 2), lambda p: (every, p)),
        "mlp_out": ("mlp_out", (2, 2), lambda p: (every, p)),
        "attn_head_pattern_all_pos": ("pattern", (2, 3), lambda h: (every, h)),
        "attn_head_pattern_by_pos": ("pattern", (2, 3, 2), lambda h, p: (every, h, p)),
        "attn_head_pattern_dest_src_pos": (
            "pattern", (2, 3, 2, 2), lambda h, p, s: (every, h, p, s)
        ),
    }  # fmt: skip
    for part, name in (("out", "z"), ("q", "q"), ("k", "k"), ("v", "v")):
        by_pos, all_pos = f"attn_head_{part}_by_pos", f"attn_head_{part}_all_pos"
        indices[by_pos] = (name, (2, 2, 3), lambda p, h: (every, p, h))
        indices[all_pos] = (name, (2, 3), lambda h: (every, every, h))
    for suffix, (name, shape, index_of) in indices.items():
        values = results[f"get_act_patch_{suffix}"]
        assert values.shape == shape
        for layer, *index in itertools.product(*map(range, shape)):
            at = index_of(*index)

            def restore(value: Tensor, hook: HookPoint, at: tuple[Any, ...] = at) -> Tensor:
                value[at] = cache[hook.name][at]
                return value

            patched = model.run_with_hooks(
                corrupted, fwd_hooks=[(get_act_name(name, layer), restore)]
            )
            torch.testing.assert_close(values[(layer, *index)], metric(patched))
    parts = ("out", "q", "k", "v", "pattern")
    stacked = [results[f"get_act_patch_attn_head_{part}_all_pos"] for part in parts]
    assert torch.equal(results["get_act_patch_attn_head_all_pos_every"], torch.stack(stacked))
    stacked = [results[f"get_act_patch_attn_head_{part}_by_pos"] for part in parts]
    stacked[-1] = stacked[-1].mT
    assert torch.equal(results["get_act_patch_attn_head_by_pos_every"], torch.stack(stacked))
    stacked = [results[f"get_act_patch_{part}"] for part in ("resid_pre", "attn_out", "mlp_out")]
    assert torch.equal(results["get_act_patch_block_every"], torch.stack(stacked))


@torch.no_grad()
def test_logit_attributions_sum_to_the_logits(model: HookedDecoder) -> None:
    folded = HookedDecoder(fold_decoder(model.decoder), Tokenizer())
    logits, cache = folded.run_with_cache(TOKENS)
    stack = cache.decompose_resid()
    terms = cache.logit_attrs(stack, TOKENS)
    expected = (logits - folded.b_U).gather(-1, TOKENS[..., None])[..., 0]
    torch.testing.assert_close(terms.sum(0), expected)
    answers, wrong = torch.tensor([5, 7]), torch.tensor([3, 11])
    terms = cache.logit_attrs(stack, answers, wrong)
    bias = folded.b_U[answers] - folded.b_U[wrong]
    rows = torch.arange(2)
    expected = (logits[rows, :, answers] - logits[rows, :, wrong]) - bias[:, None]
    torch.testing.assert_close(terms.sum(0), expected)
    last = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), answers, wrong, pos_slice=-1)
    torch.testing.assert_close(last, terms[..., -1])
    single = folded.run_with_cache(TOKENS[:1], remove_batch_dim=True)[1]
    alone = single.logit_attrs(single.decompose_resid(), "e", has_batch_dim=False)
    torch.testing.assert_close(alone, cache.logit_attrs(stack, "e")[:, 0])


def test_factored_matrices_equal_dense_matrices(model: HookedDecoder) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 5, 2), torch.randn(3, 2, 5)
    matrix, dense = FactoredMatrix(a, b), a @ b
    vector = torch.randn(5)
    right, left = torch.randn(5, 7), torch.randn(7, 5)
    rows = torch.tensor([True, False, True, False, True])
    pairs = [
        (matrix.AB, dense),
        (matrix.T.AB, dense.mT),
        ((matrix @ right).AB, dense @ right),
        ((left @ matrix @ right).AB, left @ dense @ right),
        ((matrix @ matrix.T).AB, dense @ dense.mT),
        (matrix @ vector, dense @ vector),
        (vector @ matrix, vector @ dense),
        ((2 * matrix * 3).AB, 6 * dense),
        (matrix[1, 2].AB, dense[1, 2]),
        (matrix[:, -1].AB, dense[:, -1]),
        (matrix[0, 1, 3, -1].AB, dense[0, 1, 3:4, -1:]),
        (matrix[..., 3].AB, dense[..., 3:4]),
        (matrix[..., np.int64(1), :].AB, dense[..., 1:2, :]),
        (matrix[..., torch.tensor(1), 2:].AB, dense[..., 1:2, 2:]),
        (matrix[1, ..., -2:].AB, dense[1, :, :, -2:]),
        (matrix[[0, 1], :, [3, 0, 1], rows].AB, dense[:, :, [3, 0, 1]][..., rows]),
        ((matrix * torch.tensor([2.0])).AB, 2 * dense),
        (matrix.U @ matrix.S.diag_embed() @ matrix.V.mT, dense),
        (matrix.norm(), torch.linalg.matrix_norm(dense)),
        (matrix.eigenvalues.sum(-1).real, dense.diagonal(dim1=-2, dim2=-1).sum(-1)),
    ]
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected)
    assert (matrix.ldim, matrix.mdim, matrix.rdim, matrix.ndim) == (5, 2, 5, 4)
    assert "Hidden Dim(2)" in repr(matrix)
    for refused in (None, True, (..., ...), (0, 0, 0, 0, 0), (0, 0, 5), (..., -6), (2,)):
        with pytest.raises(IndexError):
            matrix[refused]
    with pytest.raises(ValueError, match=r"a tensor of one element, got \(3,\)"):
        matrix * torch.ones(3)
    torch.testing.assert_close(model.OV.AB, model.decoder.ov().dense().mT)
    torch.testing.assert_close(model.QK.AB, model.decoder.qk().dense())
    weights = dict(model.tl_named_parameters())
    assert torch.equal(weights["blocks.1.attn.W_Q"], model.W_Q[1])


def test_utilities_print_ranks_and_convert_tensors(
    model: HookedDecoder, capsys: pytest.CaptureFixture[str]
) -> None:
    probabilities = model("ab")[0, -1].softmax(-1)
    rank = int((probabilities > probabilities[3]).sum())
    utils.test_prompt("ab", "c", model, prepend_space_to_answer=False, top_k=2)
    out = capsys.readouterr().out
    assert (
        f"|c| logit {model('ab')[0, -1, 3]:.2f}, probability {probabilities[3]:.2%}, rank {rank}"
        in out
    )
    assert out.endswith(f"Ranks of the answer tokens: [('c', {rank})]\n")
    assert out.count("Top ") == 2
    utils.test_prompt("ab", ["c", "dd"], model, prepend_space_to_answer=False, print_details=False)
    other = int((probabilities > probabilities[4]).sum())
    assert capsys.readouterr().out == (
        f"Ranks of the answer tokens: [('c', {rank}), ('d', {other})]\n"
    )
    assert utils.to_numpy(torch.ones(2, dtype=torch.bfloat16)).tolist() == [1, 1]
    assert utils.to_numpy([1, 2]).tolist() == [1, 2]
    assert utils.get_corner(torch.arange(24).view(2, 12), 2).tolist() == [[0, 1], [12, 13]]
    assert utils.get_device() in (torch.device("cpu"), torch.accelerator.current_accelerator())
    assert model.get_token_position("a", "aba", mode="last") == 3
    assert model.get_token_position(1, torch.tensor([2, 1, 1])) == 1
    _, cache = model.run_with_cache(TOKENS, names_filter=utils.get_act_name("in", 1))
    assert list(cache) == ["blocks.1.hook_resid_pre"]


def test_the_example_of_the_readme_runs(model: HookedDecoder) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(from interp.transformer_lens.*?)```", readme, re.DOTALL)
    names: dict[str, Any] = {"gpt2": model.decoder, "tokenizer": Tokenizer()}
    names |= {"corrupted_tokens": TOKENS[:, :4], "metric": lambda logits: logits[:, -1, 5].sum()}
    names |= {"texts": ["abc", "cab"], "fold_decoder": fold_decoder, "describe": lambda gpt2: gpt2}
    exec(snippet, names)
    assert names["scores"].shape == (2, 6)
    assert names["heads"].shape == (12, 2, 24)
    assert names["copying"].shape == (2, 6)
    assert names["effects"].shape == (2, 4)
    assert names["loss"] != names["model"](names["texts"], return_type="loss")


def patch_resid_pre(model: HookedDecoder, tokens: Tensor, cache: ActivationCache) -> Tensor:
    return patching.get_act_patch_resid_pre(model, tokens, cache, lambda logits: logits[0, -1, 5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.start_at_layer, "no 'start_at_layer'; .* interp's functions with .decoder"),
        (lambda m: m.W_gate, "no 'W_gate'"),
        (lambda m: copy.copy(m).W_gate, "no 'W_gate'"),
        (lambda m: m.blocks[0].attn.hook_rot_q, "'blocks.0.attn.hook_rot_q'; hook_dict has"),
        (lambda m: m.add_hook("hook_scores", print), "no hook is named 'hook_scores'"),
        (lambda m: m.add_hook("blocks.0.attn.hook_result", print), r"set_use_attn_result\(True\)"),
        (lambda m: m.add_hook("blocks.9.attn.hook_result", print), "hook_result'; hook_dict has"),
        (lambda m: m(TOKENS, "tokens"), "'both' or None, got 'tokens'"),
        (
            lambda m: m.run_with_cache(TOKENS)[1].stack_neuron_results,
            "'stack_neuron_results'; for neurons, use interp.decoder.neurons",
        ),
        (
            lambda m: m.run_with_cache(TOKENS)[1].decompose_resid(mode="attention"),
            "expected mode 'all', 'attn' or 'mlp', got 'attention'",
        ),
        (lambda m: m.run_with_cache(TOKENS, stop_at_layer=3), "from -2 to 2, got 3"),
        (lambda m: m(TOKENS, stop_at_layer=-3), "from -2 to 2, got -3"),
        *(
            (
                lambda m, read=read, layer=layer: getattr(m.run_with_cache(TOKENS)[1], read)(layer),
                f"expected a layer from 0 to 2, .* got {layer}",
            )
            for read in ("accumulated_resid", "decompose_resid", "stack_head_results")
            for layer in (-2, 3)
        ),
        (lambda m: m.to_tokens(["a", "ab"], padding_side="Left"), "'left' or 'right', got 'Left'"),
        (
            lambda m: m.generate(TOKENS, attention_mask=torch.ones(2, 12).tril(10)),
            "end with a token, .* pad on the left",
        ),
        (lambda m: m.generate(TOKENS, top_k=0), "expected temperature >= 0 and top_k >= 1"),
        (lambda m: m.generate(TOKENS, temperature=-1.0), "got -1.0 and None"),
        (
            lambda m: patch_resid_pre(m, TOKENS[:, :7], m.run_with_cache(TOKENS)[1]),
            "in the clean cache",
        ),
        (
            lambda m: patch_resid_pre(
                m, TOKENS[:1], m.run_with_cache(TOKENS[:1], remove_batch_dim=True)[1]
            ),
            r"hook_resid_pre is \(12, 24\) .* expected \(1, 12, 24\)",
        ),
        (lambda m: m.run_with_cache(TOKENS, remove_batch_dim=True), "is .2, 12, 24.; only a batch"),
        (
            lambda m: HookedDecoder(m.decoder, TokenizerWithoutPadding()).to_tokens(["a", "ab"]),
            r"\[2, 3\] tokens, .* no padding token; set tokenizer.pad_token",
        ),
        (lambda m: m(m.to_tokens(["a", "ab"], padding_side="left")), "pass attention_mask="),
        (lambda m: m.generate(TOKENS, return_type="text"), "'str' or 'tokens', got 'text'"),
        (
            lambda m: HookedDecoder(m.decoder).generate(TOKENS),
            "pass eos_token_id= or stop_at_eos=False",
        ),
        (lambda m: m.get_token_position("c", "ab"), r"token 3 .* got positions \[\] in \(1, 3\)"),
        (lambda m: m.add_hook("ln_final.hook_scale", print, "bwd"), "instead of a scale"),
        (lambda m: m.add_hook("hook_embed", print, "back"), "dir 'fwd', or 'bwd' .* got 'back'"),
        (lambda m: m.to_single_token("ab"), "'ab' has 2 tokens"),
        (lambda m: HookedDecoder(m.decoder)("ab"), r"pass HookedDecoder\(decoder, tokenizer\)"),
        (
            lambda m: m.run_with_cache(TOKENS, names_filter=[])[1]["q", 0],
            r"\('q', 0\) was not recorded; keys.. are the recorded",
        ),
        # Messages name what the caller wrote: the method and the name before it was rewritten.
        *(
            (
                lambda m, read=read: getattr(m.run_with_cache(TOKENS)[1], read)(incl_remainder=1),
                rf"{read}\(\) has no option 'incl_remainder'; expected pos_slice, apply_ln, return",
            )
            for read in ("accumulated_resid", "decompose_resid", "stack_head_results")
        ),
        *(
            (
                lambda m, call=call: getattr(m, call)(TOKENS, incl_bwd=True),
                rf"{call}\(\) has no option 'incl_bwd'; expected .*stop_at_layer or a named",
            )
            for call in ("__call__", "run_with_hooks", "run_with_cache")
        ),
        (lambda m: m.add_hook("blocks.9.hook_in", print), "no hook is named 'blocks.9.hook_in'"),
    ],
)
def test_unsupported_names_and_arguments_are_refused(
    model: HookedDecoder, call: Callable[[HookedDecoder], Any], message: str
) -> None:
    with pytest.raises((ValueError, AttributeError, KeyError, TypeError), match=message):
        call(model)


@torch.no_grad()
def test_the_model_is_converted_and_set_to_evaluation_mode() -> None:
    """Notebooks call `model.eval()` and `model.to(device)` on the result of `from_pretrained`."""
    model = build_random_model(heads=3)
    expected = model(TOKENS)
    model.decoder.train()
    assert model.eval().to(torch.float32) is model
    assert not model.decoder.training
    assert model(TOKENS).dtype == model.cfg.dtype == torch.float32
    torch.testing.assert_close(model(TOKENS).double(), expected, rtol=1e-4, atol=1e-4)
    assert model.to("meta").to_tokens("ab").device == model.cfg.device == torch.device("meta")


@torch.no_grad()
def test_weights_are_changed_in_place_and_not_replaced(model: HookedDecoder) -> None:
    """A new tensor would have no effect on the decoder."""
    expected = model(TOKENS)
    model.blocks[0].attn.W_Q.data[1] = 0
    assert not model.decoder.layers[0].attention.q.weight[4:8].any()
    assert not torch.allclose(model(TOKENS), expected)
    for owner, name in (
        (model.blocks[0].attn, "W_Q"),
        (model, "W_E"),
        (model.blocks[1].mlp, "b_in"),
    ):
        with pytest.raises(AttributeError, match=f"expected '{name}' to be read only"):
            setattr(owner, name, torch.zeros(1))


def test_tokenizers_without_bos_and_models_with_post_norms_are_refused(
    model: HookedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "bos_token_id", None)
    with pytest.raises(ValueError, match="no BOS token; pass prepend_bos=False"):
        model.to_tokens("a")
    _, cache = model.run_with_cache(TOKENS)
    model.decoder.layers[0].attention_out = nn.LayerNorm(24).double()
    with pytest.raises(ValueError, match=r"a norm follows the heads of layer 0.*decompose_resid"):
        cache.stack_head_results()


def test_short_names_are_those_of_transformer_lens() -> None:
    names = {
        ("embed",): "hook_embed",
        ("hook_embed",): "hook_embed",
        ("blocks.0.attn.hook_q",): "blocks.0.attn.hook_q",
        ("k", 6, "a"): "blocks.6.attn.hook_k",
        ("k6",): "blocks.6.attn.hook_k",
        ("pre", 2): "blocks.2.mlp.hook_pre",
        ("attn", 3): "blocks.3.attn.hook_pattern",
        ("scale4ln1",): "blocks.4.ln1.hook_scale",
        ("normalized", 2, "ln2"): "blocks.2.ln2.hook_normalized",
        ("scale",): "ln_final.hook_scale",
        ("resid_pre", 0): "blocks.0.hook_resid_pre",
        ("attn_out", 0, "b"): "blocks.0.hook_attn_out",
    }
    for arguments, expected in names.items():
        assert get_act_name(*arguments) == expected


WEIGHTS = ["W_E", "W_U", "W_pos", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out"]
WEIGHTS += ["b_Q", "b_K", "b_V", "b_O", "b_in", "b_out", "b_U"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_processed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_weights_and_activations_equal_transformer_lens(family: str, is_processed: bool) -> None:
    """The weights are equal too after the processing of `from_pretrained`."""
    theirs, ours = build_pair(family, is_processed)
    for name in WEIGHTS:
        expected = getattr(theirs, name, None)
        if expected is not None:
            torch.testing.assert_close(getattr(ours, name), expected, **CLOSE)
        elif name.startswith("b_"):
            assert not getattr(ours, name).any()
        else:
            with pytest.raises(AttributeError, match=f"HookedDecoder has no '{name}'"):
                getattr(ours, name)
    for name in ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab", "n_ctx", "dtype"):
        assert getattr(ours.cfg, name) == getattr(theirs.cfg, name)
    expected, their_cache = theirs.run_with_cache(CLEAN, return_type="both")
    result, cache = ours.run_with_cache(CLEAN, return_type="both")
    torch.testing.assert_close(result, expected, **CLOSE)
    assert set(cache) == set(ours.hook_dict)
    for name in cache:
        torch.testing.assert_close(cache[name], their_cache[name], **CLOSE)
    for tokens in (5, torch.tensor(5), torch.tensor([5]), torch.tensor([[1, 2], [3, 4]])):
        directions = [hooked.tokens_to_residual_directions(tokens) for hooked in (ours, theirs)]
        torch.testing.assert_close(*directions, **CLOSE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decompositions_equal_transformer_lens(family: str) -> None:
    caches = [hooked.run_with_cache(CLEAN)[1] for hooked in build_pair(family, is_processed=False)]
    mids = [] if family == "GPTNeoXForCausalLM" else [{"incl_mid": True}]
    stacks: list[tuple[str, dict[str, Any]]] = [
        *(("decompose_resid", {"mode": mode}) for mode in ("all", "attn", "mlp")),
        ("decompose_resid", {"incl_embeds": False}),
        *(("accumulated_resid", options) for options in [{}, *mids]),
        ("stack_head_results", {}),
    ]
    positions = [None, -1, (2,), (1, 6, 2), [0, 3]]
    for (method, options), layer, where, apply_ln in itertools.product(
        stacks, [None, -1, 1, 2], positions, [False, True]
    ):
        options |= {"layer": layer, "pos_slice": where, "apply_ln": apply_ln}
        results = [getattr(cache, method)(return_labels=True, **options) for cache in caches]
        assert results[0][1] == results[1][1]
        torch.testing.assert_close(results[0][0], results[1][0], **CLOSE)
    stream = torch.randn(3, *CLEAN.shape, 24)
    for options in ({"layer": 1, "mlp_input": True}, {"layer": 0}, {}):
        results = [cache.apply_ln_to_stack(stream, **options) for cache in caches]
        torch.testing.assert_close(*results, **CLOSE)


def compute_induction_scores(model: Any, name_of: Callable[..., str]) -> list[Tensor]:
    """Return the numbers of the induction part of the main demo, and of ARENA's ablations."""
    generator = torch.Generator().manual_seed(0)
    once = torch.randint(31, (3, 8), generator=generator)
    tokens = torch.cat([torch.zeros(3, 1, dtype=torch.long), once, once], 1)
    scores = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)

    def score(pattern: Tensor, hook: Any) -> None:
        stripe = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - once.shape[1])
        scores[hook.layer()] = stripe.mean((0, -1))

    patterns = lambda name: name.endswith("pattern")  # noqa: E731
    model.run_with_hooks(tokens, return_type=None, fwd_hooks=[(patterns, score)])
    losses = []

    def ablate(result: Tensor, hook: Any, head: int) -> Tensor:
        result[:, :, head] = 0.0
        return result

    for layer, head in itertools.product(range(model.cfg.n_layers), range(model.cfg.n_heads)):
        hooks = [(name_of("result", layer), partial(ablate, head=head))]
        losses.append(model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks))

    def ablate_value(value: Tensor, hook: Any) -> Tensor:
        value[:, :, 0] = 0.0
        return value

    def store(pattern: Tensor, hook: Any) -> None:
        hook.ctx["score"] = pattern[0, 1].diag(1 - once.shape[1]).mean()

    hooks = [(name_of("v", 0), ablate_value), (name_of("pattern", 1), store)]
    model.run_with_hooks(tokens, fwd_hooks=hooks)
    stored = model.blocks[1].attn.hook_pattern.ctx["score"]
    _, cache = model.run_with_cache(tokens[:1], remove_batch_dim=True)
    streams = [cache["embed"], cache["resid_pre", 1], cache["result", 0], cache["pattern", 1]]
    full = model.W_E @ model.W_V[1, 0] @ model.W_O[1, 0] @ model.W_U
    return [scores, torch.stack(losses), stored, full, *streams]


def run_exploratory_analysis(model: Any, name_of: Callable[..., str]) -> list[Tensor]:
    """Return the numbers of the exploratory analysis: logit attribution and patching."""
    answers = torch.tensor([[5, 7], [3, 11]])
    logits, cache = model.run_with_cache(CLEAN)
    right, wrong = model.tokens_to_residual_directions(answers).unbind(1)

    def difference(logits: Tensor) -> Tensor:
        chosen = logits[:, -1].gather(-1, answers)
        return (chosen[:, 0] - chosen[:, 1]).mean()

    def project(stack: Tensor) -> Tensor:
        scaled = cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)
        return (scaled * (right - wrong)).sum(-1).mean(-1)

    numbers = [difference(logits), project(cache["resid_post", -1][None, :, -1])]
    for method in (cache.accumulated_resid, cache.decompose_resid, cache.stack_head_results):
        stack, _ = method(layer=-1, pos_slice=-1, return_labels=True)
        numbers.append(project(stack))

    def restore(value: Tensor, hook: Any, index: tuple[slice | int, ...]) -> Tensor:
        value[index] = cache[hook.name][index]
        return value

    every = slice(None)
    patched = []
    for layer in range(model.cfg.n_layers):
        indices = [("resid_pre", (every, position)) for position in range(7)]
        indices += [("attn_out", (every, 3)), ("mlp_out", (every, 6))]
        for head in range(model.cfg.n_heads):
            indices += [("z", (every, every, head)), ("pattern", (every, head))]
        for part, index in indices:
            hook = (name_of(part, layer), partial(restore, index=index))
            patched.append(difference(model.run_with_hooks(CORRUPTED, fwd_hooks=[hook])))
    model.blocks[1].attn.hook_z.add_hook(partial(restore_zero, head=2))
    _, ablated = model.run_with_cache(CLEAN)
    model.reset_hooks()
    ratio = cache["ln_final.hook_scale"][:, -1] / ablated["ln_final.hook_scale"][:, -1]
    return [*numbers, torch.stack(patched), ratio]


def restore_zero(value: Tensor, hook: Any, head: int) -> Tensor:
    value[:, :, head] = 0.0
    return value


@pytest.mark.exhaustive
@pytest.mark.parametrize("notebook", [compute_induction_scores, run_exploratory_analysis])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_notebooks_have_the_numbers_of_transformer_lens(
    family: str, notebook: Callable[..., list[Tensor]]
) -> None:
    """The same code runs on both models."""
    theirs, ours = build_pair(family, is_processed=True)
    from transformer_lens import utilities

    expected = notebook(theirs, utilities.get_act_name)
    for number, other in zip(notebook(ours, get_act_name), expected, strict=True):
        torch.testing.assert_close(number, other, **CLOSE)


def compute_gradients(model: Any, names: list[str]) -> dict[str, Tensor]:
    """Return the gradient at each hook, with the gradient of the last MLP halved."""
    seen = {}

    def store(gradient: Tensor, hook: Any) -> None:
        # TransformerLens passes a second name of the streams.
        name = re.sub("hook_in$", "hook_resid_pre", hook.name)
        seen[re.sub("hook_out$", "hook_resid_post", name)] = gradient.clone()

    def halve(gradient: Tensor, hook: Any) -> Tensor:
        return gradient / 2

    hooks = [("blocks.1.hook_mlp_out", halve), *((name, store) for name in names)]
    with torch.enable_grad(), model.hooks(bwd_hooks=hooks):
        model(CLEAN)[:, -1, 3].sum().backward()
    return seen


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_patching_loops_gradients_and_circuits_equal_transformer_lens(family: str) -> None:
    theirs, ours = build_pair(family, is_processed=True)
    from transformer_lens import patching as their_patching

    metric = lambda logits: logits[:, -1, 3].mean() - logits[:, -1, 4].mean()  # noqa: E731
    caches = [model.run_with_cache(CLEAN[:, :4])[1] for model in (ours, theirs)]
    functions = [name for name in dir(patching) if name.startswith("get_act_patch")]
    # A patch of the stream between attention and MLP reaches only the MLP in TransformerLens 4.
    for name in sorted(set(functions) - {"get_act_patch_resid_mid"}):
        arguments = CORRUPTED[:, :4], caches[0], metric
        values = getattr(patching, name)(ours, *arguments)
        expected = getattr(their_patching, name)(theirs, CORRUPTED[:, :4], caches[1], metric)
        torch.testing.assert_close(values, expected, **CLOSE)
    names = [
        name for name in ours.hook_dict if not name.endswith(("scale", "mid", "1.hook_mlp_out"))
    ]
    expected = compute_gradients(theirs, names)
    for name, gradient in compute_gradients(ours, names).items():
        torch.testing.assert_close(gradient, expected[name], **CLOSE)
    for circuit in ("OV", "QK"):
        matrices = [model.W_E @ getattr(model, circuit) @ model.W_U for model in (ours, theirs)]
        torch.testing.assert_close(matrices[0].norm(), matrices[1].norm(), **CLOSE)
        sums = [matrix.eigenvalues.sum(-1).real for matrix in matrices]
        torch.testing.assert_close(*sums, rtol=1e-3, atol=1e-2)
    per_token = [model(CLEAN, return_type="loss", loss_per_token=True) for model in (ours, theirs)]
    torch.testing.assert_close(*per_token, **CLOSE)
    caches = [model.run_with_cache(CLEAN)[1] for model in (ours, theirs)]
    for tokens, where in itertools.product([5, torch.tensor([5, 7])], [None, -1]):
        wrong = tokens * 0 + 3
        terms = [
            cache.logit_attrs(
                cache.decompose_resid(pos_slice=where), tokens, wrong, pos_slice=where
            )
            for cache in caches
        ]
        torch.testing.assert_close(*terms, **CLOSE)


@pytest.mark.exhaustive
def test_short_names_and_texts_equal_transformer_lens() -> None:
    pytest.importorskip("transformer_lens", reason="tried with transformer-lens 4.3.0")
    from transformer_lens import utilities

    parts = ["embed", "pos_embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"]
    parts += ["q", "k", "v", "z", "result", "pattern", "attn", "attn_scores", "attn_logits", "key"]
    parts += ["query", "value", "pre", "post", "mlp_pre", "mlp_post", "scale", "normalized", "k6"]
    parts += ["in", "scale4ln1", "pre5", "hook_embed", "blocks.0.hook_resid_pre", "rot_q", "mlp_in"]
    kinds = [None, "a", "m", "b", "attn", "mlp", "ln1", "ln2", "block", "blocks", "attention"]
    for name, layer, kind in itertools.product(parts, [None, 0, 11], kinds):
        assert get_act_name(name, layer, kind) == utilities.get_act_name(name, layer, kind)
    tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer of transformers")
    import transformers

    words = ["<s>", "the", "cat", "sat", "mat", "<e>", *(f"word{i}" for i in range(25))]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", pad_token="<e>", eos_token="<e>"
    )
    theirs, ours = build_pair("GPT2LMHeadModel", is_processed=False)
    theirs.tokenizer, ours.tokenizer = tokenizer, tokenizer
    theirs.cfg.tokenizer_prepends_bos = False
    for side, texts in itertools.product(("left", "right"), (["the", "cat sat mat"], "mat")):
        tokenizer.padding_side = side
        assert torch.equal(ours.to_tokens(texts), theirs.to_tokens(texts))
        is_token = ours.to_tokens(texts) != 5
        torch.testing.assert_close(ours(texts)[is_token], theirs(texts)[is_token], **CLOSE)
        options = {"max_new_tokens": 5, "do_sample": False, "stop_at_eos": False}
        assert ours.generate(texts, **options) == theirs.generate(texts, **options)
    for prepend in (None, True, False):
        for text in ("the cat sat", ["the cat", "sat mat"]):
            assert torch.equal(ours.to_tokens(text, prepend), theirs.to_tokens(text, prepend))
            assert ours.to_str_tokens(text, prepend) == theirs.to_str_tokens(text, prepend)
            torch.testing.assert_close(
                ours(text, prepend_bos=prepend), theirs(text, prepend_bos=prepend), **CLOSE
            )
    for tokens in ([1, 2], 3, torch.tensor([4, 3]), torch.tensor([[1, 2], [3, 4]])):
        assert ours.to_string(tokens) == theirs.to_string(tokens)
    assert ours.to_single_token("mat") == theirs.to_single_token("mat") == 4
