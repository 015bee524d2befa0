"""Search for the fastest plans that fit in memory, and for the fewest devices.

The search varies the tensor, pipeline, context and expert degrees, pipeline chunks, the ZeRO stage,
recomputation, and the size of a micro-batch. `search/estimates.py` sorts tens of thousands of plans
by an estimate; only the most promising ones are computed in full.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from accounting import checks
from accounting.hardware import Hardware, find
from accounting.memory.training import training_memory
from accounting.model.transformer import Transformer
from accounting.plan import CHOICES, Plan
from accounting.precision import Precision, recipe
from accounting.search.estimates import Estimator
from accounting.time.step import step_time
from accounting.workload import Workload

#: Fields of a plan that a caller may fix; `devices` is a separate argument.
AXES = tuple(field.name for field in fields(Plan) if field.name != "devices")
#: Fraction of the memory that a plan may use.
MEMORY_FRACTION = 0.9
#: Number of plans that are computed in full to find the least memory.
PLANS_FOR_LEAST_MEMORY = 100
#: Degrees whose product is the number of devices.
DEGREES = ("data", "tensor", "pipeline", "context")


@dataclass(frozen=True, kw_only=True)
class FittingPlan:
    """A plan that fits in memory, with its memory and step time."""

    plan: Plan
    #: Bytes on the fullest device.
    memory_bytes: float
    #: Modeled seconds of a step; `accounting.time.published.predicted` adds an interval.
    step_seconds: float


@checks.entry(*AXES)
def plans_that_fit(
    model: Transformer,
    *,
    hardware: str | Hardware,
    devices: int,
    batch: int,
    seq: int,
    precision: str | Precision = "mixed_bf16",
    memory_bytes: float | None = None,
    most: int = 8,
    time_limit: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    **fixed: Any,
) -> list[FittingPlan]:
    """Return up to `most` plans that use all `devices` and fit in memory, fastest first.

    Fields of `Plan` that are passed are fixed. The search varies all other fields and keeps tensor
    parallelism inside a node. A tenth of the memory is left for buffers and fragmentation.
    `memory_bytes` replaces the memory of the device. After `time_limit` seconds, the plans found so
    far are returned, or `TimeoutError` is raised if there are none. `progress` is called with the
    number of plans that were computed in full and the number of all plans. Raises `ValueError` if
    the fixed degrees do not divide the devices.
    """
    start = time.monotonic()
    device, kind = find(hardware), recipe(precision)
    checks.fields(Plan, fixed, **CHOICES)
    _check_degrees(model, devices, fixed)
    capacity = device.memory_bytes if memory_bytes is None else memory_bytes
    work = Workload(batch=batch, seq=seq, precision=kind, fused_gate=True)
    estimator = Estimator(model, device, devices, work, capacity * MEMORY_FRACTION, fixed)
    fitting: list[FittingPlan] = []
    estimates = sorted(estimator.estimates(), key=lambda estimate: estimate.seconds)
    for computed, estimate in enumerate(estimates):
        if progress is not None:
            progress(computed, len(estimates))
        if time_limit is not None and time.monotonic() - start > time_limit:
            if fitting:
                break
            raise TimeoutError(
                f"expected a plan that fits within {time_limit} s, got none among {computed:,} of "
                f"{len(estimates):,} plans; pass a larger time_limit or fix fields of the plan"
            )
        plan = _valid_plan(model, work, estimator.fields_of_plan(estimate))
        if plan is None:
            continue
        needed = float(training_memory(model, plan, work).total)
        if needed > estimator.memory_bytes:
            continue
        step = step_time(model, plan, work, hardware=device)
        fitting.append(FittingPlan(plan=plan, memory_bytes=needed, step_seconds=float(step.total)))
        if len(fitting) >= max(2 * most, 40):
            break
    return sorted(fitting, key=lambda candidate: candidate.step_seconds)[:most]


def least_memory(model: Transformer, work: Workload, estimator: Estimator) -> float | None:
    """Return the least memory of a device over all plans, or None if no plan is valid.

    The valid plans with the smallest estimates are computed in full.
    """
    computed: list[float] = []
    for estimate in estimator.by_memory():
        plan = _valid_plan(model, work, estimator.fields_of_plan(estimate))
        if plan is not None:
            computed.append(float(training_memory(model, plan, work).total))
        if len(computed) == PLANS_FOR_LEAST_MEMORY:
            break
    return min(computed, default=None)


def _check_degrees(model: Transformer, devices: int, fixed: dict[str, Any]) -> None:
    """Raise `ValueError` if the fixed degrees do not divide the devices or the model."""
    product = math.prod(fixed.get(name) or 1 for name in DEGREES)
    if devices % product:
        degrees = " x ".join(name for name in DEGREES if name in fixed)
        raise ValueError(
            f"expected {degrees} = {product} to divide devices, got devices={devices}; "
            "change the number of devices or a degree"
        )
    if fixed.get("expert", 1) > 1 and not model.experts:
        raise ValueError(
            f"expected expert=1 for a model without experts, got expert={fixed['expert']}"
        )


def _valid_plan(model: Transformer, work: Workload, plan_fields: dict[str, Any]) -> Plan | None:
    """Return the plan, or None if it is inconsistent or its memory is not modeled."""
    try:
        plan = Plan(**plan_fields)
        plan.check(model, batch=work.batch, seq=work.seq)
        plan.keeps_weights_whole()
    except ValueError:
        return None
    return plan


@checks.entry(zero=(0, 1, 2, 3))
def fewest_devices(
    model: Transformer,
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
    """Return the smallest number of data-parallel devices on which the model trains.

    Each device processes `batch` sequences, so more devices need less memory for model states, but
    not for activations. `memory_bytes` is the memory of a device. `activation_bytes` is added to
    the memory that a device needs; the fraction `sharded_activations` of it is divided by the
    number of devices. Raises `ValueError` if `most` devices do not suffice.
    """
    checks.number("sharded_activations", sharded_activations, most=1, open=False)

    def fits(devices: int) -> bool:
        plan = Plan(data=devices, zero=zero)
        need = training_memory(model, plan, batch=batch * devices, seq=seq, precision=precision)
        whole = activation_bytes * (1 - sharded_activations + sharded_activations / devices)
        return need.total + whole <= memory_bytes

    # One device gathers no weights, so it may need less memory than two.
    if fits(1):
        return 1
    if not fits(most):
        raise ValueError(
            f"{model.name} does not fit {memory_bytes:,.0f} bytes per device on up to {most:,} "
            f"devices at zero={zero}; shard more (zero, tensor, pipeline) or pass a smaller batch"
        )
    low, high = 2, most
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low
