"""Lower bounds on the memory and the step time of a plan, from the costs of single layers.

The costs of a pipeline stage are the sum over its layers and its ends, the embedding and the head,
so they are computed once per kind of layer. The bounds are `training_memory` and `step_time`
without some terms. The memory bound omits the rounding of shards, cast weights, the temporary
gradients of tables, a recomputed block, and the points in an FSDP2 pipeline step at which memory
rarely peaks. The time bound omits the activations between pipeline stages, which compute hides in
most plans, and the tensor-parallel traffic of the ends.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from accounting.memory.activations import count_activation_bytes
from accounting.memory.backward import find_fullest_backward
from accounting.memory.states import (
    build_fsdp_groups,
    classify_layers,
    count_device_parameters,
    group_stages_by_kind,
)
from accounting.plan import Plan, build_part, count_in_flight
from accounting.precision import get_itemsize
from accounting.search.space import Candidate, Layout, Space
from accounting.time.collective import compute_seconds, count_phases
from accounting.time.communication import list_state_calls, list_token_collectives
from accounting.time.efficiency import BANDWIDTH_FRACTION, compute_stage_rates
from accounting.time.step import OVERLAP, count_attention_flops, get_group_link

#: Bounds are reduced by this fraction, because a sum of floats in another order may be smaller.
ROUNDING = 1e-9


class Memory(NamedTuple):
    """Memory per device of some layers or ends, before ZeRO and expert parallelism divide it."""

    #: Numbers of parameters outside and inside experts.
    dense: float
    routed: float
    #: Number of parameters outside the blocks, which are a part of `dense`.
    ends: float
    #: Bytes of activations that are saved per token of a micro-batch.
    saved: float


class Time(NamedTuple):
    """Forward and backward costs of some layers or ends on a device; times are in seconds."""

    #: Time of matrix products without attention, per token.
    arithmetic: float
    #: Time of memory traffic, per token.
    traffic: float
    #: Time to read the weights, outside and inside experts, per micro-batch.
    dense_weights: float
    routed_weights: float
    #: Time of attention per sequence, before tensor and context parallelism divide it.
    attention: float
    #: Numbers of ring phases of tensor parallelism, of all-to-alls, and of ring passes of context
    #: parallelism, per micro-batch.
    num_tensor_phases: float
    num_exchanges: float
    num_passes: float
    #: Bytes per token that all ring passes of a micro-batch send to each rank.
    pass_bytes: float


class Traffic(NamedTuple):
    """Seconds of several calls of a collective, and the bytes that a device of a ring sends."""

    seconds: float
    wire: float


class Stage(NamedTuple):
    """A kind of pipeline stage."""

    #: Index of the first stage of this kind.
    number: int
    is_last: bool
    #: True if `step_time` may use the collectives of this stage.
    is_inner: bool
    #: Pairs of the first layer of a kind in the model and the number of such layers in the stage.
    layers: tuple[tuple[int, int], ...]
    #: Flags that are True if the stage has the embedding, and if it has the head.
    ends: tuple[bool, bool]


class Bounds:
    """Lower bounds for the layouts and candidates of a search."""

    def __init__(self, space: Space) -> None:
        self._space = space
        kind = space.work.kind
        self._weight = float(get_itemsize(kind.weights))
        self._gradient = float(get_itemsize(kind.gradients))
        self._gathered = float(get_itemsize(kind.cast_weights or kind.weights))
        self._optimizer = float(kind.bytes_per_parameter) - self._weight - self._gradient
        self._activation = float(get_itemsize(kind.activations))
        # The optimizer reads and writes all model states once.
        bandwidth = space.device.memory_bandwidth * BANDWIDTH_FRACTION
        self._update_seconds = 2 * float(kind.bytes_per_parameter) / bandwidth
        self._stages = cache(self._compute_stages)
        self._memory = cache(self._compute_memory)
        self._time = cache(self._compute_time)
        self._temporary = cache(self._compute_temporary)
        self._link = cache(partial(get_group_link, space.device))
        self._stage_memory = cache(self._sum_memory)
        self._stage_time = cache(self._sum_time)

    def bound_layout_bytes(self, layout: Layout) -> float:
        """Return a lower bound in bytes per device on the memory of all plans of a layout."""
        sharded = (self._weight + self._optimizer) / layout.replicas
        least = 0.0
        for stage in self._get_stages(layout):
            memory = self._stage_memory(layout.tensor, layout.recompute, stage)
            stored = count_in_flight(layout, stage.number) / layout.virtual_stages
            saved = memory.saved * stored * self._count_tokens(layout)
            least = max(least, sharded * (memory.dense + memory.routed) + saved)
        return (1 - ROUNDING) * least

    def bound_bytes(self, candidate: Candidate) -> float:
        """Return a lower bound in bytes per device on the memory of a plan."""
        stages = self._get_stages(candidate.layout)
        return (1 - ROUNDING) * max(self._count_stage_bytes(stage, candidate) for stage in stages)

    def bound_layout_seconds(self, layout: Layout) -> float:
        """Return a lower bound on the step time of all plans of a layout."""
        largest_expert = max((expert for expert, _ in self._space.list_options(layout)), default=1)
        busy, _ = self._compute_busy_seconds(layout, largest_expert)
        # The traffic of tensor parallelism is not hidden.
        blocking = min(
            self._compute_tensor_traffic(stage, layout).seconds
            for stage in self._list_inner_stages(layout)
        )
        return (busy + blocking) * (1 + layout.idle_fraction) * (1 - ROUNDING)

    def bound_seconds(self, candidate: Candidate) -> float:
        """Return a lower bound on the step time of a plan."""
        layout, expert, zero = candidate
        busy, compute = self._compute_busy_seconds(layout, expert)
        updated = 0.0
        for stage in self._get_stages(layout):
            memory = self._stage_memory(layout.tensor, layout.recompute, stage)
            whole = memory.dense + memory.routed / expert
            shard = (memory.dense + memory.routed) / layout.replicas
            updated = max(updated, shard if zero else whole)
        total = busy * (1 + layout.idle_fraction) + updated * self._update_seconds
        total += self._compute_exposed_seconds(candidate, compute)
        total += self._compute_tied_seconds(layout)
        return total * (1 - ROUNDING)

    def _count_stage_bytes(self, stage: Stage, candidate: Candidate) -> float:
        layout, expert, zero = candidate
        memory = self._stage_memory(layout.tensor, layout.recompute, stage)
        whole = memory.dense + memory.routed / expert
        shard = (memory.dense + memory.routed) / layout.replicas
        states = self._weight * (shard if zero == 3 else whole)
        states += self._optimizer * (shard if zero else whole)
        saved = memory.saved * self._count_tokens(layout) / layout.virtual_stages
        temporary = self._temporary(layout.tensor, stage.is_last) * self._count_tokens(layout)
        stored = count_in_flight(layout, stage.number)
        if zero == 3 and layout.replicas > 1:
            few, every, block = self._count_gathered_bytes(stage, layout, expert)
            if layout.pipeline == 1:
                # The gradients of a block exist in addition to the copy that is reduced.
                beside = few + block * (self._gathered + self._gradient)
                return states + self._gradient * shard + saved + temporary + beside
            # See Note [FSDP2 under torch's pipeline schedules] in memory/fsdp_pipeline.py.
            temporary = 0.0
            gradients = self._gradient * whole
        else:
            few = every = 0.0
            gradients = self._gradient * (shard if zero >= 2 else whole)
            if layout.pipeline == 1:
                return states + gradients + saved + temporary
        # The first backward of a pipeline stage allocates the gradients. If no forward follows, one
        # micro-batch fewer has activations when the second backward starts.
        later = (stored - 1) * saved + every
        if layout.microbatches * layout.virtual_stages > stored:
            later = stored * saved + few
        return states + temporary + max(stored * saved + few, later + gradients)

    def _count_gathered_bytes(
        self, stage: Stage, layout: Layout, expert: int
    ) -> tuple[float, float, float]:
        """Return the bytes gathered at once, the bytes of all weights, and the size of a block.

        With `reshard_after_forward`, the weights of the ends and of two blocks are gathered at
        once; otherwise all weights are. The size is that of the largest block, in parameters.
        """
        blocks = [
            self._memory(layout.tensor, layout.recompute, layer, False, False)
            for layer, _ in stage.layers
        ]
        block = max(memory.dense + memory.routed / expert for memory in blocks)
        memory = self._stage_memory(layout.tensor, layout.recompute, stage)
        every = self._gathered * (memory.dense + memory.routed / expert)
        if not self._space.reshards:
            return every, every, block
        few = self._gathered * (memory.ends + 2 * block)
        return min(few, every), every, block

    def _compute_busy_seconds(self, layout: Layout, expert: int) -> tuple[float, float]:
        """Return two maxima over stages: the seconds without collectives, and the compute seconds.

        Different stages may have the two maxima.
        """
        sequences = self._space.work.batch / layout.data / layout.context
        tokens = sequences * self._space.work.seq
        slowest = most_compute = 0.0
        for stage in self._get_stages(layout):
            time = self._stage_time(layout.tensor, layout.recompute, stage)
            compute = tokens * time.arithmetic + sequences / layout.tensor * time.attention
            moved = layout.microbatches * (time.dense_weights + time.routed_weights / expert)
            slowest = max(slowest, compute + tokens * time.traffic + moved)
            most_compute = max(most_compute, compute)
        return slowest, most_compute

    def _compute_exposed_seconds(self, candidate: Candidate, compute: float) -> float:
        """Return the exposed seconds of traffic, with the bubble that blocking traffic causes."""
        layout, expert, zero = candidate
        can_hide = (1.0 if zero == 3 else OVERLAP["data"]) * compute
        call_bytes = self._count_tokens(layout) * self._space.model.d_model * self._activation
        if self._space.model.experts:
            call_bytes *= self._space.model.experts.per_token
        results = []
        for stage in self._list_inner_stages(layout):
            time = self._stage_time(layout.tensor, layout.recompute, stage)
            tensor = self._compute_tensor_traffic(stage, layout)
            exchanges = layout.microbatches * time.num_exchanges
            routed = self._compute_traffic(
                "all_to_all", layout.tensor, expert, exchanges, call_bytes
            )
            context = self._compute_context_traffic(stage, layout)
            states = self._list_state_traffic(stage, candidate)
            hidden = min(sum(part.seconds for part in states), can_hide) + context.seconds
            blocking = tensor.seconds + routed.seconds
            parts = (tensor, routed, context, *states)
            needs = sum(part.seconds for part in parts)
            wire = sum(part.wire for part in parts)
            results.append((wire, needs - min(hidden, compute) + blocking * layout.idle_fraction))
        # `step_time` chooses the inner stage with the most bytes on the wire.
        most_bytes = max(wire for wire, _ in results) * (1 - ROUNDING)
        return min(exposed for wire, exposed in results if wire >= most_bytes)

    def _compute_tied_seconds(self, layout: Layout) -> float:
        """Return the seconds of the all-reduce between the stages that store a tied embedding."""
        model = self._space.model
        if layout.pipeline == 1 or not (model.tied and model.lm_head):
            return 0.0
        table = model.vocab_size * model.embedding_dim / layout.tensor * self._gradient
        stride = layout.tensor * layout.replicas * (layout.pipeline - 1)
        return self._compute_traffic("all_reduce", stride, 2, 1, table).seconds

    def _compute_tensor_traffic(self, stage: Stage, layout: Layout) -> Traffic:
        call_bytes = self._count_tokens(layout) * self._space.model.d_model * self._activation
        time = self._stage_time(layout.tensor, layout.recompute, stage)
        num_calls = layout.microbatches * time.num_tensor_phases
        return self._compute_traffic("all_gather", 1, layout.tensor, num_calls, call_bytes)

    def _compute_context_traffic(self, stage: Stage, layout: Layout) -> Traffic:
        time = self._stage_time(layout.tensor, layout.recompute, stage)
        num_calls = layout.microbatches * time.num_passes
        if not num_calls:
            return Traffic(0.0, 0.0)
        # A ring pass sends the blocks of all ranks.
        call_bytes = time.pass_bytes / time.num_passes * self._count_tokens(layout) * layout.context
        return self._compute_traffic(
            "all_gather", layout.tensor, layout.context, num_calls, call_bytes
        )

    def _list_state_traffic(self, stage: Stage, candidate: Candidate) -> list[Traffic]:
        """Return the traffic of each collective of data parallelism."""
        layout, expert, zero = candidate
        memory = self._stage_memory(layout.tensor, layout.recompute, stage)
        ends = memory.ends if zero == 3 else 0.0
        reshards = self._space.reshards
        sizes = {"gradients": self._gradient}
        sizes["weights"] = self._gathered if zero == 3 else self._weight
        traffic = []
        for count, stride, ranks, is_resharded in (
            (memory.dense - ends, layout.tensor, layout.replicas, reshards),
            (ends, layout.tensor, layout.replicas, False),
            # Ranks with the same experts are `expert` times as far apart.
            (memory.routed / expert, layout.tensor * expert, layout.replicas // expert, reshards),
        ):
            for call in list_state_calls(zero, layout.pipeline, layout.microbatches, is_resharded):
                size = count * sizes[call.payload]
                traffic.append(
                    self._compute_traffic(call.operation, stride, ranks, call.calls, size)
                )
        return traffic

    def _compute_traffic(
        self, operation: str, stride: int, ranks: int, num_calls: float, call_bytes: float
    ) -> Traffic:
        if ranks == 1 or not num_calls or not call_bytes:
            return Traffic(0.0, 0.0)
        link = self._link(stride=stride, ranks=ranks, operation=operation)
        wire = count_phases(operation) * num_calls * call_bytes * (ranks - 1) / ranks
        return Traffic(compute_seconds(operation, ranks, num_calls, call_bytes, link), wire)

    def _list_inner_stages(self, layout: Layout) -> list[Stage]:
        return [stage for stage in self._get_stages(layout) if stage.is_inner]

    def _count_tokens(self, layout: Layout) -> float:
        """Return the tokens of a micro-batch on a device."""
        sequences = self._space.work.batch // (layout.data * layout.microbatches)
        return sequences * self._space.work.seq / layout.context

    def _get_stages(self, layout: Layout) -> tuple[Stage, ...]:
        return self._stages(layout.pipeline, layout.virtual_stages, layout.schedule)

    def _compute_stages(self, pipeline: int, virtual: int, schedule: str) -> tuple[Stage, ...]:
        plan = self._space.build_reference_plan(1, pipeline, virtual, schedule)
        kinds = classify_layers(self._space.model)
        return tuple(
            Stage(
                number=number,
                is_last=number == pipeline - 1,
                is_inner=0 < number < pipeline - 1 if pipeline > 2 else number == pipeline // 2,
                layers=tuple((kinds.index(kind), count) for kind, count in counts),
                ends=ends,
            )
            for (counts, ends), number in group_stages_by_kind(self._space.model, plan).items()
        )

    def _sum_memory(self, tensor: int, recompute: str, stage: Stage) -> Memory:
        return Memory(*_sum(lambda *layer: self._memory(tensor, recompute, *layer), stage))

    def _sum_time(self, tensor: int, recompute: str, stage: Stage) -> Time:
        return Time(*_sum(lambda *layer: self._time(tensor, recompute, *layer), stage))

    def _compute_memory(self, tensor: int, recompute: str, layer: int, *has_ends: bool) -> Memory:
        """Return the memory of a layer; `has_ends` states whether embedding and head are added."""
        model = build_part(self._space.model, (layer,), *has_ends)
        plan = self._build_plan(tensor, recompute)
        dense, routed = count_device_parameters(model, plan)
        saved = count_activation_bytes(model, plan, replace(self._space.work, batch=1)).total
        ends = build_fsdp_groups(model, plan, 0).ends
        return Memory(dense, routed, ends, float(saved) / self._space.work.seq)

    def _compute_time(self, tensor: int, recompute: str, layer: int, *has_ends: bool) -> Time:
        """Return the time of a layer; `has_ends` states whether embedding and head are added."""
        model = build_part(self._space.model, (layer,), *has_ends)
        plan = self._build_plan(tensor, recompute)
        device, work = self._space.device, replace(self._space.work, batch=1)
        rates = compute_stage_rates(model, plan, work, device)
        attention = count_attention_flops(model, Plan(recompute=recompute), work, 0)
        calls: Counter[str] = Counter()
        pass_bytes = 0.0
        # The few calls of the embedding and the head are omitted.
        block = build_part(self._space.model, (layer,), False, False)
        for call in list_token_collectives(block, plan, 0, get_itemsize(work.kind.activations)):
            calls[call.axis] += call.count * count_phases(call.operation)
            pass_bytes += float(call.payload) * (call.axis == "context")
        return Time(
            arithmetic=rates.arithmetic,
            traffic=rates.traffic + rates.elementwise,
            dense_weights=rates.dense_weights,
            routed_weights=rates.routed_weights,
            attention=attention / (device.peak(work.kind.activations) * device.attention_fraction),
            num_tensor_phases=calls["tensor"],
            num_exchanges=calls["expert"],
            num_passes=calls["context"],
            pass_bytes=pass_bytes,
        )

    def _compute_temporary(self, tensor: int, is_last: bool) -> float:
        """Return the bytes per token of tensors that exist only during the backward pass."""
        work = replace(self._space.work, batch=1)
        temporary = find_fullest_backward(
            self._space.model, self._build_plan(tensor, "none"), work, is_last
        )
        # The loss has a few bytes that do not grow with the tokens.
        return (float(temporary.total) - 8) / work.seq

    def _build_plan(self, tensor: int, recompute: str) -> Plan:
        sequence_parallel = self._space.has_sequence_parallelism(tensor)
        return Plan(tensor=tensor, recompute=recompute, sequence_parallel=sequence_parallel)


def _sum(costs_of: Callable[[int, bool, bool], Iterable[float]], stage: Stage) -> list[float]:
    """Return each cost of a stage, summed over its layers and its ends.

    `costs_of(layer, has_embedding, has_head)` returns the costs of a layer with these ends.
    """
    terms = [(count, costs_of(layer, False, False)) for layer, count in stage.layers]
    if any(stage.ends):
        # The costs of the ends are the costs that they add to a layer.
        layer = stage.layers[0][0]
        terms += [(1, costs_of(layer, *stage.ends)), (-1, costs_of(layer, False, False))]
    counts, costs = zip(*terms, strict=True)
    return [
        sum(count * value for count, value in zip(counts, values, strict=True))
        for values in zip(*costs, strict=True)
    ]
