"""Search for the fastest plans that fit in memory, and for the fewest devices.

The search is a branch and bound over the plans of `search/space.py`. It computes plans in full, in
the order of a lower bound on their step time. It stops when the next bound exceeds the step time of
the slowest result. Layouts and plans whose memory bound exceeds the usable memory are skipped.
"""

import bisect
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from accounting import checks
from accounting.breakdown import format_count
from accounting.hardware import Hardware, find
from accounting.memory.training import training_memory
from accounting.model.transformer import Transformer
from accounting.plan import CHOICES, Plan
from accounting.precision import Precision, get_recipe
from accounting.search.bounds import ROUNDING, Bounds
from accounting.search.space import Candidate, Layout, Space
from accounting.time.step import step_time
from accounting.workload import Workload

#: Fields of a plan that a caller may fix.
AXES = tuple(field.name for field in fields(Plan))
#: Fraction of the memory that a plan may use.
MEMORY_FRACTION = 0.9
#: Degrees whose product is the number of devices.
DEGREES = ("data", "tensor", "pipeline", "context")


@dataclass(frozen=True, kw_only=True)
class FittingPlan:
    """A plan that fits in memory, with its memory and step time."""

    plan: Plan
    #: Bytes on the fullest device.
    memory_bytes: float
    #: Modeled seconds of a step; `accounting.time.intervals.predict_seconds` adds an interval.
    step_seconds: float


@checks.validate()
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
    """Return the `most` fastest plans that use all `devices` and fit in memory, fastest first.

    Fields of `Plan` that are passed are fixed. The search compares all other plans of this space:

    - tensor-parallel degrees whose groups are inside a node,
    - pipeline degrees up to the number of layers, with 1F1B or with 2 to 8 equal interleaved chunks
      per stage,
    - context-parallel degrees that leave at least 1024 tokens of a sequence per rank; only 1 for
      models with recurrent layers,
    - expert-parallel degrees, all kinds of recomputation, and all sizes of a micro-batch,
    - ZeRO stages 0 to 3, except stage 2 in a pipeline and stage 3 with interleaved chunks.

    The data, tensor, pipeline and context degrees multiply to `devices`, and every plan passes
    `Plan.check`. Tensor-parallel plans are sequence-parallel; ZeRO-3 reshards after the forward.

    A tenth of the memory is left for buffers and fragmentation. `memory_bytes` replaces the memory
    of the device. `training_memory` computes the memory with `fused_gate=True`: one kernel computes
    the gated product of an MLP, which saves fewer activations than the default of
    `training_memory`. The list is empty if no plan fits. After `time_limit` seconds, the plans
    found so far are returned, or `TimeoutError` is raised if there are none. `progress` is called
    with the number of plans that were computed in full and the number of all plans. Raises
    `ValueError` if the training step of the model is not modeled, if the fixed degrees do not
    divide the devices, or for `expert` above 1 in a model without experts.
    """
    start = time.monotonic()
    device, kind = find(hardware), get_recipe(precision)
    for name in fixed:
        checks.require_choice("a fixed field", name, AXES)
    checks.validate_fields(Plan, fixed, **CHOICES)
    _check_degrees(model, devices, fixed)
    capacity = device.memory_bytes if memory_bytes is None else memory_bytes
    usable = capacity * MEMORY_FRACTION
    work = Workload(batch=batch, seq=seq, precision=kind, fused_gate=True)
    space = Space(model, device, devices, work, fixed)
    fitting: list[FittingPlan] = []
    slowest = math.inf
    for computed, (bound, candidate) in enumerate(_iter_fitting_by_time(space, usable)):
        if bound >= slowest:
            break
        if progress is not None:
            progress(computed, space.count)
        if time_limit is not None and time.monotonic() - start > time_limit:
            if fitting:
                break
            raise TimeoutError(
                f"expected a plan that fits within {time_limit} s, got none among {computed:,} of "
                f"{format_count(space.count, 'plan')}; pass a larger time_limit or fix fields of "
                "the plan"
            )
        fitting_plan = _compute_fitting_plan(space, candidate, usable)
        if fitting_plan is not None:
            bisect.insort(fitting, fitting_plan, key=_compute_sort_key)
            if len(fitting) >= most:
                # Bounds are reduced by the same fraction.
                slowest = fitting[most - 1].step_seconds * (1 - ROUNDING)
    return fitting[:most]


