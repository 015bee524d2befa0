"""Tests that compare memory with eager torch: saved tensors, and the peak of live storages."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accounting import (
    PRECISIONS,
    Experts,
    Plan,
    Transformer,
    Workload,
    fits,
    parameters,
    training_memory,
)
from accounting.breakdown import Breakdown
from accounting.memory.activations import count_activation_bytes, count_head_activation_bytes
from accounting.memory.live import make_state
from accounting.memory.peak import peak_memory
from accounting.memory.states import count_device_parameters, count_head_parameters
from accounting.search.plans import find_fewest_devices, plans_that_fit
from hypothesis import given, settings
from hypothesis import strategies as st
from random_shapes import draw_shapes, make_divisible
from reference import Model, PolledMemory
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

# CPU kernels: math keeps the probabilities, flash the log-sum-exp.
KERNELS = {False: SDPBackend.MATH, True: SDPBackend.FLASH_ATTENTION}
SHAPES = [
    Transformer(layers=2, d_model=24, heads=4, d_ff=40, vocab_size=31),
    Transformer(layers=3, d_model=32, heads=2, vocab_size=50, gated_mlp=False, activation="gelu"),
]

MAMBA = Transformer.from_hf(
    {"model_type": "mamba2", "hidden_size": 8, "num_hidden_layers": 3, "vocab_size": 5}
    | {"num_heads": 4, "state_size": 4, "n_groups": 1}
)


def compute_loss(
    model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def count_saved_bytes(shape: Transformer, batch: int, seq: int) -> int:
    """Bytes of every storage that a forward saves, parameters aside, each once."""
    model = Model(shape)
    tokens, targets = torch.randint(shape.vocab_size, (2, batch, seq)).unbind()
    targets = targets.clone()
    tokens = tokens.clone()
    expected = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in expected:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute_loss(model, tokens, targets)
    assert loss.isfinite()
    return sum(storage.nbytes() for storage in saved.values())


def predict_saved_bytes(shape: Transformer, batch: int, seq: int, **options: object) -> int:
    saved = count_activation_bytes(shape, batch=batch, seq=seq, fused_norm=False, **options)
    precision = options.get("precision", "fp32")
    work = Workload(batch=batch, seq=seq, precision=precision, fused_norm=False)
    head = count_head_activation_bytes(shape, Plan(), work)
    later = ("its gradient", "gradient of the logits", "logits before the cast")
    return saved.total + sum(part.total for part in head if part.name not in later)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("flash", [False, True])
def test_saved_activations_equal_eager_torch_to_the_byte(shape: Transformer, flash: bool) -> None:
    with sdpa_kernel(KERNELS[flash]):
        assert count_saved_bytes(shape, 3, 13) == predict_saved_bytes(shape, 3, 13, flash=flash)


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        (Transformer(layers=3, d_model=8, heads=0, vocab_size=5, norms_per_layer=1), "mlp"),
        (MAMBA, "mixers"),
    ],
)
def test_norms_of_layers_without_attention_save_their_inputs(shape: Transformer, part: str) -> None:
    saved = count_activation_bytes(shape, batch=2, seq=7)[part]
    assert saved["norm input"].total == saved["norm statistics"].total * 8 == 3 * 2 * 7 * 8 * 4


def test_block_with_most_activations_is_not_that_with_most_parameters() -> None:
    """The first layer is dense and wide, and the others have many narrow experts."""
    experts = Experts(count=64, per_token=1, width=32, layers=(1, 2))
    mixed = Transformer(layers=3, d_model=64, heads=4, d_ff=512, vocab_size=9, experts=experts)
    dense = replace(mixed, experts=None, mlp_layers=None)
    plan = Plan(recompute="full", data=2, expert=2, zero=3)
    memory = training_memory(mixed, plan, batch=2, seq=8)
    expected = training_memory(dense, replace(plan, expert=1), batch=2, seq=8)
    for part in ("one block recomputed", "gradients in flight"):
        assert memory[part].total == expected[part].total


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (Transformer(layers=1, d_model=8, heads=2, vocab_size=5), 5 * 8 + 8),
        (Transformer(layers=1, d_model=8, heads=2, vocab_size=5, tied=True), 5 * 8 + 8),
        (Transformer(layers=1, d_model=8, heads=2, vocab_size=5, head_bias=True), 5 * 8 + 8 + 5),
        (
            # The output of the blocks is projected to the width of the embedding.
            Transformer(layers=1, d_model=8, heads=2, vocab_size=5, embedding_dim=4),
            5 * 4 + 8 + 8 * 4,
        ),
        (Transformer(layers=1, d_model=8, heads=2, vocab_size=5, lm_head=False), 8),
    ],
)
def test_parameters_after_the_blocks_include_biases_and_projections(
    model: Transformer, count: int
) -> None:
    assert count_head_parameters(model, Plan()) == count


def test_autocast_keeps_casts_and_copies_of_the_matrices() -> None:
    shape = SHAPES[0]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cpu", torch.bfloat16):
        saved = count_saved_bytes(shape, 3, 13)
    cast = peak_memory(shape, batch=3, seq=400, precision="amp_bf16")["cast weights"].total
    assert saved == cast + predict_saved_bytes(shape, 3, 13, precision="amp_bf16")


@contextmanager
def select_kernel(flash: bool) -> Iterator[None]:
    with sdpa_kernel(KERNELS[flash]):
        yield


# The peak is at the logits, in the blocks, and in the optimizer.
PEAKS = {
    "logits": (Transformer(layers=4, d_model=64, heads=4, d_ff=172, vocab_size=500), 4, 64),
    # With fewer key heads than heads, only a flash kernel saves keys and values once.
    "activations": (
        Transformer(layers=4, d_model=96, heads=4, kv_heads=1, d_ff=256, vocab_size=100),
        8,
        64,
    ),
    "optimizer": (Transformer(layers=4, d_model=128, heads=4, d_ff=512, vocab_size=1000), 1, 32),
}


@pytest.mark.parametrize(
    ("where", "flash", "foreach", "recompute"),
    [
        ("logits", False, True, "none"),
        ("activations", True, False, "none"),
        ("activations", False, False, "full"),
        ("optimizer", True, True, "full"),
    ],
)
def test_peak_of_training_is_predicted_within_three_percent(
    where: str, flash: bool, foreach: bool, recompute: str
) -> None:
    check_peak(where, flash, foreach, recompute)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("where", PEAKS)
def test_all_peaks_of_training_are_predicted_within_three_percent(
    where: str, flash: bool, foreach: bool, recompute: str
) -> None:
    check_peak(where, flash, foreach, recompute)


def create_memory(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor
) -> PolledMemory:
    """Return a memory that knows the tensors before a second step, which has optimizer state."""
    make_state(optimizer)
    peak = PolledMemory()
    state = (leaf for leaf in tree_leaves(optimizer.state_dict()) if isinstance(leaf, torch.Tensor))
    peak.add((*inputs, *model.parameters(), *state))
    return peak


def check_peak(where: str, flash: bool, foreach: bool, recompute: str) -> None:
    """Check that the predicted peak of a real step is at most 3 percent off."""
    shape, batch, seq = PEAKS[where]
    model = Model(shape)
    if recompute == "full":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    tokens, targets = (torch.randint(shape.vocab_size, (batch, seq)) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    peak = create_memory(model, optimizer, tokens, targets)
    with select_kernel(flash), peak:
        compute_loss(model, tokens, targets).backward()
        optimizer.step()
    predicted = peak_memory(
        shape,
        Plan(recompute=recompute),
        batch=batch,
        seq=seq,
        flash=flash,
        fused_norm=False,
        foreach=foreach,
    )
    assert predicted.total == pytest.approx(peak.peak_bytes, rel=0.03)


@pytest.mark.parametrize(
    ("batch", "tied"),
    [
        *((1, True), (8, False)),
        *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in ((1, False), (8, True))),
    ],
)
def test_peak_with_accumulated_gradients_is_that_of_the_real_step(batch: int, tied: bool) -> None:
    sizes: dict[str, Any] = {"layers": 3, "d_model": 128, "heads": 4, "kv_heads": 2, "d_ff": 256}
    shape = Transformer(**sizes, vocab_size=2000, tied=tied)
    model = Model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.zeros(batch, 16, dtype=torch.long)
    peak = create_memory(model, optimizer, tokens)
    with select_kernel(True), peak:
        for _ in range(2):
            compute_loss(model, tokens, tokens).backward()
        optimizer.step()
    work = Workload(batch=2 * batch, seq=16, fused_norm=False)
    predicted = peak_memory(shape, Plan(microbatches=2), work, foreach=False)
    assert predicted.total == pytest.approx(peak.peak_bytes, rel=0.03)


def test_roots_of_two_neighboring_parameters_exist_at_once() -> None:
    """Without foreach, the root of the previous parameter is freed after those of the next."""
    shape = Transformer(layers=1, d_model=64, heads=2, d_ff=1500, vocab_size=100)
    model, tokens = Model(shape), torch.zeros(1, 1, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    peak = create_memory(model, optimizer, tokens)
    with peak:
        compute_loss(model, tokens, tokens).backward()
        optimizer.step()
    predicted = peak_memory(shape, batch=1, seq=1, fused_norm=False, foreach=False)
    assert predicted.total == pytest.approx(peak.peak_bytes, rel=0.002)


@pytest.mark.parametrize(
    ("layers", "d_model", "d_ff", "seq"), [(1, 64, 1024, 64), (1, 128, 256, 256), (2, 64, 1024, 96)]
)
def test_peak_in_the_backward_includes_the_gradients_that_it_has_computed(
    layers: int, d_model: int, d_ff: int, seq: int
) -> None:
    shape = Transformer(layers=layers, d_model=d_model, heads=2, d_ff=d_ff, vocab_size=8)
    model, tokens = Model(shape), torch.zeros(1, seq, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    peak = create_memory(model, optimizer, tokens)
    with select_kernel(True), peak:
        compute_loss(model, tokens, tokens).backward()
        optimizer.step()
    predicted = peak_memory(shape, batch=1, seq=seq, fused_norm=False, foreach=False)
    assert "in the optimizer" not in predicted.name
    assert predicted.total == pytest.approx(peak.peak_bytes, rel=0.01)


class Loss(torch.nn.Module):
    """A decoder whose loop keeps only the loss."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.model = Model(shape)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return compute_loss(self.model, tokens, tokens)


