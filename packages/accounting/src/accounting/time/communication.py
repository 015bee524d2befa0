"""The collectives of each kind of parallelism in one step."""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from accounting import checks
from accounting.memory.states import build_fsdp_groups, count_device_parameters
from accounting.model.transformer import Transformer
from accounting.plan import Plan, validate_plan
from accounting.precision import get_itemsize
from accounting.time.collective import Collective, Communication

#: Name of the all-reduce between the first and the last stage, which both store a tied embedding.
TIED_GRADIENTS = "gradients of the tied embedding"


@checks.validate()
def communication(
    model: Transformer,
    plan: Plan | None = None,
    *,
    batch: int = 0,
    seq: int = 1,
    weights: str = "bf16",
    gradients: str = "bf16",
    activations: str = "bf16",
    stage: int = 0,
) -> Communication:
    """Return the collectives that one device of a pipeline `stage` runs in a training step.

    `batch` is the number of sequences of the whole step, each with `seq` tokens; 0 selects only the
    collectives of weights and gradients. `weights`, `gradients` and `activations` are the dtypes of
    the messages. Raises `ValueError` if the plan is not valid for the model or the batch, or if the
    training step of the model is not modeled.
    """
    plan = validate_plan(plan, model, batch=batch, seq=seq)
    tokens = batch // (plan.data * plan.microbatches) * (seq // plan.context)
    size = get_itemsize(activations)
    collectives = [
        *_iter_state_collectives(model, plan, get_itemsize(weights), get_itemsize(gradients), stage)
    ]
    if batch:
        collectives += list_token_collectives(model, plan, stage, tokens * size)
    nonempty = (c for c in collectives if c.ranks > 1 and c.count and c.call_bytes)
    return Communication(name=model.name, collectives=tuple(nonempty))


def list_token_collectives(
    model: Transformer, plan: Plan, stage: int, column_bytes: Fraction
) -> list[Collective]:
    """Return the collectives of tensor, expert, context and pipeline parallelism.

    Their payload is proportional to `column_bytes`: the bytes of one feature of all tokens of a
    micro-batch on a device. Their calls are counted per step.
    """
    stage_model = plan.build_stage_model(model, stage)
    stream = column_bytes * model.d_model
    return [
        *_iter_tensor_collectives(stage_model, plan, stream, stage),
        *_iter_expert_collectives(stage_model, plan, stream),
        *_iter_context_collectives(stage_model, model, plan, column_bytes),
        *_iter_pipeline_collectives(plan, stream, stage),
    ]


class StateCalls(NamedTuple):
    """A collective over all weights or all gradients of a device, and its calls per step."""

    name: str
    operation: str
    calls: int
    #: `weights` or `gradients`, which selects the dtype.
    payload: str


def list_state_calls(
    zero: int, pipeline: int, microbatches: int, reshard_after_forward: bool
) -> list[StateCalls]:
    """Return the collectives of data parallelism for a ZeRO stage.

    FSDP2 does not reshard its root module, so pass `reshard_after_forward=False` for the weights
    outside the blocks.
    """
    # Sharded gradients are reduced after every micro-batch; replicated ones accumulate first.
    reductions = microbatches if zero >= 2 else 1
    gathers = reductions * (2 if reshard_after_forward else 1)
    if zero == 3 and pipeline > 1:
        # See Note [FSDP2 under torch's pipeline schedules] in memory/fsdp_pipeline.py: gradients
        # accumulate, and a backward leaves the weights unsharded for the next forward.
        reductions = 1
        gathers = microbatches + 1 if reshard_after_forward else 1
    reduce = "reduce_scatter" if zero else "all_reduce"
    calls = [StateCalls("gradients", reduce, reductions, "gradients")]
    if zero in (1, 2):
        calls.append(StateCalls("updated weights", "all_gather", 1, "weights"))
    if zero == 3:
        calls.append(StateCalls("weights", "all_gather", gathers, "weights"))
    return calls


def _iter_state_collectives(
    model: Transformer, plan: Plan, weight: Fraction, gradient: Fraction, stage: int
) -> Iterator[Collective]:
    """Yield the collectives of data parallelism, and the reduction of a tied embedding.

    Data parallelism reduces gradients; with ZeRO it also gathers weights.
    """
    dense, routed = count_device_parameters(model, plan, stage)
    ends = build_fsdp_groups(model, plan, stage).ends if plan.zero == 3 else 0
    reshards = plan.reshard_after_forward
    for suffix, count, ranks, is_resharded in (
        ("", dense - ends, plan.replicas, reshards),
        (" of the ends", ends, plan.replicas, False),
        (" of experts", routed, plan.expert_replicas, reshards),
    ):
        for name, operation, calls, payload in list_state_calls(
            plan.zero, plan.pipeline, plan.microbatches, is_resharded
        ):
            size = weight if payload == "weights" else gradient
            yield Collective(name + suffix, operation, "data", ranks, calls, count * size)
    if model.tied and model.lm_head and plan.pipeline > 1 and stage in (0, plan.pipeline - 1):
        table = Fraction(model.vocab_size * model.embedding_dim, plan.tensor) * gradient
        yield Collective(TIED_GRADIENTS, "all_reduce", "pipeline", 2, 1, table)


