"""The memory of FSDP2 modules in a pipeline at the moments of a step at which it may peak."""

from dataclasses import replace
from fractions import Fraction

from accounting.breakdown import Breakdown, multiply, sum_parts
from accounting.memory.activations import count_activation_bytes
from accounting.memory.backward import (
    count_block_bytes,
    count_end_bytes,
    count_temporary_gradient_bytes,
    scale_part,
)
from accounting.memory.states import build_fsdp_groups, list_stage_states
from accounting.model.transformer import Transformer
from accounting.plan import Plan, split
from accounting.precision import get_itemsize
from accounting.workload import Workload

# Note [FSDP2 under torch's pipeline schedules]
# torch.distributed.pipelining runs every backward of an FSDP2 module with
# set_requires_gradient_sync(False) and set_reshard_after_backward(False). After the last backward,
# it reduces all gradients once (`_PipelineStageBase.perform_reduce_grad`). Therefore:
# - Gradients accumulate unsharded, in the reduction's dtype, from the first backward on.
# - A backward leaves all weights of the stage unsharded. With `reshard_after_forward` the next
#   forward reshards them block by block; without it they stay unsharded until the step ends.
# - A stage peaks at one of three moments. At the start of a backward, all activations and two
#   gathered blocks are alive. At the end of a backward, one block's activations, all weights, and
#   the buffer of the last all-gather are alive. While the gradients of a group are reduced, a copy
#   of them and the weights of all other groups are alive.


class FsdpStage:
    """Memory of a stage at the moments in Note [FSDP2 under torch's pipeline schedules]."""

    def __init__(self, model: Transformer, plan: Plan, work: Workload, stage: int) -> None:
        self.plan, self.kind = plan, work.kind
        self._size = get_itemsize(self.kind.cast_weights or self.kind.weights)
        stage_model = plan.build_stage_model(model, stage)
        self.layers = stage_model.layers
        self.groups = build_fsdp_groups(model, plan, stage)
        self.ends, self.block, self.blocks = self.groups
        self.states = list_stage_states(model, plan, work.kind, stage)
        self.saved = count_activation_bytes(model, plan, work, stage=stage)
        self.recomputed = count_block_bytes(model, plan, work) if plan.recompute == "full" else None
        self.temporary = count_temporary_gradient_bytes(model, plan, work)
        table = split(stage_model.vocab_size * stage_model.embedding_dim, plan.tensor)
        self.table = table if stage == 0 else 0
        self.head_matrix = table if stage_model.lm_head else 0
        last = stage == plan.pipeline - 1
        self.head = count_end_bytes(model, plan, work) if last else None
        stream = {"tokens": work.tokens(plan), "d_model": model.d_model}
        size = get_itemsize(work.kind.activations)
        self.stream = multiply("gradient of the stream", "B", **stream, bytes=size)

    def find_fullest(self, in_flight: int) -> Breakdown:
        """Return the moment of a step with the most memory."""
        resharded = self.plan.reshard_after_forward
        # Without resharding, only the first forward gathers.
        gathers = resharded or in_flight == 1
        gathered = self._count_gathered_bytes(2 if resharded else self.layers, buffer=gathers)
        moments = [self._build_moment(in_flight, gathered), *self.list_reduction_moments()]
        moments += self.list_backward_moments(in_flight, accumulated=False, whole=False)
        if self.plan.microbatches > in_flight:
            moments += self.list_backward_moments(in_flight, accumulated=True, whole=False)
        if in_flight > 1:
            # No forward runs between the last backward passes, so the weights stay unsharded.
            moments += self.list_backward_moments(in_flight - 1, accumulated=True, whole=True)
        return max(moments, key=lambda moment: moment.total)

    def list_backward_moments(
        self, alive: int, *, accumulated: bool, whole: bool
    ) -> list[Breakdown]:
        """Return the moments of a backward in the last block, head, first block and embedding.

        `alive` is the number of micro-batches whose activations are saved. `accumulated` is True if
        gradients of an earlier backward exist, and `whole` if an earlier backward left all weights
        unsharded.
        """
        reshards = self.plan.reshard_after_forward and not whole
        grown = self._count_gradient_bytes(accumulated)
        block = self._count_gathered_bytes(2 if reshards else self.layers)
        moments = [self._build_moment(alive, block, grown, self.recomputed, self.temporary)]
        if self.head:
            # In the head no block is gathered yet. The gradient of the head is computed before it
            # is added to the accumulated gradient. At that moment the log-softmax is freed, and the
            # gradient of the logits, which has the same size, exists.
            ends = self._count_gathered_bytes(0 if reshards else self.layers)
            fresh = self._count_fresh_gradient_bytes(self.head_matrix, accumulated)
            without = replace(self.head, parts=self.head.parts[:-1])
            moments.append(self._build_moment(alive, ends, grown, self.head))
            moments.append(self._build_moment(alive, ends, grown, fresh, without))
        gathered = self._count_gathered_bytes(self.layers, reshards)
        inside = Fraction(alive - 1) + Fraction(1, self.layers)
        # The gradients of the first block are computed last.
        grown = self._count_gradient_bytes(
            True, missing=0 if accumulated else self.ends * bool(self.table) + self.block
        )
        more = (
            self._count_gradient_bytes(True),
            self._count_fresh_gradient_bytes(self.table, accumulated),
            self.stream,
        )
        return [
            *moments,
            self._build_moment(inside, gathered, grown, self.recomputed, self.temporary),
            self._build_moment(alive - 1, self._count_gathered_bytes(self.layers), *more),
        ]

    def list_reduction_moments(self) -> list[Breakdown]:
        """Return the moments at which the first block and then the ends are reduced."""
        grown, size = self._count_gradient_bytes(True), get_itemsize(self.kind.gradients)
        block = multiply("gradients being reduced", "B", parameters=self.block, bytes=size)
        ends = multiply(
            "gradients being reduced", "B", parameters=self.block + self.ends, bytes=size
        )
        others = split(self.blocks, self.plan.replicas)
        reduced = multiply("gradients", "B", parameters=self.ends + others, bytes=size)
        return [
            self._build_moment(0, self._count_gathered_bytes(self.layers - 1), grown, block),
            self._build_moment(0, None, reduced, ends),
        ]

    def _count_gradient_bytes(self, accumulated: bool, missing: int = 0) -> Breakdown:
        count = (self.ends + self.blocks - missing) * accumulated
        return multiply("gradients", "B", parameters=count, bytes=get_itemsize(self.kind.gradients))

    def _count_fresh_gradient_bytes(self, num_parameters: int, accumulated: bool) -> Breakdown:
        """Return the bytes of a gradient that is not yet added to the accumulated one."""
        # Under mixed precision the first gradient is cast, so two copies exist.
        exists = accumulated or self.kind.cast_weights is not None
        return multiply("fresh gradient", "B", parameters=num_parameters * exists, bytes=self._size)

    def _count_gathered_bytes(self, blocks: int, buffer: bool = False) -> Breakdown:
        last = self.block * buffer
        name = "buffer of the last gather"
        copy = multiply(name, "B", parameters=last, bytes=self._size)
        return self.groups.count_gathered_bytes(blocks, self._size, copy)

    def _build_moment(self, alive: Fraction | int, *more: Breakdown | None) -> Breakdown:
        states = (s for s in self.states if s.name != "gradients")
        saved = scale_part("activations", self.saved, in_flight=Fraction(alive))
        return sum_parts("moment", "B", *states, saved, *more)