def test_logits_that_are_cast_count_as_kept_by_the_loop() -> None:
    shape = Transformer(layers=1, d_model=64, heads=4, kv_heads=2, d_ff=128, vocab_size=4096)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    optimizer = partial(torch.optim.AdamW, foreach=False)
    traced = fits(Loss(shape), tokens, optimizer, rounding=1, autocast=torch.bfloat16).peak.total
    work = Workload(batch=4, seq=64, precision="amp_bf16", fused_norm=False)
    predicted = peak_memory(shape, work=work, foreach=False).total
    assert predicted - 2 * 4 * 64 * 4096 == pytest.approx(traced, rel=0.01)
    assert predicted <= 1.15 * traced


@settings(deadline=None, max_examples=25)
@given(s=st.integers(1, 64), b=st.integers(1, 8), a=st.integers(1, 8), e=st.integers(1, 16))
def test_plain_attention_is_korthikantis_formula(s: int, b: int, a: int, e: int) -> None:
    # Reducing Activation Recomputation, equations 1, 2, 4 and table 2: bytes per layer in 16 bits.
    h, t = a * e * 4, 4
    shape = Transformer(
        layers=1,
        d_model=h,
        heads=a * 4,
        vocab_size=0,
        gated_mlp=False,
        activation="gelu",
        norm="layernorm",
    )

    def layer(plan: Plan, **options: object) -> float:
        saved = count_activation_bytes(
            shape, plan, batch=b, seq=s, precision="bf16", dropout=True, flash=False, **options
        )
        # The paper leaves out the two numbers a norm keeps for a token.
        return saved.total - sum(x.total for x in saved.leaves() if x.name == "norm statistics")

    sbh, scores = s * b * h, 5 * a * 4 * s * s * b
    assert layer(Plan()) == 34 * sbh + scores
    assert layer(Plan(tensor=t)) == 10 * sbh + (24 * sbh + scores) / t
    assert layer(Plan(tensor=t, sequence_parallel=True)) == (34 * sbh + scores) / t
    assert layer(Plan(recompute="selective")) == 34 * sbh
    assert layer(Plan(recompute="full")) == 2 * sbh


