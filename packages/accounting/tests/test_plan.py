"""Tests of the search, of its command lines, and of inference."""

import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from accounting import (
    HARDWARE,
    MLA,
    PRECISIONS,
    Experts,
    Plan,
    Transformer,
    Workload,
    flops,
    kv_cache,
    plan_for,
    training_memory,
)
from accounting.cli.main import main
from accounting.cli.questions import parse_amount, read_stored_dtype
from accounting.cli.serving import estimate_serving
from accounting.hardware import find
from accounting.memory.states import count_device_parameters
from accounting.plan import can_split_evenly
from accounting.search.bounds import Bounds
from accounting.search.plans import plans_that_fit
from accounting.search.space import Space
from accounting.time.intervals import predict_seconds
from accounting.time.step import step_time
from figures import assert_at_most
from published_models import PUBLISHED

LLAMA_405B = Transformer(
    layers=126, d_model=16384, heads=128, kv_heads=8, d_ff=53248, vocab_size=128256
)
SMALL = Transformer(layers=8, d_model=1024, heads=16, vocab_size=32000)
MIXTURE = replace(SMALL, experts=Experts(count=16, per_token=2, width=512), mlp_layers=())
TEXT = "layers=8,d_model=1024,heads=16,vocab_size=32000"


@pytest.mark.timing
def test_search_for_405b_on_16384_devices_takes_less_than_one_second() -> None:
    start = time.process_time()
    answer = plan_for(LLAMA_405B, gpus=16384, hardware="H100", tokens=15.6e12, seq=8192)
    seconds = time.process_time() - start
    assert_at_most("accounting: plan of 405B on 16,384 devices", 1, seconds, "s")
    assert answer.memory.total <= 80e9


@pytest.mark.timing
def test_search_for_deepseek_v3_on_2048_devices_takes_less_than_two_seconds() -> None:
    begin = time.process_time()
    answer = plan_for(DEEPSEEK_V3, gpus=2048, hardware="H800", tokens=14.8e12, seq=4096)
    seconds = time.process_time() - begin
    assert_at_most("accounting: plan of DeepSeek-V3 on 2,048 devices", 2, seconds, "s")
    assert answer.plan.devices == 2048


def test_plans_for_tpus_print_no_command_for_gpus() -> None:
    answer = plan_for(SMALL, gpus=8, hardware="TPU v5p", batch=8, seq=64)
    assert "torchrun" not in answer.explain()


@pytest.mark.timing
def test_refusal_takes_less_than_two_seconds() -> None:
    begin = time.process_time()
    with pytest.raises(ValueError, match="no plan over"):
        plan_for(DEEPSEEK_V3, gpus=2048, hardware="H800", seq=4096, memory_bytes=1e9)
    seconds = time.process_time() - begin
    assert_at_most("accounting: refusal of DeepSeek-V3 with 1 GB", 2, seconds, "s")


def test_answer_is_consistent() -> None:
    answer = plan_for(LLAMA_405B, gpus=16384, tokens=15.6e12, seq=8192, batch=2048)
    plan = answer.plan
    assert plan.data * plan.tensor * plan.pipeline * plan.context == 16384
    plan.check(LLAMA_405B, batch=2048, seq=8192)
    assert answer.seconds.low < answer.seconds.middle < answer.seconds.high
    assert 0.3 < answer.mfu.middle < 0.6
    # The published run took 54 days for 15.6T tokens.
    assert 45 < answer.days.middle < 90
    result = answer.to_dict()
    assert json.loads(json.dumps(result))["plan"]["tensor"] == plan.tensor
    assert "MFU" in answer.explain()
    memory = training_memory(
        LLAMA_405B,
        plan,
        batch=2048,
        seq=8192,
        precision="megatron_bf16",
        fused_gate=True,
    )
    assert answer.memory.total == memory.total


def _list_divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _list_schedules(model: Transformer, pipeline: int) -> list[tuple[str, int]]:
    chunks = [
        v for v in range(2, 9) if pipeline > 1 and can_split_evenly(model.layers, pipeline * v)
    ]
    return [("1f1b", 1), *(("interleaved", v) for v in chunks)]


