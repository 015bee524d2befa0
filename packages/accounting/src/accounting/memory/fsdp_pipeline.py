"""The memory of FSDP2 modules in a pipeline at the moments of a step at which it may peak."""

from dataclasses import replace
from fractions import Fraction

from accounting.breakdown import Breakdown, product, total
from accounting.memory.activations import activations
from accounting.memory.backward import end_of_model, one_block, temporary_gradients, times
from accounting.memory.states import fsdp_groups, stage_states
from accounting.model.transformer import Transformer
from accounting.plan import Plan, split
from accounting.precision import bytes_of
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
        self._size = bytes_of(self.kind.cast_weights or self.kind.weights)
        stage_model = plan.stage_model(model, stage)
        self.layers = stage_model.layers
        self.groups = fsdp_groups(model, plan, stage)
        self.ends, self.block, self.blocks = self.groups
        self.states = stage_states(model, plan, work.kind, stage)
        self.saved = activations(model, plan, work, stage=stage)
        self.recomputed = one_block(model, plan, work) if plan.recompute == "full" else None
        self.temporary = temporary_gradients(model, plan, work)
        table = split(stage_model.vocab_size * stage_model.embedding_dim, plan.tensor)
        self.table = table if stage == 0 else 0
        self.head_matrix = table if stage_model.lm_head else 0
        last = stage == plan.pipeline - 1
        self.head = end_of_model(model, plan, work) if last else None
        stream = {"tokens": work.tokens(plan), "d_model": model.d_model}
        size = bytes_of(work.kind.activations)
        self.stream = product("gradient of the stream", "B", **stream, bytes=size)

    def fullest(self, in_flight: int) -> Breakdown:
        """Return the moment of a step with the most memory."""
        resharded = self.plan.reshard_after_forward
        # Without resharding, only the first forward gathers.
        gathers = resharded or in_flight == 1
        gathered = self._gathered(2 if resharded else self.layers, buffer=gathers)
        moments = [self._moment(in_flight, gathered), *self.reduction()]
        moments += self.backward(in_flight, accumulated=False, whole=False)
        if self.plan.microbatches > in_flight:
            moments += self.backward(in_flight, accumulated=True, whole=False)
        if in_flight > 1:
            # No forward runs between the last backward passes, so the weights stay unsharded.
            moments += self.backward(in_flight - 1, accumulated=True, whole=True)
        return max(moments, key=lambda moment: moment.total)

    def backward(self, alive: int, *, accumulated: bool, whole: bool) -> list[Breakdown]:
        """Return the moments of a backward in the last block, head, first block and embedding.

        `alive` is the number of micro-batches whose activations are saved. `accumulated` is True if
        gradients of an earlier backward exist, and `whole` if an earlier backward left all weights
        unsharded.
        """
        reshards = self.plan.reshard_after_forward and not whole
        grown = self._gradients(accumulated)
        block = self._gathered(2 if reshards else self.layers)
        moments = [self._moment(alive, block, grown, self.recomputed, self.temporary)]
        if self.head:
            # In the head no block is gathered yet. The gradient of the head is computed before it
            # is added to the accumulated gradient. At that moment the log-softmax is freed, and the
            # gradient of the logits, which has the same size, exists.
            ends = self._gathered(0 if reshards else self.layers)
            fresh = self._fresh(self.head_matrix, accumulated)
            without = replace(self.head, parts=self.head.parts[:-1])
            moments.append(self._moment(alive, ends, grown, self.head))
            moments.append(self._moment(alive, ends, grown, fresh, without))
        gathered = self._gathered(self.layers, reshards)
        inside = Fraction(alive - 1) + Fraction(1, self.layers)
        # The gradients of the first block are computed last.
        grown = self._gradients(
            True, missing=0 if accumulated else self.ends * bool(self.table) + self.block
        )
        more = (self._gradients(True), self._fresh(self.table, accumulated), self.stream)
        return [
            *moments,
            self._moment(inside, gathered, grown, self.recomputed, self.temporary),
            self._moment(alive - 1, self._gathered(self.layers), *more),
        ]

    def reduction(self) -> list[Breakdown]:
        """Return the moments at which the first block and then the ends are reduced."""
        grown, size = self._gradients(True), bytes_of(self.kind.gradients)
        block = product("gradients being reduced", "B", parameters=self.block, bytes=size)
        ends = product(
            "gradients being reduced", "B", parameters=self.block + self.ends, bytes=size
        )
        others = split(self.blocks, self.plan.replicas)
        reduced = product("gradients", "B", parameters=self.ends + others, bytes=size)
        return [
            self._moment(0, self._gathered(self.layers - 1), grown, block),
            self._moment(0, None, reduced, ends),
        ]

    def _gradients(self, accumulated: bool, missing: int = 0) -> Breakdown:
        count = (self.ends + self.blocks - missing) * accumulated
        return product("gradients", "B", parameters=count, bytes=bytes_of(self.kind.gradients))

    def _fresh(self, count: int, accumulated: bool) -> Breakdown:
        """Return the bytes of a gradient that is not yet added to the accumulated one."""
        # Under mixed precision the first gradient is cast, so two copies exist.
        exists = accumulated or self.kind.cast_weights is not None
        return product("fresh gradient", "B", parameters=count * exists, bytes=self._size)

    def _gathered(self, blocks: int, buffer: bool = False) -> Breakdown:
        last = self.block * buffer
        name = "buffer of the last gather"
        copy = product(name, "B", parameters=last, bytes=self._size)
        return self.groups.gathered(blocks, self._size, copy)

    def _moment(self, alive: Fraction | int, *more: Breakdown | None) -> Breakdown:
        states = (s for s in self.states if s.name != "gradients")
        saved = times("activations", self.saved, in_flight=Fraction(alive))
        return total("moment", "B", *states, saved, *more)
