"""One question, one answer; the command lines; what a device serves."""

import json
import time
from typing import Any

import pytest
from accounting import MLA, Experts, Transformer, kv_cache, plan_for, training_memory
from accounting.cli.main import main
from accounting.cli.questions import amount, serving
from accounting.search.launch import command_lines
from accounting.search.plans import plans_that_fit
from accounting.time.step import step_time
from published_models import PUBLISHED

LLAMA_405B = Transformer(
    layers=126, d_model=16384, heads=128, kv_heads=8, d_ff=53248, vocab_size=128256
)
SMALL = Transformer(layers=8, d_model=1024, heads=16, vocab_size=32000)
TEXT = "layers=8,d_model=1024,heads=16,vocab_size=32000"


@pytest.mark.timing
def test_all_axes_for_405b_on_16384_devices_take_less_than_a_second() -> None:
    begin = time.process_time()
    answer = plan_for(LLAMA_405B, gpus=16384, hardware="H100", tokens=15.6e12, seq=8192)
    assert time.process_time() - begin < 1
    assert answer.memory.total <= 80e9


def test_the_answer_holds_together() -> None:
    answer = plan_for(LLAMA_405B, gpus=16384, tokens=15.6e12, seq=8192, batch=2048)
    plan = answer.plan
    assert plan.data * plan.tensor * plan.pipeline * plan.context == 16384
    plan.check(LLAMA_405B, batch=2048, seq=8192)
    assert answer.seconds.low < answer.seconds.middle < answer.seconds.high
    assert 0.3 < answer.mfu.middle < 0.6
    # 54 days and 15.6T tokens are what was published of it.
    assert 45 < answer.days.middle < 90
    found = answer.to_dict()
    assert json.loads(json.dumps(found))["plan"]["tensor"] == plan.tensor
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


def test_the_estimate_puts_the_best_plans_in_front() -> None:
    # Against every plan worked out in full, on a question that is small enough.
    question: dict[str, Any] = {"hardware": "H100", "devices": 8, "batch": 16, "seq": 2048}
    question |= {"context": 1, "recompute": "none"}
    model = Transformer(layers=16, d_model=4096, heads=32, vocab_size=64000)
    best = plans_that_fit(model, **question, most=1)[0]
    everything = plans_that_fit(model, **question, most=10_000)
    assert len(everything) > 50
    assert best.step_seconds <= 1.05 * everything[0].step_seconds
    run = {"batch": 16, "seq": 2048, "precision": "mixed_bf16"}
    again = step_time(model, best.plan, hardware="H100", **run)
    assert again.total == best.step_seconds


def test_the_plan_of_a_mixture_has_room_on_its_fullest_stage() -> None:
    # Its first layers are dense, so that no end of the pipeline is the fullest stage.
    model = Transformer.from_hf(PUBLISHED["deepseek-v3"].config)
    answer = plan_for(model, gpus=2048, hardware="H100", tokens=14.8e12)
    assert answer.memory.total == answer.best.memory_bytes <= 0.9 * 80e9
    assert 0.15 < answer.mfu.middle < 0.5


@pytest.mark.parametrize("gpus", [6, 24, 1000])
def test_any_number_of_devices_has_a_plan(gpus: int) -> None:
    assert plan_for(SMALL, gpus=gpus).plan.devices == gpus


def test_command_lines_multiply_to_the_devices() -> None:
    answer = plan_for(SMALL, gpus=16, tokens=1e9, batch=64, tensor=2, pipeline=2, zero=1)
    line = command_lines(SMALL, answer.plan, batch=64, seq=4096)["torchtitan"]
    degrees = [int(word.split("=")[1]) for word in line.split() if "_degree=" in word]
    product = 1
    for degree in degrees:
        product *= degree
    assert product == 16
    assert "--training.global_batch_size=64" in line
    line = command_lines(SMALL, answer.plan, batch=64, seq=4096)["megatron"]
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2" in line
    assert "--use-distributed-optimizer" in line
    assert line.startswith("torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py")


@pytest.mark.parametrize("gpus", [1, 6, 11, 12, 20, 72, 1000])
def test_a_launcher_starts_one_process_a_device(gpus: int) -> None:
    for line in plan_for(SMALL, gpus=gpus).commands().values():
        words = line.split()
        nodes = int(words[words.index("--nnodes") + 1])
        assert nodes * int(words[words.index("--nproc-per-node") + 1]) == gpus


