from dataclasses import replace
from typing import Any

import pytest
from accounting import HARDWARE, Plan, Transformer, Workload, flops
from accounting.breakdown import Breakdown
from accounting.hardware import Link
from accounting.memory.states import count_device_parameters
from accounting.model.records import Experts
from accounting.time.collective import Collective
from accounting.time.efficiency import BANDWIDTH_FRACTION, MATMUL_FRACTION, compute_stage_rates
from accounting.time.step import get_group_link, step_time
from hypothesis import given
from hypothesis import strategies as st

MODEL = Transformer(layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336, vocab_size=128256)
H100 = HARDWARE["H100"]
NO_NETWORK = replace(
    H100,
    node_link=Link(name="free", bandwidth=1e30, latency=0),
    network=Link(name="free", bandwidth=1e30, latency=0),
)


def test_the_bubble_is_that_of_its_paper() -> None:
    # Narayanan et al. 2021, section 2.2: (p - 1) / m of the ideal time, over v if interleaved.
    shape = replace(MODEL, vocab_size=0)

    def bubble(**plan: object) -> float:
        plan = Plan(pipeline=4, microbatches=16, **plan)
        seconds = step_time(shape, plan, batch=16, seq=1024, hardware=NO_NETWORK)
        return seconds["bubble"].total / (seconds["compute"].total + seconds["bandwidth"].total)

    assert bubble() == pytest.approx(3 / 16)
    assert bubble(schedule="gpipe") == pytest.approx(3 / 16)
    assert bubble(schedule="interleaved", virtual_stages=2) == pytest.approx(3 / 32)


def test_hidden_and_exposed_traffic_add_up() -> None:
    plan = Plan(data=8, tensor=8)
    run = {"batch": 64, "seq": 4096, "hardware": "H100"}
    shown = step_time(MODEL, plan, **run)["exposed communication"]
    nothing_hides = dict.fromkeys(("data", "tensor", "pipeline", "context", "expert"), 0.0)
    bare = step_time(MODEL, plan, overlap=nothing_hides, **run)["exposed communication"]
    assert "gradients" not in shown
    assert "gradients" in bare
    assert bare["tensor-parallel forward"].total == shown["tensor-parallel forward"].total > 0
    gathers = step_time(MODEL, replace(plan, zero=3), overlap=nothing_hides, **run)
    assert "weights" in gathers["exposed communication"]
    # A ring of 65 all-reduces over NVLink, by hand.
    item = 8 * 4096 * 4096 * 2
    by_hand = 65 * (14 * 2e-6 + 1.75 * item / 450e9)
    assert shown["tensor-parallel forward"].total == pytest.approx(by_hand)


def test_groups_take_the_link_they_span() -> None:
    assert get_group_link(H100, stride=1, ranks=8) == H100.node_link
    assert get_group_link(H100, stride=8, ranks=4).bandwidth == H100.network.bandwidth
    assert get_group_link(H100, stride=2, ranks=16).bandwidth == 4 * H100.network.bandwidth
    assert get_group_link(H100, stride=1, ranks=64).bandwidth == 8 * H100.network.bandwidth
    torus = HARDWARE["TPU v5p"]
    axis = torus.node_link.bandwidth
    assert get_group_link(torus, stride=1, ranks=512).bandwidth == 3 * axis
    for ranks, operation in ((4, "all_reduce"), (4, "all_to_all"), (64, "all_to_all")):
        assert get_group_link(torus, stride=1, ranks=ranks, operation=operation).bandwidth == (
            pytest.approx(axis)
        )
    # Half of 8 x 8 x 8 chips send half of their bytes through 2 * 64 links, half of an axis each.
    exchange = get_group_link(torus, stride=1, ranks=512, operation="all_to_all")
    assert exchange.bandwidth == pytest.approx(2 * 64 * axis / 2 / (256 / 2))


def predict_rates(devices: tuple[int, ...], hardware: Any) -> list[float]:
    """Return the sequences per second and device over numbers of data-parallel devices."""
    result = []
    for count in devices:
        run: dict[str, Any] = {"batch": count, "seq": 512}
        seconds = float(step_time(MODEL, Plan(data=count), hardware=hardware, **run).total)
        result.append(1 / seconds)
    return result


