"""What each parallelism exchanges in one iteration, collective by collective."""

from __future__ import annotations

from fractions import Fraction

from accounting import checks
from accounting.breakdown import Breakdown, product, total
from accounting.memory.training import device_parameters
from accounting.model.shape import Shape
from accounting.plan import Plan
from accounting.precision import bytes_of
from accounting.time.collective import Collective, Communication


def communication(
    model: Shape,
    plan: Plan,
    *,
    batch: int = 0,
    seq: int = 1,
    weights: str = "bf16",
    gradients: str = "bf16",
    activations: str = "bf16",
    algorithm: str = "ring",
    stage: int = 0,
) -> Communication:
    """Everything that a device of `stage` exchanges in one iteration over `batch` sequences.

    `batch=0` leaves out what depends on it, so that only weights and gradients move.
    """
    plan.check(model, batch=batch, seq=seq)
    checks.choice("algorithm", algorithm, ("ring", "tree"))
    checks.whole("seq", seq)
    found = [*_states(model, plan, bytes_of(weights), bytes_of(gradients), stage, algorithm)]
    boundaries = total("stage boundaries", "B")
    if batch:
        size = bytes_of(activations)
        tokens = batch // (plan.data * plan.microbatches) * (seq // plan.context)
        found += _tensor(model, plan, tokens, size, stage, algorithm)
        found += _experts(model, plan, tokens, size, stage)
        found += _context(model, plan, tokens, size, stage)
        found += _pipeline(model, plan, tokens, size, stage)
        boundaries = _boundaries(model, plan, tokens, size)
    kept = tuple(c for c in found if c.ranks > 1 and c.count and c.each)
    return Communication(name=model.name, collectives=kept, boundaries=boundaries)


def _states(
    model: Shape,
    plan: Plan,
    weight: Fraction,
    gradient: Fraction,
    stage: int,
    algorithm: str,
) -> list[Collective]:
    """Data parallelism: gradients all-reduced, or with ZeRO sharded and gathered back."""
    dense, routed = device_parameters(model, plan, stage)
    found = []
    for what, count, ranks in (
        ("", dense, plan.replicas),
        (" of experts", routed, plan.expert_replicas),
    ):

        def collective(
            name: str,
            operation: str,
            calls: int,
            each: Fraction,
            ranks: int = ranks,
            what: str = what,
        ) -> Collective:
            return Collective(
                name=name + what,
                operation=operation,
                axis="data",
                ranks=ranks,
                count=calls,
                each=_whole(each),
                algorithm=algorithm if operation == "all_reduce" else "ring",
            )

        # Sharded gradients leave after every micro-batch; replicated ones accumulate first.
        often = plan.microbatches if plan.zero >= 2 else 1
        if plan.zero == 0:
            found.append(collective("gradients", "all_reduce", 1, count * gradient))
            continue
        found.append(collective("gradients", "reduce_scatter", often, count * gradient))
        if plan.zero < 3:
            found.append(collective("updated weights", "all_gather", 1, count * weight))
        else:
            passes = 2 if plan.reshard_after_forward else 1
            found.append(collective("weights", "all_gather", passes * often, count * weight))
    if model.tied and plan.pipeline > 1 and stage in (0, plan.pipeline - 1):
        table = Fraction(model.vocab_size * model.embedding_dim, plan.tensor) * gradient
        found.append(
            Collective(
                name="gradients of the tied embedding",
                operation="all_reduce",
                axis="pipeline",
                ranks=2,
                count=1,
                each=_whole(table),
            )
        )
    return found


