"""What each parallelism exchanges in one iteration, collective by collective."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from accounting import checks
from accounting.breakdown import Breakdown, product, total
from accounting.memory.training import device_parameters
from accounting.model.shape import Shape
from accounting.plan import Plan, fitted
from accounting.precision import bytes_of
from accounting.time.collective import Collective, Communication


@checks.entry()
def communication(
    model: Shape,
    plan: Plan | None = None,
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
    plan = fitted(plan, model, batch=batch, seq=seq)
    checks.choice("algorithm", algorithm, ("ring", "tree"))
    tokens = batch // (plan.data * plan.microbatches) * (seq // plan.context)
    size, here = bytes_of(activations), plan.stage_model(model, stage)
    found = [*_states(model, plan, bytes_of(weights), bytes_of(gradients), stage)]
    boundaries = total("stage boundaries", "B")
    if batch:
        stream = tokens * model.d_model * size
        # What one device hands to its neighbor: the stream, or its share of the sequence.
        hop = _whole(stream / (plan.tensor if plan.sequence_parallel else 1))
        found += _tensor(here, model, plan, _whole(stream), stage)
        found += _experts(here, plan, stream)
        found += _context(here, model, plan, tokens * size)
        found += _pipeline(plan, hop, stage)
        boundaries = _boundaries(plan, hop)
    kept = (c for c in found if c.ranks > 1 and c.count and c.each)
    shaped = (
        replace(c, algorithm=algorithm)
        if c.operation == "all_reduce" and c.axis != "pipeline"
        else c
        for c in kept
    )
    return Communication(name=model.name, collectives=tuple(shaped), boundaries=boundaries)


def _states(
    model: Shape, plan: Plan, weight: Fraction, gradient: Fraction, stage: int
) -> Iterator[Collective]:
    """Data parallelism: gradients all-reduced, or with ZeRO sharded and gathered back."""
    dense, routed = device_parameters(model, plan, stage)
    # Sharded gradients leave after every micro-batch; replicated ones accumulate first.
    often = plan.microbatches if plan.zero >= 2 else 1
    reduce = "reduce_scatter" if plan.zero else "all_reduce"
    gathers = often * (2 if plan.reshard_after_forward else 1)
    if plan.zero == 3 and plan.pipeline > 1:
        # See Note [FSDP2 under torch's pipeline schedules] in memory/training.py: gradients
        # accumulate, and a backward leaves the weights whole for the forward that follows.
        often = 1
        gathers = plan.microbatches + 1 if plan.reshard_after_forward else 1
    for what, count, ranks in (
        ("", dense, plan.replicas),
        (" of experts", routed, plan.expert_replicas),
    ):
        rows: list[tuple[str, str, int, Fraction]] = [("gradients", reduce, often, gradient)]
        if plan.zero in (1, 2):
            rows.append(("updated weights", "all_gather", 1, weight))
        if plan.zero == 3:
            rows.append(("weights", "all_gather", gathers, weight))
        for name, operation, calls, size in rows:
            yield _over("data", ranks, name + what, operation, calls, count * size)
    if model.tied and plan.pipeline > 1 and stage in (0, plan.pipeline - 1):
        table = Fraction(model.vocab_size * model.embedding_dim, plan.tensor) * gradient
        yield _over("pipeline", 2, "gradients of the tied embedding", "all_reduce", 1, table)


def _tensor(
    here: Shape, model: Shape, plan: Plan, each: int | Fraction, stage: int
) -> Iterator[Collective]:
    """Megatron's operators f and g: after the attention and after the MLP, forward and backward."""
    # Each attention, mixer and MLP ends in a sum over the devices; side by side they share one.
    mixed = {i for m in here.mixers for i in m.layers} | set(here.attention_layers or ())
    fed = set(here.mlp_layers or ()) | here.expert_layers
    blocks = len(mixed | fed) if model.parallel_block else len(mixed) + len(fed)
    ends = int(bool(model.vocab_size))
    first, last = ends * (stage == 0), ends * (stage == plan.pipeline - 1)
    again = blocks if plan.recompute == "full" else 0
    forward, backward = blocks + again + first, blocks + last
    rows = [
        ("tensor-parallel forward", "all_reduce", forward),
        ("tensor-parallel backward", "all_reduce", backward),
    ]
    if plan.sequence_parallel:
        # Each all-reduce falls into its halves, and the backward gathers the inputs once more.
        rows = [
            ("sequence-parallel forward gathers", "all_gather", blocks + again + last),
            ("sequence-parallel forward scatters", "reduce_scatter", forward),
            ("sequence-parallel backward gathers", "all_gather", 2 * blocks + first + last),
            ("sequence-parallel backward scatters", "reduce_scatter", backward),
        ]
    for name, operation, calls in rows:
        yield _over("tensor", plan.tensor, name, operation, calls * plan.microbatches, each)


def _experts(here: Shape, plan: Plan, stream: Fraction) -> Iterator[Collective]:
    """Every token goes to its experts and comes back, forward and backward."""
    often = len(here.expert_layers) * plan.microbatches
    each = stream * (here.experts.per_token if here.experts else 0)
    for when, passes in (("", 2 if plan.recompute == "full" else 1), (", backward", 1)):
        for way in ("to", "from"):
            name, calls = f"tokens {way} experts{when}", often * passes
            yield _over("expert", plan.expert, name, "all_to_all", calls, each)


def _context(here: Shape, model: Shape, plan: Plan, token: Fraction) -> Iterator[Collective]:
    """Ring attention: keys and values go once around, and in the backward with their gradients."""
    heads = max(1, model.kv_heads // plan.tensor) if model.heads else 0
    width = heads * (model.qk_dim + model.v_head_dim)
    if model.mla:
        width = model.mla.kv_rank + model.mla.rope_head_dim
    # A ring pass hands each device's block to every other: an all-gather of all blocks.
    whole = token * plan.context * width
    often = len(here.attention_layers or ()) * plan.microbatches
    again = 2 if plan.recompute != "none" else 1
    for name, passes in (("keys and values", again), ("keys, values and gradients", 2)):
        yield _over("context", plan.context, name, "all_gather", often * passes, whole)


def _pipeline(plan: Plan, hop: int | Fraction, stage: int) -> Iterator[Collective]:
    forward = plan.virtual_stages - (stage == plan.pipeline - 1)
    backward = plan.virtual_stages - (stage == 0)
    for name, calls in (
        ("activations to the next stage", forward),
        ("gradients to the previous stage", backward),
    ):
        yield _over("pipeline", plan.pipeline, name, "send", calls * plan.microbatches, hop)


def _boundaries(plan: Plan, hop: int | Fraction) -> Breakdown:
    each = hop * plan.tensor * plan.context
    if not plan.sequence_parallel:
        each = each // plan.tensor
    parts = []
    for left in range(plan.pipeline * plan.virtual_stages - 1 if plan.pipeline > 1 else 0):
        here, there = left % plan.pipeline, (left + 1) % plan.pipeline
        chunk = f", chunk {left // plan.pipeline}" if plan.virtual_stages > 1 else ""
        for name in (f"forward {here} to {there}{chunk}", f"backward {there} to {here}{chunk}"):
            parts.append(product(name, "B", microbatches=plan.microbatches, each=each))
    return total("stage boundaries", "B", *parts)


def _over(
    axis: str, ranks: int, name: str, operation: str, calls: int, each: int | Fraction
) -> Collective:
    about = {"axis": axis, "name": name, "operation": operation}
    return Collective(ranks=ranks, count=calls, each=_whole(each), **about)


def _whole(value: int | Fraction) -> int | Fraction:
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value
