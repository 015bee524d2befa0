"""Sizes of pipeline stages, from which the bounds of all plans of a search follow."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from accounting.memory.activations import activations
from accounting.memory.states import (
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
from accounting.time.efficiency import StageRates, stage_rates
from accounting.time.step import attention_flops


class TokenCalls(NamedTuple):
    """One collective: its calls per micro-batch, and their payload for one token per device."""

    axis: str
    operation: str
    calls: int
    #: Payload bytes of one call.
    call_bytes: float


class StageParameters(NamedTuple):
    """Parameters per device of a stage before ZeRO and expert parallelism divide them."""

    layers: int
    dense: int
    routed: int
    #: Parameters, experts included, that autocast copies to `cast_weights`.
    cast: float
    #: Parameters outside the blocks.
    ends: int
    #: Parameters of the largest block, and of the experts in it.
    block: int
    block_routed: int
    #: Parameters of all blocks.
    blocks: int


class StageCosts(NamedTuple):
    """Activations and compute of a stage for a kind of recomputation."""

    #: Bytes of saved activations per token of a micro-batch.
    activation_bytes: float
    rates: StageRates
    #: Seconds of attention per sequence, before tensor and context parallelism divide this time.
    attention: float


@dataclass(frozen=True, eq=False)
class StageSizes:
    """Sizes of a pipeline stage for a tensor-parallel degree and a kind of recomputation."""

    #: The first of the stages with these sizes.
    stage: int
    is_last: bool
    #: True if `step_time` may choose this stage for the collectives.
    is_inner: bool
    parameters: StageParameters
    costs: StageCosts
    #: Collectives other than those of data parallelism.
    calls: tuple[TokenCalls, ...]


class StageTable:
    """The sizes of the stages of all layouts of a search.

    Stages with the same layers and ends may be part of many layouts. In layouts with the same
    tensor-parallel degree and recomputation, their sizes are the same and are computed once.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._stages = cache(self._compute_stages)
        self._parameters: dict[Hashable, StageParameters] = {}
        self._costs: dict[Hashable, StageCosts] = {}

    def stages(self, layout: Layout) -> tuple[StageSizes, ...]:
        """Return the sizes of one stage of each kind."""
        return self._stages(
            layout.tensor,
            layout.pipeline,
            layout.virtual_stages,
            layout.schedule,
            layout.recompute,
        )

    def _compute_stages(
        self, tensor: int, pipeline: int, virtual: int, schedule: str, recompute: str
    ) -> tuple[StageSizes, ...]:
        plan = self._space.reference(tensor, pipeline, virtual, schedule, recompute)
        sizes = []
        for kind, stage in stages_by_kind(self._space.model, plan).items():
            parameters_key, costs_key = (tensor, kind), (tensor, recompute, kind)
            if parameters_key not in self._parameters:
                self._parameters[parameters_key] = self._compute_parameters(plan, stage)
            if costs_key not in self._costs:
                self._costs[costs_key] = self._compute_costs(plan, stage)
            is_end = stage in (0, pipeline - 1)
            sizes.append(
                StageSizes(
                    stage=stage,
                    is_last=stage == pipeline - 1,
                    is_inner=not is_end if pipeline > 2 else stage == pipeline // 2,
                    parameters=self._parameters[parameters_key],
                    costs=self._costs[costs_key],
                    calls=self._calls(plan, stage),
                )
            )
        return tuple(sizes)

    def _compute_parameters(self, plan: Plan, stage: int) -> StageParameters:
        model = self._space.model
        stage_model = plan.stage_model(model, stage)
        dense, routed = device_parameters(model, plan, stage)
        cast = cast_weights(model, plan, self._space.work.kind, stage)
        groups = fsdp_groups(model, plan, stage)
        return StageParameters(
            layers=stage_model.layers,
            dense=dense,
            routed=routed,
            cast=float(dict(cast.factors)["parameters"]) if cast else 0.0,
            ends=groups.ends,
            block=groups.block,
            block_routed=device_parameters(one_layer(stage_model), Plan(tensor=plan.tensor))[1],
            blocks=groups.blocks,
        )

    def _compute_costs(self, plan: Plan, stage: int) -> StageCosts:
        model, work = self._space.model, self._space.work
        device = self._space.device
        # A micro-batch of the reference plan consists of one sequence.
        sequences = replace(work, batch=plan.microbatches)
        saved = activations(model, plan, sequences, stage=stage).total
        whole = replace(plan, tensor=1, sequence_parallel=False, devices=0)
        attention = attention_flops(model, whole, replace(work, batch=1), stage)
        return StageCosts(
            activation_bytes=float(saved) / work.seq,
            rates=stage_rates(plan.stage_model(model, stage), plan, work, device),
            attention=attention / (device.peak(work.kind.activations) * device.attention_fraction),
        )

    def _calls(self, plan: Plan, stage: int) -> tuple[TokenCalls, ...]:
        value_bytes = bytes_of(self._space.work.kind.activations)
        collectives = token_collectives(self._space.model, plan, stage, value_bytes)
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
