"""Models of transformers with random weights have the logits of their eager attention."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the models are transformers' own")

from flashattn2 import attention_reference  # noqa: E402
from flashattn2.integrations import transformers as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
COMMON = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
    # With the default weights, all scores are near zero, and a softcap has no effect.
    "initializer_range": 0.2,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 5, "head_dim": 16, "attn_logit_softcapping": 5.0},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": 5, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1,
         "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 1},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered():
    ours.register()


@pytest.fixture(scope="module", params=MODELS)
def models(request):
    """Return two models with the same weights, under eager attention and under ours."""
    name, changes = MODELS[request.param]
    torch.manual_seed(0)
    pair = []
    for implementation in ("eager", "linear_memory"):
        config = getattr(transformers, name)(**COMMON | changes)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation
        )
        pair.append(model.eval())
    if hasattr(pair[0].model.layers[0].self_attn, "sinks"):
        for layer in pair[0].model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


def draw_tokens(batch=2, seq=13):
    return torch.randint(3, 97, (batch, seq), generator=torch.Generator().manual_seed(1))


def compare(models, rows=None, **inputs):
    eager, flash = (m(**inputs).logits for m in models)
    rows = torch.ones(eager.shape[:2], dtype=torch.bool) if rows is None else rows.bool()
    torch.testing.assert_close(flash[rows], eager[rows], atol=2e-5, rtol=2e-4)


def test_logits_without_padding(models):
    compare(models, input_ids=draw_tokens())


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_logits_with_padding(models, side):
    mask = torch.ones(2, 13, dtype=torch.long)
    if side != "right":
        mask[0, :4] = 0
    if side != "left":
        mask[1, -5:] = 0
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    compare(models, mask, input_ids=draw_tokens(), attention_mask=mask, position_ids=position_ids)


def test_gradients_with_padding(models):
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = mask[1, -5:] = 0
    grads = []
    for model in models:
        logits = model(input_ids=draw_tokens(), attention_mask=mask).logits
        loss = logits[mask.bool()].square().mean()
        named = dict(model.named_parameters())
        computed = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        grads.append(dict(zip(named, computed, strict=True)))
    for name, expected in grads[0].items():
        if expected is not None:
            torch.testing.assert_close(grads[1][name], expected, atol=2e-5, rtol=2e-4)


def test_loss_after_left_padding_is_equal_without_the_prediction_at_padding(models):
    inputs = draw_tokens(1, 9)
    mask = torch.ones_like(inputs)
    mask[:, :4] = 0
    labels = inputs.masked_fill(mask == 0, -100)
    labels[:, 4] = -100  # the prediction of the first token is made at the last padding
    eager, flash = (m(inputs, attention_mask=mask, labels=labels).loss for m in models)
    torch.testing.assert_close(flash, eager, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_with_left_padding(models, cache):
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    kwargs = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    texts = [
        m.generate(draw_tokens(), attention_mask=mask, max_new_tokens=9, do_sample=False, **kwargs)
        for m in models
    ]
    assert torch.equal(*texts)


def test_packed_sequences_are_recognized_by_position_ids(models):
    positions = torch.cat([torch.arange(n) for n in (4, 8, 1)])[None].expand(2, -1)
    if models[0].config.model_type == "gpt_oss":
        # Its masks never separate packed sequences.
        with pytest.raises(ValueError, match="position_ids restart within a sequence"):
            models[1](input_ids=draw_tokens(), position_ids=positions, use_cache=False)
    else:
        compare(models, input_ids=draw_tokens(), position_ids=positions, use_cache=False)


def test_repeated_registration_wraps_the_choice_of_attention_once():
    choose = transformers.PreTrainedModel.get_correct_attn_implementation
    ours.register()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is choose


def test_unsupported_mask_is_an_error(models):
    _, flash = models
    four = torch.ones(2, 1, 13, 13, dtype=torch.bool).tril()
    message = r"Attention to pass a mask made by flashattn2, got a tensor of shape \(2, 1, 13, 13\)"
    for mask in (four, torch.zeros(2, 1, 13, 13).masked_fill(~four, -torch.inf)):
        with pytest.raises(ValueError, match=f"{message}.* you or the model make, use attn_impl"):
            flash(input_ids=draw_tokens(), attention_mask=mask)
    with pytest.raises(ValueError, match="returns no attention weights"):
        flash(input_ids=draw_tokens(), output_attentions=True)


def test_position_biases_of_t5_are_refused_by_name():
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="linear_memory")
    with pytest.raises(ValueError, match="does not support position_bias of T5Attention"):
        model.eval().encoder(input_ids=draw_tokens())


def test_holes_in_the_padding_are_followed_or_refused(models):
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, 5:7] = 0
    if getattr(models[0].config, "sliding_window", None):
        with pytest.raises(ValueError, match="holes between tokens"):
            models[1](input_ids=draw_tokens(), attention_mask=mask)
    else:
        compare(models, mask, input_ids=draw_tokens(), attention_mask=mask)


def make_visible(mask):
    """Return a mask as a boolean tensor (batch, seq_q, seq_k)."""
    rule, seq_k = mask.rule, mask.shape[3]
    q = torch.arange(rule.seq_q)[:, None] + rule.first
    k = torch.arange(seq_k)[None]
    seen = (mask.sequence > 0)[:, None, :].expand(-1, rule.seq_q, -1)
    if rule.is_packed:
        of_query = mask.sequence[:, rule.first : rule.first + rule.seq_q]
        seen = seen & (of_query[:, :, None] == mask.sequence[:, None, :])
    if rule.left is not None:
        seen = seen & (q - k <= rule.left)
    if rule.right is not None:
        seen = seen & (k - q <= rule.right)
    return seen


def test_unknown_mask_functions_are_refused_and_never_called():
    """A mask is found by its structure, in linear time, or not at all."""
    from transformers import masking_utils

    def unknown(b, h, q, k):
        raise AssertionError("the mask function was evaluated")

    causal = masking_utils.causal_mask_function
    q = torch.randn(3, 1, 1, 9, 8)
    for function in (
        unknown,
        masking_utils.and_masks(causal, unknown),
        masking_utils.or_masks(causal, unknown),
        masking_utils.blockwise_overlay(torch.zeros(1, 9)),
        masking_utils.add_offsets_to_mask_function(causal, 2, 0),
    ):
        mask = ours.make_mask(1, 9, 9, mask_function=function)
        with pytest.raises(
            ValueError, match=r"mask function .* is not a causal, bidirectional, sliding, chunked"
        ):
            ours.attention(torch.nn.Identity(), *q, mask)


def test_known_masks_are_recognized_exactly():
    """A recognized mask equals transformers', for windows, chunks, packed sequences and caches."""
    from flashattn2.integrations import mask_functions
    from flashattn2.integrations.masks import AttentionMask, Rule
    from transformers import masking_utils

    positions = torch.cat([torch.arange(n) for n in (3, 1, 5, 4)])[None].expand(2, -1)
    packed = masking_utils.find_packed_sequence_indices(positions)
    square = mask_functions.Grid(2, 13, 13, 0, 0, "cpu")
    cached = mask_functions.Grid(2, 2, 13, 11, 0, "cpu")
    sliding_cache = mask_functions.Grid(2, 3, 9, 20, 14, "cpu")
    for window in (1, 2, 6, 12, 13, 40):
        sliding = masking_utils.sliding_window_causal_mask_function(window)
        both_sides = masking_utils.sliding_window_bidirectional_mask_function(window)
        chunks = masking_utils.chunked_causal_mask_function(window, torch.tensor([0, 3]))
        cases = [
            (f, grid)
            for f in (sliding, both_sides, chunks)
            for grid in (square, cached, sliding_cache)
        ]
        for function in (sliding, masking_utils.causal_mask_function):
            parts = [
                masking_utils.packed_sequence_mask_function(packed),
                masking_utils.remap_positions_for_packed_sequence(function, positions),
            ]
            # transformers 5.24 combines the parts in the other order.
            for ordered in (parts, parts[::-1]):
                cases.append((masking_utils.and_masks(*ordered), square))
        for function, grid in cases:
            expected = masking_utils.sdpa_mask(
                *(2, grid.q_length, grid.kv_length, grid.first_query, grid.first_key),
                *(function,),
                allow_is_causal_skip=False,
            )
            pattern = mask_functions.find_pattern(function, grid)
            sequence = pattern.sequence
            if sequence is None:
                sequence = torch.ones(2, grid.kv_length, dtype=torch.int32)
            is_packed = bool((sequence > 1).any())
            rule = Rule(grid.q_length, grid.shift, pattern.left, pattern.right, True, is_packed)
            assert torch.equal(make_visible(AttentionMask(sequence, rule)), expected[:, 0])


