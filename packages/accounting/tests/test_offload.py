"""Tests of offloading to the host: its time, and searches that need it."""

from typing import Any

import pytest
from accounting import HARDWARE, Plan, Transformer, plan_for, plans_that_fit, step_time
from accounting.memory.activations import activations
from accounting.precision import recipe
from accounting.time.offload import HOST_BANDWIDTH

MODEL = Transformer(layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336, vocab_size=128256)
RUN: dict[str, Any] = {"batch": 4, "seq": 4096, "precision": "megatron_bf16", "hardware": "H100"}


def test_an_optimizer_on_the_host_waits_for_link_and_memory() -> None:
    stage_model = step_time(MODEL, Plan(), **RUN)
    there = step_time(MODEL, Plan(offload="optimizer"), **RUN)
    kind, link = recipe("megatron_bf16"), HARDWARE["H100"].host_link.bandwidth
    count = 8_030_261_248
    wire = count * 4 / link + count * 2 / link
    update = count * 2 * float(kind.bytes_per_parameter) / HOST_BANDWIDTH
    assert there["offload"].total == pytest.approx(wire + update)
    assert "optimizer" not in there
    rest = stage_model.total - stage_model["optimizer"].total
    assert there.total - there["offload"].total == pytest.approx(rest)


def test_only_uncovered_transfers_of_offloaded_activations_take_time() -> None:
    plan = Plan(recompute="full", offload="activations", microbatches=2)
    assert step_time(MODEL, plan, **RUN).parts[-1].name != "offload"
    # One layer's arithmetic covers little of a wide stream.
    thin = Transformer(layers=4, d_model=8192, heads=8, d_ff=8, vocab_size=8, head_dim=8)
    saved = activations(thin, plan, batch=4, seq=4096, precision="megatron_bf16").total * 2
    result = step_time(thin, plan, **RUN)
    needs = 2 * saved / HARDWARE["H100"].host_link.bandwidth
    assert 0 < result["offload"].total == pytest.approx(needs - result["compute"].total)


def test_search_offloads_if_no_other_plan_fits() -> None:
    question: dict[str, Any] = {"hardware": "H100", "devices": 1, "batch": 4, "seq": 4096}
    question["precision"] = "megatron_bf16"
    assert plans_that_fit(MODEL, **question) == []
    result = plans_that_fit(MODEL, **question, offload="optimizer")
    answer = plan_for(MODEL, gpus=1, batch=4)
    assert answer.best == result[0]
    with pytest.raises(ValueError, match=r"no plan over 1 H100 fits .*, offload=none"):
        plan_for(MODEL, gpus=1, batch=4, offload="none")
