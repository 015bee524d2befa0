"""Memory of training per device: all tensors at once, or the fullest moment of a pipeline stage."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, multiply, sum_parts
from accounting.memory.activations import count_activation_bytes
from accounting.memory.backward import (
    count_block_bytes,
    count_end_bytes,
    find_fullest_backward,
    scale_part,
)
from accounting.memory.fsdp_pipeline import FsdpStage
from accounting.memory.states import (
    build_fsdp_groups,
    count_cast_weight_bytes,
    count_head_gradient_bytes,
    count_tied_gradient_bytes,
    list_distinct_stages,
    list_stage_states,
)
from accounting.model.transformer import Transformer
from accounting.plan import Plan, count_in_flight, split, validate_plan
from accounting.precision import Precision, get_itemsize
from accounting.workload import Workload, build_workload


@checks.validate(stage=0)
def training_memory(
    model: Transformer,
    plan: Plan | None = None,
    work: Workload | None = None,
    *,
    stage: int | None = None,
    **run: Any,
) -> Breakdown:
    """Return the bytes of training on a device of the fullest pipeline stage.

    Without a pipeline, the result is the sum of all tensors of a step, as if all existed at once.
    In a pipeline, it is the fullest moment of the stage's schedule. `stage` selects one stage
    instead of the fullest. `run` contains fields of a `Workload`; `batch` is the whole batch in
    sequences. With a batch of 0, the result is the model states alone. With ZeRO-3 the result
    includes the weights that are gathered and the gradients that are reduced during a step. Raises
    `ValueError` if the plan is not valid for the model or the batch, or if the training step of
    the model is not modeled.

    The optimizer is assumed to be fused. `foreach`, torch's default, needs another copy of the
    second moments after activations are freed; `peak_memory` counts it.
    """
    work = build_workload(work, run)
    plan = validate_plan(plan, model, batch=work.batch, seq=work.seq)
    stages = list_distinct_stages(model, plan) if stage is None else [stage]
    every = (_count_stage_memory(model, plan, work, index) for index in stages)
    return max(every, key=lambda memory: memory.total)


def _count_stage_memory(model: Transformer, plan: Plan, work: Workload, stage: int) -> Breakdown:
    """Return the bytes of training on a device of one pipeline stage."""
    kind = work.kind
    states = list_stage_states(model, plan, kind, stage)
    where = f"stage {stage} of {plan.pipeline}, " if plan.pipeline > 1 else ""
    name = f"training memory of {model.name}, {where}{kind.name}"
    if not work.batch:
        return sum_parts(name, "B", *states)
    if plan.has_unsharded_weights():
        fullest = FsdpStage(model, plan, work, stage).find_fullest(count_in_flight(plan, stage))
        return replace(fullest, name=name)
    saved = count_activation_bytes(model, plan, work, stage=stage)
    unsharded = (
        count_cast_weight_bytes(model, plan, kind, stage),
        _count_gathered_bytes(model, plan, kind, stage),
    )
    recomputed = count_block_bytes(model, plan, work) if plan.recompute == "full" else None
    # In a pipeline, the embedding and the head are on two stages.
    tables = count_tied_gradient_bytes(model, plan, kind) if plan.pipeline == 1 else None
    temporary = find_fullest_backward(model, plan, work, is_last=stage == plan.pipeline - 1)

    def build_moment(stored: int, states: list[Breakdown], *others: Breakdown | None) -> Breakdown:
        alive = scale_part("activations", saved, in_flight=Fraction(stored, plan.virtual_stages))
        return sum_parts(name, "B", *states, alive, *unsharded, *others)

    stored = count_in_flight(plan, stage)
    inside = (recomputed, temporary)
    if plan.pipeline == 1:
        return build_moment(stored, states, *inside, tables)
    # The first backward pass allocates the gradients. The second one has as many micro-batches in
    # flight as the first if a forward pass runs between the two, and otherwise one fewer.
    later = stored if plan.microbatches * plan.virtual_stages > stored else stored - 1
    moments = [
        build_moment(stored, [state for state in states if state.name != "gradients"], *inside),
        build_moment(later, states, *inside),
    ]
    for freed, temporary_tensors in _iter_table_gradients(model, plan, work, stage):
        moments.append(build_moment(later - freed, states, *temporary_tensors))
    return max(moments, key=lambda memory: memory.total)


def _iter_table_gradients(
    model: Transformer, plan: Plan, work: Workload, stage: int
) -> Iterator[tuple[int, list[Breakdown]]]:
    """Yield the moments at which a backward pass adds a table's gradient to the stored gradient.

    A moment is a pair: the number of micro-batches whose activations the backward pass has freed,
    and the temporary tensors. The gradient of the head is computed before the gradients of the
    blocks, and the gradient of the embedding after them.
    """
    stage_model = plan.build_stage_model(model, stage)
    if plan.microbatches == 1 or not stage_model.vocab_size:
        return
    entries = split(stage_model.vocab_size * stage_model.embedding_dim, plan.tensor)
    # The dtype is that of the parameter. It is the dtype of the activations for fp8 parameters.
    size = max(get_itemsize(work.kind.weights), get_itemsize(work.kind.activations))
    gradient = multiply("gradient of the table", "B", parameters=entries, bytes=size)
    if stage == 0:
        yield 1, [gradient]
    if stage_model.lm_head:
        # The last two parts are gradients of the loss. Only the gradient of the logits is alive at
        # this moment. The log-softmax, which is freed and at least as large, counts in its place.
        end = count_end_bytes(model, plan, work)
        yield 0, [gradient, replace(end, parts=end.parts[:-2])]


def _count_gathered_bytes(
    model: Transformer, plan: Plan, kind: Precision, stage: int
) -> Breakdown | None:
    """Return the unsharded tensors of ZeRO-3, or None if weights are not sharded.

    FSDP2 keeps the weights of the root (embedding, final norm, head) gathered and the gradient of
    the head unsharded. It computes one block while it prefetches the next, so the weights of two
    blocks are gathered. Without `reshard_after_forward`, all blocks stay gathered. The gradients of
    one block exist in addition to the copy that is reduced.
    """
    if plan.zero < 3 or plan.replicas == 1:
        return None
    layers = plan.build_stage_model(model, stage).layers
    groups = build_fsdp_groups(model, plan, stage)
    size = get_itemsize(kind.cast_weights or kind.weights)
    return groups.count_gathered_bytes(
        2 if plan.reshard_after_forward else layers,
        size,
        count_head_gradient_bytes(model, plan, kind),
        multiply("gradients of a block", "B", parameters=groups.block, bytes=size),
        multiply(
            "gradients being reduced",
            "B",
            parameters=groups.block,
            bytes=get_itemsize(kind.gradients),
        ),
    )