def test_restarting_positions_without_separated_sequences_are_not_a_pattern():
    """Positions alone do not hide the keys of other sequences."""
    from transformers import masking_utils

    positions = torch.tensor([[0, 1, 2, 0, 1]])
    function = masking_utils.remap_positions_for_packed_sequence(
        masking_utils.causal_mask_function, positions
    )
    mask = ours.make_mask(1, 5, 5, mask_function=function)
    assert "is not a causal, bidirectional, sliding, chunked" in mask.rule.refusal


def test_known_masks_are_checked_on_the_cpu_if_another_device_is_the_default():
    """`torch.set_default_device("cuda")` would put a part of the examples on the GPU."""
    from flashattn2.integrations import mask_functions

    known = mask_functions._map_known_codes.__wrapped__()
    with torch.device("meta"):
        assert mask_functions._map_known_codes.__wrapped__() == known
    assert "and_masks" in known.values()


def test_memory_of_a_sliding_mask_is_linear():
    from flashattn2.bench.measure import measure_peak_extra_bytes
    from transformers import masking_utils

    function = masking_utils.sliding_window_causal_mask_function(64)
    peaks = [
        measure_peak_extra_bytes(
            lambda seq=seq: ours.make_mask(1, seq, seq, mask_function=function)
        )
        for seq in (4096, 8192)
    ]
    assert peaks[0] <= 100 * 4096
    assert peaks[1] <= 2.1 * peaks[0]


