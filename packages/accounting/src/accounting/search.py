"""Which plans fit the memory of a device, which is fastest, and how few devices will do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from accounting import checks
from accounting.hardware import Hardware, find
from accounting.memory import training_memory
from accounting.plan import Plan
from accounting.precision import Precision
from accounting.step_time import step_time
from accounting.transformer import Transformer

AXES = tuple(field.name for field in fields(Plan) if field.name != "devices")
"""What a search may be given; `devices` is an argument of its own."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that fits, with what it needs and how long an iteration takes."""

    plan: Plan
    memory_bytes: float
    """Of the fullest device."""
    step_seconds: float


def plans_that_fit(
    model: Transformer,
    *,
    hardware: str | Hardware,
    devices: int,
    batch: int,
    seq: int,
    precision: str | Precision = "mixed_bf16",
    share_of_memory: float = 0.9,
    efficiency: float = 0.5,
    **given: Any,
) -> list[Candidate]:
    """Every plan over all `devices` whose fullest device has room, the fastest first.

    Fields of `Plan` that are `given` are kept; all others are tried. Tensor parallelism stays
    inside a node. `share_of_memory` leaves the rest to buffers and fragmentation.
    """
    device = find(hardware)
    checks.whole("devices", devices)
    checks.whole("batch", batch)
    checks.whole("seq", seq)
    checks.number("share_of_memory", share_of_memory, most=1)
    for name in given:
        checks.choice("a field of the plan", name, AXES)
    room = device.memory_bytes * share_of_memory
    found = []
    for plan in _plans(model, device, devices, batch, seq, given):
        need = float(training_memory(model, plan, batch=batch, seq=seq, precision=precision).total)
        if need > room:
            continue
        seconds = step_time(
            model,
            plan,
            batch=batch,
            seq=seq,
            hardware=device,
            efficiency=efficiency,
            precision=precision,
        )
        found.append(Candidate(plan=plan, memory_bytes=need, step_seconds=float(seconds.total)))
    return sorted(found, key=lambda candidate: candidate.step_seconds)


def smallest_machine(
    model: Transformer,
    *,
    hardware: str | Hardware,
    batch: int,
    seq: int,
    precision: str | Precision = "mixed_bf16",
    share_of_memory: float = 0.9,
    efficiency: float = 0.5,
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
    model: Transformer,
    *,
    memory_bytes: float,
    batch: int = 0,
    seq: int = 1,
    precision: str | Precision = "fp32",
    zero: int = 3,
    most: int = 1 << 20,
) -> int:
    """The smallest number of data-parallel devices on which the model trains; `ValueError` if none.

    Each device takes `batch` sequences of its own, so adding devices shards states but not
    activations.
    """

    checks.number("memory_bytes", memory_bytes)
    checks.whole("batch", batch, least=0)
    checks.whole("most", most)

    def fits(devices: int) -> bool:
        plan = Plan(data=devices, zero=zero)
        need = training_memory(model, plan, batch=batch * devices, seq=seq, precision=precision)
        return need.total <= memory_bytes

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


def _plans(
    model: Transformer,
    device: Hardware,
    devices: int,
    batch: int,
    seq: int,
    given: Mapping[str, Any],
) -> Iterator[Plan]:
    """Every plan that can be, with the fields that are given as they are."""

    def tried(name: str, others: Iterable[Any]) -> list[Any]:
        return [given[name]] if name in given else list(others)

    inside = min(device.devices_per_node, devices)
    for tensor, pipeline, context in itertools.product(
        tried("tensor", _powers(inside)),
        tried("pipeline", _powers(min(model.layers, devices))),
        tried("context", _powers(min(devices, max(1, seq // 1024)))),
    ):
        data, rest = divmod(devices, tensor * pipeline * context)
        if rest or not data or batch % data or given.get("data", data) != data:
            continue
        experts = [e for e in _powers(data * context) if e == 1 or model.experts]
        # One sequence at a time, all of them at once, and the powers of two between.
        most = batch // data
        pieces = [most // size for size in _powers(most) if most % size == 0]
        chunks = [v for v in (1, 2, 4) if v == 1 or 1 < pipeline * v <= model.layers]
        for expert, microbatches, virtual in itertools.product(
            tried("expert", experts),
            tried("microbatches", sorted({1, *pieces})),
            tried("virtual_stages", chunks),
        ):
            for zero, recompute, offload in itertools.product(
                tried("zero", (0, 1, 2, 3) if data * context > 1 else (0,)),
                tried("recompute", ("none", "selective", "full")),
                tried("offload", ("none",)),
            ):
                schedule = given.get("schedule", "interleaved" if virtual > 1 else "1f1b")
                try:
                    plan = Plan(
                        data=data,
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        expert=expert,
                        zero=zero,
                        microbatches=microbatches,
                        schedule=schedule,
                        virtual_stages=virtual,
                        sequence_parallel=given.get("sequence_parallel", tensor > 1),
                        recompute=recompute,
                        reshard_after_forward=given.get("reshard_after_forward", True),
                        offload=offload,
                    )
                    plan.check(model, batch=batch, seq=seq)
                except ValueError:
                    # This combination cannot be; the next one may.
                    continue
                yield plan


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]
