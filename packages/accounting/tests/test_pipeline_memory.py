"""Tests that compare pipeline memory with the live tensors of torch's schedules.

Each stage runs its schedule alone, in a group without processes. torch's memory trackers support
neither pipeline stages nor sequence parallelism.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from accounting import Plan, Transformer, communication, training_memory
from accounting.memory.ledger import Ledger
from accounting.memory.live import make_state
from reference import Block, emulate_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}

releases_outputs = pytest.mark.skipif(
    not hasattr(PipelineStage, "release_fwd_send_outputs"),
    reason="stages of torch 2.11 keep sent outputs and the receive buffers of all micro-batches",
)


class Chunk(nn.Module):
    """Some layers, with the embedding before the first of all and the head after the last."""

    def __init__(self, t: Transformer, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(t.vocab_size, t.d_model) if first else None
        self.blocks = nn.ModuleList(Block(t) for _ in range(layers))
        self.norm = nn.RMSNorm(t.d_model) if last else None
        self.head = nn.Linear(t.d_model, t.vocab_size, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.embedding else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.norm and self.head else x


def shard_chunk(chunk: Chunk, plan: Plan, mesh: Any, mixed: bool) -> None:
    """Wrap each block and the ends by FSDP2."""
    options: dict[str, Any] = {"mesh": mesh}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for block in chunk.blocks:
        fully_shard(block, reshard_after_forward=plan.reshard_after_forward, **options)
    fully_shard(chunk, **options)


def count_peak(
    shape: Transformer, plan: Plan, stage: int, batch: int, seq: int, mixed: bool = False
) -> int:
    """Return the most bytes that are alive while torch's schedule runs on a stage."""
    chunks = plan.pipeline * plan.virtual_stages
    item = shape.layers // chunks
    rows, dtype = batch // plan.microbatches // plan.data, torch.bfloat16 if mixed else None
    stream = torch.empty(rows, seq, shape.d_model, dtype=dtype)
    tokens = torch.zeros(rows, seq, dtype=torch.long)
    with emulate_world(plan.pipeline * plan.data, rank=stage * plan.data):
        mesh = init_device_mesh(
            "cpu", (plan.pipeline, plan.data), mesh_dim_names=("pipeline", "data")
        )
        stages, actual = [], []
        for index in range(stage, chunks, plan.pipeline):
            first, last = index == 0, index == chunks - 1
            chunk = Chunk(shape, item, first=first, last=last)
            if plan.zero == 3:
                shard_chunk(chunk, plan, mesh["data"], mixed)
            out = torch.empty(rows, seq, shape.vocab_size, dtype=dtype) if last else stream.clone()
            stages.append(
                PipelineStage(
                    chunk,
                    index,
                    chunks,
                    torch.device("cpu"),
                    input_args=tokens if first else stream.clone().requires_grad_(),
                    output_args=out.requires_grad_(),
                    group=mesh.get_group("pipeline"),
                )
            )
            actual.append(chunk)
        many = plan.virtual_stages > 1
        schedule = SCHEDULES[plan.schedule](
            stages if many else stages[0],
            plan.microbatches,
            loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
        )
        optimizer = torch.optim.AdamW(
            [p for chunk in actual for p in chunk.parameters()], fused=True
        )
        if plan.zero < 3:
            make_state(optimizer)
        whole = torch.zeros(batch // plan.data, seq, dtype=torch.long)
        inputs = (whole,) if stage == 0 else ()
        target = {"target": whole} if stage == plan.pipeline - 1 else {}
        peaks = []
        # The first step makes the buffers that the schedule keeps.
        for _ in range(2):
            ledger = Ledger()
            ledger.hold("weights", *(p for chunk in actual for p in chunk.parameters()))
            state = tree_leaves([*optimizer.state.values()])
            ledger.hold("optimizer", *(leaf for leaf in state if isinstance(leaf, Tensor)))
            with ledger:
                schedule.step(*inputs, **target, return_outputs=False)
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(ledger.peak_bytes)
    return peaks[-1]


def check_schedule(
    schedule: str, pipeline: int, stage: int, virtual: int = 1, vocab_size: int = 256, seq: int = 64
) -> None:
    item = 2 if virtual == 1 else 4
    shape = Transformer(
        layers=item * pipeline * virtual, d_model=64, heads=4, d_ff=192, vocab_size=vocab_size
    )
    plan = Plan(
        pipeline=pipeline, microbatches=2 * pipeline, schedule=schedule, virtual_stages=virtual
    )
    batch = 2 * plan.microbatches
    result = count_peak(shape, plan, stage, batch, seq)
    run: dict[str, Any] = {"batch": batch, "seq": seq, "fused_norm": False}
    predicted = training_memory(shape, plan, stage=stage, **run)
    total = predicted.total
    if stage == pipeline - 1:
        # Torch's schedules keep the logits, which are the last stage's output, and by the losses
        # that they gather its inputs, which are counted where all of them are in flight.
        rows, gpipe = batch // plan.microbatches * seq, schedule == "gpipe"
        total += 4 * rows * shape.vocab_size * (plan.microbatches if gpipe else 1)
        total += 4 * rows * shape.d_model * (0 if gpipe else plan.microbatches)
    assert total == pytest.approx(result, rel=0.03), predicted


@releases_outputs
@pytest.mark.parametrize(
    ("schedule", "stage"),
    [
        *(("gpipe", 1), ("1f1b", 0)),
        *(pytest.param(*s, marks=pytest.mark.exhaustive) for s in (("gpipe", 0), ("1f1b", 1))),
    ],
)
def test_stage_peak_equals_torch_schedule(schedule: str, stage: int) -> None:
    check_schedule(schedule, 2, stage)


@releases_outputs
@pytest.mark.parametrize("stage", [0, 1])
def test_stage_peak_contains_a_second_gradient_of_a_large_table(stage: int) -> None:
    check_schedule("1f1b", 2, stage, vocab_size=8192, seq=8)


@pytest.mark.parametrize(
    ("precision", "size"), [("megatron_bf16", 2), ("amp_bf16", 4), ("deepseek_v3", 2)]
)
def test_second_gradient_of_a_table_has_the_dtype_of_its_parameter(
    precision: str, size: int
) -> None:
    shape = Transformer(layers=2, d_model=64, heads=4, d_ff=192, vocab_size=8192)
    plan = Plan(pipeline=2, microbatches=4)
    memory = training_memory(shape, plan, stage=0, batch=4, seq=8, precision=precision)
    assert memory["gradient of the table"].total == 64 * 8192 * size


@releases_outputs
@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_four_stage_peaks_equal_torch_schedule(schedule: str, stage: int) -> None:
    check_schedule(schedule, 4, stage)


@releases_outputs
@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(4))
def test_interleaved_stage_peaks_equal_torch_schedule(stage: int) -> None:
    check_schedule("interleaved", 4, stage, virtual=2)


