"""Which plans fit the memory of a device, which is fastest, and how few devices will do.

All axes are tried: tensor, pipeline with its chunks, context, expert, ZeRO, recomputation, the size
of a micro-batch. Tens of thousands of plans are put in order by an estimate that is arithmetic on a
few numbers, and only those in front are worked out in full.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from accounting import checks
from accounting.flops import flops
from accounting.hardware import Hardware, find
from accounting.memory.activations import activations
from accounting.memory.training import (
    device_parameters,
    one_layer,
    training_memory,
)
from accounting.model.shape import Shape
from accounting.plan import Plan, check_fields, even
from accounting.precision import Precision, bytes_of, recipe
from accounting.time.step import step_time
from accounting.workload import Workload

AXES = tuple(field.name for field in fields(Plan) if field.name != "devices")
"""What a search may be given; `devices` is an argument of its own."""


_DEGREES = ("data", "tensor", "pipeline", "context")


_QUESTION = (
    *("hardware", "batch", "seq", "precision", "share_of_memory", "memory_bytes", "efficiency"),
)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that fits, with what it needs and how long an iteration takes."""

    plan: Plan
    memory_bytes: float
    """Of the fullest device."""
    step_seconds: float
    """As modeled; `accounting.time.published.predicted` makes an interval of it."""


@checks.entry(*AXES)
def plans_that_fit(
    model: Shape,
    *,
    hardware: str | Hardware,
    devices: int,
    batch: int,
    seq: int,
    precision: str | Precision = "mixed_bf16",
    share_of_memory: float = 0.9,
    memory_bytes: float | None = None,
    efficiency: float | None = None,
    most: int = 8,
    **given: Any,
) -> list[Candidate]:
    """Plans over all `devices` whose fullest device has room, the fastest first, at most `most`.

    Fields of `Plan` that are `given` are kept; all others but `offload` are tried. Tensor
    parallelism stays inside a node. `share_of_memory` leaves the rest to buffers and fragmentation;
    `memory_bytes` replaces what the device has.
    """
    device, kind = find(hardware), recipe(precision)
    checks.number("share_of_memory", share_of_memory, most=1)
    check_fields(given)
    fixed = math.prod(given.get(name) or 1 for name in _DEGREES)
    if devices % fixed:
        degrees = " x ".join(name for name in _DEGREES if name in given)
        raise ValueError(f"devices is {devices}, which {degrees} = {fixed} does not divide")
    if given.get("expert", 1) > 1 and not model.experts:
        raise ValueError(f"expert is {given['expert']}; the model has 0 experts")
    bytes_there = device.memory_bytes if memory_bytes is None else memory_bytes
    room = bytes_there * share_of_memory
    work = Workload(batch=batch, seq=seq, precision=kind, fused_gate=True)
    device.peak(kind.compute)
    order = sorted(
        _estimates(model, device, devices, work, room, given), key=lambda found: found[0]
    )
    found: list[Candidate] = []
    for _, fields_of_plan in order:
        try:
            plan = Plan(**fields_of_plan)
            plan.check(model, batch=batch, seq=seq)
            plan.keeps_weights_whole()
        except ValueError:
            # This combination cannot be, or its memory is not modeled; the next one may.
            continue
        # Alike stages need most at an end or next to it; unlike ones are all worked out.
        unlike = bool(model.experts or model.mixers or model.extra)
        ends = {0, min(1, plan.pipeline - 1), plan.pipeline - 1}
        need = max(
            float(training_memory(model, plan, work, stage=stage).total)
            for stage in (range(plan.pipeline) if unlike else ends)
        )
        if need > room:
            continue
        seconds = step_time(model, plan, work, hardware=device, efficiency=efficiency)
        found.append(Candidate(plan=plan, memory_bytes=need, step_seconds=float(seconds.total)))
        if len(found) >= max(2 * most, 40):
            break
    return sorted(found, key=lambda candidate: candidate.step_seconds)[:most]


@checks.entry(*AXES, *_QUESTION)
def smallest_machine(model: Shape, *, most: int = 1 << 14, **question: Any) -> list[Candidate]:
    """The plans that fit on the fewest devices, doubled from what is given; `ValueError` if none.

    `question` are the other arguments of `plans_that_fit`.
    """
    devices = math.prod(question.get(name) or 1 for name in _DEGREES)
    while devices <= most:
        found = plans_that_fit(model, devices=devices, **question)
        if found:
            return found
        devices *= 2
    kept = ", ".join(f"{name}={value}" for name, value in question.items() if name != "hardware")
    raise ValueError(
        f"{model.name} with {kept} fits no plan on up to {most:,} "
        f"{find(question['hardware']).name}; give a smaller batch, or a larger `most`"
    )


