"""A training step as a timeline of moments, its peak, and the bytes of single tensors."""

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, Sizes, product, total
from accounting.memory.activations import activations, flying_gradients, head_activations
from accounting.memory.training import model_states, one_layer, times
from accounting.model.matrices import all_matrices, matrices
from accounting.model.shape import Shape
from accounting.plan import Plan, fitted, split
from accounting.precision import Precision, bytes_of
from accounting.workload import WORKLOAD, Workload, workload


@checks.entry(*WORKLOAD)
def peak_memory(
    model: Shape,
    plan: Plan | None = None,
    work: Workload | None = None,
    *,
    foreach: bool = True,
    gradients_kept: bool = False,
    checkpointed: bool = False,
    **run: Any,
) -> Breakdown:
    """The most that one device holds at one time in a training loop, once it has made a step.

    Not everything is alive at once: where gradients are set to None they are not there yet when the
    backward starts, and activations are gone when the optimizer runs. Each block of the backward
    frees its activations and leaves its gradients, so the peak is at an end: at the start, inside
    the last, the last but one or the first block (run again there where blocks are `checkpointed`),
    or in the optimizer. `gradients_kept` is for loops that keep them (accumulation, buckets);
    `foreach` is torch's default on a GPU, where the optimizer takes the square root of all second
    moments in one go.

    A `plan` may shard states over data ranks. ZeRO-3 is torch's FSDP2, a group for each block and
    one for the ends: these stay gathered all through the backward with the gradient of the head
    whole, while one block is at work, the next is gathered and the one before is reduced.
    """
    work = workload(work, run)
    checks.whole("batch", work.batch)
    plan = fitted(plan, model, batch=work.batch, seq=work.seq)
    if plan.tensor * plan.pipeline * plan.context * plan.microbatches > 1:
        raise ValueError("peak_memory follows data parallelism alone; training_memory knows more")
    full = checkpointed or plan.recompute == "full"
    plan = replace(plan, recompute="full" if full else "none", devices=0)
    moments = _moments(model, plan, work, foreach, gradients_kept)
    return max(moments, key=lambda moment: moment.total)


def _moments(
    model: Shape, plan: Plan, work: Workload, foreach: bool, gradients_kept: bool
) -> Iterator[Breakdown]:
    """What is alive where a step may be fullest."""
    kind = work.kind
    everything = _count(model)
    states = model_states(everything, data=plan.data, zero=plan.zero, precision=kind)
    whole, tokens = _Whole(model, plan, kind), work.tokens(plan)
    kept = activations(model, plan, work)
    head = head_activations(model, tokens=tokens, **work.head)

    def moment(when: str, *parts: Breakdown | None, gradients: int) -> Breakdown:
        held = split(gradients, plan.data if plan.zero >= 2 else 1)
        name = f"peak memory of {model.name}, {when}"
        grown = product("gradients", "B", parameters=held, bytes=bytes_of(kind.gradients))
        optimizer = (part for part in states if part.name == "optimizer")
        return total(name, "B", states["weights"], grown, *optimizer, *parts)

    def before(blocks: int) -> Breakdown | None:
        share = Fraction(max(0, blocks), model.layers)
        return times("activations of the blocks before", kept, share=share)

    always = everything * gradients_kept
    forward = replace(kept, name="activations")
    # At the end of the forward the gradient of the logits is not there yet.
    without = replace(head, parts=head.parts[:-1])
    end = whole.gathered(blocks=0, buffer=True)
    yield moment("at the end of the forward", whole.cast(), end, forward, without, gradients=always)
    # A loss in chunks has the gradient of the head from the chunks before, and then adds its own.
    chunked = work.loss_chunks > 1
    start = whole.gathered(blocks=0, head=chunked)
    own = whole.of_head(chunked and not start, 1)
    yield moment("at the start of the backward", whole.cast(), start, own, forward, head,
                 gradients=always)  # fmt: skip
    both = whole.of_head(chunked, 1 if start else 2)
    yield moment("at the head's gradients", whole.cast(), start, both, forward, without,
                 gradients=always)  # fmt: skip
    normed = replace(head, parts=tuple(part for part in head if "norm" in part.name))
    if "normalized" in normed:
        # Of several operators: gradients of its result, of both factors, and of their squares.
        size = normed["normalized"].factors[-1][1]
        flying = product("gradients in flight", "B", tokens=tokens, tensors=4,
                         d_model=model.d_model, bytes=size)  # fmt: skip
        yield moment("in the final norm", whole.cast(), start, forward, normed, flying,
                     gradients=always)  # fmt: skip
    later = everything if gradients_kept else everything - _first_block_and_table(model)
    block = activations(one_layer(model), replace(plan, recompute="none"), work)
    for part, alive in _inside(model, block, tokens, kind, None if work.flash else work.seq):
        # In its MLP a block has no gradients yet, in its attention it has most of them.
        grown = part == "attention"
        last = whole.gathered(blocks=2, head=True, grown=grown)
        yield moment(f"in the last block's {part}", whole.cast(), last, before(model.layers - 1),
                     alive, gradients=always)  # fmt: skip
        # Of the blocks between, the last has most activations and the first most gradients.
        for place, done in (("last block but one", 1), ("second block", model.layers - 2)):
            if plan.zero < 3 or model.layers < 3:
                break
            middle = whole.gathered(blocks=2, done=done, head=True, grown=grown, reduced=True)
            yield moment(f"in the {place}'s {part}", middle, before(model.layers - 1 - done),
                         alive, gradients=always or done * whole.block)  # fmt: skip
        done, reduced = model.layers - 1, model.layers > 1
        first = whole.gathered(blocks=1, done=done, head=True, grown=grown, reduced=reduced)
        yield moment(f"in the first block's {part}", whole.cast(), first, alive, gradients=later)
    roots = _roots(model, kind, foreach, plan)
    yield moment("in the optimizer", roots, gradients=everything)