def test_recipes_keep_the_bytes_that_their_sources_say() -> None:
    expected = {
        "fp32": 16,
        "amp_bf16": 16,
        "mixed_bf16": 16,
        "mixed_fp16": 16,
        "fsdp_bf16": 16,
        "fsdp_fp8": 16,
        "megatron_bf16": 18,
        "megatron_fp8": 18,
        "deepseek_v3": 13,
        "adam_8bit": 10 + Fraction(8, 256),
        "bf16": 8,
        "sgd_fp32": 8,
    }
    assert {name: p.bytes_per_parameter for name, p in PRECISIONS.items()} == expected
    assert PRECISIONS["deepseek_v3"].master == "fp32"
    assert PRECISIONS["deepseek_v3"].moments == ("bf16", "bf16")


@settings(deadline=None, max_examples=25)
@given(
    draw_shapes(),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
)
def test_devices_of_every_plan_store_all_parameters(
    shape: Transformer, tensor: int, pipeline: int, expert: int, zero: int
) -> None:
    shape = make_divisible(shape)
    expert = expert if shape.experts else 1
    plan = Plan(data=4, tensor=tensor, pipeline=pipeline, expert=expert, zero=zero)
    actual = split = 0
    for stage in range(pipeline):
        dense, routed = count_device_parameters(shape, plan, stage)
        actual += tensor * (dense + routed * expert)
        memory = training_memory(shape, plan, batch=0, seq=1, stage=stage, precision="sgd_fp32")
        split += plan.devices // pipeline * memory["weights"].total
    tied_copy = shape.tied and pipeline > 1
    everything = parameters(shape).total + tied_copy * shape.vocab_size * shape.d_model
    assert actual >= everything
    if tensor == 1:
        # Only tensor parallelism copies (norms, routers); a cut by layers or experts must be exact.
        assert actual == everything
        if zero == 3:
            assert 4 * everything <= split <= 4 * (everything + 3 * 2 * pipeline)