def _tensor(
    model: Shape, plan: Plan, tokens: int, size: Fraction, stage: int, algorithm: str
) -> list[Collective]:
    """Megatron's operators f and g: after the attention and after the MLP, forward and backward."""
    here = plan.stage_model(model, stage)
    # Each attention, mixer and MLP ends in a sum over the devices; side by side they share one.
    mixed = {i for m in here.mixers for i in m.layers} | set(here.attention_layers or ())
    fed = set(here.mlp_layers or ()) | here.expert_layers
    blocks = len(mixed | fed) if model.parallel_block else len(mixed) + len(fed)
    ends = int(bool(model.vocab_size))
    first, last = ends * (stage == 0), ends * (stage == plan.pipeline - 1)
    again = blocks if plan.recompute == "full" else 0
    each = _whole(tokens * model.d_model * size)

    def collective(name: str, operation: str, calls: int) -> Collective:
        return Collective(
            name=name,
            operation=operation,
            axis="tensor",
            ranks=plan.tensor,
            count=calls * plan.microbatches,
            each=each,
            algorithm=algorithm if operation == "all_reduce" else "ring",
        )

    forward, backward = blocks + again + first, blocks + last
    if not plan.sequence_parallel:
        return [
            collective("tensor-parallel forward", "all_reduce", forward),
            collective("tensor-parallel backward", "all_reduce", backward),
        ]
    # Each all-reduce falls into its halves, and the backward gathers the inputs once more.
    return [
        collective("sequence-parallel forward gathers", "all_gather", blocks + again + last),
        collective("sequence-parallel forward scatters", "reduce_scatter", forward),
        collective("sequence-parallel backward gathers", "all_gather", 2 * blocks + first + last),
        collective("sequence-parallel backward scatters", "reduce_scatter", backward),
    ]


def _experts(model: Shape, plan: Plan, tokens: int, size: Fraction, stage: int) -> list[Collective]:
    """Every token goes to its experts and comes back, forward and backward."""
    sparse = len(plan.stage_model(model, stage).expert_layers)
    chosen = model.experts.per_token if model.experts else 0
    each = _whole(tokens * chosen * model.d_model * size)
    again = 2 if plan.recompute == "full" else 1
    return [
        Collective(
            name=f"tokens {direction}",
            operation="all_to_all",
            axis="expert",
            ranks=plan.expert,
            count=sparse * plan.microbatches * calls,
            each=each,
        )
        for direction, calls in (
            ("to experts", again),
            ("from experts", again),
            ("to experts, backward", 1),
            ("from experts, backward", 1),
        )
    ]


def _context(model: Shape, plan: Plan, tokens: int, size: Fraction, stage: int) -> list[Collective]:
    """Ring attention: keys and values go once around, and in the backward with their gradients."""
    layers = len(plan.stage_model(model, stage).attention_layers or ())
    heads = max(1, model.kv_heads // plan.tensor) if model.heads else 0
    width = heads * (model.qk_dim + model.v_head_dim)
    if model.mla:
        width = model.mla.kv_rank + model.mla.rope_head_dim
    # A ring pass hands each device's block to every other: an all-gather of all blocks.
    whole = _whole(tokens * plan.context * width * size)
    again = 2 if plan.recompute != "none" else 1
    return [
        Collective(
            name=name,
            operation="all_gather",
            axis="context",
            ranks=plan.context,
            count=layers * plan.microbatches * passes,
            each=whole,
        )
        for name, passes in (("keys and values", again), ("keys, values and gradients", 2))
    ]


def _pipeline(
    model: Shape, plan: Plan, tokens: int, size: Fraction, stage: int
) -> list[Collective]:
    forward = plan.virtual_stages - (stage == plan.pipeline - 1)
    backward = plan.virtual_stages - (stage == 0)
    return [
        Collective(
            name=name,
            operation="send",
            axis="pipeline",
            ranks=plan.pipeline,
            count=calls * plan.microbatches,
            each=_hop(model, plan, tokens, size),
        )
        for name, calls in (
            ("activations to the next stage", forward),
            ("gradients to the previous stage", backward),
        )
    ]


def _boundaries(model: Shape, plan: Plan, tokens: int, size: Fraction) -> Breakdown:
    hop = _hop(model, plan, tokens, size) * plan.tensor * plan.context
    if not plan.sequence_parallel:
        hop = hop // plan.tensor
    chunks = plan.pipeline * plan.virtual_stages
    parts = []
    for left in range(chunks - 1 if plan.pipeline > 1 else 0):
        here, there = left % plan.pipeline, (left + 1) % plan.pipeline
        chunk = f", chunk {left // plan.pipeline}" if plan.virtual_stages > 1 else ""
        for name in (f"forward {here} to {there}{chunk}", f"backward {there} to {here}{chunk}"):
            parts.append(product(name, "B", microbatches=plan.microbatches, each=hop))
    return total("stage boundaries", "B", *parts)


def _hop(model: Shape, plan: Plan, tokens: int, size: Fraction) -> int | Fraction:
    """What one device hands to its neighbor: the stream, or its share of the sequence."""
    return _whole(tokens * model.d_model * size / (plan.tensor if plan.sequence_parallel else 1))


def _whole(value: int | Fraction) -> int | Fraction:
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value
