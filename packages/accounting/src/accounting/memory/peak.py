"""The peak memory of a training step."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, multiply, sum_parts
from accounting.memory.activations import (
    count_activation_bytes,
    count_gradients_in_flight,
    count_head_activation_bytes,
)
from accounting.memory.backward import count_final_norm_bytes, find_fullest_block, scale_part
from accounting.memory.states import (
    build_fsdp_groups,
    count_cast_weight_bytes,
    count_head_gradient_bytes,
    count_head_parameters,
    count_state_bytes,
    count_tied_gradient_bytes,
    find_largest_single_layer,
)
from accounting.model.transformer import Transformer, list_matrices
from accounting.plan import Plan, split, validate_plan
from accounting.precision import Precision, get_itemsize
from accounting.workload import Workload, build_workload


@checks.validate()
def peak_memory(
    model: Transformer,
    plan: Plan | None = None,
    work: Workload | None = None,
    *,
    foreach: bool = True,
    **run: Any,
) -> Breakdown:
    """Return the peak memory of one device in a training loop after the first step.

    Not all tensors are alive at once. The loop is assumed to set gradients to None, so the first
    backward pass of a step starts without them. The backward pass of each block frees its
    activations and allocates its gradients, so no activations are left for the optimizer's step.
    The result is the largest of these moments:

    - the end of the forward pass, and the start of the backward pass
    - the backward pass of the final norm, and of the first two and the last two blocks
    - the sum of the two gradients of a tied table
    - the step of the optimizer

    With `foreach`, torch's default on a GPU, the optimizer computes the square roots of all second
    moments at once. `run` contains fields of a `Workload`. The result is in bytes. Raises
    `ValueError` for plans with parallelism other than `data`, for selective recomputation, and for
    linear layers in fp8. Several micro-batches with several data ranks require ZeRO-3.

    A `plan` may recompute each block and shard states over data ranks. ZeRO-3 is torch's FSDP2 with
    one group per block and one for the ends, which are the weights outside the blocks. During the
    backward pass the ends and the whole gradient of the head stay unsharded. Meanwhile one block
    computes, the next one is gathered, and the previous one is reduced. Gradients are reduced after
    each micro-batch, as by default in FSDP2, so their shards exist from the second micro-batch on.
    """
    work = build_workload(work, run)
    checks.require_integer("batch", work.batch)
    plan = validate_plan(plan, model, batch=work.batch, seq=work.seq)
    if plan.tensor * plan.pipeline * plan.context * plan.expert > 1:
        raise ValueError(
            "peak_memory supports data parallelism only; use training_memory for other plans"
        )
    if plan.microbatches > 1 and plan.zero < 3 and plan.data > 1:
        raise ValueError(
            f"expected microbatches=1 with data > 1 and without ZeRO-3 in peak_memory, got "
            f"{plan.microbatches}; use training_memory, which adds all tensors of a step"
        )
    if plan.recompute == "selective":
        raise ValueError(
            "expected recompute 'none' or 'full' in peak_memory, got 'selective'; use "
            "training_memory instead"
        )
    if work.kind.compute != work.kind.activations:
        raise ValueError(
            f"expected linear layers in the dtype of the activations in peak_memory, got "
            f"{work.kind.compute} with {work.kind.activations} in the recipe {work.kind.name}; the "
            "copies and scales of such layers are not modeled; use training_memory as an estimate"
        )
    step = _Step(model, plan, work)
    moments = [
        *step.iter_head_moments(),
        *step.iter_block_moments(),
        *step.iter_tied_table_moments(),
        step.build_optimizer_moment(foreach),
    ]
    return max(moments, key=lambda moment: moment.total)


class _Step:
    """The live tensors at the moments at which a training step may peak."""

    def __init__(self, model: Transformer, plan: Plan, work: Workload) -> None:
        self.model = model
        self.plan = plan
        self.work = work
        self.kind = work.kind
        self.tokens = work.tokens(plan)
        self.parameters = model.size
        self.states = count_state_bytes(
            self.parameters, data=plan.data, zero=plan.zero, precision=self.kind
        )
        self.cast_weights = count_cast_weight_bytes(model, plan, self.kind)
        self.is_gathered = plan.zero == 3 and plan.data > 1
        # The number of parameters with gradients after the backward of the head. If ZeRO-3 gathers
        # the weights, `unsharded` contains these gradients.
        self.after_head = 0 if self.is_gathered else count_head_parameters(model, plan)
        self.unsharded = _Unsharded(model, plan, self.kind)
        self.saved = count_activation_bytes(model, plan, work)

    def iter_head_moments(self) -> Iterator[Breakdown]:
        """Yield the moments from the end of the forward to the backward of the final norm."""
        unsharded, cast = self.unsharded, self.cast_weights
        saved = replace(self.saved, name="activations")
        head = count_head_activation_bytes(self.model, self.plan, self.work)
        # At the end of the forward the gradient of the logits does not exist yet.
        without = replace(head, parts=head.parts[:-1])
        ends = unsharded.count_gathered_bytes(0, unsharded.buffer)
        yield self._build_moment(
            "at the end of the forward", cast, ends, saved, without, gradients=0
        )
        ends = unsharded.count_gathered_bytes(0)
        yield self._build_moment(
            "at the start of the backward", cast, ends, saved, head, gradients=0
        )
        norm = count_final_norm_bytes(self.model, self.plan, self.work)
        if norm.total:
            ends = unsharded.count_gathered_bytes(0, unsharded.head_gradient)
            yield self._build_moment(
                "in the final norm", cast, ends, saved, norm, gradients=self.after_head
            )

    def iter_block_moments(self) -> Iterator[Breakdown]:
        """Yield the moments inside the blocks, from the last block to the first."""
        model, unsharded = self.model, self.unsharded
        cast = self.cast_weights
        after_first = self.parameters - _count_first_block_and_table(model)
        block = find_fullest_block(model, self.plan, self.work)
        for part, alive in _iter_parts_of_block(model, block, self.tokens, self.work):
            inside = _count_gradients_inside(model, part)
            # In attention, the gradients of the whole block are unsharded.
            count = unsharded.groups.block if part == "attention" else inside
            block_gradients = multiply(
                "gradients of a block", "B", parameters=count, bytes=unsharded.size
            )
            if self.is_gathered:
                inside = 0  # These gradients are unsharded, so `block_gradients` contains them.
            gradients = (unsharded.head_gradient, block_gradients)
            last = unsharded.count_gathered_bytes(2, *gradients)
            yield self._build_moment(
                f"in the last block's {part}",
                cast,
                last,
                self._count_saved_before(model.layers - 1),
                alive,
                gradients=self.after_head + inside,
            )
            if self.plan.zero == 3 and model.layers > 2:
                yield from self._iter_middle_moments(part, alive, block_gradients)
            reduced = unsharded.reduced_gradients if model.layers > 1 else None
            first = unsharded.count_gathered_bytes(1, *gradients, reduced, done=model.layers - 1)
            yield self._build_moment(
                f"in the first block's {part}", cast, first, alive, gradients=after_first + inside
            )

    def _iter_middle_moments(
        self, part: str, alive: Breakdown, block_gradients: Breakdown | None
    ) -> Iterator[Breakdown]:
        # The last middle block has the most activations, and the first has the most gradients.
        middle_blocks = {"last block but one": 1, "second block": self.model.layers - 2}
        unsharded = self.unsharded
        gradients = (unsharded.head_gradient, block_gradients, unsharded.reduced_gradients)
        for name, done in middle_blocks.items():
            gathered = unsharded.count_gathered_bytes(2, *gradients, done=done)
            yield self._build_moment(
                f"in the {name}'s {part}",
                gathered,
                self._count_saved_before(self.model.layers - 1 - done),
                alive,
                gradients=done * unsharded.groups.block,
            )

    def iter_tied_table_moments(self) -> Iterator[Breakdown]:
        """Yield the moment at which the two gradients of a tied table are added."""
        tables = count_tied_gradient_bytes(self.model, self.plan, self.kind)
        if tables is not None:
            yield self._build_moment(
                "at the gradient of the tied table",
                self.unsharded.count_gathered_bytes(0, done=self.model.layers),
                tables,
                gradients=self.parameters,
            )

    def build_optimizer_moment(self, foreach: bool) -> Breakdown:
        """Return the live tensors while the optimizer computes its square roots."""
        elements = self.parameters if foreach else self._count_most_root_elements()
        shard = split(elements, self.plan.data if self.plan.zero else 1)
        size = get_itemsize(self.kind.moments[-1]) if self.kind.moments else Fraction(0)
        roots = multiply("square roots", "B", parameters=shard, bytes=size)
        return self._build_moment("in the optimizer", roots, gradients=self.parameters)

    def _count_most_root_elements(self) -> int:
        """Return the largest number of temporary elements if parameters are updated one by one.

        Three tensors exist at once: sqrt(v), sqrt(v) divided by the bias correction, and the latter
        of the previous parameter, which is freed last.
        """
        # If a bias follows each matrix, the previous parameter is small.
        biased = {"attention": self.model.qkv_bias, "mlp": self.model.mlp_bias}
        elements = previous = 0
        for matrix in list_matrices(self.model):
            elements = max(elements, previous + 2 * matrix.entries)
            previous = 0 if biased.get(matrix.part) else matrix.entries
        experts = self.model.experts
        if experts and self.work.transformers:
            # One tensor contains the gates and the up-projections of all experts.
            stacked = experts.count * (self.model.mlp_matrices - 1)
            elements = max(elements, 2 * stacked * self.model.d_model * experts.width)
        return elements

    def _build_moment(self, when: str, *parts: Breakdown | None, gradients: int) -> Breakdown:
        if self.plan.microbatches > 1:
            gradients = self.parameters
        shard = split(gradients, self.plan.data if self.plan.zero >= 2 else 1)
        size = get_itemsize(self.kind.gradients)
        return sum_parts(
            f"peak memory of {self.model.name}, {when}",
            "B",
            self.states["weights"],
            multiply("gradients", "B", parameters=shard, bytes=size),
            *(part for part in self.states if part.name == "optimizer"),
            *parts,
        )

    def _count_saved_before(self, blocks: int) -> Breakdown | None:
        fraction = Fraction(max(0, blocks), self.model.layers)
        return scale_part("activations of the blocks before", self.saved, share=fraction)


class _Unsharded:
    """The weights and gradients that ZeRO-3 stores unsharded temporarily during a step."""

    def __init__(self, model: Transformer, plan: Plan, kind: Precision) -> None:
        self.model = model
        self.plan = plan
        self.groups = build_fsdp_groups(model, plan, 0)
        self.size = get_itemsize(kind.cast_weights or kind.weights)
        block, size = self.groups.block, self.size
        self.buffer = multiply("buffer of the last gather", "B", parameters=block, bytes=size)
        self.head_gradient = count_head_gradient_bytes(model, plan, kind)
        self.reduced_gradients = multiply(
            "gradients being reduced", "B", parameters=block, bytes=get_itemsize(kind.gradients)
        )

    def count_gathered_bytes(
        self, blocks: int, *others: Breakdown | None, done: int = 0
    ) -> Breakdown | None:
        """Return the gathered weights of the ends and of `blocks` blocks, added to `others`.

        `done` is the number of blocks whose backward is complete. The result is None without
        ZeRO-3 or with a single data rank, because nothing is gathered.
        """
        if self.plan.zero < 3 or self.plan.data == 1:
            return None
        if not self.plan.reshard_after_forward:
            # All blocks stay gathered, and each one is freed after its backward.
            blocks = self.model.layers - done
        return self.groups.count_gathered_bytes(blocks, self.size, *others)


def _iter_parts_of_block(
    model: Transformer, block: Breakdown, tokens: int, work: Workload
) -> Iterator[tuple[str, Breakdown]]:
    """Yield the live tensors in the backward of one block: in its MLP, and in its attention.

    In the MLP, all saved tensors of the block are alive. In the attention, only those of the
    attention are alive. Both include the temporary gradients.
    """
    size = get_itemsize(work.kind.activations)
    core = (block["attention"],) if "attention" in block else ()
    # The backward of GELU in one kernel starts after the input of the down-projection is freed.
    is_gelu = not model.gated_mlp and model.activation == "gelu"
    temporary = count_gradients_in_flight(
        model,
        tokens=tokens,
        keys=None if work.flash else work.seq,
        hidden_tensors=1 if is_gelu else 2,
    )
    for part, saved, numbers in zip(
        ("MLP", "attention"), (block.parts, core), temporary, strict=True
    ):
        gradients = multiply("gradients in flight", "B", numbers=numbers, bytes=size)
        yield part, Breakdown(f"one block, in its {part}", "B", parts=(*saved, gradients))


def _count_gradients_inside(model: Transformer, part: str) -> int:
    """Return the number of parameters of a block with gradients at the peak in a part of it.

    `part` is "MLP", whose backward pass starts with its down-projection, or attention. The backward
    pass of attention follows those of the MLP and the output projection.
    """
    block = [m for m in list_matrices(find_largest_single_layer(model)) if m.layers is not None]
    mlp = [m for m in block if m.part in ("mlp", "experts")]
    if part == "MLP":
        return sum(m.size for m in mlp if m.name in ("down", "shared down"))
    return sum(m.size for m in mlp) + sum(
        m.size for m in block if (m.part, m.name) == ("attention", "out")
    )


def _count_first_block_and_table(model: Transformer) -> int:
    """Return the number of parameters without gradients before the first block's backward pass."""
    layer_matrices = list_matrices(find_largest_single_layer(model))
    block = sum(m.size for m in layer_matrices if m.layers is not None and m.part != "norms")
    table = sum(m.size for m in layer_matrices if m.kind == "table" or m.part == "embedding")
    return block + (0 if model.tied else table)