@settings(deadline=None, max_examples=8)
@given(draw_shapes(), st.integers(1, 8), st.integers(1, 32))
def test_memory_is_sum_of_parts_and_grows_with_every_size(
    shape: Transformer, batch: int, seq: int
) -> None:
    def need(model: Transformer, **sizes: int) -> float:
        sizes = {"batch": batch, "seq": seq} | sizes
        memory = training_memory(model, **sizes)
        assert memory.total == sum(leaf.total for leaf in memory.leaves())
        return memory.total

    least = need(shape)
    assert need(shape, batch=batch + 1) > least
    assert need(shape, seq=seq + 1) > least
    for field in ("d_model", "d_ff", "vocab_size", "head_dim"):
        assert need(replace(shape, **{field: getattr(shape, field) + 1})) >= least
    one_more = {"layers": shape.layers + 1, "attention_layers": None, "mlp_layers": None}
    assert need(replace(shape, **one_more)) > least


def test_more_sharding_and_less_keeping_need_less_memory() -> None:
    shape = Transformer(layers=8, d_model=64, heads=8, vocab_size=256)

    def need(**plan: object) -> float:
        return training_memory(shape, Plan(**plan), batch=32, seq=64, flash=False).total

    by_stage = [need(data=4, zero=stage) for stage in range(4)]
    assert by_stage == sorted(by_stage, reverse=True)
    assert len(set(by_stage)) == 4
    stored, without_scores, inputs = (need(recompute=how) for how in ("none", "selective", "full"))
    assert stored > without_scores > inputs
    assert need(tensor=4) > need(tensor=4, sequence_parallel=True)
    assert need(data=4, context=2) < need(data=4)


