"""Which plans fit the memory of a device, which is fastest, and how few devices will do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from accounting.hardware import Hardware, find
from accounting.memory import training_memory
from accounting.plan import Plan
from accounting.precision import Precision
from accounting.step_time import step_time
from accounting.transformer import Transformer


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
) -> list[Candidate]:
    """Every plan over all `devices` whose fullest device has room, the fastest first.

    Tensor parallelism stays inside a node; pipelines run 1F1B with micro-batches of one sequence.
    `share_of_memory` leaves the rest to buffers and fragmentation.
    """
    device = find(hardware)
    room = device.memory_bytes * share_of_memory
    found = []
    for plan in _plans(model, device, devices, batch):
        need = float(training_memory(model, plan, batch=batch, seq=seq, precision=precision).total)
        if need > room:
            continue
        seconds = step_time(
            model, plan, batch=batch, seq=seq, hardware=device, efficiency=efficiency
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
    most: int = 1 << 14,
) -> list[Candidate]:
    """The plans that fit on the fewest devices, a power of two; `ValueError` if there are none."""
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
        )
        if found:
            return found
        devices *= 2
    raise ValueError(
        f"{model.name} with batch={batch} and seq={seq} fits no plan on up to {most:,} "
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


def _plans(model: Transformer, device: Hardware, devices: int, batch: int) -> Iterator[Plan]:
    for tensor in _powers(min(device.devices_per_node, devices)):
        for pipeline in _powers(min(model.layers, devices // tensor)):
            data, rest = divmod(devices, tensor * pipeline)
            if rest or batch % data:
                continue
            # Several stages need several micro-batches; one stage may take its batch whole.
            pieces = {1, batch // data} if pipeline == 1 else {batch // data}
            for microbatches in sorted(pieces):
                base = Plan(
                    data=data,
                    tensor=tensor,
                    pipeline=pipeline,
                    microbatches=microbatches,
                    sequence_parallel=tensor > 1,
                )
                try:
                    base.check(model, batch=batch)
                except ValueError:
                    continue
                for zero in (0, 1, 2, 3) if data > 1 else (0,):
                    for recompute in ("none", "selective", "full"):
                        yield replace(base, zero=zero, recompute=recompute)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]
