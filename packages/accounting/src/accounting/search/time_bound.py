"""A lower bound on the step time of a plan, from the sizes of its stages.

The bound is `step_time` without three terms: the reduction of a tied embedding in a pipeline, the
rounding of shards, and the part of the bubble that waits for context parallelism.
"""

from functools import cache
from typing import NamedTuple

from accounting.hardware import Link
from accounting.precision import bytes_of
from accounting.search.space import Candidate, Layout, Space
from accounting.search.stage_sizes import StageParameters, StageSizes, StageTable
from accounting.time.collective import ring_wire, seconds
from accounting.time.communication import state_calls
from accounting.time.efficiency import BANDWIDTH_FRACTION
from accounting.time.step import OVERLAP, group_link

#: Bounds are reduced by this fraction, because the order of a sum of floats changes its rounding.
ROUNDING = 1e-9


class Traffic(NamedTuple):
    """Seconds of some collectives, and the bytes that a device sends for them in rings."""

    seconds: float
    wire: float


class TimeBound:
    """Lower bounds on the modeled seconds of a step."""

    def __init__(self, space: Space, table: StageTable) -> None:
        self._space = space
        self._table = table
        kind = space.work.kind
        self._sizes = {name: float(bytes_of(dtype)) for name, dtype in kind.wire_dtypes.items()}
        # The optimizer reads and writes all model states once.
        bandwidth = space.device.memory_bandwidth * BANDWIDTH_FRACTION
        self._update_seconds = 2 * float(kind.bytes_per_parameter) / bandwidth
        # Plans that differ only in the ZeRO stage or the recomputation share most of these values.
        self._link = cache(self._find_link)
        self._busy = cache(self._compute_busy)
        self._axis = cache(self._compute_axis)
        self._states = cache(self._compute_states)

    def of_layout(self, layout: Layout) -> float:
        """Return a lower bound over all plans of a layout."""
        largest_expert = max((expert for expert, _ in self._space.options(layout)), default=1)
        busy, _ = self._busy(layout, largest_expert)
        # The traffic of tensor parallelism is not hidden.
        tensor = min(
            self._axis(stage, "tensor", layout.tensor, layout).seconds
            for stage in self._inner(layout)
        )
        return (busy + tensor) * (1 + _idle(layout)) * (1 - ROUNDING)

    def of_candidate(self, candidate: Candidate) -> float:
        """Return a lower bound for one plan."""
        layout, expert, _ = candidate
        busy, compute = self._busy(layout, expert)
        exposed = self._exposed_seconds(candidate, compute)
        updated = max(_updated(stage, candidate) for stage in self._table.stages(layout))
        total = busy * (1 + _idle(layout)) + exposed + updated * self._update_seconds
        return total * (1 - ROUNDING)

    def _inner(self, layout: Layout) -> list[StageSizes]:
        return [stage for stage in self._table.stages(layout) if stage.is_inner]

    def _exposed_seconds(self, candidate: Candidate, compute: float) -> float:
        """Return the seconds of traffic that compute does not hide, plus its part of the bubble."""
        layout, expert, zero = candidate
        results = []
        for stage in self._inner(layout):
            tensor = self._axis(stage, "tensor", layout.tensor, layout)
            routed = self._axis(stage, "expert", expert, layout)
            context = self._axis(stage, "context", layout.context, layout)
            sends = self._axis(stage, "pipeline", layout.pipeline, layout)
            states = self._states(
                stage.parameters,
                layout._replace(recompute="none"),
                expert,
                zero,
            )
            can_hide = (1.0 if zero == 3 else OVERLAP["data"]) * compute
            hidden = sum(min(call.seconds, can_hide) for call in states)
            hidden += context.seconds + sends.seconds
            blocking = tensor.seconds + routed.seconds
            parts = (tensor, routed, context, sends, *states)
            needs = sum(part.seconds for part in parts)
            wire = sum(part.wire for part in parts)
            results.append((wire, needs - min(hidden, compute) + blocking * _idle(layout)))
        # `step_time` chooses the inner stage with the most bytes on the wire.
        most = max(wire for wire, _ in results) * (1 - ROUNDING)
        return min(exposed for wire, exposed in results if wire >= most)

    def _compute_busy(self, layout: Layout, expert: int) -> tuple[float, float]:
        """Return the slowest stage's seconds without communication, and its seconds of compute."""
        sequences = self._space.work.batch / layout.data / layout.context
        tokens = sequences * self._space.work.seq
        results = []
        for stage in self._table.stages(layout):
            rates = stage.costs.rates
            weights = rates.dense_weights + rates.routed_weights / expert
            compute = tokens * rates.arithmetic + sequences / layout.tensor * stage.costs.attention
            moved = tokens * (rates.traffic + rates.elementwise) + layout.microbatches * weights
            results.append((compute + moved, compute))
        slowest = max(busy for busy, _ in results)
        # If several stages are equally slow, the most compute hides the most communication.
        return slowest, max(
            compute for busy, compute in results if busy >= slowest * (1 - ROUNDING)
        )

    def _compute_axis(self, stage: StageSizes, axis: str, ranks: int, layout: Layout) -> Traffic:
        """Return the traffic of all collectives of an axis other than data."""
        if ranks == 1:
            return Traffic(0.0, 0.0)
        sequences = self._space.work.batch / layout.data / layout.microbatches
        tokens = sequences * self._space.work.seq / layout.context
        strides = {"tensor": 1, "pipeline": layout.tensor * layout.replicas}
        stride = strides.get(axis, layout.tensor)
        time = wire = 0.0
        for call in stage.calls:
            if call.axis != axis:
                continue
            count = call.calls * layout.microbatches
            # A ring pass of context parallelism sends the blocks of all ranks.
            call_bytes = call.call_bytes * tokens * (ranks if axis == "context" else 1)
            link = self._link(stride, ranks, call.operation)
            time += seconds(call.operation, ranks, count, call_bytes, link)
            wire += ring_wire(call.operation, ranks, count * call_bytes)
        return Traffic(time, wire)

    def _compute_states(
        self, parameters: StageParameters, layout: Layout, expert: int, zero: int
    ) -> list[Traffic]:
        """Return the traffic of each collective of data parallelism."""
        traffic = []
        ends, reshards = parameters.ends * (zero == 3), self._space.reshards
        # Ranks with the same experts are `expert` times as far apart.
        far = layout.replicas // expert, layout.tensor * expert
        for count, ranks, stride, is_resharded in (
            (parameters.dense - ends, layout.replicas, layout.tensor, reshards),
            (ends, layout.replicas, layout.tensor, False),
            (parameters.routed / expert, *far, reshards),
        ):
            if ranks == 1 or not count:
                continue
            for call in state_calls(zero, layout.pipeline, layout.microbatches, is_resharded):
                link = self._link(stride, ranks, call.operation)
                call_bytes = count * self._sizes[call.payload]
                time = seconds(call.operation, ranks, call.calls, call_bytes, link)
                wire = ring_wire(call.operation, ranks, call.calls * call_bytes)
                traffic.append(Traffic(time, wire))
        return traffic

    def _find_link(self, stride: int, ranks: int, operation: str) -> Link:
        return group_link(self._space.device, stride=stride, ranks=ranks, operation=operation)


def _idle(layout: Layout) -> float:
    """Return the seconds of the pipeline bubble per second of a stage's work."""
    return (layout.pipeline - 1) / (layout.microbatches * layout.virtual_stages)


def _updated(stage: StageSizes, candidate: Candidate) -> float:
    """Return the number of parameters that a device of a stage updates."""
    layout, expert, zero = candidate
    if zero:
        return (stage.parameters.dense + stage.parameters.routed) / layout.replicas
    return stage.parameters.dense + stage.parameters.routed / expert