def test_schedules_store_micro_batches_in_flight() -> None:
    shape = Transformer(layers=8, d_model=64, heads=8, vocab_size=0)

    def saved(stage: int, **plan: object) -> float:
        plan = Plan(pipeline=4, microbatches=8, **plan)
        memory = training_memory(shape, plan, batch=8, seq=64, stage=stage)
        return memory["activations"].total

    single = count_activation_bytes(shape, batch=1, seq=64).total / 4
    assert [saved(s, schedule="gpipe") / single for s in range(4)] == [8, 8, 8, 8]
    assert [saved(s, schedule="1f1b") / single for s in range(4)] == [4, 3, 2, 1]
    # Narayanan et al. 2021: interleaving holds 1 + (p - 1)/(p v) times 1F1B's first stage.
    first = saved(0, schedule="interleaved", virtual_stages=2)
    assert first == 4 * single * (1 + Fraction(3, 8))


def test_model_states_need_no_sequence_length() -> None:
    model = Transformer(layers=2, d_model=64, heads=4, vocab_size=100)
    states = training_memory(model, batch=0, precision="mixed_bf16")
    assert states.total == training_memory(model, batch=0, seq=128, precision="mixed_bf16").total
    with pytest.raises(ValueError, match="expected seq >= 1 with batch=2, got 0"):
        training_memory(model, batch=2)


def test_searches_give_the_smallest_that_fits() -> None:
    shape = Transformer(layers=4, d_model=256, heads=4, vocab_size=1000)
    limit = 30e6
    count = find_fewest_devices(shape, memory_bytes=limit)

    def need(devices: int) -> float:
        return training_memory(shape, Plan(data=devices, zero=3), batch=0, seq=1).total

    assert need(count) <= limit < need(count - 1)


@pytest.mark.parametrize("data", [8, 64, 8192])
def test_zero_3_holds_the_blocks_that_it_gathers(data: int) -> None:
    model = Transformer(
        layers=126, d_model=16384, heads=128, kv_heads=8, d_ff=53248, vocab_size=128256
    )

    def need(**plan: object) -> Breakdown:
        return training_memory(
            model,
            Plan(data=data, zero=3, recompute="full", **plan),
            batch=data,
            seq=1,
            precision="mixed_bf16",
        )

    ends = 2 * 128256 * 16384 + 16384
    block = (model.size - ends) // model.layers
    saved = need()["gathered"]
    # Two blocks in bf16, the ends, the gradient of the head, one block's gradients and the copy of
    # them that is reduced.
    head = 128256 * 16384 + 16384
    assert saved.total == 2 * (ends + head + (2 + 1 + 1) * block)
    whole = need(reshard_after_forward=False)["gathered"]
    assert whole.total == 2 * (ends + head + (126 + 2) * block)
    assert need().total > 2 * block
    states = training_memory(model, Plan(data=data, zero=3), batch=0, seq=1)
    assert "gathered" not in states


