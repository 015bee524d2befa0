import math
from typing import Any

import pytest
import torch
from accounting import Transformer, flops, mfu, parameters
from accounting.flops import compute_utilization, count_pairs
from accounting.model.records import MLA, Experts, Window
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SHAPES = [
    Transformer(layers=2, d_model=24, heads=4, d_ff=40, vocab_size=31),
    Transformer(layers=3, d_model=24, heads=6, kv_heads=2, head_dim=5, vocab_size=17, tied=True),
    Transformer(layers=1, d_model=16, heads=4, kv_heads=1, vocab_size=7, gated_mlp=False),
    Transformer(layers=2, d_model=16, heads=2, head_dim=6, v_head_dim=10, vocab_size=11),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_full_attention_equals_torchs_counter_forward_and_training(shape: Transformer) -> None:
    model = Model(shape)
    tokens = torch.randint(shape.vocab_size, (3, 13))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        loss = model(tokens).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    expected = forward.get_total_flops()
    ours = flops(shape, batch=3, seq=13, phase="forward", attention="full").total
    assert ours == expected
    ours = flops(shape, batch=3, seq=13, phase="training", attention="full").total
    assert ours == expected + backward.get_total_flops()


JUDGED = {
    "dense": Transformer(layers=3, d_model=48, heads=6, kv_heads=2, d_ff=100, vocab_size=65),
    "gelu": Transformer(layers=2, d_model=32, heads=4, d_ff=128, vocab_size=51, gated_mlp=False),
    "experts": Transformer(
        layers=2,
        d_model=32,
        heads=4,
        vocab_size=51,
        experts=Experts(count=8, per_token=3, width=20, shared=12),
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_flops_equal_formula_of_megatron_lm(name: str) -> None:
    """Its `num_floating_point_operations` counts full attention, and does not count routers."""
    model = JUDGED[name]
    batch, seq = 4, 24
    experts = model.experts or Experts(count=1, per_token=1, width=model.d_ff)
    d, gate = model.d_model, 3 if model.gated_mlp else 2
    attention = 2 * d * (1 + model.kv_heads / model.heads) + 2 * seq
    mlp = gate * (experts.width * experts.per_token + experts.shared)
    expected = 6 * batch * seq * d * (model.layers * (attention + mlp) + model.vocab_size)
    counted = flops(model, batch=batch, seq=seq, attention="full")
    router = counted["experts/router"].total if model.experts else 0
    assert counted.total - router == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", JUDGED)
def test_flops_equal_formula_of_torchtitan(name: str) -> None:
    """It counts 6 per parameter except the embedding, also for norms, and full attention."""
    model, seq = JUDGED[name], 24
    counted = parameters(model, active=True)
    attention = 12 * model.layers * model.heads * model.head_dim * seq
    expected = 6 * (counted.total - counted["embedding"].total) + attention
    ours = flops(model, seq=seq, attention="full").total / seq
    assert ours == expected - 6 * counted["norms"].total


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gpt_neox", "mixtral"])
def test_products_equal_the_ones_that_calflops_counts_in_transformers(kind: str) -> None:
    """The counter replaces functions of torch, and does not see the products of fused experts."""
    calflops = pytest.importorskip("calflops", reason="tried with calflops 0.3.2")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    if kind != "gpt2":
        sizes |= {"intermediate_size": 160, "head_dim": 16}
    if kind in ("llama", "qwen3", "mixtral"):
        sizes["num_key_value_heads"] = 2
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=1000, bos_token_id=0, eos_token_id=0, **sizes
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    _, multiplications, _ = calflops.calculate_flops(
        model=model,
        kwargs={"input_ids": torch.zeros(2, 32, dtype=torch.long)},
        print_results=False,
        output_as_string=False,
    )
    counted = flops(Transformer.from_hf(config), batch=2, seq=32, phase="forward", attention="full")
    fused = 0
    if kind == "mixtral":
        fused = counted["experts"].total - counted["experts/router"].total
    assert 2 * multiplications == counted.total - fused


@given(seq=st.integers(1, 40), window=st.integers(0, 50), chunked=st.booleans())
def test_pairs_are_the_ones_that_the_mask_lets_through(
    seq: int, window: int, chunked: bool
) -> None:
    some = Window(size=window, chunked=chunked) if window else None
    shape = Transformer(layers=2, d_model=8, heads=2, vocab_size=0, window=some)
    causal = torch.ones(seq, seq).tril()
    band = causal.triu(-(window - 1)) if window else causal
    if window and chunked:
        chunk = torch.arange(seq) // window
        band = causal * (chunk[:, None] == chunk)
    assert count_pairs(shape, seq) == (causal.sum(), band.sum())
    assert count_pairs(shape, seq, "full") == (seq**2, seq**2)


@settings(deadline=None, max_examples=30)
@given(seq=st.integers(1, 20), window=st.integers(0, 9), chunked=st.booleans())
def test_decoding_all_tokens_costs_as_much_as_prefill(seq: int, window: int, chunked: bool) -> None:
    shape = Transformer(
        layers=3,
        d_model=12,
        heads=3,
        kv_heads=1,
        vocab_size=19,
        window=Window(size=window, layers=(1,), chunked=chunked) if window else None,
    )
    one_by_one = sum(flops(shape, seq=i, phase="decode").total for i in range(1, seq + 1))
    assert one_by_one == flops(shape, seq=seq, phase="forward").total


def test_chunks_of_llama_4_are_those_of_its_mask() -> None:
    from transformers import Llama4TextConfig
    from transformers.masking_utils import create_chunked_causal_mask

    config = Llama4TextConfig(attention_chunk_size=4, num_hidden_layers=4)
    config._attn_implementation = "eager"
    embeds = torch.zeros(1, 11, 8)
    mask = create_chunked_causal_mask(config, embeds, None, None)
    shape = Transformer.from_hf(config)
    assert count_pairs(shape, 11)[1] == int((mask == 0).sum())


def test_bidirectional_gemma_3_attends_to_both_sides() -> None:
    from transformers import Gemma3TextConfig

    sizes: dict[str, Any] = {"sliding_window": 6, "num_hidden_layers": 6}
    config = Gemma3TextConfig(**sizes, use_bidirectional_attention=True)
    shape = Transformer.from_hf(config)
    distance = (torch.arange(11)[:, None] - torch.arange(11)).abs()
    # The class stores the window as an exclusive bound to each side.
    assert count_pairs(shape, 11) == (11 * 11, int((distance < config.sliding_window).sum()))
    assert count_pairs(Transformer.from_hf(Gemma3TextConfig(**sizes)), 11)[0] == 11 * 12 / 2


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_attention_whose_mask_depends_on_the_kernel_is_refused(family: str) -> None:
    sizes = {"model_type": family, "use_bidirectional_attention": True}
    with pytest.raises(ValueError, match="use_bidirectional_attention is set"):
        Transformer.from_hf(sizes | {"hidden_size": 64, "num_hidden_layers": 2})


def test_prefill_leaves_out_all_heads_but_the_last() -> None:
    shape = SHAPES[0]
    forward, prefill = (flops(shape, seq=10, batch=2, phase=p) for p in ("forward", "prefill"))
    assert forward["head"].total == 10 * prefill["head"].total
    assert forward["mlp"].total == prefill["mlp"].total


def test_attention_of_decoded_token_is_linear_in_context() -> None:
    shape = SHAPES[0]
    cost = [flops(shape, seq=s, phase="decode")["attention"].total for s in (100, 200, 400)]
    assert cost == [cost[0], 2 * cost[0], 4 * cost[0]]
    assert cost[0] == shape.layers * 4 * 100 * shape.d_model


def test_recomputation_adds_a_forward_of_the_blocks() -> None:
    shape = SHAPES[1]
    plain = flops(shape, seq=8)
    forward = flops(shape, seq=8, phase="forward")
    full = flops(shape, seq=8, recompute="full")
    assert full.total - plain.total == forward.total - forward["head"].total
    selective = flops(shape, seq=8, recompute="selective")
    assert selective.total - plain.total == forward["attention"].total
    # q and k have the width of v here, so that the scores are half of the attention.
    flash = flops(shape, seq=8, flash=True)
    assert 2 * (flash.total - plain.total) == forward["attention"].total


INDEXED = Transformer(
    layers=2,
    d_model=32,
    heads=4,
    head_dim=8,
    v_head_dim=8,
    mla=MLA(kv_rank=10, q_rank=7, rope_head_dim=4, index_heads=2, index_head_dim=6, index_top=5),
    vocab_size=31,
)


def test_recomputation_repeats_attention_with_an_index() -> None:
    plain = flops(INDEXED, seq=8).total
    forward = flops(INDEXED, phase="forward", seq=8)
    full = flops(INDEXED, recompute="full", seq=8).total
    assert full - plain == forward.total - forward["head"].total
    core = forward["attention"]
    assert flops(INDEXED, recompute="selective", seq=8).total - plain == core.total
    assert flops(INDEXED, flash=True, seq=8).total - plain == core["scores"].total
    rate = {"tokens_per_second": 8.0, "seq": 8, "peak_flops": 1e9}
    without = sum(
        2 * math.prod(value for name, value in leaf.factors if name not in ("passes", "ops"))
        for leaf in forward.leaves()
        if not {"pairs"} & dict(leaf.factors).keys()
    )
    assert mfu(INDEXED, include_attention=False, **rate) == pytest.approx(3 * without / 1e9)


def test_full_attention_decodes_on_all_keys() -> None:
    by_attention = {
        a: flops(INDEXED, seq=9, phase="decode", attention=a) for a in ("full", "causal")
    }
    assert (
        by_attention["full"]["attention"].total * 5 == by_attention["causal"]["attention"].total * 9
    )


def test_expert_flops_count_chosen_experts_only() -> None:
    dense = Transformer(layers=2, d_model=8, heads=2, d_ff=24, vocab_size=0)
    sparse = Transformer(
        layers=2,
        d_model=8,
        heads=2,
        experts=Experts(count=7, per_token=3, width=8),
        vocab_size=0,
    )
    router = 3 * 2 * 2 * 8 * 7 * 5
    assert flops(sparse, seq=5).total == flops(dense, seq=5).total + router


def test_latent_attention_decodes_on_the_latent() -> None:
    shape = Transformer(
        layers=2,
        d_model=32,
        heads=4,
        head_dim=8,
        v_head_dim=6,
        mla=MLA(kv_rank=10, rope_head_dim=4),
        vocab_size=0,
    )
    a, b = (flops(shape, seq=s, phase="decode").total for s in (50, 51))
    assert b - a == 2 * shape.layers * shape.heads * (10 + 4 + 10)


def test_utilization_of_published_runs() -> None:
    palm = Transformer(
        layers=118,
        d_model=18432,
        heads=48,
        kv_heads=1,
        head_dim=256,
        vocab_size=256_000,
        tied=True,
        norms_per_layer=1,
        parallel_block=True,
    )
    run = {"tokens_per_second": 238.3e3, "seq": 2048, "devices": 6144, "hardware": "TPU v4"}
    assert mfu(palm, attention="full", **run) == pytest.approx(0.462, abs=1.5e-3)
    assert mfu(palm, include_attention=False, **run) == pytest.approx(0.457, abs=1.5e-3)
    # Chowdhery et al. 2022, table 3: rematerialization puts the hardware figure at 57.8 %.
    executed = flops(palm, seq=2048, attention="full", recompute="full").total / 2048
    second = compute_utilization(executed * 238.3e3 / 6144, hardware="TPU v4")
    assert second == pytest.approx(0.578, abs=0.04)


def test_only_masked_pairs_raise_utilization_above_one() -> None:
    model = Transformer(layers=1, d_model=8, heads=1, vocab_size=0, d_ff=8)
    causal, full = (flops(model, seq=4096, attention=a).total for a in ("causal", "full"))
    run = {"seq": 4096, "peak_flops": 1.0, "tokens_per_second": 0.999 * 4096 / causal}
    assert mfu(model, **run) == pytest.approx(0.999)
    assert mfu(model, attention="full", **run) == pytest.approx(0.999 * full / causal)
    run["tokens_per_second"] *= 1.002
    for attention in ("causal", "full"):
        with pytest.raises(ValueError, match=r"expected a utilization <= 1, got 1\.001 "):
            mfu(model, attention=attention, **run)
