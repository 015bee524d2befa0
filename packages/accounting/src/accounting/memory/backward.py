"""Memory at the fullest moment of the backward pass.

The tensors are those of the final norm, the logits and the loss; temporary gradients; and a
recomputed block.
"""

from dataclasses import replace
from fractions import Fraction

from accounting.breakdown import Breakdown, Number, multiply, sum_parts
from accounting.memory.activations import (
    count_activation_bytes,
    count_gradients_in_flight,
    count_head_activation_bytes,
)
from accounting.memory.states import build_single_layers
from accounting.model.transformer import Transformer
from accounting.plan import Plan
from accounting.precision import get_itemsize
from accounting.workload import Workload


def count_end_bytes(model: Transformer, plan: Plan, work: Workload) -> Breakdown:
    """Return the bytes of `count_head_activation_bytes` on the last stage of the plan.

    In a GPipe pipeline, the last stage stores these tensors for every micro-batch, except for
    gradients, which exist for one micro-batch at a time.
    """
    end = count_head_activation_bytes(model, plan, work)
    stored = plan.microbatches if plan.schedule == "gpipe" and plan.pipeline > 1 else 1
    parts = (
        part if "gradient" in part.name else scale_part(part.name, part, micro_batches=stored)
        for part in end
    )
    return end if stored == 1 else sum_parts(end.name, "B", *parts)


def find_fullest_backward(
    model: Transformer, plan: Plan, work: Workload, is_last: bool
) -> Breakdown:
    """Return the temporary tensors at the fullest moment of a backward pass.

    The moment is at the logits, in the final norm, or inside a block. Only the last stage of a
    pipeline contains the logits and the final norm.
    """
    inside = count_temporary_gradient_bytes(model, plan, work)
    if not is_last:
        return inside
    end = count_end_bytes(model, plan, work)
    norm = count_final_norm_bytes(model, plan, work)
    if plan.schedule == "gpipe" and plan.pipeline > 1:
        # Inside the blocks of a micro-batch, the logits of the other micro-batches still exist.
        saved = [part for part in end if "gradient" not in part.name]
        others = Fraction(plan.microbatches - 1, plan.microbatches)
        logits = (scale_part(part.name, part, others=others) for part in saved)
        inside = sum_parts(inside.name, "B", *inside, *logits)
    return max(end, norm, inside, key=lambda tensors: tensors.total)


def count_final_norm_bytes(model: Transformer, plan: Plan, work: Workload) -> Breakdown:
    """Return the bytes of the tensors of the final norm in its backward; 0 for a fused norm.

    A norm of several operators has gradients of its result, of both factors, and of its input
    squared.
    """
    head = count_head_activation_bytes(model, plan, work)
    saved = replace(head, parts=tuple(part for part in head if "norm" in part.name))
    if "normalized" not in saved:
        return sum_parts("final norm", "B")
    sizes = {"tensors": 4} | dict(saved["normalized"].factors)
    return sum_parts("final norm", "B", saved, multiply("gradients in flight", "B", **sizes))


def count_temporary_gradient_bytes(model: Transformer, plan: Plan, work: Workload) -> Breakdown:
    """Return the bytes of temporary gradients inside a block.

    The gradients of the block's tensors exist together with the gradient of its output.
    """
    tokens, size = work.tokens(plan), get_itemsize(work.kind.activations)
    keys = None if work.flash else work.seq
    inside = max(count_gradients_in_flight(model, tokens=tokens, tensor=plan.tensor, keys=keys))
    return sum_parts(
        "gradients in flight",
        "B",
        multiply("inside a block", "B", numbers=inside, bytes=size),
        multiply("of the output", "B", tokens=tokens, d_model=model.d_model, bytes=size),
    )


def count_block_bytes(model: Transformer, plan: Plan, work: Workload) -> Breakdown:
    """Return the bytes of the saved tensors of one block, which exist while it is recomputed."""
    return sum_parts("one block recomputed", "B", *find_fullest_block(model, plan, work).parts)


def find_fullest_block(model: Transformer, plan: Plan, work: Workload) -> Breakdown:
    """Return the activations of the block that saves the most without recomputation."""
    # A dense layer has no experts to distribute.
    plan = replace(
        plan,
        pipeline=1,
        virtual_stages=1,
        schedule="1f1b",
        expert=1,
        recompute="none",
    )
    blocks = (count_activation_bytes(layer, plan, work) for layer in build_single_layers(model))
    return max(blocks, key=lambda block: block.total)


def scale_part(name: str, part: Breakdown, **factor: Number) -> Breakdown | None:
    """Return `part` with another name and one more factor, or None if the factor is 0."""
    ((label, count),) = factor.items()
    if not count:
        return None

    def scale_node(node: Breakdown) -> Breakdown:
        if node.factors:
            return replace(node, factors=((label.replace("_", " "), count), *node.factors))
        return replace(node, parts=tuple(map(scale_node, node.parts)))

    return replace(part if count == 1 else scale_node(part), name=name, note="")
