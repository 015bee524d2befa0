"""Which plans fit the memory of a device, which is fastest, and how few devices will do.

All axes are tried: tensor, pipeline with its chunks, context, expert, ZeRO, recomputation, the size
of a micro-batch. Tens of thousands of plans are put in order by an estimate that is arithmetic on a
few numbers, and only those in front are worked out in full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from accounting import checks
from accounting.flops import flops
from accounting.hardware import Hardware, find
from accounting.memory.activations import activations
from accounting.memory.training import device_parameters, one_layer, training_memory
from accounting.model.shape import Shape
from accounting.plan import Plan
from accounting.precision import Precision, bytes_of, recipe
from accounting.time.step import step_time

AXES = tuple(field.name for field in fields(Plan) if field.name != "devices")
"""What a search may be given; `devices` is an argument of its own."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that fits, with what it needs and how long an iteration takes."""

    plan: Plan
    memory_bytes: float
    """Of the fullest device."""
    step_seconds: float
    """As modeled; `accounting.time.published.predicted` makes an interval of it."""


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

    Fields of `Plan` that are `given` are kept; all others are tried. Tensor parallelism stays
    inside a node. `share_of_memory` leaves the rest to buffers and fragmentation; `memory_bytes`
    replaces what the device has.
    """
    device, kind = find(hardware), recipe(precision)
    checks.whole("devices", devices)
    checks.whole("batch", batch)
    checks.whole("seq", seq)
    checks.whole("most", most)
    checks.number("share_of_memory", share_of_memory, most=1)
    for name in given:
        checks.choice("a field of the plan", name, AXES)
    room = checks.number("memory_bytes", memory_bytes or device.memory_bytes) * share_of_memory
    device.peak(kind.compute)
    order = sorted(
        _estimates(model, device, devices, batch, seq, kind, room, given),
        key=lambda found: found[0],
    )
    found: list[Candidate] = []
    for _, fields_of_plan in order:
        try:
            plan = Plan(**fields_of_plan)
            plan.check(model, batch=batch, seq=seq)
        except ValueError:
            # This combination cannot be; the next one may.
            continue
        run: dict[str, Any] = {"batch": batch, "seq": seq, "precision": kind}
        # Alike stages need most at an end or next to it; unlike ones are all worked out.
        unlike = bool(model.experts or model.mixers or model.extra)
        ends = {0, min(1, plan.pipeline - 1), plan.pipeline - 1}
        need = max(
            float(training_memory(model, plan, stage=stage, fused_gate=True, **run).total)
            for stage in (range(plan.pipeline) if unlike else ends)
        )
        if need > room:
            continue
        seconds = step_time(model, plan, hardware=device, efficiency=efficiency, **run)
        found.append(Candidate(plan=plan, memory_bytes=need, step_seconds=float(seconds.total)))
        if len(found) >= max(2 * most, 40):
            break
    return sorted(found, key=lambda candidate: candidate.step_seconds)[:most]


def smallest_machine(
    model: Shape,
    *,
    hardware: str | Hardware,
    batch: int,
    seq: int,
    precision: str | Precision = "mixed_bf16",
    share_of_memory: float = 0.9,
    efficiency: float | None = None,
    most: int = 1 << 14,
    **given: Any,
) -> list[Candidate]:
    """The plans that fit on the fewest devices, a power of two; `ValueError` if there are none."""
    checks.whole("most", most)
    devices = 1
    while devices <= most:
        found = plans_that_fit(
            model,
            hardware=hardware,
            devices=devices,
            batch=batch,
            seq=seq,
            precision=precision,
            share_of_memory=share_of_memory,
            efficiency=efficiency,
            **given,
        )
        if found:
            return found
        devices *= 2
    kept = "".join(f", {name}={value}" for name, value in given.items())
    raise ValueError(
        f"{model.name} with batch={batch} and seq={seq}{kept} fits no plan on up to {most:,} "
        f"{find(hardware).name}; give a smaller batch, or a larger `most`"
    )


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
    checks.number("memory_bytes", memory_bytes)
    checks.whole("batch", batch, least=0)
    checks.whole("most", most)
    checks.number("activation_bytes", activation_bytes, open=False)
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
    batch: int,
    seq: int,
    kind: Precision,
    room: float,
    given: Mapping[str, Any],
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Every plan with about the seconds that it takes, of those that about fit."""

    def tried(name: str, others: Iterable[Any]) -> list[Any]:
        return [given[name]] if name in given else list(others)

    layer = one_layer(model)
    work = float(flops(model, seq=seq, batch=batch).total) / devices
    seconds = work / (0.7 * device.peak(kind.compute))
    again = {"none": 1.0, "selective": 1.03, "full": 4 / 3}
    weight, gradient = float(bytes_of(kind.weights)), float(bytes_of(kind.gradients))
    state = float(kind.bytes_per_parameter) - weight - gradient
    for tensor in tried("tensor", _powers(min(device.devices_per_node, devices))):
        if "tensor" not in given and (model.heads % tensor or model.d_ff % tensor):
            continue
        dense, routed = device_parameters(model, Plan(tensor=tensor))
        sequence = given.get("sequence_parallel", tensor > 1)
        kept = {}
        for how in tried("recompute", again):
            plan = Plan(tensor=tensor, sequence_parallel=sequence, recompute=how)
            kept[how] = float(activations(layer, plan, batch=1, seq=1, precision=kind).total)
        for pipeline, context in itertools.product(
            tried("pipeline", _powers(min(model.layers, devices))),
            tried("context", _powers(min(devices, max(1, seq // 1024)))),
        ):
            data, rest = divmod(devices, tensor * pipeline * context)
            if rest or not data or batch % data or given.get("data", data) != data:
                continue
            each = batch // data
            chunks = [v for v in (1, 2, 4, 8) if v == 1 or 1 < pipeline * v <= model.layers]
            sizes = [size for size in (1, 2, 4, each) if each % size == 0 and size <= each]
            most = _powers(data * context) if model.experts else [1]
            for expert, microbatches, virtual, zero in itertools.product(
                tried("expert", most),
                tried("microbatches", sorted({each // size for size in sizes})),
                tried("virtual_stages", chunks),
                tried("zero", (0, 1, 2, 3) if data * context > 1 else (0,)),
            ):
                if each % microbatches or (virtual > 1 and microbatches % pipeline):
                    continue
                schedule = given.get("schedule", "interleaved" if virtual > 1 else "1f1b")
                held = dense / pipeline / (data * context), routed / pipeline / (data * context)
                held_whole = (dense + routed / expert) / pipeline
                shards = sum(held)
                need = weight * (shards if zero == 3 else held_whole)
                need += gradient * (shards if zero >= 2 else held_whole)
                need += state * (shards if zero else held_whole)
                tokens = each / microbatches * seq / context
                flight = min(microbatches, pipeline) if schedule != "gpipe" else microbatches
                bubble = (pipeline - 1) / (microbatches * virtual)
                # What shows of the traffic: tensor parallelism's, the gathers of every micro-batch.
                moved = 8 * model.layers / pipeline * tokens * microbatches * model.d_model
                exposed = moved * (tensor > 1) / device.node_link.bandwidth
                if expert > 1 and model.experts:
                    inside = device.devices_per_node // tensor
                    link = device.node_link if expert <= inside else device.network
                    exposed += moved * model.experts.per_token / link.bandwidth
                ports = max(1, device.devices_per_node // tensor)
                near = tensor * context * data <= device.devices_per_node
                link_rate = device.node_link.bandwidth if near else device.network.bandwidth * ports
                sent = 2 * held_whole * 2 / link_rate
                gathers = 3 * microbatches if zero == 3 else microbatches if zero == 2 else 1
                exposed += max(0.0, sent * gathers - 2 / 3 * seconds)
                # Every micro-batch reads all weights that the device holds, three times.
                exposed += 3 * microbatches * 2 * held_whole / (0.8 * device.memory_bandwidth)
                for how, one in kept.items():
                    if need + one * tokens * model.layers / pipeline * flight > 1.1 * room:
                        continue
                    for offload in tried("offload", ("none",)):
                        yield (
                            (seconds * again[how] + exposed) * (1 + bubble),
                            {
                                "data": data,
                                "tensor": tensor,
                                "pipeline": pipeline,
                                "context": context,
                                "expert": expert,
                                "zero": zero,
                                "microbatches": microbatches,
                                "schedule": schedule,
                                "virtual_stages": virtual,
                                "sequence_parallel": sequence,
                                "recompute": how,
                                "reshard_after_forward": given.get("reshard_after_forward", True),
                                "offload": offload,
                            },
                        )


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]