def test_more_devices_each_compute_less_unless_communication_is_free() -> None:
    result = predict_rates((1, 10, 100, 1_000, 10_000, 100_000), H100)
    shares = [round(rate / result[0], 9) for rate in result]
    assert shares == sorted(shares, reverse=True)
    # One sequence per device hides little of the traffic of the gradients.
    assert 0.2 < shares[-1] < 0.9
    assert predict_rates((1, 10, 1000), NO_NETWORK) == pytest.approx([result[0]] * 3)


def test_the_precision_decides_how_fast_matrices_are_multiplied() -> None:
    def compute(precision: str, hardware: str = "H100") -> Breakdown:
        run: dict[str, Any] = {"batch": 1, "seq": 4096, "precision": precision}
        return step_time(MODEL, Plan(), hardware=hardware, **run)["compute"]

    rate = {dtype: H100.peak(dtype) * MATMUL_FRACTION[dtype] for dtype in ("bf16", "fp32", "fp8")}
    sixteen = compute("mixed_bf16")
    expected = sixteen["matrices"].total * rate["bf16"]
    assert compute("fp32")["matrices"].total == pytest.approx(expected / rate["fp32"])
    # Linear layers run in 8 bits, attention does not.
    eight = compute("deepseek_v3")
    assert eight["matrices"].total == pytest.approx(expected / rate["fp8"])
    assert eight["attention"].total == sixteen["attention"].total
    with pytest.raises(ValueError, match=r"expected a dtype that A100 lists .*, got 'fp8'"):
        compute("deepseek_v3", "A100")
    for precision in ("mixed_fp16", "fp32"):
        assert compute(precision, "V100").total > 0


#: A decoder, a decoder with state spaces, and an image encoder with a class token and a pooler.
KINDS = [
    MODEL,
    Transformer.from_hf(
        {"model_type": "bamba", "attn_layer_indices": [1], "mamba_n_heads": 8}
        | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
        | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    ),
    Transformer.from_hf({"model_type": "vit", "architectures": ["ViTModel"]}),
]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", KINDS, ids=["decoder", "hybrid", "encoder"])
def test_matrices_and_attention_are_all_the_arithmetic(model: Transformer, recompute: str) -> None:
    plan = Plan(recompute=recompute)
    compute = step_time(model, plan, batch=2, seq=512, hardware="H100")["compute"]
    work = flops(model, seq=512, batch=2, recompute=recompute, flash=True).total
    forward = flops(model, seq=512, batch=2, phase="forward")["attention"]
    # The backward of flash attention computes the scores again.
    attention = forward.total * (3 if recompute == "none" else 4) + forward["scores"].total
    peak = H100.peak("bf16")
    assert compute["attention"].total == pytest.approx(
        attention / (peak * HARDWARE["H100"].attention_fraction)
    )
    rate = peak * MATMUL_FRACTION["bf16"] * HARDWARE["H100"].power_factor
    assert compute["matrices"].total == pytest.approx((work - attention) / rate)


def test_product_moves_the_input_and_output_that_its_shard_has() -> None:
    """A matrix that is split along its rows reads a part of its input, and writes all outputs."""
    plan, work = Plan(tensor=8, sequence_parallel=True), Workload(batch=1, seq=64, precision="bf16")
    device = HARDWARE["A100"]
    mlp = Transformer(layers=3, d_model=512, heads=0, d_ff=4096, vocab_size=0, gated_mlp=False)
    values = 3 * 3 * 2 * (512 + 4096 / 8)
    moved = compute_stage_rates(mlp, plan, work, device).traffic * device.memory_bandwidth
    assert moved * BANDWIDTH_FRACTION == pytest.approx(2 * values)
    heads = [
        compute_stage_rates(replace(MODEL, tied=tied), plan, work, device) for tied in (False, True)
    ]
    assert heads[0] == heads[1]


