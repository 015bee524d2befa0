"""How long an iteration takes: arithmetic at a stated efficiency, what of the traffic shows, and
the bubble.

A message costs alpha + bytes * beta. Devices are numbered tensor first, then context, data,
pipeline, so that small groups stay inside a node. A group with k members in each node crosses with
k network ports at once, and its collectives run at min(node link, k ports). What can hide behind
arithmetic does: gradients behind the backward, FSDP's gathers behind everything, the pipeline's and
context's passes too; tensor and expert parallelism wait in line. All that hides shares one
iteration's arithmetic.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, product, total
from accounting.flops import flops
from accounting.hardware import Hardware, Link, find
from accounting.model.shape import Shape
from accounting.plan import Plan, fitted
from accounting.precision import Precision
from accounting.time.collective import Collective
from accounting.time.communication import communication
from accounting.time.efficiency import ATTENTION_SHARE, BANDWIDTH_SHARE, stage_seconds
from accounting.time.offload import held_parameters, offload_seconds
from accounting.workload import WORKLOAD, Workload, workload

_HIDDEN = {"context": 1.0, "pipeline": 1.0, "tensor": 0.0, "expert": 0.0}
OVERLAP: Mapping[str, float] = {"data": 2 / 3, **_HIDDEN}
"""The share of an iteration's arithmetic that the traffic of each axis can hide behind."""