def _iter_documented_plans(
    model: Transformer, hardware: str, devices: int, batch: int, seq: int
) -> Iterator[Plan]:
    """Yield the plans of the space that the docstring of `plans_that_fit` states."""
    node = find(hardware).devices_per_node
    for tensor, pipeline, context in product(_list_divisors(devices), repeat=3):
        data, remainder = divmod(devices, tensor * pipeline * context)
        inside = tensor <= node and (devices <= node or node % tensor == 0)
        if remainder or not inside or (context > 1 and seq < 1024 * context):
            continue
        options = product(
            _list_schedules(model, pipeline),
            _list_divisors(data * context) if model.experts else [1],
            (0, 1, 3) if pipeline > 1 else (0, 1, 2, 3),
            _list_divisors(batch // data) if batch % data == 0 else [],
            ("none", "selective", "full"),
        )
        for (schedule, virtual), expert, zero, microbatches, recompute in options:
            try:
                plan = Plan(
                    data=data,
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    expert=expert,
                    zero=zero,
                    microbatches=microbatches,
                    schedule=schedule,
                    virtual_stages=virtual,
                    sequence_parallel=tensor > 1,
                    recompute=recompute,
                )
                plan.check(model, batch=batch, seq=seq)
                plan.has_unsharded_weights()
            except ValueError:
                continue
            # ZeRO has no effect on a single replica.
            if zero == 0 or plan.replicas > 1:
                yield plan


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 34))]
)
def test_search_returns_the_fastest_plans_of_its_space(seed: int) -> None:
    """Compare the search with all plans of the documented space, each computed in full."""
    drawn = random.Random(seed)
    is_large = seed >= 4
    heads = drawn.choice([4, 6, 12])
    experts = Experts(count=drawn.choice([4, 6, 8]), per_token=2, width=256)
    model = Transformer(
        layers=drawn.choice([2, 3, 6, 12] if is_large else [2, 3]),
        d_model=heads * drawn.choice([32, 128]),
        heads=heads,
        kv_heads=drawn.choice([heads, heads // 2]),
        vocab_size=drawn.choice([500, 32000]),
        tied=drawn.random() < 0.3,
        experts=experts if drawn.random() < 0.4 else None,
    )
    hardware = drawn.choice(["H100", "RTX 4090", "TPU v5p", "A100 40GB"])
    devices = drawn.choice([4, 6, 8, 12, 16] if is_large else [3, 4, 6])
    batch, seq = devices * drawn.choice([1, 2, 3]), drawn.choice([512, 2048])
    precision = drawn.choice(["mixed_bf16", "megatron_bf16", "fsdp_bf16"])
    work = Workload(batch=batch, seq=seq, precision=precision, fused_gate=True)
    plans = list(_iter_documented_plans(model, hardware, devices, batch, seq))
    needed = [training_memory(model, plan, work).total for plan in plans]
    # Between a tenth and all plans fit.
    usable = sorted(needed)[int(len(plans) * drawn.uniform(0.1, 1))]
    fastest = sorted(
        float(step_time(model, plan, work, hardware=hardware).total)
        for plan, memory in zip(plans, needed, strict=True)
        if memory <= usable
    )
    result = plans_that_fit(
        model,
        hardware=hardware,
        devices=devices,
        batch=batch,
        seq=seq,
        precision=precision,
        memory_bytes=usable / 0.9 * (1 + 1e-12),
        most=5,
    )
    assert [plan.step_seconds for plan in result] == pytest.approx(fastest[:5], rel=1e-8)


@pytest.mark.parametrize(
    ("hardware", "devices", "sequences", "seq", "precision", "layers", "width", "count", "fixed"),
    [
        ("A100 40GB", 24, 48, 1024, "mixed_bf16", 48, 1024, 8, {"pipeline": 3}),
        pytest.param(
            *("TPU v5p", 16, 32, 4096, "fsdp_bf16", 48, 5120, 0),
            {"data": 16, "zero": 3},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *("RTX 4090", 16, 64, 1024, "megatron_bf16", 32, 4096, 0),
            {"tensor": 2, "zero": 3},
            marks=pytest.mark.exhaustive,
        ),
        ("H100", 8, 32, 4096, "fsdp_bf16", 12, 2048, 16, {"expert": 4, "zero": 3}),
        pytest.param(
            *("H100", 32, 256, 4096, "fsdp_bf16", 48, 5120, 64),
            {"expert": 4, "zero": 3},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_fixing_the_plan_finds_no_faster_plan(
    hardware: str,
    devices: int,
    sequences: int,
    seq: int,
    precision: str,
    layers: int,
    width: int,
    count: int,
    fixed: dict[str, Any],
) -> None:
    model = Transformer(
        layers=layers,
        d_model=width,
        heads=width // 128,
        vocab_size=32000,
        experts=Experts(count=count, per_token=2, width=width // 2) if count else None,
    )
    question: dict[str, Any] = {"hardware": hardware, "devices": devices, "batch": sequences}
    question |= {"seq": seq, "precision": precision, "most": 1}
    (free,) = plans_that_fit(model, **question)
    (restricted,) = plans_that_fit(model, **question, **fixed)
    assert free.step_seconds <= restricted.step_seconds


def test_plan_with_experts_fits_on_fullest_stage() -> None:
    # Its first layers are dense, so that no end of the pipeline is the fullest stage.
    model = Transformer.from_hf(PUBLISHED["deepseek-v3"].config)
    answer = plan_for(model, gpus=512, hardware="H100", tokens=14.8e12)
    assert answer.memory.total == answer.best.memory_bytes <= 0.9 * 80e9
    assert 0.15 < answer.mfu.middle < 0.5


@pytest.mark.parametrize("gpus", [6, 1100])
def test_every_number_of_devices_has_a_plan(gpus: int) -> None:
    assert plan_for(SMALL, gpus=gpus).plan.devices == gpus


@pytest.mark.parametrize("model", [SMALL, MIXTURE], ids=["dense", "experts"])
def test_every_proposed_plan_divides_devices_batch_and_layers(model: Transformer) -> None:
    """Chunks of interleaved stages are equal, or both ends have a layer less."""
    question: dict[str, Any] = {"hardware": "H100", "devices": 16, "batch": 240, "seq": 4096}
    result = plans_that_fit(model, **question, most=20)
    result += plans_that_fit(model, **question, pipeline=4, data=4)
    assert result
    for plan in (candidate.plan for candidate in result):
        plan.check(model, batch=240, seq=4096)
        assert plan.data * plan.tensor * plan.pipeline * plan.context == plan.devices == 16
        chunks = plan.pipeline * plan.virtual_stages
        if plan.virtual_stages > 1:
            assert model.layers % chunks in (0, chunks - 2)
            assert plan.microbatches % plan.pipeline == 0


def test_no_interleaved_plan_is_proposed_whose_chunks_are_unlike() -> None:
    # 28 layers are 4 chunks of 7 and 28 chunks of 1, but not 8 or 16 equal chunks. With 6 and 10
    # chunks of 28 layers, and with all of these of 30 layers, both ends have one layer less.
    assert [n for n in (2, 4, 8, 16) if can_split_evenly(28, n)] == [2, 4]
    assert [n for n in (2, 4, 8, 16, 32) if can_split_evenly(30, n)] == [2, 4, 8, 16]
    uneven = replace(SMALL, layers=28, attention_layers=None, mlp_layers=None)
    question = {"hardware": "H100", "devices": 8, "batch": 16, "seq": 4096, "tensor": 1, "zero": 1}
    for pipeline, virtual in ((4, {1, 7}), (2, {1, 2, 3, 5, 7})):
        result = plans_that_fit(uneven, **question, pipeline=pipeline, recompute="none", most=100)
        assert {c.plan.virtual_stages for c in result} == virtual
    uneven = replace(uneven, layers=30, attention_layers=None, mlp_layers=None)
    plan = Plan(pipeline=4, microbatches=4, schedule="interleaved", virtual_stages=2)
    assert [len(plan.list_stage_layers(uneven, stage)) for stage in range(4)] == [7, 8, 8, 7]


def test_device_without_bf16_trains_in_fp16() -> None:
    answer = plan_for(SMALL, gpus=2, batch=8, seq=128, hardware="V100")
    assert answer.precision == "mixed_fp16"


def test_command_line_answers_every_question(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", TEXT, "--gpus", "8", "--tokens", "10B", "--batch", "64", "--tp", "2"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "tensor 2" in shown
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["tensor"] == 2
    assert main(["plan", TEXT, "--gpus", "8", "--memory", "0.1"]) == 2
    error = capsys.readouterr().err
    assert "no plan over 8 H100" in error
    assert re.search(r"needs [\d.]+ [KMG]iB per device and 85\.83 MiB are usable", error)
    assert main(["diff", TEXT, TEXT]) == 0
    assert "1.000" in capsys.readouterr().out
    assert main(["diff", TEXT, TEXT + ",tied=true", "--json"]) == 0
    first, *_ = json.loads(capsys.readouterr().out)
    assert first["cost"] == "parameters"
    assert first["first"] - first["second"] == 1024 * 32000
    assert main(["serve", TEXT, "--seq", "1024"]) == 0
    assert "sequences at once" in capsys.readouterr().out


def test_concurrent_sequences_follow_from_cache_size() -> None:
    result = estimate_serving(SMALL, gpus=1, hardware="H100", seq=1024)
    cache = kv_cache(SMALL, seq=1024).total
    assert result["cache_bytes_per_sequence"] == cache
    room = 0.9 * 80e9 - result["weights_bytes"]
    assert result["sequences_at_once"] == room // cache


DEEPSEEK_V3 = Transformer(
    layers=61,
    d_model=7168,
    heads=128,
    head_dim=128,
    v_head_dim=128,
    d_ff=18432,
    vocab_size=129280,
    mla=MLA(q_rank=1536, kv_rank=512, rope_head_dim=64),
    experts=Experts(count=256, per_token=8, width=2048, shared=2048, layers=tuple(range(3, 61))),
)
QWEN3_30B = Transformer(
    layers=48,
    d_model=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    d_ff=6144,
    vocab_size=151936,
    qk_norm=True,
    experts=Experts(count=128, per_token=8, width=768),
)


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("model", [DEEPSEEK_V3, QWEN3_30B, SMALL], ids=["mla", "few keys", "small"])
def test_weights_and_cache_are_served_by_one_plan(model: Transformer, gpus: int) -> None:
    result = estimate_serving(model, gpus=gpus, hardware="H200", seq=8192)
    actual = 2 * sum(count_device_parameters(model, Plan(tensor=gpus)))
    single = kv_cache(model, seq=8192, tensor=gpus).total
    assert result["weights_bytes"] == gpus * actual
    assert result["cache_bytes_per_sequence"] == gpus * single
    usable = 0.9 * HARDWARE["H200"].memory_bytes
    assert result["sequences_at_once"] == max(0, (usable - actual) // single)
    read = result["bytes_per_token"] / gpus
    assert read < actual + single
    speed = HARDWARE["H200"].memory_bandwidth / read
    assert result["tokens_per_second_high"] == pytest.approx(speed)


def test_copies_under_tensor_parallelism_count_on_every_device() -> None:
    caches = [estimate_serving(DEEPSEEK_V3, gpus=n)["cache_bytes_per_sequence"] for n in (1, 8)]
    assert caches[1] == 8 * caches[0]
    caches = [estimate_serving(QWEN3_30B, gpus=n)["cache_bytes_per_sequence"] for n in (1, 4, 8)]
    assert caches == [caches[0], caches[0], 2 * caches[0]]
    with pytest.raises(ValueError, match=r"expected tensor to divide .* = 6 / \(1 x 2\), so pass"):
        estimate_serving(QWEN3_30B, gpus=6, pipeline=2)
    with pytest.raises(ValueError, match="has no cache"):
        estimate_serving(replace(SMALL, causal=False))


@pytest.mark.parametrize("seq", [1, 500])
def test_bytes_per_device_equal_count_by_hand(seq: int) -> None:
    sizes: dict[str, Any] = {"layers": 4, "d_model": 64, "heads": 8, "kv_heads": 2, "d_ff": 256}
    dense = Transformer(**sizes, vocab_size=1000)
    # Attention and norms of one layer, split over two tensor-parallel devices.
    attention = 2 * 64 * 64 // 2 + 2 * 64 * 16 // 2
    norms = 2 * 64
    table = 1000 * 64 // 2
    # One device stores one key head of width 8, and its values.
    cache_layer = 2 * 8 * seq
    # 2 replicas of 2 stages: 2 layers per stage; the last stage has the head and a norm.
    stage = 2 * (attention + norms + 3 * 64 * 256 // 2) + table
    result = estimate_serving(dense, gpus=8, data=2, pipeline=2, seq=seq, batch=6)
    assert result["bytes_per_device"] == 2 * (stage + 64) + 2 * 3 * 2 * cache_layer
    assert result["weights_bytes"] == 2 * 2 * 2 * (2 * stage + 64)
    assert result["cache_bytes_per_sequence"] == 2 * 2 * 4 * cache_layer
    # 4 replicas, of which each pair distributes 8 experts; one expert is shared.
    experts = Experts(count=8, per_token=2, width=32, shared=16, layers=(1, 2, 3))
    sparse = Transformer(**sizes, vocab_size=1000, experts=experts)
    routed = 8 // 2 * 3 * 64 * 32 // 2
    layers = 4 * (attention + norms) + 3 * 64 * 256 // 2 + 3 * (64 * 8 + 3 * 64 * 16 // 2 + routed)
    result = estimate_serving(sparse, gpus=8, data=4, expert=2, seq=seq, batch=12)
    assert result["bytes_per_device"] == 2 * (layers + 2 * table + 64) + 2 * 3 * 4 * cache_layer
    assert result["weights_bytes"] == 8 * 2 * (layers + 2 * table + 64)
    assert result["cache_bytes_per_sequence"] == 2 * 2 * 4 * cache_layer


@pytest.mark.parametrize("pipeline", [1, 2])
def test_replicas_multiply_sequences_and_throughput(pipeline: int) -> None:
    single = estimate_serving(QWEN3_30B, gpus=4, pipeline=pipeline, seq=1024, batch=8)
    replicated = estimate_serving(QWEN3_30B, gpus=12, pipeline=pipeline, seq=1024, batch=24, data=3)
    multiplied = ("memory_bytes", "weights_bytes", "sequences_at_once", "batch")
    for name, value in single.items():
        factor = 3 if name in multiplied or name.startswith("tokens_per_second") else 1
        assert replicated[name] == pytest.approx(factor * value), name


def test_decode_step_has_an_all_reduce_per_block() -> None:
    """A parallel block has one output, and a layer of a state space has no MLP."""
    parallel = replace(SMALL, parallel_block=True)
    mamba = Transformer.from_hf(
        {"model_type": "mamba2", "hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000}
        | {"num_heads": 32, "state_size": 16, "n_groups": 8}
    )
    with_mlp = replace(mamba, mlp_layers=tuple(range(8)), d_ff=8, gated_mlp=False)
    link = HARDWARE["H100"].node_link
    # A double binary tree with a payload of eight tokens.
    call = 2 * (3 * link.latency + 8 * 1024 * 2 / link.bandwidth)
    for models in ((parallel, SMALL), (mamba, with_mlp)):
        fewer, more = (
            estimate_serving(model, gpus=8, batch=8, seq=8)["decode_step_seconds"]
            for model in models
        )
        assert more - fewer == pytest.approx(predict_seconds(8 * call).middle, rel=0.05)


@pytest.mark.parametrize("expert", [8, 16])
def test_expert_parallel_decode_step_adds_two_all_to_alls_per_layer(expert: int) -> None:
    """Eight H100 are one node; of sixteen, half of the bytes go through the network."""
    device = HARDWARE["H100"]
    run: dict[str, Any] = {"gpus": 16, "data": 16, "seq": 8, "batch": 16 * 64}
    alone, shared = (
        estimate_serving(QWEN3_30B, **run),
        estimate_serving(QWEN3_30B, expert=expert, **run),
    )
    payload = 64 * 8 * 2048 * 2
    # A device sends (n - 1) / n of the payload to the others, or half of it in each of log n steps.
    link, bandwidth = device.node_link, device.node_link.bandwidth
    if expert == 16:
        link, bandwidth = device.network, device.network.bandwidth * 15 / 8
    ring = (expert - 1) * link.latency + payload * (expert - 1) / expert / bandwidth
    tree = math.log2(expert) * (link.latency + payload / 2 / bandwidth)
    # Both steps are bound by memory, so their rooflines are the bytes that they read.
    saved = (alone["decode_step_seconds_low"] - shared["decode_step_seconds_low"]) / 0.8
    factor = predict_seconds(1.0).middle
    added = (shared["decode_step_seconds"] - alone["decode_step_seconds"]) / factor + saved
    assert added == pytest.approx(2 * 48 * min(ring, tree))
    assert shared["weights_bytes"] < alone["weights_bytes"]
    assert shared["sequences_at_once"] > alone["sequences_at_once"]


@pytest.mark.parametrize("batch", [1, 64])
def test_inference_times_start_at_roofline_of_stages(batch: int) -> None:
    device = HARDWARE["H100"]
    model = replace(SMALL, tied=False)
    table = model.vocab_size * model.d_model
    read = 2 * (model.size - table) + batch * kv_cache(model, seq=1024).total
    work = flops(model, seq=1024, batch=batch, phase="decode").total
    expected = max(read / device.memory_bandwidth, work / device.peak("bf16"))
    result = estimate_serving(model, hardware="H100", seq=1024, batch=batch)
    assert result["decode_step_seconds_low"] == pytest.approx(expected)
    work = flops(model, seq=1024, batch=batch, phase="prefill").total
    expected = max(read / device.memory_bandwidth, work / device.peak("bf16"))
    assert result["prefill_seconds_low"] == pytest.approx(expected)
    for name in ("prefill_seconds", "decode_step_seconds", "tokens_per_second"):
        assert result[f"{name}_low"] < result[name] < result[f"{name}_high"]
    assert result["tokens_per_second"] == pytest.approx(batch / result["decode_step_seconds"])
    # Stages run one after another: the same bytes and the same roofline on half of the memory each.
    staged = estimate_serving(model, hardware="H100", seq=1024, batch=batch, gpus=2, pipeline=2)
    assert staged["weights_bytes"] == 2 * model.size
    assert staged["cache_bytes_per_sequence"] == result["cache_bytes_per_sequence"]
    assert staged["decode_step_seconds_low"] == pytest.approx(
        result["decode_step_seconds_low"], rel=0.2
    )
    assert staged["sequences_at_once"] > 2 * result["sequences_at_once"]


def test_decode_step_reads_no_latents_that_are_not_selected() -> None:
    latent = replace(DEEPSEEK_V3.mla, index_heads=64, index_head_dim=128, index_top=2048)
    sparse = replace(DEEPSEEK_V3, mla=latent)
    short, long = (estimate_serving(sparse, seq=seq)["bytes_per_token"] for seq in (2048, 16384))
    assert long - short == 61 * (16384 - 2048) * 128 * 2


def test_devices_repeat_products_that_are_not_split() -> None:
    """Each tensor-parallel device computes latents, the router and the index of all heads."""
    latent = replace(DEEPSEEK_V3.mla, index_heads=64, index_head_dim=128, index_top=2048)
    sparse = replace(DEEPSEEK_V3, mla=latent)
    work = flops(sparse, seq=65536, phase="prefill")
    whole = work["index"].total + work["experts"]["router"].total
    for name in (
        "query down",
        "latent down",
        "index queries",
        "index keys",
        "weights of index heads",
    ):
        whole += work["projections"][name].total
    expected = (whole + (work.total - whole) / 8) / HARDWARE["H100"].peak("bf16")
    assert estimate_serving(sparse, gpus=8, seq=65536)["prefill_seconds_low"] == pytest.approx(
        expected
    )


def test_attention_between_eight_bit_products_has_sixteen_bits() -> None:
    model = Transformer(layers=2, d_model=64, heads=1, vocab_size=99)
    sixteen, eight = (
        estimate_serving(model, seq=65536, weights=dtype)["prefill_seconds"]
        for dtype in ("bf16", "fp8")
    )
    assert eight == pytest.approx(sixteen, rel=0.05)


@pytest.mark.parametrize("replicas", [1, 4])
def test_batch_reads_experts_that_its_tokens_choose(replicas: int) -> None:
    """The experts of 4 replicas are read for the tokens of all of them, a quarter by each."""
    experts = Experts(count=128, per_token=8, width=768)
    model = Transformer(layers=2, d_model=2048, heads=32, vocab_size=99, experts=experts)
    rng = random.Random(0)
    chosen = []
    for _ in range(400):
        tokens = [rng.sample(range(128), 8) for _ in range(16 * replicas)]
        chosen.append(len({expert for token in tokens for expert in token}))
    expert = 3 * 2048 * 768
    run: dict[str, Any] = {"gpus": replicas, "data": replicas, "expert": replicas, "seq": 8}
    seconds = estimate_serving(model, batch=16 * replicas, **run)["decode_step_seconds_low"]
    read = seconds * HARDWARE["H100"].memory_bandwidth - 16 * kv_cache(model, seq=8).total
    dense = 2 * (model.size - 2 * 128 * expert - 99 * 2048)
    assert read - dense == pytest.approx(2 * 2 * fmean(chosen) / replicas * expert, rel=0.02)


def test_each_layer_reads_the_keys_and_values_that_it_shares() -> None:
    shape = Transformer(
        layers=4, d_model=64, heads=4, kv_heads=2, vocab_size=100, shared_kv_layers=(2, 3)
    )
    served = estimate_serving(shape, seq=128)
    alone = estimate_serving(replace(shape, shared_kv_layers=()), seq=128)
    assert served["cache_bytes_per_sequence"] == kv_cache(shape, seq=128).total
    assert 2 * served["cache_bytes_per_sequence"] == alone["cache_bytes_per_sequence"]
    # The two layers without key and value matrices read 2 * 2 * 64 * 32 weights less.
    assert alone["bytes_per_token"] - served["bytes_per_token"] == 2 * 2 * 2 * 64 * 32
    with pytest.raises(ValueError, match="pipeline=1 for a model whose layers share keys"):
        estimate_serving(shape, gpus=2, pipeline=2, seq=128)


def test_serving_refuses_layouts_that_are_not_modeled(capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in {
        "--dp 2 --batch 2 --ep 2": "expected expert to divide the 0 experts of the model, got 2",
        "--dp 2": "expected data=2 to divide batch, got batch=1; batch is the number of sequences",
        "--pp 3": "expected data x pipeline = 1 x 3 to divide gpus, got gpus=4",
    }.items():
        assert main(["serve", TEXT, "--gpus", "4", *words.split()]) == 2
        assert reason in capsys.readouterr().err
    with pytest.raises(ValueError, match="experts are spread over these ranks"):
        estimate_serving(QWEN3_30B, gpus=4, expert=4)
    assert main(["serve", TEXT, "--seq", "8192", "--batch", "100000"]) == 1
    assert "for batch=100000" in capsys.readouterr().out


def test_serve_reads_quantization_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-V3 has room on 8 H200 in fp8, and not in bf16."""
    content = PUBLISHED["deepseek-v3"].config
    path = tmp_path / "config.json"
    words = ["serve", str(path), "--gpus", "8", "--hardware", "H200", "--json"]
    path.write_text(json.dumps(content | {"quantization_config": {"quant_method": "fp8"}}))
    assert main(words) == 0
    quantized = json.loads(capsys.readouterr().out)
    assert main([*words, "--weights", "bf16"]) == 1
    assert json.loads(capsys.readouterr().out)["weights_bytes"] == 2 * quantized["weights_bytes"]
    path.write_text(json.dumps(content | {"quantization_config": {"quant_method": "awq"}}))
    assert main(words) == 2
    assert "got 'awq'; pass the dtype of the weights with --weights" in capsys.readouterr().err
    assert main([*words, "--weights", "fp8"]) == 0


@pytest.mark.parametrize("outer", [{}, {"text_config": {"model_type": "llama"}}])
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_quantization_is_read_wherever_a_file_states_it(
    field: str, outer: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    for method, dtype in (("fp8", "fp8"), ("compressed-tensors", None)):
        stated = {field: {"quant_method": method}}
        nested = {name: inner | stated for name, inner in outer.items()} or stated
        path.write_text(json.dumps({"model_type": "llava"} | nested))
        if dtype:
            assert read_stored_dtype(str(path)) == dtype
        else:
            with pytest.raises(ValueError, match="got 'compressed-tensors'; pass the dtype"):
                read_stored_dtype(str(path))


def test_experts_in_another_dtype_than_the_quantization_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    content = {"model_type": "deepseek_v4", "quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(content | {"expert_dtype": "fp8"}))
    assert read_stored_dtype(str(path)) == "fp8"
    nested = {"quantization_config": {"quant_method": "fp8", "expert_dtype": "fp4"}}
    for stated in ({"expert_dtype": "fp4"}, nested):
        path.write_text(json.dumps(content | stated))
        with pytest.raises(ValueError, match=r"expected expert_dtype 'fp8' as .*, got 'fp4'; pass"):
            read_stored_dtype(str(path))


def test_refusal_says_which_numbers_do_not_divide_and_by_how_much() -> None:
    # Neither 8 layers nor 16 heads are divided by 11, so all ranks are data-parallel.
    reason = r"divisibility fails, not memory.*ranks are 11, and batch=13 is 2 more.*batch=11 or 22"
    with pytest.raises(ValueError, match=reason):
        plan_for(SMALL, gpus=11, batch=13, seq=64)
    for batch in (11, 22):
        assert plan_for(SMALL, gpus=11, batch=batch, seq=64).plan.data == 11
    # A pipeline of 7 stages needs no data-parallel ranks.
    assert plan_for(SMALL, gpus=7, batch=9, seq=64).plan.pipeline == 7
    # At most 8 tensor ranks and 8 stages divide 4096 devices.
    with pytest.raises(ValueError, match="ranks are 64, and batch=1 is 63 fewer; pass batch=64"):
        plan_for(SMALL, gpus=4096, batch=1, seq=64)
    with pytest.raises(ValueError, match=r"not memory\. No degrees divide 4 devices, batch=4, 8 l"):
        plan_for(SMALL, gpus=4, batch=4, seq=64, microbatches=3)


def test_plan_that_splits_least_is_first_among_equally_fast_plans() -> None:
    # On 8 devices, context parallelism takes the same time and memory as data parallelism here.
    shape = Transformer(
        **{"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336},
        vocab_size=128256,
    )
    plan = plan_for(shape, gpus=8, hardware="H100", seq=4096, batch=1024).plan
    assert (plan.data, plan.context) == (8, 1)


@pytest.mark.parametrize("vocab_size", [SMALL.vocab_size, 100 * SMALL.vocab_size])
def test_refusal_says_how_much_memory_is_missing(vocab_size: int) -> None:
    """Estimates omit the logits, which are most of the memory with a large vocabulary."""
    model = replace(SMALL, vocab_size=vocab_size)
    with pytest.raises(ValueError, match="are missing") as refused:
        plan_for(model, gpus=2, batch=2, seq=64, memory_bytes=1e8)
    # A fixed expert degree does not change the reason.
    with pytest.raises(ValueError, match="are missing"):
        plan_for(MIXTURE, gpus=8, batch=8, seq=64, memory_bytes=1e6, expert=4)
    numbers = re.findall(r"([\d.]+) (MiB|GiB)", str(refused.value))
    needed, usable, missing = (float(n) * {"MiB": 1, "GiB": 1024}[unit] for n, unit in numbers)
    assert usable == pytest.approx(0.9 * 1e8 / 2**20, rel=0.01)
    assert missing == pytest.approx(needed - usable, rel=0.02)
    # The need is that of the plan with the least memory.
    plan_for(model, gpus=2, batch=2, seq=64, memory_bytes=1.001 * needed * 2**20 / 0.9)
    with pytest.raises(ValueError, match="are missing"):
        plan_for(model, gpus=2, batch=2, seq=64, memory_bytes=0.999 * needed * 2**20 / 0.9)


def test_search_finds_plan_without_gradients_at_its_peak() -> None:
    """With one micro-batch, gradients and all activations never exist at once in a pipeline."""
    model = Transformer(layers=60, d_model=512, heads=8, vocab_size=1000)
    work = {"batch": 32, "seq": 512, "precision": "megatron_bf16"}
    plan = {"data": 32, "pipeline": 2, "microbatches": 1, "zero": 1, "recompute": "none"}
    needed = training_memory(model, Plan(**plan), fused_gate=True, **work).total
    question = {"hardware": "H100", "devices": 64, "memory_bytes": 1.001 * needed / 0.9}
    assert len(plans_that_fit(model, **question, **work, **plan)) == 1


def test_answer_prints_the_memory_that_was_passed() -> None:
    answer = plan_for(SMALL, gpus=2, batch=2, seq=64, memory_bytes=40 * 2**30)
    assert " of 40 GiB" in str(answer)


def test_unknown_price_is_not_zero_in_json() -> None:
    question: dict[str, Any] = {"gpus": 2, "hardware": "A100 40GB", "batch": 2, "seq": 64}
    unknown = plan_for(SMALL, **question)
    assert "price      unknown" in str(unknown)
    assert unknown.to_dict()["usd"] is None
    assert plan_for(SMALL, **question, usd_per_hour=1.0).to_dict()["usd"]["middle"] > 0


def test_search_stops_at_time_limit_and_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def record(computed: int, plans: int) -> None:
        seen.append((computed, plans))

    question: dict[str, Any] = {"hardware": "H100", "devices": 4, "batch": 4, "seq": 64}
    whole = plans_that_fit(SMALL, **question, progress=record)
    assert [computed for computed, _ in seen] == list(range(len(seen)))
    assert len({plans for _, plans in seen}) == 1
    assert plans_that_fit(SMALL, **question, time_limit=600.0) == whole
    with pytest.raises(TimeoutError, match=r"within 1e-09 s, got none among 0 of [\d,]+ plans"):
        plans_that_fit(SMALL, **question, time_limit=1e-9)

    assert main(["plan", TEXT, "--gpus", "8", "--time-limit", "1e-9"]) == 2
    late = [0.0]
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + late[0])

    def pass_limit(computed: int, plans: int) -> None:
        late[0] = 601.0 * (computed == 5)

    some = plans_that_fit(SMALL, **question, most=40, time_limit=600.0, progress=pass_limit)
    assert 0 < len(some) <= 5


@pytest.mark.parametrize("number", [np.float32, torch.tensor, Fraction, Decimal])
def test_numbers_of_other_libraries_are_those_of_python(number: Any) -> None:
    question: dict[str, Any] = {"gpus": 1, "batch": 1, "seq": 64, "recompute": "none"}
    expected = plan_for(SMALL, **question, tokens=2.0**30)
    answer = plan_for(SMALL, **question, tokens=number(2.0**30))
    assert json.dumps(answer.to_dict()) == json.dumps(expected.to_dict())


def test_amounts_with_suffixes_are_parsed() -> None:
    assert (parse_amount("1T"), parse_amount("300B"), parse_amount("2.5e9")) == (1e12, 3e11, 2.5e9)


@pytest.mark.parametrize("devices", [16, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_no_plan_is_proposed_whose_memory_is_not_modeled(devices: int) -> None:
    """In a pipeline, torch has no ZeRO-2, and which chunks of ZeRO-3 are whole is not known."""
    model = Transformer(layers=16, d_model=2048, heads=16, vocab_size=32000)
    about: dict[str, Any] = {"devices": devices, "batch": 64, "seq": 2048, "hardware": "H100"}
    for memory in (6e9, 2e9, 80e9):
        result = plans_that_fit(model, **about, memory_bytes=memory, pipeline=4, most=12)
        for candidate in result:
            assert candidate.plan.zero != 2
            assert candidate.plan.zero < 3 or candidate.plan.schedule != "interleaved"
    with pytest.raises(ValueError, match="not modeled"):
        plan_for(
            model,
            gpus=16,
            tensor=1,
            pipeline=4,
            zero=3,
            schedule="interleaved",
            virtual_stages=2,
        )


def test_search_reads_fields_like_a_plan() -> None:
    model = Transformer(layers=4, d_model=64, heads=4, vocab_size=100)
    question: dict[str, Any] = {"hardware": "H100", "devices": 2, "batch": 4, "seq": 8}
    with pytest.raises(ValueError, match="expected data >= 1, got 0"):
        plans_that_fit(model, **question, data=0)
    recipe = replace(PRECISIONS["fp32"], name="mine")
    assert plan_for(model, gpus=1, seq=8, batch=2, precision=recipe).precision == "mine"


HYBRID = {
    "model_type": "jamba",
    **{"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 1000},
    **{"intermediate_size": 1024, "num_key_value_heads": 2},
}


BOUNDED_MODELS = {
    "hybrid": Transformer.from_hf(HYBRID),
    "experts": MIXTURE,
    "tied": replace(SMALL, layers=12, tied=True, attention_layers=None, mlp_layers=None),
    "mla": replace(
        DEEPSEEK_V3,
        layers=7,
        attention_layers=None,
        mlp_layers=(0, 1, 2),
        experts=Experts(count=48, per_token=8, width=2048, shared=2048, layers=(3, 4, 5, 6)),
    ),
}


#: Each model and each precision occurs at least once; all other pairs are exhaustive.
BOUNDED_PAIRS = {
    *(("hybrid", "megatron_bf16"), ("experts", "mixed_bf16"), ("tied", "fsdp_bf16")),
    ("mla", "megatron_bf16"),
}


@pytest.mark.parametrize(
    ("name", "devices", "batch", "seq", "precision"),
    [
        pytest.param(*question, precision, marks=() if is_usual else pytest.mark.exhaustive)
        for question in (
            ("hybrid", 8, 16, 64),
            ("experts", 24, 96, 2048),
            ("tied", 48, 96, 4096),
            ("mla", 64, 192, 2048),
        )
        for precision in ("megatron_bf16", "mixed_bf16", "fsdp_bf16")
        for is_usual in [(question[0], precision) in BOUNDED_PAIRS]
    ],
)
def test_bounds_of_a_plan_are_at_most_its_memory_and_time(
    name: str, devices: int, batch: int, seq: int, precision: str
) -> None:
    model = BOUNDED_MODELS[name]
    work = Workload(batch=batch, seq=seq, precision=precision, fused_gate=True)
    space = Space(model, find("H100"), devices, work, {})
    bounds = Bounds(space)
    drawn = random.Random(0)
    compared = 0
    for layout in drawn.sample(space.layouts, min(20, len(space.layouts))):
        candidate = drawn.choice(list(space.iter_candidates(layout)))
        plan = space.build_plan(candidate)
        if plan is None:
            continue
        needed = training_memory(model, plan, work).total
        assert bounds.bound_layout_bytes(layout) <= bounds.bound_bytes(candidate) <= needed, plan
        step = step_time(model, plan, work, hardware="H100").total
        assert bounds.bound_layout_seconds(layout) <= bounds.bound_seconds(candidate) <= step, plan
        # A loose bound would make the search slow.
        assert bounds.bound_seconds(candidate) >= 0.8 * step, plan
        compared += 1
    assert compared > 10


def test_bounds_include_the_gradients_of_a_tied_embedding() -> None:
    """Without them, the search computes 56 plans in full."""
    model = Transformer(layers=24, d_model=2048, heads=16, vocab_size=256000, tied=True)
    about: dict[str, Any] = {"hardware": "H100", "devices": 64, "batch": 64, "seq": 512}
    computed: list[int] = []
    plans_that_fit(model, **about, memory_bytes=6e9, progress=lambda n, _: computed.append(n))
    assert len(computed) < 20
