"""A lower bound on the memory of a plan, from the sizes of its stages.

The bound is `training_memory` without four terms: the rounding of shards, the logits that GPipe
saves for every micro-batch but one, the gradient of the head with ZeRO-3, and the moments of FSDP2
in a pipeline that are rarely the peak.
"""

from dataclasses import replace
from functools import cache

from accounting.memory.backward import fullest_backward, one_block
from accounting.memory.states import tied_table_gradients
from accounting.plan import Plan, in_flight
from accounting.precision import bytes_of
from accounting.search.space import Candidate, Layout, Space
from accounting.search.stage_sizes import StageSizes, StageTable
from accounting.search.time_bound import ROUNDING


class MemoryBound:
    """Lower bounds on the bytes of the fullest device."""

    def __init__(self, space: Space, table: StageTable) -> None:
        self._space = space
        self._table = table
        kind = space.work.kind
        self._weight = float(bytes_of(kind.weights))
        self._gradient = float(bytes_of(kind.gradients))
        self._gathered = float(bytes_of(kind.cast_weights or kind.weights))
        self._cast = float(bytes_of(kind.cast_weights)) if kind.cast_weights else 0.0
        self._optimizer = float(kind.bytes_per_parameter) - self._weight - self._gradient
        self._temporary = cache(self._compute_temporary)
        self._block = cache(self._compute_block)
        self._table_gradients = cache(self._compute_table_gradients)

    def of_layout(self, layout: Layout) -> float:
        """Return a lower bound over all plans of a layout."""
        sharded = (self._weight + self._optimizer) / layout.replicas
        return (1 - ROUNDING) * max(
            sharded * (stage.parameters.dense + stage.parameters.routed)
            + stage.costs.activation_bytes * self._stored_tokens(stage, layout)
            for stage in self._table.stages(layout)
        )

    def of_candidate(self, candidate: Candidate) -> float:
        """Return a lower bound for one plan."""
        layout, _, zero = candidate
        is_fsdp_stage = zero == 3 and layout.pipeline > 1 and layout.replicas > 1
        stage_bytes = self._fsdp_stage if is_fsdp_stage else self._stage
        stages = self._table.stages(layout)
        return (1 - ROUNDING) * max(stage_bytes(stage, candidate) for stage in stages)

    def _stage(self, stage: StageSizes, candidate: Candidate) -> float:
        """Return the bytes of a stage, except for FSDP2 in a pipeline."""
        layout, expert, zero = candidate
        whole = stage.parameters.dense + stage.parameters.routed / expert
        gradients = self._gradient * (_shard(stage, layout) if zero >= 2 else whole)
        states = self._other_states(stage, candidate)
        saved = stage.costs.activation_bytes * self._stored_tokens(stage, layout)
        micro_batch = layout.tensor, layout.context, self._sequences(layout)
        beside = self._temporary(*micro_batch, stage.is_last)
        beside += self._block(*micro_batch) if layout.recompute == "full" else 0.0
        if zero == 3 and layout.replicas > 1:
            blocks = 2 if self._space.reshards else stage.parameters.layers
            block = _block(stage, expert)
            beside += self._gathered_bytes(stage, expert, blocks)
            # The gradients of a block exist in addition to the copy that is reduced.
            beside += block * (self._gathered + self._gradient)
        else:
            beside += self._cast * (
                stage.parameters.cast - stage.parameters.routed * (1 - 1 / expert)
            )
        if layout.pipeline == 1:
            is_sharded = layout.replicas > 1
            beside += self._table_gradients(
                layout.tensor, zero if is_sharded else 0, layout.microbatches > 1
            )
            return states + gradients + saved + beside
        # The first backward of a pipeline stage allocates the gradients. If no forward follows, it
        # also frees the activations of a micro-batch.
        stored = in_flight(layout, stage.stage)
        has_more = layout.microbatches * layout.virtual_stages > stored
        later = saved if has_more else saved * (stored - 1) / stored
        return states + beside + max(saved, gradients + later)

    def _fsdp_stage(self, stage: StageSizes, candidate: Candidate) -> float:
        """Return the bytes of a stage of FSDP2 in a pipeline.

        See Note [FSDP2 under torch's pipeline schedules] in memory/fsdp_pipeline.py.
        """
        layout, expert, _ = candidate
        gradients = self._gradient * (stage.parameters.dense + stage.parameters.routed / expert)
        stored = in_flight(layout, stage.stage)
        saved = stage.costs.activation_bytes * self._stored_tokens(stage, layout)
        few = self._gathered_bytes(
            stage, expert, 2 if self._space.reshards else stage.parameters.layers
        )
        every = self._gathered_bytes(stage, expert, stage.parameters.layers)
        moments = [saved + few]
        if layout.microbatches > stored:
            moments.append(saved + few + gradients)
        if stored > 1:
            moments.append(saved * (stored - 1) / stored + every + gradients)
        reduced = self._gathered_bytes(stage, expert, stage.parameters.layers - 1)
        moments.append(reduced + gradients + self._gradient * _block(stage, expert))
        return self._other_states(stage, candidate) + max(moments)

    def _other_states(self, stage: StageSizes, candidate: Candidate) -> float:
        """Return the bytes of weights and optimizer state."""
        layout, expert, zero = candidate
        whole = stage.parameters.dense + stage.parameters.routed / expert
        shard = _shard(stage, layout)
        weights = self._weight * (shard if zero == 3 else whole)
        return weights + self._optimizer * (shard if zero else whole)

    def _gathered_bytes(self, stage: StageSizes, expert: int, blocks: int) -> float:
        """Return the bytes of the gathered weights of the ends and of `blocks` blocks."""
        every = stage.parameters.blocks - stage.parameters.routed * (1 - 1 / expert)
        inside = min(blocks * _block(stage, expert), every)
        return self._gathered * (stage.parameters.ends + inside)

    def _sequences(self, layout: Layout) -> int:
        """Return the number of sequences in a micro-batch."""
        return self._space.work.batch // (layout.data * layout.microbatches)

    def _stored_tokens(self, stage: StageSizes, layout: Layout) -> float:
        """Return the number of tokens whose activations a device of the stage stores at once."""
        stored = in_flight(layout, stage.stage) / layout.virtual_stages
        return self._sequences(layout) * self._space.work.seq / layout.context * stored

    def _compute_temporary(self, tensor: int, context: int, sequences: int, is_last: bool) -> float:
        """Return the bytes of tensors that exist only in a backward."""
        work = replace(self._space.work, batch=sequences)
        plan = self._plan(tensor, context)
        return float(fullest_backward(self._space.model, plan, work, is_last).total)

    def _compute_block(self, tensor: int, context: int, sequences: int) -> float:
        """Return the bytes of a recomputed block."""
        work = replace(self._space.work, batch=sequences)
        return float(one_block(self._space.model, self._plan(tensor, context), work).total)

    def _plan(self, tensor: int, context: int) -> Plan:
        sequence_parallel = self._space.sequence_parallel(tensor)
        return Plan(tensor=tensor, context=context, sequence_parallel=sequence_parallel)

    def _compute_table_gradients(self, tensor: int, zero: int, accumulates: bool) -> float:
        """Return the bytes of the temporary gradients of a tied table."""
        data, microbatches = 2 if zero else 1, 2 if accumulates else 1
        plan = Plan(data=data, tensor=tensor, zero=zero, microbatches=microbatches)
        table = tied_table_gradients(self._space.model, plan, self._space.work.kind)
        return float(table.total) if table else 0.0


def _shard(stage: StageSizes, layout: Layout) -> float:
    """Return the parameters per device of a stage if ZeRO shards them over all replicas."""
    return (stage.parameters.dense + stage.parameters.routed) / layout.replicas


def _block(stage: StageSizes, expert: int) -> float:
    """Return the parameters of the largest block after expert parallelism divides its experts."""
    return stage.parameters.block - stage.parameters.block_routed * (1 - 1 / expert)
