"""Memory in time under a plan, and the record of a workload."""

from dataclasses import replace
from typing import Any

import pytest
from accounting import (
    Experts,
    Plan,
    Transformer,
    Workload,
    communication,
    flops,
    kv_cache,
    memory_timeline,
    peak_memory,
    step_time,
    training_memory,
)
from hypothesis import given, settings
from hypothesis import strategies as st

MODEL = Transformer(layers=16, d_model=64, heads=8, kv_heads=4, vocab_size=1000)
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "interleaved", "virtual_stages": 2},
]


def alive(plan: Plan, stage: int) -> int:
    """Return the most micro-batches or chunks in flight on a stage, by simulation."""
    work = Workload(batch=plan.data * plan.microbatches, seq=32, precision="mixed_bf16")
    line = memory_timeline(MODEL, plan, work, stage=stage)
    most = max(moment.parts["activations"] for moment in line.moments)
    return round(most / min(m.parts["activations"] for m in line.moments[1:-1]))


@pytest.mark.parametrize("stage", range(4))
def test_stage_stores_micro_batches_in_flight(stage: int) -> None:
    plan = Plan(pipeline=4, microbatches=8)
    assert alive(plan, stage) == 4 - stage
    assert alive(replace(plan, schedule="gpipe"), stage) == 8
    interleaved = replace(plan, schedule="interleaved", virtual_stages=2)
    # Megatron's warm-up, and one more: 2(p - s - 1) + (v - 1)p + 1.
    assert alive(interleaved, stage) == 2 * (4 - stage - 1) + 4 + 1


@given(
    schedule=st.sampled_from(SCHEDULES),
    pipeline=st.sampled_from([2, 4]),
    often=st.integers(1, 4),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
@settings(max_examples=20, deadline=None)
def test_the_peak_in_time_is_everything_at_once_or_less(
    schedule: dict[str, Any], pipeline: int, often: int, zero: int, recompute: str
) -> None:
    plan = Plan(
        pipeline=pipeline,
        data=2,
        microbatches=pipeline * often,
        zero=zero,
        recompute=recompute,
        **schedule,
    )
    work = Workload(batch=2 * pipeline * often, seq=32, precision="megatron_bf16")
    if zero == 3 and plan.virtual_stages > 1:
        with pytest.raises(ValueError, match="not modeled"):
            memory_timeline(MODEL, plan, work)
        return
    for stage in range(pipeline):
        whole = float(training_memory(MODEL, plan, work, stage=stage).total)
        line = memory_timeline(MODEL, plan, work, stage=stage)
        assert line.peak.total <= whole * (1 + 1e-9)
        assert line.moments[0].total <= line.moments[-1].total
        chunks = plan.microbatches * plan.virtual_stages
        assert len(line.moments) == 2 * chunks + 2
        if chunks > plan.in_flight(stage) and plan.schedule != "gpipe":
            # Gradients are there when it is fullest again: all is alive at once.
            assert line.peak.total == pytest.approx(whole)
        else:
            gradients = line.moments[-1].parts["gradients"]
            assert line.peak.total >= whole - gradients - 1e-6 * whole


def test_one_micro_batch_peaks_at_start_of_backward() -> None:
    # peak_memory is compared with torch's trackers; both peak at the start of the backward.
    model = Transformer(layers=2, d_model=32, heads=4, vocab_size=4000)
    work = Workload(batch=4, seq=64)
    step = peak_memory(model, work=work)
    assert step.name.endswith("at the start of the backward")
    line = memory_timeline(model, work=work)
    assert line.peak.when == "the backward of micro-batch 1"
    assert line.peak.total == step.total


def test_timeline_shows_fullest_stage_and_last_stage_has_head() -> None:
    work = Workload(batch=8, seq=512, precision="mixed_bf16")
    wide = replace(MODEL, vocab_size=100_000)
    line = memory_timeline(wide, Plan(pipeline=4, microbatches=8), work)
    assert "stage 3" in line.name
    assert line.peak.parts["head and loss"] > 0
    first = memory_timeline(wide, Plan(pipeline=4, microbatches=8), work, stage=0)
    assert first.peak.parts["head and loss"] == 0
    assert "the fullest of 18 moments" in line.explain()


def test_workload_record_equals_keywords() -> None:
    plan = Plan(data=2, tensor=2, zero=1)
    work = Workload(batch=4, seq=16, precision="mixed_bf16", flash=False, dropout=True)
    fields: dict[str, Any] = {"batch": 4, "seq": 16, "precision": "mixed_bf16"}
    fields |= {"flash": False, "dropout": True}
    assert training_memory(MODEL, plan, work) == training_memory(MODEL, plan, **fields)
    seconds = step_time(MODEL, plan, work, hardware="H100")
    assert seconds == step_time(MODEL, plan, hardware="H100", **fields)
    # A field beside the record replaces the record's.
    longer = training_memory(MODEL, plan, work, seq=32)
    assert longer == training_memory(MODEL, plan, **fields | {"seq": 32})
    with pytest.raises(TypeError, match=r"got 'presicion'; did you mean 'precis"):
        training_memory(MODEL, batch=4, seq=16, presicion="fp32")
    with pytest.raises(TypeError, match=r"expected flash to be True or False, got 1"):
        Workload(batch=1, seq=1, flash=1)


@pytest.mark.parametrize("wrong", [None, "llama", 3, {"layers": 2}])
def test_wrong_model_or_plan_type_is_refused(wrong: object) -> None:
    run = {"batch": 2, "seq": 8}
    for cost in (flops, kv_cache, training_memory, peak_memory, memory_timeline):
        with pytest.raises(TypeError, match=r"expected model to be a Transformer"):
            cost(wrong, **run)
    if wrong is not None:
        for cost in (training_memory, memory_timeline, communication):
            with pytest.raises(TypeError, match=r"expected plan to be a Plan or None"):
                cost(MODEL, wrong, **run)


def test_model_with_experts_has_a_timeline() -> None:
    model = replace(MODEL, experts=Experts(count=8, per_token=2, width=32))
    plan = Plan(data=4, expert=4, pipeline=2, microbatches=4, zero=3)
    work = Workload(batch=16, seq=32, precision="fsdp_bf16")
    line = memory_timeline(model, plan, work)
    whole = training_memory(model, plan, work)
    assert line.peak.total == pytest.approx(float(whole.total))
