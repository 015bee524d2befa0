"""The peak of a plain training loop on one device, and the bytes of single tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from accounting import checks
from accounting.breakdown import Breakdown, product, total
from accounting.memory.activations import activations, head_activations
from accounting.memory.training import model_states, one_layer, times
from accounting.model.matrices import all_matrices, matrices
from accounting.model.shape import Shape
from accounting.plan import Plan, split
from accounting.precision import Precision, bytes_of, recipe


def peak_memory(
    model: Shape,
    plan: Plan | None = None,
    *,
    batch: int,
    seq: int,
    precision: str | Precision = "fp32",
    flash: bool = True,
    fused_norm: bool = True,
    fused_projections: bool = False,
    foreach: bool = True,
    gradients_kept: bool = False,
    checkpointed: bool = False,
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
    checks.whole("batch", batch)
    checks.whole("seq", seq)
    plan = plan or Plan()
    if plan.tensor * plan.pipeline * plan.context * plan.microbatches > 1:
        raise ValueError("peak_memory follows data parallelism alone; training_memory knows more")
    checkpointed = checks.flag("checkpointed", checkpointed) or plan.recompute == "full"
    kind = recipe(precision)
    everything = _count(model)
    states = {
        part.name: part
        for part in model_states(everything, data=plan.data, zero=plan.zero, precision=kind)
    }
    share = plan.data if plan.zero >= 2 else 1
    local = replace(plan, recompute="full" if checkpointed else "none", devices=0)

    def held(layers: Shape, plan: Plan) -> Breakdown:
        return activations(
            layers,
            plan,
            batch=batch,
            seq=seq,
            precision=kind,
            flash=flash,
            fused_norm=fused_norm,
            fused_projections=fused_projections,
        )

    def moment(when: str, *parts: Breakdown | None, gradients: int) -> Breakdown:
        size = bytes_of(kind.gradients)
        kept = split(gradients, share)
        return total(
            f"peak memory of {model.name}, {when}",
            "B",
            states["weights"],
            product("gradients", "B", parameters=kept, bytes=size) if kept else None,
            states.get("optimizer"),
            *parts,
        )

    whole = _Whole(model, plan, kind)
    tokens = batch // plan.data * seq
    kept = held(model, local)
    head = head_activations(model, tokens=tokens, precision=kind, fused_norm=fused_norm)

    def before(blocks: int) -> Breakdown | None:
        share = Fraction(max(0, blocks), model.layers)
        return times("activations of the blocks before", kept, share=share)

    everywhere = everything * gradients_kept
    moments = [
        moment(
            "at the start of the backward",
            whole.cast(),
            whole.gathered(blocks=0),
            Breakdown("activations", "B", parts=kept.parts),
            head,
            gradients=everywhere,
        ),
        moment(
            "at the end of the forward",
            whole.cast(),
            whole.gathered(blocks=0, buffer=True),
            Breakdown("activations", "B", parts=kept.parts),
            # The gradient of the logits is not there yet.
            Breakdown("head and loss", "B", parts=head.parts[:-1]),
            gradients=everywhere,
        ),
        moment("in the optimizer", _roots(model, kind, foreach, plan), gradients=everything),
    ]
    later = everything if gradients_kept else everything - _first_block_and_table(model)
    block = held(one_layer(model), replace(local, recompute="none"))
    for part, alive in _inside(model, block, tokens, kind, None if flash else seq):
        # In its MLP a block has no gradients yet, in its attention it has most of them.
        grown = part == "attention"
        moments += [
            moment(
                f"in the last block's {part}",
                whole.cast(),
                whole.gathered(blocks=2, head=True, grown=grown),
                before(model.layers - 1),
                alive,
                gradients=everywhere,
            ),
            moment(
                f"in the first block's {part}",
                whole.cast(),
                whole.gathered(
                    blocks=1,
                    done=model.layers - 1,
                    head=True,
                    grown=grown,
                    reduced=model.layers > 1,
                ),
                alive,
                gradients=later,
            ),
        ]
        if plan.zero == 3 and model.layers > 2:
            moments.append(
                moment(
                    f"in the last block but one's {part}",
                    whole.gathered(blocks=2, done=1, head=True, grown=grown, reduced=True),
                    before(model.layers - 2),
                    alive,
                    gradients=everywhere or whole.block,
                )
            )
    return max(moments, key=lambda moment: moment.total)


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

    def gathered(
        self,
        *,
        blocks: int,
        done: int = 0,
        buffer: bool = False,
        head: bool = False,
        grown: bool = False,
        reduced: bool = False,
    ) -> Breakdown | None:
        """The ends, and of the blocks those at work, gathered ahead, and reduced."""
        if self.plan.zero < 3 or self.plan.data == 1:
            return None
        if not self.plan.reshard_after_forward:
            # Each is freed when its own backward is done.
            blocks = self.model.layers - done
        blocks = min(blocks, self.model.layers)
        return total(
            "gathered",
            "B",
            product("weights of the ends", "B", parameters=self.ends, bytes=self.size),
            product(
                "weights of blocks", "B", blocks=blocks, parameters=self.block, bytes=self.size
            ),
            product(
                "buffer of the last gather", "B", parameters=buffer * self.block, bytes=self.size
            ),
            product("gradient of the head", "B", parameters=head * self.head, bytes=self.size),
            product("gradients of a block", "B", parameters=grown * self.block, bytes=self.size),
            product(
                "gradients being reduced",
                "B",
                parameters=reduced * self.block,
                bytes=bytes_of(self.kind.gradients),
            ),
        )


def _inside(
    model: Shape, block: Breakdown, tokens: int, kind: Precision, keys: int | None
) -> Iterator[tuple[str, Breakdown]]:
    """What is alive in the backward of one block: in its MLP all that it saved and the gradients of
    two hidden tensors, in its attention what that saved and the gradients of two score matrices
    (of `keys` a row; with None, flash attention, of queries, keys and values)."""
    hidden = model.d_ff
    if model.experts:
        hidden = model.experts.per_token * model.experts.width + model.experts.shared
    scores = 3 * model.qk_dim if keys is None else 2 * keys
    size = bytes_of(kind.activations)
    core = (block["attention"],) if "attention" in block else ()
    for part, saved, width in (
        ("MLP", block.parts, 2 * hidden),
        ("attention", core, model.heads * scores),
    ):
        gradients = product(
            "gradients in flight", "B", tokens=tokens, width=model.d_model + width, bytes=size
        )
        yield part, Breakdown(f"one block, in its {part}", "B", parts=(*saved, gradients))


def _roots(model: Shape, kind: Precision, foreach: bool, plan: Plan) -> Breakdown:
    """Adam's square roots of second moments: of all parameters, or of one and its denominator."""
    count = _count(model) if foreach else 2 * _largest(model)
    return product(
        "square roots",
        "B",
        parameters=split(count, plan.data if plan.zero else 1),
        bytes=bytes_of(kind.moments[-1]) if kind.moments else Fraction(0),
    )


def _count(model: Shape) -> int:
    return sum(matrix.size for matrix in all_matrices(model))


def _first_block_and_table(model: Shape) -> int:
    """Parameters whose gradients are not there yet when the backward enters the first block."""
    found = matrices(one_layer(model))
    block = sum(m.size for m in found if m.layers is not None and m.part != "norms")
    table = sum(m.size for m in found if m.kind == "table" or m.part == "embedding")
    return block + (0 if model.tied else table)


def _largest(model: Shape) -> int:
    """The largest single parameter tensor of a plain implementation."""
    return max((matrix.one for matrix in matrices(model)), default=0)


def _matrix_parameters(model: Shape) -> int:
    """Parameters of linear layers: all but tables, norms, biases and sinks."""
    found = sum(matrix.size for matrix in matrices(model) if matrix.kind == "matrix")
    return found + (model.vocab_size * model.embedding_dim if model.tied and model.lm_head else 0)


def tensor_bytes(*shape: int, dtype: str = "fp32") -> int:
    """Bytes of one tensor, such as a residual stream (B, S, d) or a score matrix (B, S, S)."""
    for extent in shape:
        checks.whole("an extent of shape", extent, least=0)
    size = math.prod(shape) * bytes_of(dtype)
    return math.ceil(size)
