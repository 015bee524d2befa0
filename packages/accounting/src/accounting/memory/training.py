"""What training keeps on each device: weights, gradients, optimizer, activations, logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from accounting import checks
from accounting.breakdown import Breakdown, Number, product, total
from accounting.memory.activations import activations, head_activations
from accounting.model.matrices import all_matrices, matrices
from accounting.model.shape import Shape
from accounting.parameters import lora_parameters
from accounting.plan import Plan, split
from accounting.precision import Precision, bytes_of, recipe


def training_memory(
    model: Shape,
    plan: Plan | None = None,
    *,
    batch: int,
    seq: int,
    precision: str | Precision = "fp32",
    flash: bool = True,
    dropout: bool = False,
    fused_gate: bool = False,
    stage: int | None = None,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = ("query", "value"),
) -> Breakdown:
    """Bytes on one device with everything alive at once, of the fullest pipeline stage or of
    `stage`.

    `batch` is the whole batch, in sequences; 0 asks for the model's states alone, as they lie
    between two steps. With ZeRO-3 a step also holds what it gathers and reduces. `lora_rank`
    freezes the weights and trains low-rank updates of `lora_targets`, by the names that
    `parameters` prints.
    """
    plan = plan or Plan()
    checks.whole("seq", seq)
    checks.whole("lora_rank", lora_rank, least=0)
    plan.check(model, batch=batch, seq=seq)
    kind = recipe(precision)
    if stage is not None:
        return _stage_memory(
            model,
            plan,
            batch,
            seq,
            kind,
            flash,
            dropout,
            fused_gate,
            stage,
            lora_rank,
            lora_targets,
        )
    every = (
        _stage_memory(
            model, plan, batch, seq, kind, flash, dropout, fused_gate, each, lora_rank, lora_targets
        )
        for each in range(plan.pipeline)
    )
    return max(every, key=lambda memory: memory.total)


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
    checks.whole("count", count, least=0)
    checks.choice("zero", checks.whole("zero", zero, least=0), (0, 1, 2, 3))
    kind = recipe(precision)
    share = split(count, checks.whole("data", data))

    def held(sharded_from: int) -> int:
        return share if zero >= sharded_from else count

    master = bytes_of(kind.master) if kind.master else Fraction(0)
    here = 0 if offload else 1
    return total(
        "model states",
        "B",
        product("weights", "B", parameters=held(3), bytes=bytes_of(kind.weights)),
        product("gradients", "B", parameters=held(2), bytes=bytes_of(kind.gradients)),
        total(
            "optimizer",
            "B",
            product("master weights", "B", parameters=here * held(1), bytes=master),
            product("moments", "B", parameters=here * held(1), bytes=kind.moment_bytes),
        ),
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
    return max(
        (_layer(model, layer) for layer in _kinds(model)),
        key=lambda one: sum(matrix.size for matrix in matrices(one)),
    )


def _kinds(model: Shape) -> list[int]:
    """A layer of each kind that there is."""
    kinds: dict[tuple[object, ...], int] = {}
    attention, mlp = set(model.attention_layers or ()), set(model.mlp_layers or ())
    for i in range(model.layers):
        mixed = tuple(i in mixer.layers for mixer in model.mixers)
        kinds.setdefault((i in attention, i in mlp, i in model.expert_layers, mixed), i)
    return list(kinds.values())


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
        mixers=tuple(replace(m, layers=(0,)) for m in model.mixers if layer in m.layers),
        extra=tuple(replace(m, layers=(0,)) for m in model.extra if m.layers and layer in m.layers),
        encoder=model.encoder,
    )


def _stage_memory(
    model: Shape,
    plan: Plan,
    batch: int,
    seq: int,
    kind: Precision,
    flash: bool,
    dropout: bool,
    fused_gate: bool,
    stage: int,
    lora_rank: int,
    lora_targets: Sequence[str],
) -> Breakdown:
    states = _states(model, plan, kind, stage, lora_rank, lora_targets)
    where = f"stage {stage} of {plan.pipeline}, " if plan.pipeline > 1 else ""
    name = f"training memory of {model.name}, {where}{kind.name}"
    if not batch:
        return total(name, "B", *states)
    one = activations(
        model,
        plan,
        batch=batch,
        seq=seq,
        precision=kind,
        flash=flash,
        dropout=dropout,
        fused_gate=fused_gate,
        stage=stage,
    )
    held = Fraction(plan.in_flight(stage), plan.virtual_stages)
    sequences = batch // (plan.data * plan.microbatches)
    tokens = sequences * (seq // plan.context)
    working = None
    if plan.recompute == "full":
        working = _one_block(model, plan, batch, seq, kind, flash, dropout)
    on_host = plan.offload == "activations" and plan.recompute == "full"
    last = stage == plan.pipeline - 1
    return total(
        name,
        "B",
        *states,
        times("activations", one, in_flight=0 if on_host else held),
        working,
        _gathered(model, plan, kind, stage),
        head_activations(model, tokens=tokens, precision=kind, tensor=plan.tensor)
        if last
        else None,
    )


def _gathered(model: Shape, plan: Plan, kind: Precision, stage: int) -> Breakdown | None:
    """What ZeRO-3 holds whole for a while: weights in use and the next block's, and gradients.

    FSDP2 keeps the root's weights (embedding, final norm, head) gathered, works on one block while
    it prefetches the next, and has one block's gradients whole, beside the copy that it reduces.
    """
    if plan.zero < 3 or plan.replicas == 1:
        return None
    dense, routed = device_parameters(model, plan, stage)
    here = plan.stage_model(model, stage)
    one = one_layer(here)
    ends = replace(one, vocab_size=0, positions=0, final_norm=False, encoder=None)
    # A block's dense weights are gathered over all replicas, its experts over theirs.
    block = sum(
        device_parameters(
            ends, replace(plan, pipeline=1, virtual_stages=1, schedule="1f1b", devices=0)
        )
    )
    blocks = min(2, here.layers) if plan.reshard_after_forward else here.layers
    root = max(0, dense + routed - block * here.layers)
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
    model: Shape,
    plan: Plan,
    kind: Precision,
    stage: int,
    lora_rank: int,
    lora_targets: Sequence[str],
) -> list[Breakdown]:
    dense, routed = device_parameters(model, plan, stage)
    offload = plan.offload == "optimizer"

    def states(count: int, ranks: int) -> Breakdown:
        return model_states(count, data=ranks, zero=plan.zero, precision=kind, offload=offload)

    if lora_rank:
        held = [split(dense, plan.replicas), split(routed, plan.expert_replicas)]
        frozen = sum(held) if plan.zero == 3 else dense + routed
        update = _lora(plan.stage_model(model, stage), lora_rank, lora_targets)
        return [
            product("frozen weights", "B", parameters=frozen, bytes=bytes_of(kind.weights)),
            total("adapters", "B", *states(split(update, plan.tensor), plan.replicas).parts),
        ]
    both = (states(dense, plan.replicas), states(routed, plan.expert_replicas))
    if not routed:
        return list(both[0].parts)
    # Dense weights and experts are sharded over groups of their own.
    return [
        total(
            name,
            "B",
            *(
                Breakdown(label, "B", parts=part[name].parts, factors=part[name].factors)
                for label, part in (("dense", both[0]), ("experts", both[1]))
                if name in part
            ),
        )
        for name in ("weights", "gradients", "optimizer")
    ]


def _lora(model: Shape, rank: int, targets: Sequence[str]) -> int:
    found = {m.name: m for m in matrices(model) if m.kind == "matrix" and m.layers}
    for target in targets:
        if target not in found:
            raise ValueError(f"lora_targets names {target!r}; there are {', '.join(found)}")
    return sum(
        found[target].times
        * found[target].copies
        * lora_parameters(found[target].rows, found[target].columns, rank)
        for target in targets
    )


def _one_block(
    model: Shape,
    plan: Plan,
    batch: int,
    seq: int,
    kind: Precision,
    flash: bool,
    dropout: bool,
) -> Breakdown:
    """While a block is recomputed, what it saves is there as well."""
    whole = replace(
        plan,
        recompute="none",
        offload="none",
        pipeline=1,
        virtual_stages=1,
        schedule="1f1b",
        devices=0,
    )
    block = activations(
        one_layer(model), whole, batch=batch, seq=seq, precision=kind, flash=flash, dropout=dropout
    )
    return total("one block recomputed", "B", *block.parts)


def times(name: str, part: Breakdown, **factor: Number) -> Breakdown | None:
    """A part that is there several times, each of its leaves multiplied by a named factor."""
    ((label, count),) = factor.items()
    if not count:
        return None
    if count == 1:
        return Breakdown(name, part.unit, parts=part.parts)

    def scaled(node: Breakdown) -> Breakdown:
        if node.factors:
            factors = ((label.replace("_", " "), count), *node.factors)
            return Breakdown(node.name, node.unit, factors=factors, note=node.note)
        return Breakdown(node.name, node.unit, parts=tuple(map(scaled, node.parts)))

    return Breakdown(name, part.unit, parts=tuple(map(scaled, part.parts)))
