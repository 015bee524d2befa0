"""Sizes of pipeline stages, from which the bounds of all plans of a search follow."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from accounting.memory.activations import activations
from accounting.memory.states import (
    FsdpGroups,
    cast_weights,
    device_parameters,
    fsdp_groups,
    one_layer,
    stages_by_kind,
)
from accounting.plan import Plan
from accounting.precision import bytes_of
from accounting.search.space import Layout, Space
from accounting.time.communication import token_collectives
from accounting.time.efficiency import ATTENTION_FRACTION, StageRates, stage_rates
from accounting.time.step import attention_flops


class TokenCalls(NamedTuple):
    """The calls of a collective per micro-batch, for one token per device."""

    axis: str
    operation: str
    calls: int
    #: Payload bytes of one call.
    call_bytes: float


@dataclass(frozen=True, eq=False)
class StageSizes:
    """Sizes of a pipeline stage for a tensor-parallel degree and a kind of recomputation.

    Numbers of parameters are per device before ZeRO and expert parallelism divide them.
    """

    #: The first of the stages with these sizes.
    stage: int
    is_last: bool
    #: True if `step_time` may choose this stage for the collectives.
    is_inner: bool
    layers: int
    dense: int
    routed: int
    #: Parameters with a copy in the dtype of the arithmetic, experts included.
    cast: float
    #: Parameters of the groups that FSDP gathers.
    groups: FsdpGroups
    #: Parameters of the experts in the largest block.
    block_routed: int
    #: Bytes of saved activations per token of a micro-batch.
    activation_bytes: float
    rates: StageRates
    #: Seconds of attention per sequence, before tensor and context parallelism divide them.
    attention: float
    calls: tuple[TokenCalls, ...]


class StageTable:
    """The sizes of the stages of all layouts of a search."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._cached = cache(self._sizes)

    def stages(self, layout: Layout) -> tuple[StageSizes, ...]:
        """Return the sizes of one stage of each kind."""
        return self._cached(
            layout.tensor,
            layout.pipeline,
            layout.virtual_stages,
            layout.schedule,
            layout.recompute,
        )

    def _sizes(
        self, tensor: int, pipeline: int, virtual: int, schedule: str, recompute: str
    ) -> tuple[StageSizes, ...]:
        plan = self._space.reference(tensor, pipeline, virtual, schedule, recompute)
        stages = stages_by_kind(self._space.model, plan).values()
        return tuple(self._stage_sizes(plan, stage) for stage in stages)

    def _stage_sizes(self, plan: Plan, stage: int) -> StageSizes:
        model, work, device = self._space.model, self._space.work, self._space.device
        stage_model = plan.stage_model(model, stage)
        dense, routed = device_parameters(model, plan, stage)
        cast = cast_weights(model, plan, work.kind, stage)
        # A micro-batch of the reference plan consists of one sequence.
        sequences = replace(work, batch=plan.microbatches)
        saved = float(activations(model, plan, sequences, stage=stage).total) / work.seq
        whole = replace(plan, tensor=1, sequence_parallel=False, devices=0)
        attention = attention_flops(model, whole, replace(work, batch=1), stage)
        attention_rate = device.peak(work.kind.activations) * ATTENTION_FRACTION
        one_block = one_layer(stage_model)
        is_end = stage in (0, plan.pipeline - 1)
        return StageSizes(
            stage=stage,
            is_last=stage == plan.pipeline - 1,
            is_inner=not is_end if plan.pipeline > 2 else stage == plan.pipeline // 2,
            layers=stage_model.layers,
            dense=dense,
            routed=routed,
            cast=float(dict(cast.factors)["parameters"]) if cast else 0.0,
            groups=fsdp_groups(model, plan, stage),
            block_routed=device_parameters(one_block, Plan(tensor=plan.tensor))[1],
            activation_bytes=saved,
            rates=stage_rates(stage_model, plan, work, device),
            attention=attention / attention_rate,
            calls=self._calls(plan, stage),
        )

    def _calls(self, plan: Plan, stage: int) -> tuple[TokenCalls, ...]:
        value_bytes = bytes_of(self._space.work.kind.activations)
        collectives = token_collectives(self._space.model, plan, stage, Fraction(value_bytes))
        return tuple(
            TokenCalls(
                call.axis,
                call.operation,
                call.count // plan.microbatches,
                float(call.call_bytes),
            )
            for call in collectives
            if call.count and call.call_bytes
        )
