"""The plans that a search compares: combinations of degrees that divide devices and model."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from accounting.hardware import Hardware
from accounting.model.transformer import Transformer
from accounting.plan import CHOICES, Plan, can_split_evenly
from accounting.workload import Workload

#: Context parallelism leaves at least this many tokens of a sequence on each rank.
LEAST_TOKENS_PER_RANK = 1024
#: Largest number of interleaved chunks per pipeline stage.
MOST_CHUNKS = 8


class Layout(NamedTuple):
    """A plan without its ZeRO stage and expert degree; the fields are defined in `Plan`."""

    tensor: int
    pipeline: int
    context: int
    data: int
    microbatches: int
    virtual_stages: int
    schedule: str
    recompute: str

    @property
    def replicas(self) -> int:
        """The number of ranks that store the same dense weights."""
        return self.data * self.context

    @property
    def idle_fraction(self) -> float:
        """The seconds of the pipeline bubble per second of a stage's work."""
        return (self.pipeline - 1) / (self.microbatches * self.virtual_stages)


class Candidate(NamedTuple):
    """A layout with an expert degree and a ZeRO stage, which determine a plan."""

    layout: Layout
    expert: int
    zero: int


class Space:
    """All plans for one model and batch on a number of devices.

    `fixed` contains fields of `Plan` that the search does not vary.
    """

    def __init__(
        self,
        model: Transformer,
        device: Hardware,
        devices: int,
        work: Workload,
        fixed: Mapping[str, Any],
    ) -> None:
        model.check_step()
        self.model = model
        self.device = device
        self.devices = devices
        self.work = work
        self.fixed = fixed
        self._cached_options = cache(self._list_replica_options)

    @cached_property
    def layouts(self) -> list[Layout]:
        """All layouts whose degrees divide the devices, the batch and the model."""
        return [
            layout
            for tensor in self._list_tensor_degrees()
            for pipeline in self._list_pipeline_degrees(tensor)
            for layout in self._iter_layouts(tensor, pipeline)
        ]

    @cached_property
    def count(self) -> int:
        """The number of plans."""
        return sum(len(self.list_options(layout)) for layout in self.layouts)

    def list_data_degrees(self) -> list[int]:
        """Return the sorted data-parallel degrees that are possible for some batch."""
        free = {name: value for name, value in self.fixed.items() if name != "microbatches"}
        # A batch of one sequence per device is a multiple of data x pipeline for every layout.
        work = replace(self.work, batch=self.devices)
        space = Space(self.model, self.device, self.devices, work, free)
        return sorted({layout.data for layout in space.layouts})

    def list_options(self, layout: Layout) -> list[tuple[int, int]]:
        """Return the pairs (expert degree, ZeRO stage) of the plans of a layout."""
        return self._cached_options(layout.replicas, layout.pipeline, layout.schedule)

    def iter_candidates(self, layout: Layout) -> Iterator[Candidate]:
        """Yield the plans of a layout."""
        for expert, zero in self.list_options(layout):
            yield Candidate(layout, expert, zero)

    def build_plan(self, candidate: Candidate) -> Plan | None:
        """Return the plan of a candidate, or None if it is invalid or its memory is not modeled."""
        layout, expert, zero = candidate
        try:
            plan = Plan(
                **layout._asdict(),
                expert=expert,
                zero=zero,
                sequence_parallel=self.has_sequence_parallelism(layout.tensor),
                reshard_after_forward=self.reshards,
            )
            plan.check(self.model, batch=self.work.batch, seq=self.work.seq)
            plan.has_unsharded_weights()
        except ValueError:
            return None
        return plan

    @property
    def reshards(self) -> bool:
        """True unless `reshard_after_forward=False` is fixed."""
        return bool(self.fixed.get("reshard_after_forward", True))

    def has_sequence_parallelism(self, tensor_degree: int) -> bool:
        """Return True if plans with this tensor-parallel degree use sequence parallelism."""
        return bool(self.fixed.get("sequence_parallel", tensor_degree > 1))

    def build_reference_plan(self, tensor: int, pipeline: int, virtual: int, schedule: str) -> Plan:
        """Return a plan with one replica and one micro-batch per pipeline stage."""
        return Plan(
            tensor=tensor,
            pipeline=pipeline,
            virtual_stages=virtual,
            schedule=schedule,
            microbatches=pipeline,
            sequence_parallel=self.has_sequence_parallelism(tensor),
        )

    def _list_pipeline_degrees(self, tensor: int) -> list[int]:
        ranks = self.devices // tensor
        degrees = self._list_choices("pipeline", list_divisors(ranks))
        return [p for p in degrees if ranks % p == 0 and p <= self.model.layers]

    def _list_choices(self, name: str, default: Iterable[Any]) -> list[Any]:
        if name in self.fixed:
            return [self.fixed[name]]
        return list(default)

    def _list_tensor_degrees(self) -> list[int]:
        """Return the fixed tensor-parallel degree, or all degrees with groups inside a node."""
        node = self.device.devices_per_node
        inside = [
            tensor
            for tensor in list_divisors(self.devices)
            if tensor <= node and (self.devices <= node or node % tensor == 0)
        ]
        return [t for t in self._list_choices("tensor", inside) if self.devices % t == 0]

    def _iter_layouts(self, tensor: int, pipeline: int) -> Iterator[Layout]:
        """Yield the layouts with the given degrees."""
        for virtual in self._list_choices("virtual_stages", self._list_chunks(pipeline)):
            usual = "interleaved" if virtual > 1 else "1f1b"
            schedule = self.fixed.get("schedule", usual)
            if self._is_valid(tensor, pipeline, virtual, schedule):
                for context, data in self._iter_replicas(self.devices // (tensor * pipeline)):
                    for microbatches in self._list_microbatches(data):
                        if schedule == "interleaved" and microbatches % pipeline:
                            continue
                        for recompute in self._list_choices("recompute", CHOICES["recompute"]):
                            yield Layout(
                                tensor=tensor,
                                pipeline=pipeline,
                                context=context,
                                data=data,
                                microbatches=microbatches,
                                virtual_stages=virtual,
                                schedule=schedule,
                                recompute=recompute,
                            )

    def _list_chunks(self, pipeline: int) -> list[int]:
        """Return the numbers of chunks per stage; only equal chunks are interleaved."""
        if pipeline == 1:
            return [1]
        several = range(2, MOST_CHUNKS + 1)
        return [1, *(v for v in several if can_split_evenly(self.model.layers, pipeline * v))]

    def _is_valid(self, tensor: int, pipeline: int, virtual: int, schedule: str) -> bool:
        """Return True if the model can be divided by these degrees."""
        try:
            plan = self.build_reference_plan(tensor, pipeline, virtual, schedule)
            plan.check(self.model, seq=self.work.seq)
        except ValueError:
            return False
        return True

    def _iter_replicas(self, replicas: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs of context- and data-parallel degrees whose product is `replicas`."""
        seq = self.work.seq
        max_context = 1 if self.model.mixers else max(1, seq // LEAST_TOKENS_PER_RANK)
        usual = (c for c in list_divisors(replicas) if c <= max_context)
        for context in self._list_choices("context", usual):
            if replicas % context or seq % context:
                continue
            data = replicas // context
            if self.fixed.get("data", data) == data:
                yield context, data

    def _list_microbatches(self, data: int) -> list[int]:
        if self.work.batch % data:
            return []
        batch = self.work.batch // data
        return [
            m for m in self._list_choices("microbatches", list_divisors(batch)) if batch % m == 0
        ]

    def _list_replica_options(
        self, replicas: int, pipeline: int, schedule: str
    ) -> list[tuple[int, int]]:
        """Return the pairs (expert degree, ZeRO stage) for a number of replicas."""
        num_experts = self.model.experts.count if self.model.experts else 1
        experts = list_divisors(math.gcd(replicas, num_experts))
        zeros = CHOICES["zero"] if replicas > 1 else (0,)
        return [
            (expert, zero)
            for expert in self._list_choices("expert", experts)
            for zero in self._list_choices("zero", zeros)
            if replicas % expert == 0
            and num_experts % expert == 0
            and self._has_zero(zero, replicas, pipeline, schedule)
        ]

    def _has_zero(self, zero: int, replicas: int, pipeline: int, schedule: str) -> bool:
        """Return True if the search proposes this ZeRO stage for these degrees and schedule."""
        if pipeline == 1 or replicas == 1:
            return True
        # torch's schedules accumulate unsharded gradients, so ZeRO-2 would have no effect.
        if zero == 2:
            return "zero" in self.fixed
        return zero < 3 or schedule != "interleaved"


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    large = [number // d for d in reversed(small)]
    return small + [d for d in large if d > small[-1]]