@pytest.mark.parametrize("layers", [8, 11, 14])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_fullest_stage_is_found_among_distinct_stages(layers: int, schedule: str) -> None:
    model = Transformer(
        **{"layers": layers, "d_model": 64, "heads": 4, "vocab_size": 500},
        experts=Experts(count=4, per_token=2, width=32, layers=tuple(range(3, layers))),
    )
    chunks = 2 if schedule == "interleaved" else 1
    plan = Plan(pipeline=4, microbatches=8, schedule=schedule, virtual_stages=chunks)
    run = {"batch": 8, "seq": 16}
    every = [training_memory(model, plan, stage=stage, **run).total for stage in range(4)]
    assert training_memory(model, plan, **run).total == max(every)


@pytest.mark.parametrize("precision", ["amp_bf16", "fsdp_bf16", "mixed_bf16"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_training_memory_contains_every_tensor_of_the_peak(precision: str, zero: int) -> None:
    sizes: dict[str, Any] = {"layers": 4, "d_model": 256, "heads": 4, "vocab_size": 8000}
    for model in (Transformer(**sizes), Transformer(**sizes, tied=True, gated_mlp=False)):
        for data in (1, 2):
            work: dict[str, Any] = {"batch": 2, "seq": 16, "precision": precision}
            plan = Plan(data=data, zero=zero)
            everything = training_memory(model, plan, **work)
            peak = peak_memory(model, plan, **work, foreach=False)
            roots = peak["square roots"].total if "square roots" in peak else 0
            assert peak.total - roots <= everything.total
            copied = "cast weights" in everything or "gathered" in everything
            assert copied == (precision != "mixed_bf16" or (zero == 3 and data > 1))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("flash", [True, False])
def test_training_memory_contains_a_peak_inside_a_block(flash: bool, recompute: str) -> None:
    # The vocabulary is so small that the step peaks inside a block instead of at the logits.
    model = Transformer(layers=3, d_model=64, heads=8, kv_heads=2, vocab_size=32)
    for zero in (2, 3):
        plan = Plan(data=2, zero=zero, recompute=recompute)
        work = Workload(batch=4, seq=1024, flash=flash, fused_norm=False)
        peak = peak_memory(model, plan, work, foreach=False)
        assert "block" in peak.name
        assert peak.total <= training_memory(model, plan, work).total


def test_training_memory_contains_the_final_norm_and_the_gradient_of_the_head() -> None:
    small = Transformer(layers=1, d_model=64, heads=4, vocab_size=8)
    large = replace(small, layers=4, vocab_size=20_000, attention_layers=None, mlp_layers=None)
    for model, seq, zero in ((small, 1024, 0), (large, 1, 3)):
        plan = Plan(data=2, zero=zero)
        work = Workload(batch=2, seq=seq, fused_norm=False)
        peak = peak_memory(model, plan, work, foreach=False)
        roots = peak["square roots"].total if "square roots" in peak else 0
        assert peak.total - roots <= training_memory(model, plan, work).total


def test_peak_memory_refuses_the_plans_that_it_does_not_model() -> None:
    experts = Experts(count=8, per_token=2, width=64)
    shape = Transformer(layers=2, d_model=64, heads=4, vocab_size=100, experts=experts)
    plans = (
        Plan(data=8, expert=8),
        Plan(recompute="selective"),
        Plan(data=4, zero=2, microbatches=2),
    )
    for plan in plans:
        with pytest.raises(ValueError, match="use training_memory"):
            peak_memory(shape, plan=plan, batch=8, seq=16)


def test_peak_memory_and_fits_refuse_linear_layers_in_fp8() -> None:
    shape = Transformer(layers=2, d_model=64, heads=4, vocab_size=100)
    recipes = [name for name, recipe in PRECISIONS.items() if recipe.compute == "fp8"]
    assert recipes == ["fsdp_fp8", "megatron_fp8", "deepseek_v3"]
    for name in recipes:
        with pytest.raises(ValueError, match=f"got fp8 with bf16 in the recipe {name}"):
            peak_memory(shape, batch=8, seq=16, precision=name)
    for dtype in (torch.float8_e4m3fn, torch.float32):
        # torch only warns, and runs the step without autocast.
        with pytest.raises(ValueError, match="expected autocast to be one of None"):
            fits(nn.Linear(4, 4), torch.ones(2, 4), autocast=dtype)


@pytest.mark.parametrize("integer", [np.int32, torch.tensor])
def test_integers_of_numpy_and_torch_do_not_overflow(integer: Any) -> None:
    shape = Transformer(layers=2, d_model=64, heads=4, vocab_size=100)
    expected = peak_memory(shape, batch=1024, seq=4096).total
    assert peak_memory(shape, batch=integer(1024), seq=integer(4096)).total == expected
    assert type(Plan(data=integer(4)).data) is int


def make_mixture_with_dense_layers(width: int = 64, dense: int = 64) -> Transformer:
    experts = Experts(count=16, per_token=2, width=width, layers=(1, 2))
    return Transformer(layers=3, d_model=32, heads=4, vocab_size=500, d_ff=dense, experts=experts)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_gathered_ends_do_not_depend_on_the_kinds_of_blocks(pipeline: int) -> None:
    model = make_mixture_with_dense_layers()
    plan = Plan(data=4, zero=3, pipeline=pipeline, microbatches=2, reshard_after_forward=False)
    memory = training_memory(model, plan, batch=8, seq=16, precision="bf16", stage=0)
    ends = 500 * 32 * (1 if pipeline > 1 else 2) + (0 if pipeline > 1 else 32)
    assert memory["gathered/weights of the ends"].total == 2 * ends
    weights = sum(part.total for part in memory["gathered"] if "weights" in part.name)
    # At the fullest moment of a pipeline, the weights of a block may be resharded already.
    whole = 2 * sum(count_device_parameters(model, plan))
    assert weights == whole if pipeline == 1 else weights <= whole


def test_sequence_parallelism_splits_the_inputs_of_final_norm_and_head() -> None:
    """Korthikanti et al. 2022, section 4.3: 4 s b h / t (1 + v / h)."""
    model = Transformer(layers=2, d_model=64, heads=8, vocab_size=96, norm="layernorm")
    plan = Plan(tensor=8, sequence_parallel=True)
    head = count_head_activation_bytes(
        model, plan, Workload(batch=2, seq=16, precision="mixed_bf16")
    )
    saved = sum(head[name].total for name in ("norm input", "head input", "log-softmax"))
    assert saved == 4 * 2 * 16 * (64 + 96) / 8


@pytest.mark.parametrize("expert", [1, 16])
def test_largest_block_of_a_device_is_gathered(expert: int) -> None:
    """With one expert per device, the block without experts is the largest one."""
    model = make_mixture_with_dense_layers(dense=256)
    plan = Plan(data=16, zero=3, expert=expert)
    memory = training_memory(model, plan, batch=16, seq=16, precision="bf16")
    attention, expert_size = 4 * 32 * 32 + 2 * 32, 3 * 32 * 64
    sparse = attention + 32 * 16 + 16 // expert * expert_size
    dense = attention + 3 * 32 * 256
    largest = max(dense, sparse)
    assert memory["gathered/gradients of a block"].total == 2 * largest
    weights = memory["gathered/weights of blocks"].total
    assert weights == 2 * min(2 * largest, dense + 2 * sparse)


def test_tensor_parallelism_divides_the_widths_that_the_model_has() -> None:
    plan = Plan(tensor=2)
    everywhere = replace(make_mixture_with_dense_layers(dense=1), mlp_layers=())
    plan.check(everywhere)
    assert plans_that_fit(everywhere, hardware="H100", devices=2, batch=2, seq=8, tensor=2)
    with pytest.raises(ValueError, match=r"tensor to divide experts\.width=33"):
        plan.check(make_mixture_with_dense_layers(width=33))
