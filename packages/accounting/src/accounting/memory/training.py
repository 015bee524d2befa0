"""What training keeps on each device: weights, gradients, optimizer, activations, logits."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, Number, Sizes, product, total
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
        cut = matrix.tensor_ranks(plan.tensor, model.kv_heads)
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
    if plan.keeps_weights_whole():
        if lora[0]:
            raise ValueError(
                f"lora_rank is {lora[0]} with zero=3 and pipeline={plan.pipeline}, which is not "
                "modeled; give zero=1, or pipeline=1"
            )
        fullest = FsdpStage(model, plan, work, stage).fullest(plan.in_flight(stage))
        return replace(fullest, name=name)
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
    layers = plan.stage_model(model, stage).layers
    root, block = _groups(model, plan, stage)
    blocks = min(2, layers) if plan.reshard_after_forward else layers
    size = bytes_of(kind.cast_weights or kind.weights)
    return total(
        "gathered",
        "B",
        product("weights of the ends", "B", parameters=root, bytes=size),
        product("weights of blocks", "B", blocks=blocks, parameters=block, bytes=size),
        product("gradients of a block", "B", parameters=block, bytes=size),
        product("gradients being reduced", "B", parameters=block, bytes=bytes_of(kind.gradients)),
    )


def _groups(model: Shape, plan: Plan, stage: int) -> tuple[int, int]:
    """Return the parameters of FSDP's groups before sharding: the ends, and one block.

    A block's dense weights are gathered over all replicas, its experts over theirs.
    """
    here = plan.stage_model(model, stage)
    inside = replace(one_layer(here), vocab_size=0, positions=0, final_norm=False, encoder=None)
    block = sum(device_parameters(inside, alone(plan)))
    return max(0, sum(device_parameters(model, plan, stage)) - block * here.layers), block


# Note [FSDP2 under torch's pipeline schedules]
# torch.distributed.pipelining runs every backward of an FSDP2 module with
# set_requires_gradient_sync(False) and set_reshard_after_backward(False), and reduces once after
# the last one (`_PipelineStageBase.backward_maybe_with_nosync`, `perform_reduce_grad`). Therefore:
# - Gradients accumulate unsharded, in the reduction's dtype, from the first backward on.
# - A backward leaves all weights of the stage unsharded. With `reshard_after_forward` the next
#   forward reshards them block by block; without it they stay unsharded until the step ends.
# - So a stage is fullest at the start of a backward (all activations, two blocks gathered), at its
#   end (one block's activations, all weights and the buffer of the last all-gather), or when
#   gradients are reduced (all weights but those of a group, and the group's copy).


class FsdpStage:
    """What a pipeline stage of FSDP2 modules stores at the moments of a step.

    See Note [FSDP2 under torch's pipeline schedules].
    """

    def __init__(self, model: Shape, plan: Plan, work: Workload, stage: int) -> None:
        self.plan, self.kind = plan, work.kind
        here = plan.stage_model(model, stage)
        self.layers = here.layers
        self.ends, self.block = _groups(model, plan, stage)
        self.states = _states(model, plan, work.kind, stage, 0, ())
        self.kept = activations(model, plan, work, stage=stage)
        self.recomputed = one_block(model, plan, work) if plan.recompute == "full" else None
        self.flying = _flying(model, plan, work)
        table = split(here.vocab_size * here.embedding_dim, plan.tensor)
        self.table = table if stage == 0 else 0
        self.head_matrix = table if here.lm_head else 0
        head: dict[str, Any] = {"tokens": work.tokens(plan), "tensor": plan.tensor} | work.head
        last = stage == plan.pipeline - 1
        self.head = _head(model, plan, head) if last else None
        stream = {"tokens": work.tokens(plan), "d_model": model.d_model}
        size = bytes_of(work.kind.activations)
        self.stream = product("gradient of the stream", "B", **stream, bytes=size)

    def between_steps(self, *, reduced: bool) -> Breakdown:
        """Return the sharded states, with the gradients once they are `reduced`."""
        states = (s for s in self.states if reduced or s.name != "gradients")
        return total("states", "B", *states)

    def forward(self, alive: int, *, accumulated: bool, whole: bool) -> Breakdown:
        """Return the fuller moment of a forward: before the first block or after the last."""
        grown = self._gradients(accumulated)
        resharded = self.plan.reshard_after_forward
        last = self._moment(
            alive, self._gathered(2 if resharded else self.layers, not whole), grown
        )
        first = self._moment(alive - 1, self._gathered(self.layers if whole else 0), grown)
        return max(first, last, key=lambda moment: moment.total)

    def backward(self, alive: int, *, accumulated: bool, whole: bool) -> Breakdown:
        """Return the fullest moment of a backward, from the head to the embedding."""
        moments = self.start(alive, accumulated=accumulated, whole=whole)
        moments += self.end(alive, accumulated=accumulated, whole=whole)
        return max(moments, key=lambda moment: moment.total)

    def start(self, alive: int, *, accumulated: bool, whole: bool) -> list[Breakdown]:
        """Return the start of a backward: all activations, and the end of the model."""
        whole = whole or not self.plan.reshard_after_forward
        grown = self._gradients(accumulated)
        block = self._gathered(self.layers if whole else 2)
        moments = [self._moment(alive, block, grown, self.recomputed, self.flying)]
        if self.head:
            # At the head no block is gathered yet. Its gradient is computed in full before it is
            # added to the accumulated one; then the gradient of the logits is there, and their
            # log-softmax is not any more.
            ends = self._gathered(self.layers if whole else 0)
            fresh = self._fresh(self.head_matrix, accumulated)
            without = replace(self.head, parts=self.head.parts[:-1])
            moments.append(self._moment(alive, ends, grown, self.head))
            moments.append(self._moment(alive, ends, grown, fresh, without))
        return moments

    def end(self, alive: int, *, accumulated: bool, whole: bool) -> list[Breakdown]:
        """Return the end of a backward: in the first block, and in the embedding."""
        gathered = self._gathered(self.layers, self.plan.reshard_after_forward and not whole)
        inside = Fraction(alive - 1) + Fraction(1, self.layers)
        # The gradients of the first block come last.
        grown = self._gradients(
            True, missing=0 if accumulated else self.ends * bool(self.table) + self.block
        )
        more = (self._gradients(True), self._fresh(self.table, accumulated), self.stream)
        return [
            self._moment(inside, gathered, grown, self.recomputed, self.flying),
            self._moment(alive - 1, self._gathered(self.layers), *more),
        ]

    def reduction(self) -> list[Breakdown]:
        """Return the reductions of the last block, which is the first, and of the ends."""
        grown, size = self._gradients(True), bytes_of(self.kind.gradients)
        block = product("gradients being reduced", "B", parameters=self.block, bytes=size)
        ends = product(
            "gradients being reduced", "B", parameters=self.block + self.ends, bytes=size
        )
        others = split(self.block * self.layers, self.plan.replicas)
        reduced = product("gradients", "B", parameters=self.ends + others, bytes=size)
        return [
            self._moment(0, self._gathered(self.layers - 1), grown, block),
            self._moment(0, None, reduced, ends),
        ]

    def fullest(self, alive: int) -> Breakdown:
        """Return the fullest moment once gradients have accumulated."""
        whole = self.plan.schedule == "gpipe"
        moments = self.start(alive, accumulated=True, whole=whole)
        moments += self.end(alive, accumulated=True, whole=whole) + self.reduction()
        return max(moments, key=lambda moment: moment.total)

    def _gradients(self, accumulated: bool, missing: int = 0) -> Breakdown:
        count = (self.ends + self.block * self.layers - missing) * accumulated
        return product("gradients", "B", parameters=count, bytes=bytes_of(self.kind.gradients))

    def _fresh(self, count: int, accumulated: bool) -> Breakdown:
        # Under mixed precision the first gradient is cast, so that it is there twice as well.
        there = accumulated or self.kind.cast_weights is not None
        return product("fresh gradient", "B", parameters=count * there, bytes=self._size)

    @property
    def _size(self) -> Fraction:
        return bytes_of(self.kind.cast_weights or self.kind.weights)

    def _gathered(self, blocks: int, buffer: bool = False) -> Breakdown:
        blocks, size = min(blocks, self.layers), self._size
        several: Sizes = {"blocks": blocks, "parameters": self.block, "bytes": size}
        return total(
            "gathered",
            "B",
            product("weights of the ends", "B", parameters=self.ends, bytes=size),
            product("weights of blocks", "B", **several),
            product("buffer of the last gather", "B", parameters=self.block * buffer, bytes=size),
        )

    def _moment(self, alive: Fraction | int, *more: Breakdown | None) -> Breakdown:
        if self.plan.offload == "activations":
            alive = min(Fraction(alive), Fraction(1, self.layers))
        states = (s for s in self.states if s.name != "gradients")
        kept = times("activations", self.kept, in_flight=Fraction(alive))
        return total("moment", "B", *states, kept, *more)


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
