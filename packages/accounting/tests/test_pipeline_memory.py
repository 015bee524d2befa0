"""Pipelines against torch's own: each stage runs its schedule alone, in a group without processes,
and every tensor that is alive is counted. torch's trackers know neither stages nor sequences."""

from typing import Any

import pytest
import torch
from accounting import Plan, Transformer, memory_timeline
from accounting.memory.ledger import Ledger
from accounting.memory.live import make_state
from reference import Block, world_of
from torch import Tensor, nn
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


def counted(shape: Transformer, plan: Plan, stage: int, batch: int, seq: int) -> int:
    """The most bytes that are alive while torch's schedule runs on that stage."""
    chunks = plan.pipeline * plan.virtual_stages
    each = shape.layers // chunks
    rows = batch // plan.microbatches
    stream, tokens = torch.empty(rows, seq, shape.d_model), torch.zeros(rows, seq, dtype=torch.long)
    with world_of(plan.pipeline, rank=stage):
        stages, held = [], []
        for index in range(stage, chunks, plan.pipeline):
            first, last = index == 0, index == chunks - 1
            chunk = Chunk(shape, each, first=first, last=last)
            out = torch.empty(rows, seq, shape.vocab_size) if last else stream
            stages.append(
                PipelineStage(
                    chunk,
                    index,
                    chunks,
                    torch.device("cpu"),
                    input_args=tokens if first else stream.clone().requires_grad_(),
                    output_args=out.requires_grad_(),
                )
            )
            held.append(chunk)
        many = plan.virtual_stages > 1
        schedule = SCHEDULES[plan.schedule](
            stages if many else stages[0],
            plan.microbatches,
            loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
        )
        optimizer = torch.optim.AdamW(
            [p for chunk in held for p in chunk.parameters()], foreach=False
        )
        make_state(optimizer)
        whole = torch.zeros(batch, seq, dtype=torch.long)
        inputs = (whole,) if stage == 0 else ()
        target = {"target": whole} if stage == plan.pipeline - 1 else {}
        peaks = []
        # The first step makes the buffers that the schedule keeps.
        for _ in range(2):
            ledger = Ledger()
            ledger.hold("weights", *(p for chunk in held for p in chunk.parameters()))
            state = tree_leaves(optimizer.state_dict())
            ledger.hold("optimizer", *(leaf for leaf in state if isinstance(leaf, Tensor)))
            with ledger:
                schedule.step(*inputs, **target, return_outputs=False)
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(ledger.peak_bytes)
    return peaks[-1]


def agrees(schedule: str, pipeline: int, stage: int, virtual: int = 1) -> None:
    each = 2 if virtual == 1 else 4
    shape = Transformer(
        layers=each * pipeline * virtual, d_model=64, heads=4, d_ff=192, vocab_size=256
    )
    plan = Plan(
        pipeline=pipeline, microbatches=2 * pipeline, schedule=schedule, virtual_stages=virtual
    )
    batch, seq = 2 * plan.microbatches, 64
    found = counted(shape, plan, stage, batch, seq)
    run: dict[str, Any] = {"batch": batch, "seq": seq, "fused_norm": False}
    predicted = memory_timeline(shape, plan, stage=stage, **run).peak
    total = predicted.total
    if stage == pipeline - 1:
        # Torch's schedules keep the logits, which are the last stage's output, and by the losses
        # that they gather its inputs, which are counted where all of them are in flight.
        rows, gpipe = batch // plan.microbatches * seq, schedule == "gpipe"
        total += 4 * rows * shape.vocab_size * (plan.microbatches if gpipe else 1)
        total += 4 * rows * shape.d_model * (0 if gpipe else plan.microbatches)
    assert total == pytest.approx(found, rel=0.03), predicted


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_holds_what_torchs_schedule_holds(schedule: str, stage: int) -> None:
    agrees(schedule, 2, stage)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_four_stages_hold_what_torchs_schedule_holds(schedule: str, stage: int) -> None:
    agrees(schedule, 4, stage)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(4))
def test_interleaved_stages_hold_what_torchs_schedule_holds(stage: int) -> None:
    agrees("interleaved", 4, stage, virtual=2)
