"""Patches during generation, and removal of hooks."""

from collections.abc import Iterator

import pytest
import torch
from interp import (
    AttentionOnly,
    Cache,
    at_positions,
    patch,
    record,
    record_patterns,
)
from torch import Tensor
from transformers_cache import cache_name


@pytest.fixture
def model() -> AttentionOnly:
    torch.manual_seed(0)
    return AttentionOnly(vocabulary=11, context=9, d_model=8, layers=2, heads=2)


def test_rows_of_new_values_belong_to_the_positions_in_their_order(model: AttentionOnly) -> None:
    rows = torch.stack([torch.full((8,), 2.0), torch.full((8,), 5.0)])
    tokens = torch.randint(11, (1, 9))
    at = at_positions([2, 5], rows)
    with patch(model, {"blocks.0": at}), record(model, "blocks.0") as seen:
        model(tokens)
    assert torch.equal(seen["blocks.0"][0, [2, 5]], rows)
    with patch(model, {"blocks.0": at_positions([5, 2], rows)}), record(model, "blocks.0") as seen:
        model(tokens)
    assert torch.equal(seen["blocks.0"][0, [5, 2]], rows)


def test_each_call_uses_the_new_values_of_its_positions(model: AttentionOnly) -> None:
    tokens = torch.randint(11, (2, 9))
    rows = torch.randn(4, 8)
    with patch(model, {"blocks.0": at_positions([1, 2, 6, 7], rows)}):
        whole = model(tokens)
    for parts in ([3, 6], [2, 5, 2], [1] * 9):
        cache = Cache()
        with patch(model, {"blocks.0": at_positions([1, 2, 6, 7], rows)}):
            logits = [model(part, cache=cache) for part in tokens.split(parts, 1)]
        torch.testing.assert_close(torch.cat(logits, 1), whole)
    # Two rows would otherwise be used for positions 1 and 2, and again for 6 and 7.
    for chosen in ([1, 2, 6, 7], slice(1, None)):
        with (
            pytest.raises(ValueError, match=r"of one or \d+ positions, got \(2, 8\)"),
            patch(model, {"blocks.0": at_positions(chosen, rows[:2])}),
        ):
            model(tokens[:, :3], cache=Cache())


def hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_closed_generators_and_nested_records_leave_no_hooks(model: AttentionOnly) -> None:
    tokens = torch.randint(11, (3, 9))

    def layers() -> Iterator[Tensor]:
        with (
            record(model, "blocks.*") as seen,
            patch(model, {"embed": torch.zeros_like}),
            record_patterns(model),
        ):
            model(tokens)
            yield from seen.values()

    generator = layers()
    assert next(generator).shape == (3, 9, 8)
    assert hooks(model) > 0
    generator.close()
    assert hooks(model) == 0
    expected = model(tokens)
    first, second = record(model, "blocks.0"), record(model, "blocks.*")
    single = first.__enter__()
    both = second.__enter__()
    model(tokens)
    first.__exit__(None, None, None)  # not in the order of entry
    model(tokens[:1])
    second.__exit__(None, None, None)
    assert single["blocks.0"].shape[0] == 3
    assert both["blocks.0"].shape[0] == 1
    assert hooks(model) == 0
    assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize("cached", [True, False])
def test_patches_act_at_their_positions_during_generation(cached: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    prompt, site = torch.tensor([[1, 5, 7]]), "model.layers.0"
    push = 4 * torch.randn(12)
    chosen = slice(4, 7)
    with patch(model, {site: at_positions(chosen, lambda x: x + push)}):
        ours = model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=cached)
    tokens = prompt  # by hand: the whole text again for every token

    def pushed(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, chosen] += push
        return x

    for _ in range(6):
        with patch(model, {site: pushed}):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(ours, tokens)
    assert not torch.equal(ours, model.generate(prompt, max_new_tokens=6, do_sample=False))
    for wrong in (slice(-2, None), [-1]):
        with pytest.raises(ValueError, match="depends on its length"):
            at_positions(wrong, torch.zeros(12))


def test_a_patch_acts_in_every_text(model: AttentionOnly) -> None:
    first, second = torch.randint(11, (2, 1, 6))
    at = at_positions([2], torch.zeros_like)
    with patch(model, {"blocks.0": at}):
        patched = [model(tokens) for tokens in (first, second, first)]
    assert torch.equal(patched[0], patched[2])
    for out, tokens in zip(patched, (first, second, first), strict=True):
        assert (out != model(tokens)).any(-1)[0].tolist() == [False, False, True, True, True, True]
    assert hooks(model) == 0
    with (
        pytest.raises(ValueError, match="heads before positions"),
        patch(model, {"blocks.0.attention.pattern": at_positions([2], torch.zeros_like)}),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match=r"an inner module was called.*passed to patch\(\)"),
        patch(model, {"blocks.0": at_positions([2], torch.zeros_like)}),
    ):
        model.blocks[0](torch.zeros(1, 3, 8))


def test_caches_of_unknown_length_are_refused() -> None:
    class Stateful(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(11, 4)

        def forward(self, input_ids: Tensor, cache_params: object = None) -> Tensor:
            return self.embed(input_ids)

    model = Stateful()
    with patch(model, {"embed": at_positions([1], torch.zeros_like)}):
        model(torch.ones(1, 3, dtype=torch.long))
        for wrong in (object(), ((torch.zeros(1),),)):
            with pytest.raises(RuntimeError, match=r"cache_params is a .* length is unknown"):
                model(torch.ones(1, 1, dtype=torch.long), cache_params=wrong)


def test_one_patch_acts_at_several_sites(model: AttentionOnly) -> None:
    tokens = torch.randint(11, (2, 6))
    with (
        patch(model, {"blocks.*": at_positions([2, 4], torch.zeros_like)}),
        record(model, "blocks.*") as seen,
    ):
        model(tokens)
    for stream in seen.values():
        assert not stream[:, [2, 4]].any()
        assert stream[:, [0, 1, 3, 5]].any(-1).all()


def test_positions_that_no_call_contains_are_an_error(model: AttentionOnly) -> None:
    with (
        pytest.raises(RuntimeError, match=r"patch of blocks\.0 changed nothing"),
        patch(model, {"blocks.0": at_positions([6], torch.zeros_like)}),
    ):
        model(torch.randint(11, (2, 6)))


@torch.no_grad()
def test_positions_count_from_the_start_of_a_text_in_the_cache() -> None:
    transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens, site = torch.randint(31, (1, 9)), "model.layers.*"
    name = cache_name(model)
    for split in (3, 5):
        with patch(model, {site: at_positions([4, 6], lambda x: x + 1)}):
            expected = model(tokens).logits
            first = model(tokens[:, :split], use_cache=True)
            rest = model(tokens[:, split:], **{name: getattr(first, name)})
        torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), expected)
    # The beginning of this prompt is in the cache.
    cache = {name: getattr(model(tokens[:, :3], use_cache=True), name)}
    with patch(model, {site: at_positions([4, 6], lambda x: x + 1)}):
        rest = model(tokens[:, 3:], **cache)
    torch.testing.assert_close(rest.logits, expected[:, 3:])
    with (
        pytest.raises(RuntimeError, match="the activation has 1 positions, and the call 9 tokens"),
        patch(model, {"lm_head": at_positions([0], torch.zeros_like)}),
    ):
        model(tokens, logits_to_keep=1)