@checks.entry(*WORKLOAD)
def step_time(
    model: Shape,
    plan: Plan,
    work: Workload | None = None,
    *,
    hardware: str | Hardware,
    efficiency: float | None = None,
    overlap: Mapping[str, float] = OVERLAP,
    **run: Any,
) -> Breakdown:
    """Seconds of one iteration over `batch` sequences: arithmetic, what is bound by bandwidth,
    what of the traffic shows, and the bubble over all that a micro-batch waits for.

    `run` are the fields of a `Workload`, in `mixed_bf16` if not given. Its precision says which
    peak: linear layers multiply in its `compute` dtype, attention in that of its activations; what
    travels has its dtypes. `ValueError` if the device lists none such. `efficiency` replaces the
    table of `accounting.time.efficiency` by one share of the peak for all arithmetic, and leaves
    out what is bound by bandwidth. `flash=False` is for attention that writes its scores to memory.
    """
    work = workload(work, run, precision="mixed_bf16")
    checks.whole("batch", work.batch)
    if efficiency is not None:
        checks.number("efficiency", efficiency, most=1)
    device = find(hardware)
    plan = fitted(plan, model, batch=work.batch, seq=work.seq)
    parts = max(
        (
            _stage_seconds(model, plan, work, stage, device, efficiency)
            for stage in {0, plan.pipeline // 2, plan.pipeline - 1}
        ),
        key=lambda parts: sum(float(part.total) for part in parts),
    )
    compute = float(parts[0].total)
    for axis, share in overlap.items():
        checks.choice("an axis of overlap", axis, OVERLAP)
        checks.number(f"overlap of {axis}", share, most=1, open=False)
    # Sharded weights are gathered ahead of the forward as well.
    overlap = {**OVERLAP, **overlap}
    can_hide = overlap | ({"data": max(overlap["data"], 1.0)} if plan.zero == 3 else {})
    free, waits = compute, 0.0
    shown = []
    for collective, link in collectives_on(model, plan, work, hardware=device):
        needs = fastest(collective, link)
        hidden = min(needs, free, can_hide[collective.axis] * compute)
        free -= hidden
        if collective.axis in ("tensor", "expert", "context"):
            waits += needs - hidden
        what = f"{needs:.4g} s on {link.name}, {hidden:.4g} s of it hidden"
        shown.append(product(collective.name, "s", what, exposed=needs - hidden))
    idle = (plan.pipeline - 1) / (plan.microbatches * plan.virtual_stages)
    busy = sum(float(part.total) for part in parts) + waits
    bubble = product("bubble", "s", "(p - 1) / (m v) of a stage's work", share=idle, busy=busy)
    return total(
        f"iteration of {model.name} on {plan.devices} {device.name}",
        "s",
        *parts,
        bubble,
        total("exposed communication", "s", *shown),
        _optimizer(model, plan, work.kind, device) if efficiency is None else None,
        offload_seconds(model, plan, work, device, free=free),
    )


def _stage_seconds(
    model: Shape, plan: Plan, work: Workload, stage: int, device: Hardware, efficiency: float | None
) -> list[Breakdown]:
    kind = work.kind
    linear, attention = _stage_flops(model, plan, work, stage)
    share = ATTENTION_SHARE if efficiency is None else efficiency
    core = 1 / (device.peak(kind.activations) * share)
    scores = product("attention", "s", flops=attention, seconds_per_flop=core)
    if efficiency is not None:
        each = 1 / (device.peak(kind.compute) * efficiency)
        products = product("matrices", "s", flops=linear, seconds_per_flop=each)
        return [total("compute", "s", products, scores)]
    here = plan.stage_model(model, stage)
    busy, thin, rest = stage_seconds(here, plan, work, work.tokens(plan), device)
    if here.encoder:
        source = replace(work, seq=here.encoder.positions or work.seq)
        seen = work.tokens(plan) * source.seq // work.seq
        more = stage_seconds(here.encoder, plan, source, seen, device)
        busy, thin, rest = (a + b for a, b in zip((busy, thin, rest), more, strict=True))

    def often(name: str, seconds: float) -> Breakdown:
        return product(name, "s", microbatches=plan.microbatches, each=seconds)

    return [
        total("compute", "s", often("matrices", busy), scores),
        total("bandwidth", "s", often("matrices", thin), often("between them", rest)),
    ]


def _stage_flops(model: Shape, plan: Plan, work: Workload, stage: int) -> tuple[float, float]:
    """Operations of one device, with what it recomputes: of matrices, and of attention.

    The head is on the last stage alone.
    """
    here = plan.stage_model(model, stage)
    again: Any = {"recompute": plan.recompute, "flash": work.flash}
    found = flops(here, seq=work.seq, batch=work.batch // plan.data, **again)
    attention = core = float(found["attention"].total) if "attention" in found else 0.0
    if "recomputed" in found:
        attention += sum(part.total for part in found["recomputed"] if part.name != "blocks")
        # A second forward of the blocks is a third of their training, attention's part included.
        attention += core / 3 if plan.recompute == "full" else 0
    share = plan.tensor * plan.context
    return (found.total - attention) / share, attention / share


def _optimizer(model: Shape, plan: Plan, kind: Precision, device: Hardware) -> Breakdown | None:
    """The update reads and writes all that is kept for a parameter, once."""
    if plan.offload == "optimizer":
        return None
    each = 1 / (device.memory_bandwidth * BANDWIDTH_SHARE)
    count, moved = held_parameters(model, plan), 2 * kind.bytes_per_parameter
    return product("optimizer", "s", parameters=count, bytes=moved, seconds_per_byte=each)


def collectives_on(
    model: Shape, plan: Plan, work: Workload, *, hardware: Hardware
) -> Iterable[tuple[Collective, Link]]:
    """Each collective of a device in the middle of the plan, with the link that its group runs
    over."""
    found = communication(
        model,
        plan,
        batch=work.batch,
        seq=work.seq,
        stage=plan.pipeline // 2,
        **work.kind.travels,
    )
    strides = {"tensor": 1, "pipeline": plan.tensor * plan.replicas}
    for collective in found:
        stride = strides.get(collective.axis, plan.tensor)
        if collective.axis == "data" and collective.ranks == plan.expert_replicas:
            # Ranks that hold the same experts are that far apart.
            stride *= plan.expert
        ranks, operation = collective.ranks, collective.operation
        yield collective, group_link(hardware, stride=stride, ranks=ranks, operation=operation)


@checks.entry()
def group_link(
    hardware: str | Hardware, *, stride: int, ranks: int, operation: str = "all_reduce"
) -> Link:
    """The link of a group whose members are `stride` devices apart.

    A ring passes every byte through each member, so that k members of a node may carry a k-th of it
    each through k ports. In an all-to-all, and in a send, each device has bytes of its own, and one
    port to send them through: of an all-to-all only what leaves the node.
    """
    hardware = find(hardware)
    near, link = hardware.devices_per_node, hardware.node_link
    if hardware.pod:
        # A torus: rings run along its axes, and a larger group spans all of them.
        near = hardware.pod
        axes = hardware.torus_axes if ranks > 4 else 1
        link = replace(link, bandwidth=link.bandwidth * axes)
    inside = max(1, near // stride)
    if ranks <= inside:
        return link
    network = hardware.network
    if operation == "send":
        return network
    if operation == "all_to_all":
        # Seconds are wire / bandwidth, and (ranks - 1) / ranks of the payload is on the wire.
        bandwidth = network.bandwidth * (ranks - 1) / (ranks - inside)
        return replace(network, bandwidth=min(bandwidth, link.bandwidth))
    ports = min(inside, ranks)
    bandwidth = min(link.bandwidth, network.bandwidth * ports)
    return replace(network, bandwidth=bandwidth)


def fastest(collective: Collective, link: Link) -> float:
    """Seconds by ring or by tree, whichever is faster."""
    return min(
        replace(collective, algorithm=algorithm).seconds(
            bandwidth=link.bandwidth, latency=link.latency
        )
        for algorithm in ("ring", "tree")
    )


@checks.entry(latency=0)
def bucket_overhead_seconds(
    model_bytes: float, *, bandwidth: float, latency: float, num_buckets: int
) -> float:
    """What data parallelism adds after the backward: the last bucket, and a call for each.

    T(n) = s / (n w) + n o, if all but the last bucket hide behind the backward.
    """
    return model_bytes / (num_buckets * bandwidth) + num_buckets * latency


@checks.entry()
def optimal_bucket_bytes(model_bytes: float, *, bandwidth: float, latency: float) -> float:
    """Where that is least: n = sqrt(s / (w o)), so a bucket holds sqrt(s o w) bytes."""
    return math.sqrt(model_bytes * latency * bandwidth)