class _Whole:
    """What is whole for a while: the copy in fewer bytes, and what ZeRO-3 gathers and reduces."""

    def __init__(self, model: Shape, plan: Plan, kind: Precision) -> None:
        self.model, self.plan, self.kind = model, plan, kind
        inside = [m for m in all_matrices(model) if m.layers is not None]
        self.block = sum(m.size for m in matrices(one_layer(model)) if m.layers is not None)
        self.ends = _count(model) - sum(m.size for m in inside)
        self.size = bytes_of(kind.cast_weights or kind.weights)
        table = model.vocab_size * model.embedding_dim if model.lm_head else 0
        self.head = table + (model.norm_vectors * model.d_model if model.final_norm else 0)

    def cast(self) -> Breakdown | None:
        """Autocast's copies of the matrices, which the graph keeps."""
        if self.plan.zero == 3 or not self.kind.cast_weights:
            return None
        count = _matrix_parameters(self.model)
        return product("cast weights", "B", parameters=count, bytes=self.size)

    def of_head(self, there: bool, copies: int) -> Breakdown:
        """Gradients of the head's matrix."""
        count = self.model.vocab_size * self.model.embedding_dim * self.model.lm_head * there
        size = bytes_of(self.kind.gradients)
        return product("gradient of the head", "B", copies=copies, parameters=count, bytes=size)

    def gathered(self, *, blocks: int, done: int = 0, **also: bool) -> Breakdown | None:
        """The ends, and of the blocks those at work, gathered ahead, and reduced.

        `also` says what else is there: the `buffer` of the last gather, the gradient of the `head`,
        those of a block that have `grown`, and those that are `reduced`.
        """
        if self.plan.zero < 3 or self.plan.data == 1:
            return None
        if not self.plan.reshard_after_forward:
            # Each is freed when its own backward is done.
            blocks = self.model.layers - done
        blocks = min(blocks, self.model.layers)

        def one(name: str, count: int, key: str = "", size: Fraction = self.size) -> Breakdown:
            there = not key or also.get(key, False)
            return product(name, "B", parameters=count * there, bytes=size)

        several: Sizes = {"blocks": blocks, "parameters": self.block, "bytes": self.size}
        reduced = bytes_of(self.kind.gradients)
        return total(
            "gathered",
            "B",
            one("weights of the ends", self.ends),
            product("weights of blocks", "B", **several),
            one("buffer of the last gather", self.block, "buffer"),
            one("gradient of the head", self.head, "head"),
            one("gradients of a block", self.block, "grown"),
            one("gradients being reduced", self.block, "reduced", reduced),
        )


def _inside(
    model: Shape, block: Breakdown, tokens: int, kind: Precision, keys: int | None
) -> Iterator[tuple[str, Breakdown]]:
    """What is alive in the backward of one block: in its MLP all that it saved, in its attention
    what that saved, and the gradients of what is worked on."""
    size = bytes_of(kind.activations)
    core = (block["attention"],) if "attention" in block else ()
    flying = flying_gradients(model, tokens=tokens, keys=keys)
    for part, saved, numbers in zip(("MLP", "attention"), (block.parts, core), flying, strict=True):
        gradients = product("gradients in flight", "B", numbers=numbers, bytes=size)
        yield part, Breakdown(f"one block, in its {part}", "B", parts=(*saved, gradients))


def _roots(model: Shape, kind: Precision, foreach: bool, plan: Plan) -> Breakdown:
    """Adam's square roots of second moments: of all parameters, or of one and its denominator."""
    largest = max((matrix.one for matrix in matrices(model)), default=0)
    count = split(_count(model) if foreach else 2 * largest, plan.data if plan.zero else 1)
    size = bytes_of(kind.moments[-1]) if kind.moments else Fraction(0)
    return product("square roots", "B", parameters=count, bytes=size)


def _count(model: Shape) -> int:
    return sum(matrix.size for matrix in all_matrices(model))


def _first_block_and_table(model: Shape) -> int:
    """Parameters whose gradients are not there yet when the backward enters the first block."""
    found = matrices(one_layer(model))
    block = sum(m.size for m in found if m.layers is not None and m.part != "norms")
    table = sum(m.size for m in found if m.kind == "table" or m.part == "embedding")
    return block + (0 if model.tied else table)


def _matrix_parameters(model: Shape) -> int:
    """Parameters of linear layers: all but tables, norms, biases and sinks."""
    found = sum(matrix.size for matrix in matrices(model) if matrix.kind == "matrix")
    return found + (model.vocab_size * model.embedding_dim if model.tied and model.lm_head else 0)


@checks.entry()
def tensor_bytes(*shape: int, dtype: str = "fp32") -> int:
    """Bytes of one tensor, such as a residual stream (B, S, d) or a score matrix (B, S, S)."""
    for extent in shape:
        checks.whole("an extent of shape", extent, least=0)
    return math.ceil(math.prod(shape) * bytes_of(dtype))