def draw_fsdp_case(seed: int) -> tuple[Transformer, Plan, int, int, int, bool]:
    """Return a decoder, a plan of ZeRO-3 over a pipeline, a stage, sequences, tokens, if mixed."""
    dice = random.Random(seed)
    width = dice.choice([64, 128])
    pipeline = dice.choice([2, 4])
    plan = Plan(
        data=dice.choice([2, 8]),
        pipeline=pipeline,
        zero=3,
        microbatches=dice.choice([1, 2, 8]),
        schedule=dice.choice(["1f1b", "gpipe"]),
        reshard_after_forward=dice.random() < 0.6,
    )
    shape = Transformer(
        layers=pipeline * dice.choice([2, 5]),
        d_model=width,
        heads=4,
        d_ff=dice.choice([2, 4]) * width,
        vocab_size=dice.choice([64, 512, 4096]),
    )
    # torch's 1F1B wants as many micro-batches as stages.
    if plan.schedule == "1f1b":
        plan = replace(plan, microbatches=max(plan.microbatches, pipeline))
    batch = plan.data * plan.microbatches * dice.choice([1, 2])
    return shape, plan, batch, dice.randrange(pipeline), dice.choice([8, 32]), dice.random() < 0.5


def check_fsdp_case(seed: int) -> None:
    shape, plan, batch, stage, seq, mixed = draw_fsdp_case(seed)
    result = count_peak(shape, plan, stage, batch, seq, mixed)
    precision = "fsdp_bf16" if mixed else "fp32"
    run: dict[str, Any] = {"batch": batch, "seq": seq, "precision": precision, "fused_norm": False}
    predicted = training_memory(shape, plan, stage=stage, **run)
    total = predicted.total
    if stage == plan.pipeline - 1:
        # The logits of one micro-batch, or of all of them, are the last stage's output.
        rows, gpipe = batch // plan.data // plan.microbatches * seq, plan.schedule == "gpipe"
        total += (2 if mixed else 4) * rows * shape.vocab_size * (plan.microbatches * gpipe or 1)
    assert total == pytest.approx(result, rel=0.03), (shape, plan, stage, predicted)


@releases_outputs
@pytest.mark.parametrize("seed", [35])
def test_fsdp_in_pipeline_stores_unsharded_weights_and_gradients(seed: int) -> None:
    check_fsdp_case(seed)


@releases_outputs
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [*range(35), *range(36, 52)])
def test_fifty_fsdp_stages_peak_like_live_tensors(seed: int) -> None:
    check_fsdp_case(seed)


@pytest.mark.parametrize(("schedule", "reshard"), [("gpipe", True), ("1f1b", False)])
def test_fsdp_in_pipeline_gathers_and_reduces_as_often_as_torch(
    schedule: str, reshard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    class Counting(Ledger):
        def __enter__(self) -> "Counting":
            calls.clear()
            return super().__enter__()

        def __torch_dispatch__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
            calls[str(func)] += 1
            return super().__torch_dispatch__(func, *args, **kwargs)

    monkeypatch.setitem(globals(), "Ledger", Counting)
    shape = Transformer(layers=4, d_model=32, heads=4, d_ff=64, vocab_size=64)
    plan = Plan(
        data=4,
        pipeline=2,
        zero=3,
        microbatches=4,
        schedule=schedule,
        reshard_after_forward=reshard,
    )
    count_peak(shape, plan, 0, 16, 8)
    # Two blocks, and the ends, which are gathered once.
    result = communication(shape, plan, batch=16, seq=8)
    assert calls["c10d._allgather_base_.default"] == 2 * result["weights"].count + 1
    assert calls["c10d._reduce_scatter_base_.default"] == 3 * result["gradients"].count