@checks.entry(zero=(0, 1, 2, 3))
def fewest_devices(
    model: Shape,
    *,
    memory_bytes: float,
    batch: int = 0,
    seq: int = 1,
    precision: str | Precision = "fp32",
    zero: int = 3,
    most: int = 1 << 20,
    activation_bytes: float = 0,
    sharded_activations: float = 0.0,
) -> int:
    """The smallest number of data-parallel devices on which the model trains; `ValueError` if none.

    Each device takes `batch` sequences of its own, so adding devices shards states but not
    activations. `activation_bytes` are added to what a device holds, a share of
    `sharded_activations` of them divided among all devices.
    """
    checks.number("sharded_activations", sharded_activations, most=1, open=False)

    def fits(devices: int) -> bool:
        plan = Plan(data=devices, zero=zero)
        need = training_memory(model, plan, batch=batch * devices, seq=seq, precision=precision)
        whole = activation_bytes * (1 - sharded_activations + sharded_activations / devices)
        return need.total + whole <= memory_bytes

    if not fits(most):
        raise ValueError(
            f"{model.name} does not fit {memory_bytes:,.0f} bytes on up to {most:,} devices at "
            f"zero={zero}; shard more (zero, tensor, pipeline) or give a smaller batch"
        )
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _estimates(
    model: Shape,
    device: Hardware,
    devices: int,
    work: Workload,
    room: float,
    given: Mapping[str, Any],
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Every plan with about the seconds that it takes, of those that about fit."""

    def tried(name: str, others: Iterable[Any]) -> list[Any]:
        return [given[name]] if name in given else list(others)

    kind, layer = work.kind, one_layer(model)
    operations = float(flops(model, seq=work.seq, batch=work.batch).total) / devices
    seconds = operations / (0.7 * device.peak(kind.compute))
    again = {"none": 1.0, "selective": 1.03, "full": 4 / 3}
    weight, gradient = float(bytes_of(kind.weights)), float(bytes_of(kind.gradients))
    state = float(kind.bytes_per_parameter) - weight - gradient
    offload = given.get("offload", "none")
    state *= offload != "optimizer"
    token = replace(work, batch=1, seq=1, fused_gate=False)
    for tensor in tried("tensor", _powers(min(device.devices_per_node, devices))):
        if "tensor" not in given and (model.heads % tensor or model.d_ff % tensor):
            continue
        dense, routed = device_parameters(model, Plan(tensor=tensor))
        sequence = given.get("sequence_parallel", tensor > 1)
        kept = {}
        for how in tried("recompute", again):
            if offload == "activations":
                kept["full"] = 0.0
                continue
            plan = Plan(tensor=tensor, sequence_parallel=sequence, recompute=how)
            kept[how] = float(activations(layer, plan, token).total)
        inside = device.devices_per_node // tensor
        for pipeline, context in itertools.product(
            tried("pipeline", _powers(min(model.layers, devices))),
            tried("context", _powers(min(devices, max(1, work.seq // 1024)))),
        ):
            data, rest = divmod(devices, tensor * pipeline * context)
            if rest or not data or work.batch % data or given.get("data", data) != data:
                continue
            each, replicas = work.batch // data, data * context
            near = tensor * replicas <= device.devices_per_node
            rate = device.network.bandwidth * max(1, inside)
            rate = device.node_link.bandwidth if near else rate
            # Megatron interleaves even chunks alone.
            chunks = [
                v
                for v in (1, 2, 4, 8)
                if v == 1 or (pipeline > 1 and even(model.layers, pipeline * v))
            ]
            sizes = {each // size for size in (1, 2, 4, each) if each % size == 0 and size <= each}
            for expert, microbatches, virtual, zero in itertools.product(
                tried("expert", _powers(replicas) if model.experts else [1]),
                tried("microbatches", sorted(sizes)),
                tried("virtual_stages", chunks),
                tried("zero", (0, 1, 2, 3) if replicas > 1 else (0,)),
            ):
                if each % microbatches or (virtual > 1 and microbatches % pipeline):
                    continue
                schedule = given.get("schedule", "interleaved" if virtual > 1 else "1f1b")
                whole = (dense + routed / expert) / pipeline
                shard = (dense + routed) / pipeline / replicas
                if zero == 2 and pipeline > 1 and "zero" not in given:
                    # torch's schedules accumulate whole gradients, so that none would be sharded.
                    continue
                need = weight * (shard if zero == 3 and pipeline == 1 else whole)
                apart = zero == 2 or (zero == 3 and pipeline == 1)
                need += gradient * (shard if apart else whole)
                need += state * (shard if zero else whole)
                tokens = each / microbatches * work.seq / context
                flight = microbatches if schedule == "gpipe" else min(microbatches, pipeline)
                # What shows of the traffic: tensor parallelism's, the gathers of every micro-batch.
                moved = 8 * model.layers / pipeline * tokens * microbatches * model.d_model
                exposed = moved * (tensor > 1) / device.node_link.bandwidth
                if expert > 1 and model.experts:
                    link = device.node_link if expert <= inside else device.network
                    exposed += moved * model.experts.per_token / link.bandwidth
                gathers = {3: 3 * microbatches, 2: microbatches}.get(zero, 1)
                if zero == 3 and pipeline > 1:
                    gathers = microbatches + 2
                exposed += max(0.0, 4 * whole / rate * gathers - 2 / 3 * seconds)
                # Every micro-batch reads all weights that the device holds, three times.
                exposed += 3 * microbatches * 2 * whole / (0.8 * device.memory_bandwidth)
                bubble = (pipeline - 1) / (microbatches * virtual)
                fields_of_plan = {
                    **{"data": data, "tensor": tensor, "pipeline": pipeline, "context": context},
                    **{"expert": expert, "zero": zero, "microbatches": microbatches},
                    **{"schedule": schedule, "virtual_stages": virtual},
                    "sequence_parallel": sequence,
                    "reshard_after_forward": given.get("reshard_after_forward", True),
                    "offload": offload,
                }
                for how, one in kept.items():
                    if need + one * tokens * model.layers / pipeline * flight <= 1.1 * room:
                        about = (seconds * again[how] + exposed) * (1 + bubble)
                        yield about, fields_of_plan | {"recompute": how}


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]