def _iter_tensor_collectives(
    stage_model: Transformer, plan: Plan, call_bytes: int | Fraction, stage: int
) -> Iterator[Collective]:
    """Yield the collectives of tensor parallelism, with or without sequence parallelism."""
    blocks = count_reduced_blocks(stage_model)
    # The embedding and the gradient of the head's input also end with an all-reduce.
    first = int(stage == 0 and stage_model.vocab_size > 0)
    last = int(stage == plan.pipeline - 1 and stage_model.lm_head and stage_model.vocab_size > 0)
    recomputed = blocks if plan.recompute == "full" else 0
    forward, backward = blocks + recomputed + first, blocks + last
    rows = [
        ("tensor-parallel forward", "all_reduce", forward),
        ("tensor-parallel backward", "all_reduce", backward),
    ]
    if plan.sequence_parallel:
        # Each all-reduce is split into its two phases, and the backward gathers the inputs again.
        rows = [
            ("sequence-parallel forward gathers", "all_gather", blocks + recomputed + last),
            ("sequence-parallel forward scatters", "reduce_scatter", forward),
            ("sequence-parallel backward gathers", "all_gather", 2 * blocks + first + last),
            ("sequence-parallel backward scatters", "reduce_scatter", backward),
        ]
    for name, operation, calls in rows:
        step_calls = calls * plan.microbatches
        yield Collective(name, operation, "tensor", plan.tensor, step_calls, call_bytes)


def count_reduced_blocks(model: Transformer) -> int:
    """Return the number of blocks whose outputs tensor parallelism reduces in a forward pass.

    These are attention or a mixer, and the MLP or experts. A parallel block has a single output.
    """
    mixing = {i for m in model.mixers for i in m.layers} | {*(model.attention_layers or ())}
    mlp = {*(model.mlp_layers or ())} | model.expert_layers
    return len(mixing | mlp) if model.parallel_block else len(mixing) + len(mlp)


def _iter_expert_collectives(
    stage_model: Transformer, plan: Plan, stream: Fraction
) -> Iterator[Collective]:
    """Yield the all-to-alls that send tokens to their experts and back, forward and backward."""
    calls_per_pass = len(stage_model.expert_layers) * plan.microbatches
    call_bytes = stream * (stage_model.experts.per_token if stage_model.experts else 0)
    for when, passes in (("", 2 if plan.recompute == "full" else 1), (", backward", 1)):
        for direction in ("to", "from"):
            name, calls = f"tokens {direction} experts{when}", calls_per_pass * passes
            yield Collective(name, "all_to_all", "expert", plan.expert, calls, call_bytes)


def _iter_context_collectives(
    stage_model: Transformer, model: Transformer, plan: Plan, column_bytes: Fraction
) -> Iterator[Collective]:
    """Yield the traffic of ring attention: keys and values, and their gradients.

    `column_bytes` is that of `list_token_collectives`.
    """
    heads = max(1, model.kv_heads // plan.tensor) if model.heads else 0
    width = heads * (model.qk_dim + model.v_head_dim)
    if model.mla:
        width = model.mla.kv_rank + model.mla.rope_head_dim
    # A ring pass sends each device's block to all other devices, like an all-gather of all blocks.
    all_blocks = column_bytes * plan.context * width
    calls_per_pass = len(stage_model.attention_layers or ()) * plan.microbatches
    forward_passes = 2 if plan.recompute != "none" else 1
    for name, passes in (("keys and values", forward_passes), ("keys, values and gradients", 2)):
        calls = calls_per_pass * passes
        yield Collective(name, "all_gather", "context", plan.context, calls, all_blocks)


def _iter_pipeline_collectives(plan: Plan, stream: Fraction, stage: int) -> Iterator[Collective]:
    # A device sends the stream, or its shard of the sequence.
    sent_bytes = stream / (plan.tensor if plan.sequence_parallel else 1)
    forward = plan.virtual_stages - (stage == plan.pipeline - 1)
    backward = plan.virtual_stages - (stage == 0)
    for name, calls in (
        ("activations to the next stage", forward),
        ("gradients to the previous stage", backward),
    ):
        step_calls = calls * plan.microbatches
        yield Collective(name, "send", "pipeline", plan.pipeline, step_calls, sent_bytes)