def _compute_sort_key(fitting: FittingPlan) -> tuple[float, int]:
    """Return the time of a plan up to rounding, and the number of ranks that split a sequence.

    Among plans of equal time, the ones that split models and sequences least are first.
    """
    plan = fitting.plan
    return float(f"{fitting.step_seconds:.9g}"), plan.tensor * plan.pipeline * plan.context


def _iter_fitting_by_time(space: Space, usable_bytes: float) -> Iterator[tuple[float, Candidate]]:
    """Yield the plans whose memory bound fits, in the order of the lower bounds of their time."""
    bounds = Bounds(space)
    return _iter_ascending(
        (layout for layout in space.layouts if bounds.bound_layout_bytes(layout) <= usable_bytes),
        bounds.bound_layout_seconds,
        lambda layout: (
            (bounds.bound_seconds(candidate), candidate)
            for candidate in space.iter_candidates(layout)
            if bounds.bound_bytes(candidate) <= usable_bytes
        ),
    )


def _iter_ascending(
    layouts: Iterable[Layout],
    bound_of_layout: Callable[[Layout], float],
    bounds_of_candidates: Callable[[Layout], Iterable[tuple[float, Candidate]]],
) -> Iterator[tuple[float, Candidate]]:
    """Yield the candidates of all layouts with their bounds, the smallest bound first.

    The candidates of a layout are created when no other bound is smaller than the layout's bound.
    """
    order = itertools.count()
    heap: list[tuple[float, int, Layout | Candidate]] = [
        (bound_of_layout(layout), next(order), layout) for layout in layouts
    ]
    heapq.heapify(heap)
    while heap:
        bound, _, item = heapq.heappop(heap)
        if isinstance(item, Candidate):
            yield bound, item
        else:
            for bound, candidate in bounds_of_candidates(item):
                heapq.heappush(heap, (bound, next(order), candidate))


def _compute_fitting_plan(
    space: Space, candidate: Candidate, usable_bytes: float
) -> FittingPlan | None:
    """Return a candidate's plan with its memory and time, or None if it is invalid or too large."""
    plan = space.build_plan(candidate)
    if plan is None:
        return None
    memory_bytes = float(training_memory(space.model, plan, space.work).total)
    if memory_bytes > usable_bytes:
        return None
    step = step_time(space.model, plan, space.work, hardware=space.device)
    return FittingPlan(plan=plan, memory_bytes=memory_bytes, step_seconds=float(step.total))


def find_least_memory(space: Space) -> float | None:
    """Return the least bytes per device over all plans, or None if no plan is valid."""
    bounds = Bounds(space)
    least = math.inf
    plans = _iter_ascending(
        space.layouts,
        bounds.bound_layout_bytes,
        lambda layout: ((bounds.bound_bytes(c), c) for c in space.iter_candidates(layout)),
    )
    for bound, candidate in plans:
        if bound >= least * (1 - ROUNDING):
            break
        plan = space.build_plan(candidate)
        if plan is not None:
            least = min(least, float(training_memory(space.model, plan, space.work).total))
    return None if math.isinf(least) else least


def _check_degrees(model: Transformer, devices: int, fixed: dict[str, Any]) -> None:
    """Raise `ValueError` if the fixed degrees do not divide the devices.

    Also raises `ValueError` for `expert` above 1 in a model without experts.
    """
    product = math.prod(fixed.get(name, 1) for name in DEGREES)
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


@checks.validate()
def find_fewest_devices(
    model: Transformer,
    *,
    memory_bytes: float,
    activation_bytes: float = 0,
    sharded_activations: float = 0.0,
) -> int:
    """Return the smallest number of devices over which ZeRO-3 can shard the model states in fp32.

    The states are weights, gradients and Adam's moments, and each device has `memory_bytes` bytes.
    `activation_bytes` is added to the memory that a device needs. The fraction
    `sharded_activations` of it is divided by the number of devices. Raises `ValueError` if
    2**20 devices do not suffice.
    """
    checks.require_number("sharded_activations", sharded_activations, maximum=1, open=False)

    def has_room(devices: int) -> bool:
        need = training_memory(model, Plan(data=devices, zero=3), batch=0).total
        whole = activation_bytes * (1 - sharded_activations + sharded_activations / devices)
        return bool(need + whole <= memory_bytes)

    most = 2**20
    if not has_room(most):
        raise ValueError(
            f"{model.name} does not fit {memory_bytes:,.0f} bytes per device on up to {most:,} "
            "devices; pass fewer activation_bytes, or shard more of them"
        )
    return bisect.bisect_left(range(most), True, lo=1, key=has_room)
