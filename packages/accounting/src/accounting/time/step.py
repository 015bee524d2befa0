"""Time of a training step: compute, exposed communication, pipeline bubble and optimizer.

A message takes its latency plus its bytes divided by the bandwidth. Device numbers vary fastest by
tensor rank, then by context, data and pipeline rank, so that small groups stay inside a node. A
group with k members per node uses k network ports at once. Its bandwidth is the smaller of the
node's link and k ports. As in common frameworks, gradients overlap with the backward, and FSDP's
gathers, pipeline and context traffic overlap with all compute. The traffic of tensor and expert
parallelism is not hidden. In total, at most the compute time of a step is hidden.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, multiply, sum_parts
from accounting.flops import count_attention_operations, flops
from accounting.hardware import Hardware, Link, find
from accounting.memory.states import count_device_parameters, list_distinct_stages
from accounting.model.transformer import Transformer
from accounting.plan import Plan, split, validate_plan
from accounting.precision import Precision
from accounting.time.collective import Collective
from accounting.time.communication import TIED_GRADIENTS, communication
from accounting.time.efficiency import BANDWIDTH_FRACTION, compute_stage_rates
from accounting.workload import Workload, build_workload

#: For each axis, the fraction of a step's compute time that can hide its traffic.
OVERLAP = {"data": 2 / 3, "context": 1.0, "pipeline": 1.0, "tensor": 0.0, "expert": 0.0}


@checks.validate()
def step_time(
    model: Transformer,
    plan: Plan,
    work: Workload | None = None,
    *,
    hardware: str | Hardware,
    overlap: Mapping[str, float] | None = None,
    **run: Any,
) -> Breakdown:
    """Return the seconds of one step, by part.

    The parts are compute, bandwidth-bound operations, bubble, exposed communication and optimizer.

    `run` contains fields of a `Workload`; the default precision is `mixed_bf16`. Linear layers
    multiply in the `compute` dtype of the recipe, and attention in the dtype of activations. With
    `flash=False`, attention writes its scores to memory. `overlap` maps an axis of the plan to the
    fraction of the compute time that can hide its traffic. The defaults are `OVERLAP`, and 1 for
    the data axis with ZeRO-3. The result is the modeled time, to which `predict_seconds` adds the
    factor and interval of published runs. Raises `ValueError` if the device does not list a dtype
    of the recipe. Also raises `ValueError` if the plan is not valid for the model or the batch, or
    if the training step of the model is not modeled.
    """
    work = build_workload(work, run, precision="mixed_bf16")
    checks.require_integer("batch", work.batch)
    device = find(hardware)
    plan = validate_plan(plan, model, batch=work.batch, seq=work.seq)
    parts = max(
        (
            _list_stage_seconds(model, plan, work, stage, device)
            for stage in list_distinct_stages(model, plan)
        ),
        key=lambda parts: sum(float(part.total) for part in parts),
    )
    compute = float(parts[0].total)
    can_hide = dict(OVERLAP)
    if plan.zero == 3:
        # ZeRO-3 also gathers weights during the forward, so all compute can hide its data traffic.
        can_hide["data"] = 1.0
    for axis, fraction in (overlap or {}).items():
        checks.require_choice("an axis of overlap", axis, OVERLAP)
        can_hide[axis] = checks.require_number(
            f"overlap of {axis}", fraction, maximum=1, open=False
        )
    unused_compute, blocking_seconds = compute, 0.0
    unused = {axis: fraction * compute for axis, fraction in can_hide.items()}
    exposed_parts = []
    for collective, link in iter_linked_collectives(model, plan, work, hardware=device):
        needs = collective.compute_seconds(link)
        hidden = min(needs, unused_compute, unused[collective.axis])
        if collective.name == TIED_GRADIENTS:
            hidden = 0.0  # The gradient of the embedding is the last one of a step.
        unused_compute -= hidden
        unused[collective.axis] -= hidden
        if collective.axis in ("tensor", "expert", "context"):
            blocking_seconds += needs - hidden
        note = f"{needs:.4g} s on {link.name}, {hidden:.4g} s of it hidden"
        exposed_parts.append(multiply(collective.name, "s", note, exposed=needs - hidden))
    idle = (plan.pipeline - 1) / (plan.microbatches * plan.virtual_stages)
    busy = sum(float(part.total) for part in parts) + blocking_seconds
    bubble = multiply("bubble", "s", "(p - 1) / (m v) of a stage's work", share=idle, busy=busy)
    return sum_parts(
        f"iteration of {model.name} on {plan.devices} {device.name}",
        "s",
        *parts,
        bubble,
        sum_parts("exposed communication", "s", *exposed_parts),
        _compute_optimizer_seconds(model, plan, work.kind, device),
    )


def _list_stage_seconds(
    model: Transformer, plan: Plan, work: Workload, stage: int, device: Hardware
) -> list[Breakdown]:
    attention = count_attention_flops(model, plan, work, stage)
    seconds_per_flop = 1 / (device.peak(work.kind.activations) * device.attention_fraction)
    scores = multiply("attention", "s", flops=attention, seconds_per_flop=seconds_per_flop)
    stage_model = plan.build_stage_model(model, stage)
    rates = compute_stage_rates(stage_model, plan, work, device)
    tokens = work.tokens(plan)
    weights = rates.dense_weights + rates.routed_weights / plan.expert

    def multiply_by_microbatches(name: str, seconds: float) -> Breakdown:
        return multiply(name, "s", microbatches=plan.microbatches, each=seconds)

    return [
        sum_parts(
            "compute", "s", multiply_by_microbatches("matrices", tokens * rates.arithmetic), scores
        ),
        sum_parts(
            "bandwidth",
            "s",
            multiply_by_microbatches("matrices", tokens * rates.traffic + weights),
            multiply_by_microbatches("between them", tokens * rates.elementwise),
        ),
    ]


def count_attention_flops(model: Transformer, plan: Plan, work: Workload, stage: int) -> float:
    """Return the FLOPs of attention per step on one device of a stage, with recomputation."""
    stage_model = plan.build_stage_model(model, stage)
    options: Any = {"recompute": plan.recompute, "flash": work.flash}
    operations = flops(stage_model, seq=work.seq, batch=work.batch // plan.data, **options)
    attention = core = float(count_attention_operations(operations))
    if "recomputed" in operations:
        recomputed = operations["recomputed"]
        attention += sum(float(part.total) for part in recomputed if part.name != "blocks")
    if plan.recompute == "full":
        # A second forward of the blocks adds a third of the training operations of attention.
        attention += core / 3
    return attention / (plan.tensor * plan.context)


def _compute_optimizer_seconds(
    model: Transformer, plan: Plan, kind: Precision, device: Hardware
) -> Breakdown:
    """Return the seconds to read and write each weight, gradient and optimizer state once."""
    seconds_per_byte = 1 / (device.memory_bandwidth * BANDWIDTH_FRACTION)
    count = _count_updated_parameters(model, plan)
    moved = 2 * kind.bytes_per_parameter
    return multiply(
        "optimizer", "s", parameters=count, bytes=moved, seconds_per_byte=seconds_per_byte
    )


def _count_updated_parameters(model: Transformer, plan: Plan) -> int:
    """Return the largest number of parameters that a device updates, over the pipeline stages.

    With ZeRO, a device updates one shard.
    """
    largest = 0
    for stage in list_distinct_stages(model, plan):
        dense, routed = count_device_parameters(model, plan, stage)
        if plan.zero:
            dense, routed = split(dense, plan.replicas), split(routed, plan.expert_replicas)
        largest = max(largest, dense + routed)
    return largest


def iter_linked_collectives(
    model: Transformer, plan: Plan, work: Workload, *, hardware: Hardware
) -> Iterable[tuple[Collective, Link]]:
    """Yield each collective of the inner stage that sends the most bytes, and its group's link.

    A pipeline of one or two stages has no inner stage, so its last stage is used. The all-reduce of
    a tied embedding, which is on the first and the last stage, is included.
    """
    inner = [stage for stage in list_distinct_stages(model, plan) if 0 < stage < plan.pipeline - 1]
    kind = work.kind
    run: dict[str, Any] = {"batch": work.batch, "seq": work.seq}
    # FSDP gathers the cast copies of the weights, if there are any.
    run["weights"] = (kind.cast_weights if plan.zero == 3 else None) or kind.weights
    run |= {"gradients": kind.gradients, "activations": kind.activations}
    collectives = max(
        (communication(model, plan, stage=stage, **run) for stage in inner or [plan.pipeline // 2]),
        key=lambda of_stage: sum(float(collective.wire) for collective in of_stage),
    )
    ends = communication(model, plan, stage=0, **run) if inner and model.tied else ()
    strides = {"tensor": 1, "pipeline": plan.tensor * plan.replicas}
    for collective in (*collectives, *(c for c in ends if c.name == TIED_GRADIENTS)):
        stride = strides.get(collective.axis, plan.tensor)
        if collective.axis == "data" and collective.ranks == plan.expert_replicas:
            # Ranks with the same experts are `expert` times as far apart.
            stride *= plan.expert
        if collective.name == TIED_GRADIENTS:
            stride *= plan.pipeline - 1
        ranks, operation = collective.ranks, collective.operation
        yield collective, get_group_link(hardware, stride=stride, ranks=ranks, operation=operation)


@checks.validate()
def get_group_link(
    hardware: str | Hardware, *, stride: int, ranks: int, operation: str = "all_reduce"
) -> Link:
    """Return the slowest link of a group of `ranks` devices that are `stride` devices apart.

    `operation` is a value of `Collective.operation`. For a ring collective, k members in a node use
    k network ports, each for 1/k of the bytes. In an all-to-all and in a send, each device sends
    its bytes through its own port. An all-to-all sends only the bytes that leave the node. In a
    torus, half of its bytes cross the middle of each axis.
    """
    hardware = find(hardware)
    near, link = hardware.devices_per_node, hardware.node_link
    if hardware.pod:
        # In a torus, a group of up to four devices uses one axis, and a larger group all axes.
        near = hardware.pod
        axes = hardware.torus_axes if ranks > 4 else 1
        factor = 4 / ranks ** (1 / axes) if operation == "all_to_all" and ranks > 4 else axes
        link = replace(link, bandwidth=link.bandwidth * factor)
    inside = max(1, near // stride)
    if ranks <= inside:
        return link
    network = hardware.network
    if operation == "send":
        return network
    if operation == "all_to_all":
        # Seconds are computed as wire / bandwidth. The wire has (ranks - 1) / ranks of the payload,
        # but only (ranks - inside) / ranks leaves the node.
        bandwidth = network.bandwidth * (ranks - 1) / (ranks - inside)
        return replace(network, bandwidth=min(bandwidth, link.bandwidth))
    ports = min(inside, ranks)
    bandwidth = min(link.bandwidth, network.bandwidth * ports)
    return replace(network, bandwidth=bandwidth)
