"""What training keeps on each device: weights, gradients, optimizer, activations, logits."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, Number, product, total
from accounting.memory.activations import activations, flying_gradients, head_activations
from accounting.model.matrices import all_matrices, matrices
from accounting.model.shape import Shape
from accounting.parameters import lora_parameters
from accounting.plan import Plan, fitted, split
from accounting.precision import Precision, bytes_of, recipe
from accounting.workload import WORKLOAD, Workload, workload


@checks.entry(*WORKLOAD, stage=0)
def training_memory(
    model: Shape,
    plan: Plan | None = None,
    work: Workload | None = None,
    *,
    stage: int | None = None,
    lora_rank: int = 0,
    lora_targets: Sequence[str] | None = None,
    **run: Any,
) -> Breakdown:
    """Bytes on one device with everything alive at once, of the fullest pipeline stage or of
    `stage`.

    `run` are the fields of a `Workload`; `batch` is the whole batch, in sequences; 0 asks for the
    model's states alone, as they lie between two steps. With ZeRO-3 a step also holds what it
    gathers and reduces. `lora_rank` freezes the weights and trains low-rank updates of all matrices
    named in `lora_targets` (query and value), by the names that `parameters` prints.
    """
    work = workload(work, run)
    if lora_targets is not None and not lora_rank:
        raise ValueError(f"lora_targets is {lora_targets!r} with lora_rank=0; give a rank")
    plan = fitted(plan, model, batch=work.batch, seq=work.seq)
    stages = range(plan.pipeline) if stage is None else (stage,)
    lora = lora_rank, ("query", "value") if lora_targets is None else lora_targets
    every = (_stage_memory(model, plan, work, each, lora) for each in stages)
    return max(every, key=lambda memory: memory.total)


@checks.entry(count=0, zero=(0, 1, 2, 3))
def model_states(
    count: int,
    *,
    data: int = 1,
    zero: int = 0,
    precision: str | Precision = "mixed_bf16",
    offload: bool = False,
) -> Breakdown:
    """Weights, gradients and optimizer of `count` parameters over `data` ranks, by ZeRO stage.

    Per rank: (w + g + o)P, (w + g)P + oP/N, wP + (g + o)P/N, (w + g + o)P/N for stages 0 to 3, each
    share rounded up to a whole parameter (Rajbhandari et al. 2020, section 5).
    """
    kind = recipe(precision)
    share = split(count, data)

    def held(name: str, sharded_from: int, size: Fraction) -> Breakdown:
        return product(name, "B", parameters=share if zero >= sharded_from else count, bytes=size)

    master = bytes_of(kind.master) if kind.master else Fraction(0)
    kept = (held("master weights", 1, master), held("moments", 1, kind.moment_bytes))
    return total(
        "model states",
        "B",
        held("weights", 3, bytes_of(kind.weights)),
        held("gradients", 2, bytes_of(kind.gradients)),
        total("optimizer", "B", *(() if offload else kept)),
    )


def device_parameters(model: Shape, plan: Plan, stage: int = 0) -> tuple[int, int]:
    """Parameters on one device before ZeRO shards them: all but the experts, and the experts."""
    dense = routed = 0
    for matrix in all_matrices(plan.stage_model(model, stage)):
        # With fewer heads of keys and values than devices, each device keeps a copy of one.
        ranks = {"none": 1, "heads": min(plan.tensor, model.kv_heads)}
        cut = ranks.get(matrix.split, plan.tensor)
        if matrix.routed:
            routed += split(matrix.size, cut * plan.expert)
        else:
            dense += split(matrix.size, cut)
    return dense, routed


def one_layer(model: Shape) -> Shape:
    """A single layer of `model`, of the kind that holds most, without a window."""
    # A layer of each kind that there is.
    kinds: dict[tuple[object, ...], int] = {}
    for i in range(model.layers):
        mixed = tuple(i in mixer.layers for mixer in model.mixers)
        has = (i in (model.attention_layers or ()), i in (model.mlp_layers or ()))
        kinds.setdefault((*has, i in model.expert_layers, mixed), i)
    return max(
        (_layer(model, layer) for layer in kinds.values()),
        key=lambda one: sum(matrix.size for matrix in matrices(one)),
    )


def _layer(model: Shape, layer: int) -> Shape:
    def has(layers: Iterable[int] | None) -> tuple[int, ...]:
        return (0,) if layer in (layers or ()) else ()

    experts = model.experts if has(model.expert_layers) else None
    return replace(
        model,
        layers=1,
        experts=replace(experts, layers=(0,)) if experts else None,
        window=None,
        attention_layers=has(model.attention_layers),
        mlp_layers=has(model.mlp_layers),
        mixers=tuple(replace(m, layers=(0,)) for m in model.mixers if has(m.layers)),
        extra=tuple(replace(m, layers=(0,)) for m in model.extra if has(m.layers)),
    )


def _stage_memory(
    model: Shape, plan: Plan, work: Workload, stage: int, lora: tuple[int, Sequence[str]]
) -> Breakdown:
    kind = work.kind
    states = _states(model, plan, kind, stage, *lora)
    where = f"stage {stage} of {plan.pipeline}, " if plan.pipeline > 1 else ""
    name = f"training memory of {model.name}, {where}{kind.name}"
    if not work.batch:
        return total(name, "B", *states)
    held = Fraction(plan.in_flight(stage), plan.virtual_stages)
    if plan.offload == "activations":
        held = Fraction(0)
    head: dict[str, Any] = {"tokens": work.tokens(plan), "tensor": plan.tensor} | work.head
    return total(
        name,
        "B",
        *states,
        times("activations", activations(model, plan, work, stage=stage), in_flight=held),
        one_block(model, plan, work) if plan.recompute == "full" else None,
        _gathered(model, plan, kind, stage),
        _head(model, plan, head) if stage == plan.pipeline - 1 else _flying(model, plan, work),
    )


def _head(model: Shape, plan: Plan, head: dict[str, Any]) -> Breakdown:
    """The end of the model; where all forwards come first, its logits are kept of each of them."""
    end = head_activations(model, **head)
    often = plan.microbatches if plan.schedule == "gpipe" and plan.pipeline > 1 else 1
    parts = (
        part if "gradient" in part.name else times(part.name, part, micro_batches=often)
        for part in end
    )
    return end if often == 1 else total(end.name, "B", *parts)


def _flying(model: Shape, plan: Plan, work: Workload) -> Breakdown:
    """Before the last stage a backward is fullest inside a block, where gradients of what it works
    on are there, and the one that came from the next stage."""
    tokens, size = work.tokens(plan), bytes_of(work.kind.activations)
    keys = None if work.flash else work.seq
    inside = max(flying_gradients(model, tokens=tokens, tensor=plan.tensor, keys=keys))
    return total(
        "gradients in flight",
        "B",
        product("inside a block", "B", numbers=inside, bytes=size),
        product("from the next stage", "B", tokens=tokens, d_model=model.d_model, bytes=size),
    )


def one_block(model: Shape, plan: Plan, work: Workload) -> Breakdown:
    """While a block is recomputed, what it saves is there as well."""
    block = activations(
        one_layer(model),
        replace(alone(plan), recompute="none", offload="none"),
        replace(work, fused_norm=True, fused_projections=False, fused_gate=False),
    )
    return total("one block recomputed", "B", *block.parts)


def alone(plan: Plan) -> Plan:
    """The plan of a single layer: one stage."""
    return replace(plan, pipeline=1, virtual_stages=1, schedule="1f1b", devices=0)


def _gathered(model: Shape, plan: Plan, kind: Precision, stage: int) -> Breakdown | None:
    """What ZeRO-3 holds whole for a while: weights in use and the next block's, and gradients.

    FSDP2 keeps the root's weights (embedding, final norm, head) gathered, works on one block while
    it prefetches the next, and has one block's gradients whole, beside the copy that it reduces.
    """
    if plan.zero < 3 or plan.replicas == 1:
        return None
    here = plan.stage_model(model, stage)
    inside = replace(one_layer(here), vocab_size=0, positions=0, final_norm=False, encoder=None)
    # A block's dense weights are gathered over all replicas, its experts over theirs.
    block = sum(device_parameters(inside, alone(plan)))
    blocks = min(2, here.layers) if plan.reshard_after_forward else here.layers
    root = max(0, sum(device_parameters(model, plan, stage)) - block * here.layers)
    size = bytes_of(kind.cast_weights or kind.weights)
    return total(
        "gathered",
        "B",
        product("weights of the ends", "B", parameters=root, bytes=size),
        product("weights of blocks", "B", blocks=blocks, parameters=block, bytes=size),
        product("gradients of a block", "B", parameters=block, bytes=size),
        product("gradients being reduced", "B", parameters=block, bytes=bytes_of(kind.gradients)),
    )


def _states(
    model: Shape, plan: Plan, kind: Precision, stage: int, rank: int, targets: Sequence[str]
) -> list[Breakdown]:
    dense, routed = device_parameters(model, plan, stage)

    def states(count: int, ranks: int) -> Breakdown:
        offload = plan.offload == "optimizer"
        return model_states(count, data=ranks, zero=plan.zero, precision=kind, offload=offload)

    if rank:
        held = [split(dense, plan.replicas), split(routed, plan.expert_replicas)]
        frozen = sum(held) if plan.zero == 3 else dense + routed
        update = split(_lora(plan.stage_model(model, stage), rank, targets), plan.tensor)
        return [
            product("frozen weights", "B", parameters=frozen, bytes=bytes_of(kind.weights)),
            total("adapters", "B", *states(update, plan.replicas).parts),
        ]
    if not routed:
        return list(states(dense, plan.replicas).parts)
    # Dense weights and experts are sharded over groups of their own.
    both = {
        "dense": states(dense, plan.replicas),
        "experts": states(routed, plan.expert_replicas),
    }
    return [
        total(name, "B", *(replace(s[name], name=of) for of, s in both.items() if name in s))
        for name in ("weights", "gradients", "optimizer")
    ]


def _lora(model: Shape, rank: int, targets: Sequence[str]) -> int:
    if not isinstance(targets, list | tuple) or not targets:
        raise TypeError(f"lora_targets is {targets!r}; it must list names, such as ('query',)")
    found = [m for m in matrices(model) if m.kind == "matrix" and m.layers is not None]
    for target in targets:
        checks.choice("one of lora_targets", target, dict.fromkeys(m.name for m in found))
    count = 0
    for m in (m for m in found if m.name in targets):
        if rank > min(m.rows, m.columns):
            raise ValueError(
                f"lora_rank is {rank}; {m.name} of {m.part} is {m.rows} x {m.columns}, and an "
                "update of that rank is not low"
            )
        count += m.times * m.copies * lora_parameters(m.rows, m.columns, rank)
    return count


def times(name: str, part: Breakdown, **factor: Number) -> Breakdown | None:
    """A part that is there several times, each of its leaves multiplied by a named factor."""
    ((label, count),) = factor.items()
    if not count:
        return None

    def scaled(node: Breakdown) -> Breakdown:
        if node.factors:
            return replace(node, factors=((label.replace("_", " "), count), *node.factors))
        return replace(node, parts=tuple(map(scaled, node.parts)))

    return replace(part if count == 1 else scaled(part), name=name, note="")