@pytest.mark.parametrize(
    ("precision", "there"),
    [("fp32", ""), ("sgd_fp32", ""), ("megatron_bf16", "--bf16"), ("mixed_fp16", "--fp16")],
)
def test_a_command_line_computes_in_what_the_answer_counted(precision: str, there: str) -> None:
    lines = plan_for(SMALL, gpus=8, precision=precision).commands()
    assert {"--bf16", "--fp16"} & set(lines["megatron"].split()) == {there} - {""}
    # torchtitan computes in bfloat16 if nothing else is said, and does not know fp16.
    assert ("torchtitan" in lines) == (there != "--fp16")
    assert ("mixed_precision_param=float32" in lines.get("torchtitan", "")) == (there == "")
    assert "--fp16" in plan_for(SMALL, gpus=8, hardware="V100").commands()["megatron"]


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("microbatches", [2, 8])
def test_a_micro_batch_of_torchtitan_is_the_plans(pipeline: int, microbatches: int) -> None:
    given = {"data": 4 // pipeline, "pipeline": pipeline, "microbatches": microbatches}
    answer = plan_for(SMALL, gpus=4, batch=64, seq=128, schedule="1f1b", **given)
    line = answer.commands()["torchtitan"]
    said = dict(word.split("=") for word in line.split() if word.startswith("--") and "=" in word)
    local = int(said["--training.local_batch_size"])
    assert 64 % (local * answer.plan.data) == 0
    micro = said.get("--parallelism.pipeline_parallel_microbatch_size", local)
    assert int(micro) == 64 // answer.plan.data // microbatches


def test_megatrons_line_has_the_latent_the_shared_expert_and_the_dense_layers() -> None:
    model = Transformer(
        **{"layers": 3, "d_model": 64, "heads": 4, "vocab_size": 1000, "head_dim": 32},
        **{"mla": MLA(kv_rank=16, rope_head_dim=8, q_rank=24)},
        experts=Experts(count=8, per_token=2, width=48, shared=96, layers=(1, 2)),
    )
    line = plan_for(model, gpus=8).commands()["megatron"]
    assert "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 32" in line
    assert "--qk-pos-emb-head-dim 8 --v-head-dim 32 --q-lora-rank 24" in line
    assert "--moe-shared-expert-intermediate-size 96 --moe-layer-freq '[0, 1, 1]'" in line
    assert "--kv-channels" not in line
    grouped = Transformer(
        **{"layers": 2, "d_model": 64, "heads": 4, "kv_heads": 2, "vocab_size": 1000},
        **{"qk_norm": True, "qkv_bias": True},
    )
    line = plan_for(grouped, gpus=8).commands()["megatron"]
    assert "--qk-layernorm --add-qkv-bias" in line
    assert "--num-query-groups 2" in line


def test_the_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", TEXT, "--gpus", "8", "--tokens", "10B", "--batch", "64", "--tp", "2"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "tensor 2" in shown
    assert "torchtitan:" in shown
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["tensor"] == 2
    assert main(["plan", TEXT, "--gpus", "8", "--memory", "0.1"]) == 2
    assert "no plan over 8 H100" in capsys.readouterr().err
    assert main(["diff", TEXT, TEXT]) == 0
    assert "1.000" in capsys.readouterr().out
    assert main(["diff", TEXT, TEXT + ",tied=true", "--json"]) == 0
    first, *_ = json.loads(capsys.readouterr().out)
    assert first["cost"] == "parameters"
    assert first["first"] - first["second"] == 1024 * 32000
    assert main(["serve", TEXT, "--seq", "1024"]) == 0
    assert "sequences at once" in capsys.readouterr().out


def test_what_is_served_follows_from_the_cache() -> None:
    found = serving(SMALL, gpus=1, hardware="H100", seq=1024)
    cache = kv_cache(SMALL, seq=1024).total
    assert found["cache_bytes_a_sequence"] == cache
    room = 0.9 * 80e9 - found["weights_bytes"]
    assert found["sequences_at_once"] == room // cache


def test_amounts_are_read_as_they_are_written() -> None:
    assert (amount("1T"), amount("300B"), amount("2.5e9")) == (1e12, 3e11, 2.5e9)