def build_tiny(name, **changes):
    kind, defaults = MODELS[name]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**COMMON | defaults | changes),
        attn_implementation="linear_memory",
    ).eval()


def collate_batch(*parts, **options):
    """Return the batch of these token sequences by the padding-free collator."""
    batch = transformers.DataCollatorWithFlattening(**options)(
        [{"input_ids": part.tolist()} for part in parts]
    )
    batch.pop("labels", None)
    return batch


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3"])
@torch.no_grad()
def test_packed_sequences_of_a_padding_free_collator(name):
    """Each document has its separate logits by its positions; cu_seq_lens are refused."""
    model = build_tiny(name)
    parts = [draw_tokens(1, n)[0] for n in (9, 1, 6)]
    expected = torch.cat([model(input_ids=part[None]).logits for part in parts], 1)
    logits = model(**collate_batch(*parts), use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-4)
    with pytest.raises(ValueError, match=r"leave them out \(return_flash_attn_kwargs=False"):
        model(**collate_batch(*parts, return_flash_attn_kwargs=True), use_cache=False)
    # With a cache transformers makes a mask of one sequence.
    with pytest.raises(ValueError, match="position_ids restart within a sequence"):
        model(**collate_batch(*parts), use_cache=True)
    # Two sequences of one token have the positions 0 and 0.
    with pytest.raises(ValueError, match="position_ids restart within a sequence"):
        model(**collate_batch(*(part[:1] for part in parts)), use_cache=True)


@torch.no_grad()
def test_positions_of_padding_are_not_packed_sequences():
    """In generation, left padding has position 0 or 1, and tokens start at 0 after it."""
    model = build_tiny("llama")
    ids = draw_tokens(1)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    alone = model(input_ids=ids[:, 4:]).logits
    torch.testing.assert_close(out[:, 4:], alone, atol=2e-5, rtol=2e-4)


@torch.no_grad()
def test_a_missing_mask_must_define_the_visible_keys():
    """Cross-attention of Mllama has no `is_causal`: eager attention sees every key."""
    config = transformers.MllamaTextConfig(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=2, attn_implementation="eager"
    )
    module = transformers.models.mllama.modeling_mllama.MllamaTextCrossAttention(config, 0)
    hidden, image = torch.randn(1, 4, 32), torch.randn(1, 6, 32)
    expected, _ = module(hidden[:, :1], image)
    config._attn_implementation = "linear_memory"
    torch.testing.assert_close(module(hidden[:, :1], image)[0], expected)
    with pytest.raises(ValueError, match=r"4 queries and 6 keys of MllamaTextCross.* got None"):
        module(hidden, image)
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    for keys, options in (
        (k, {"is_causal": True}),
        (q, {}),
        (q, {"is_causal": False, "sliding_window": 2}),
    ):
        with pytest.raises(ValueError, match="does not define the visible keys"):
            ours.attention(torch.nn.Identity(), q, keys, keys, None, **options)
    out, _ = ours.attention(torch.nn.Identity(), q, k, k, None, is_causal=False)
    torch.testing.assert_close(out.transpose(1, 2), attention_reference(q, k, k))


@torch.no_grad()
def test_unknown_tensor_arguments_are_refused():
    q = torch.randn(1, 2, 4, 8)
    for name in ("position_bias", "alibi", "indices", "sinks"):
        with pytest.raises(ValueError, match=f"flashattn2 does not support {name}"):
            ours.attention(torch.nn.Identity(), q, q, q, None, **{name: torch.zeros(1)})
    out, _ = ours.attention(
        torch.nn.Identity(), q, q, q, None, is_causal=True, num_items_in_batch=torch.ones(())
    )
    assert out.shape == (1, 4, 2, 8)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_compiled_layer_equals_eager_layer():
    """The exhaustive tests of the families compile whole models."""
    torch._dynamo.reset()
    model = build_tiny("mistral", num_hidden_layers=1)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    expected = model(input_ids=draw_tokens(), attention_mask=mask).logits
    model.model.layers[0].self_attn.compile(backend="eager")
    logits = model(input_ids=draw_tokens(), attention_mask=mask).logits
    torch.testing.assert_close(logits, expected)