def test_axis_hides_at_most_its_fraction_of_compute() -> None:
    plan = Plan(data=64, zero=1)
    run = {"batch": 64, "seq": 256, "hardware": "H100"}
    bare = step_time(MODEL, plan, overlap={"data": 0}, **run)["exposed communication"].total
    for fraction in (0.1, 0.5, 1.0):
        step = step_time(MODEL, plan, overlap={"data": fraction}, **run)
        # Both the gradients and the updated weights would take longer than all compute.
        hidden = bare - step["exposed communication"].total
        assert hidden == pytest.approx(fraction * step["compute"].total)


@pytest.mark.parametrize(
    ("pipeline", "data", "link"),
    [(2, 4, H100.node_link), (4, 1, H100.node_link), (4, 4, H100.network)],
)
def test_first_and_last_stage_reduce_the_tied_embedding(
    pipeline: int, data: int, link: Link
) -> None:
    run: dict[str, Any] = {"batch": pipeline * data, "seq": 512, "hardware": "H100"}
    plan = Plan(data=data, pipeline=pipeline, microbatches=pipeline)
    exposed = step_time(replace(MODEL, tied=True), plan, **run)["exposed communication"]
    expected = 2 * link.latency + 128256 * 4096 * 2 / link.bandwidth
    assert exposed["gradients of the tied embedding"].total == pytest.approx(expected)


@pytest.mark.parametrize(("zero", "name", "factor"), [(1, "updated weights", 2), (3, "weights", 1)])
def test_only_fsdp_gathers_cast_weights(zero: int, name: str, factor: int) -> None:
    run: dict[str, Any] = {"batch": 8, "seq": 64, "hardware": "H100", "overlap": {"data": 0}}
    seconds = [
        step_time(MODEL, Plan(data=8, zero=zero), precision=precision, **run)
        for precision in ("amp_bf16", "mixed_bf16")
    ]
    autocast, sixteen = (step["exposed communication"][name].total for step in seconds)
    assert autocast == pytest.approx(factor * sixteen, rel=1e-3)


@given(expert=st.sampled_from([8, 16, 64, 256]), size=st.integers(1, 10**9))
def test_all_to_all_uses_one_port_per_device(expert: int, size: int) -> None:
    exchange = Collective(
        name="tokens", operation="all_to_all", axis="expert", ranks=expert, count=1, call_bytes=size
    )
    link = get_group_link(H100, stride=1, ranks=expert, operation="all_to_all")
    leaves = size * (expert - 8) / expert
    seconds = exchange.compute_seconds(replace(link, latency=0.0))
    assert seconds >= leaves / H100.network.bandwidth * (1 - 1e-9)
    inside = size * (expert - 1) / expert / H100.node_link.bandwidth
    assert seconds == pytest.approx(max(leaves / H100.network.bandwidth, inside))


def test_pipeline_send_uses_one_port() -> None:
    link = get_group_link(H100, stride=1, ranks=16, operation="send")
    assert link.bandwidth == H100.network.bandwidth


def test_optimizer_takes_the_time_of_the_largest_stage() -> None:
    # The first and the last of four stages have one layer, and the others have two.
    model = Transformer(layers=6, d_model=64, heads=4, vocab_size=10)
    plan = Plan(pipeline=4, microbatches=4)
    stages = [sum(count_device_parameters(model, plan, stage)) for stage in range(4)]
    step = step_time(model, plan, batch=4, seq=64, hardware=H100)
    assert stages[0] < max(stages) == dict(step["optimizer"].factors)["parameters"]


@pytest.mark.parametrize("expert", [1, 4])
def test_slowest_stage_of_a_pipeline_counts(expert: int) -> None:
    model = Transformer(layers=8, d_model=256, heads=4, vocab_size=100)
    plan = Plan(data=4, pipeline=4, expert=expert, microbatches=4)
    totals = set()
    for stage in (1, 2):
        experts = Experts(count=8, per_token=8, layers=plan.list_stage_layers(model, stage))
        mixture = replace(model, experts=experts, mlp_layers=None)
        totals.add(step_time(mixture, plan, hardware="H100", batch=16, seq=512).total)
    assert len(totals) == 1
