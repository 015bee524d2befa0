"""Memory of training per device: weights, gradients, optimizer, activations and logits."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, Number, Sizes, product, total
from accounting.memory.activations import activations, gradients_in_flight, head_activations
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
    """Return the bytes on one device if all tensors are alive at once, for the fullest stage.

    `stage` selects one pipeline stage. `run` are the fields of a `Workload`; `batch` is the whole
    batch in sequences, and 0 selects the model states between two steps. With ZeRO-3 the result
    includes the weights and gradients that are gathered and reduced during a step. `lora_rank`
    freezes the weights and trains low-rank updates of all matrices in `lora_targets` (the default
    is query and value); `parameters` prints their names.
    """
    work = workload(work, run)
    if lora_targets is not None and not lora_rank:
        raise ValueError(f"expected lora_rank >= 1 with lora_targets={lora_targets!r}, got 0")
    plan = fitted(plan, model, batch=work.batch, seq=work.seq)
    stages = distinct_stages(model, plan) if stage is None else [stage]
    lora = lora_rank, ("query", "value") if lora_targets is None else lora_targets
    every = (_stage_memory(model, plan, work, index, lora) for index in stages)
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
    """Return weights, gradients and optimizer of `count` parameters over `data` ranks.

    Per rank: (w + g + o)P, (w + g)P + oP/N, wP + (g + o)P/N, (w + g + o)P/N for ZeRO stages 0 to 3,
    with each shard rounded up to an integer (Rajbhandari et al. 2020, section 5).
    """
    kind = recipe(precision)
    shard = split(count, data)

    def state(name: str, sharded_from: int, size: Fraction) -> Breakdown:
        return product(name, "B", parameters=shard if zero >= sharded_from else count, bytes=size)

    master = bytes_of(kind.master) if kind.master else Fraction(0)
    optimizer_states = (state("master weights", 1, master), state("moments", 1, kind.moment_bytes))
    return total(
        "model states",
        "B",
        state("weights", 3, bytes_of(kind.weights)),
        state("gradients", 2, bytes_of(kind.gradients)),
        total("optimizer", "B", *(() if offload else optimizer_states)),
    )


def device_parameters(model: Shape, plan: Plan, stage: int = 0) -> tuple[int, int]:
    """Return the parameters per device before ZeRO: all except experts, and the experts."""
    dense = routed = 0
    for matrix in all_matrices(plan.stage_model(model, stage)):
        cut = matrix.tensor_ranks(plan.tensor, model.kv_heads)
        if matrix.routed:
            routed += split(matrix.size, cut * plan.expert)
        else:
            dense += split(matrix.size, cut)
    return dense, routed


def distinct_stages(model: Shape, plan: Plan) -> list[int]:
    """Return the first of all stages with the same kinds of layers and the same ends.

    The other stages of the same kind have at most as many micro-batches in flight, so one of the
    returned stages is the fullest.
    """
    kinds = _layer_kinds(model)
    first: dict[Hashable, int] = {}
    for stage in range(plan.pipeline):
        counts = Counter(kinds[layer] for layer in plan.stage_layers(model, stage))
        ends = stage == 0, stage == plan.pipeline - 1
        first.setdefault((frozenset(counts.items()), ends), stage)
    return list(first.values())


@lru_cache
def _layer_kinds(model: Shape) -> tuple[tuple[bool, ...], ...]:
    """Return for each layer which of attention, MLP, experts, window and so on it has."""
    parts: list[Iterable[int]] = [
        model.attention_layers or (),
        model.mlp_layers or (),
        model.expert_layers,
        model.windowed_layers,
        *(mixer.layers for mixer in model.mixers),
        *(matrix.layers or () for matrix in model.extra),
    ]
    sets = [frozenset(part) for part in parts]
    return tuple(tuple(layer in part for part in sets) for layer in range(model.layers))


@lru_cache
def one_layer(model: Shape) -> Shape:
    """Return the largest kind of layer of `model` as a model of one layer without a window."""
    kinds = _layer_kinds(model)
    first = {kind: kinds.index(kind) for kind in kinds}
    return max(
        (_layer(model, layer) for layer in first.values()),
        key=lambda layer_model: sum(matrix.size for matrix in matrices(layer_model)),
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
                f"LoRA with zero=3 and pipeline={plan.pipeline} is not modeled, got "
                f"lora_rank={lora[0]}; pass zero=1 or pipeline=1"
            )
        fullest = FsdpStage(model, plan, work, stage).fullest(plan.in_flight(stage))
        return replace(fullest, name=name)
    in_flight = Fraction(plan.in_flight(stage), plan.virtual_stages)
    if plan.offload == "activations":
        in_flight = Fraction(0)
    head: dict[str, Any] = {"tokens": work.tokens(plan), "tensor": plan.tensor} | work.head(model)
    return total(
        name,
        "B",
        *states,
        times("activations", activations(model, plan, work, stage=stage), in_flight=in_flight),
        one_block(model, plan, work) if plan.recompute == "full" else None,
        _gathered(model, plan, kind, stage),
        _head(model, plan, head)
        if stage == plan.pipeline - 1
        else _temporary_gradients(model, plan, work),
    )


def _head(model: Shape, plan: Plan, head: dict[str, Any]) -> Breakdown:
    """Return the end of the model; GPipe saves the logits of every micro-batch."""
    end = head_activations(model, **head)
    often = plan.microbatches if plan.schedule == "gpipe" and plan.pipeline > 1 else 1
    parts = (
        part if "gradient" in part.name else times(part.name, part, micro_batches=often)
        for part in end
    )
    return end if often == 1 else total(end.name, "B", *parts)


def _temporary_gradients(model: Shape, plan: Plan, work: Workload) -> Breakdown:
    """Return the temporary gradients of a stage that is not the last one.

    A backward peaks inside a block, where the gradients of the tensors in use are alive together
    with the gradient that the next stage sent.
    """
    tokens, size = work.tokens(plan), bytes_of(work.kind.activations)
    keys = None if work.flash else work.seq
    inside = max(gradients_in_flight(model, tokens=tokens, tensor=plan.tensor, keys=keys))
    return total(
        "gradients in flight",
        "B",
        product("inside a block", "B", numbers=inside, bytes=size),
        product("from the next stage", "B", tokens=tokens, d_model=model.d_model, bytes=size),
    )


def one_block(model: Shape, plan: Plan, work: Workload) -> Breakdown:
    """Return the saved tensors of a block, which are alive while the block is recomputed."""
    block = activations(
        one_layer(model),
        replace(alone(plan), recompute="none", offload="none"),
        replace(work, fused_norm=True, fused_projections=False, fused_gate=False),
    )
    return total("one block recomputed", "B", *block.parts)


def alone(plan: Plan) -> Plan:
    """Return the plan without pipeline stages, for the memory of a single layer."""
    return replace(plan, pipeline=1, virtual_stages=1, schedule="1f1b", devices=0)


def _gathered(model: Shape, plan: Plan, kind: Precision, stage: int) -> Breakdown | None:
    """Return the unsharded tensors of ZeRO-3: weights of two blocks and of the ends, and gradients.

    FSDP2 keeps the root's weights (embedding, final norm, head) gathered, computes one block while
    it prefetches the next, and has the gradients of one block besides the copy that it reduces.
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
    """Return the unsharded parameters of FSDP's two kinds of groups: the ends, and one block.

    All replicas shard a block's dense weights; the ranks with the same experts shard its experts.
    """
    stage_model = plan.stage_model(model, stage)
    inside = replace(
        one_layer(stage_model), vocab_size=0, positions=0, final_norm=False, encoder=None
    )
    block = sum(device_parameters(inside, alone(plan)))
    return max(0, sum(device_parameters(model, plan, stage)) - block * stage_model.layers), block


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
    """The memory of a pipeline stage of FSDP2 modules at the moments of a step.

    See Note [FSDP2 under torch's pipeline schedules].
    """

    def __init__(self, model: Shape, plan: Plan, work: Workload, stage: int) -> None:
        self.plan, self.kind = plan, work.kind
        stage_model = plan.stage_model(model, stage)
        self.layers = stage_model.layers
        self.ends, self.block = _groups(model, plan, stage)
        self.states = _states(model, plan, work.kind, stage, 0, ())
        self.saved = activations(model, plan, work, stage=stage)
        self.recomputed = one_block(model, plan, work) if plan.recompute == "full" else None
        self.temporary = _temporary_gradients(model, plan, work)
        table = split(stage_model.vocab_size * stage_model.embedding_dim, plan.tensor)
        self.table = table if stage == 0 else 0
        self.head_matrix = table if stage_model.lm_head else 0
        head: dict[str, Any] = {"tokens": work.tokens(plan), "tensor": plan.tensor} | work.head(
            model
        )
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
        """Return the moments at the start of a backward: in the last block, and in the head."""
        whole = whole or not self.plan.reshard_after_forward
        grown = self._gradients(accumulated)
        block = self._gathered(self.layers if whole else 2)
        moments = [self._moment(alive, block, grown, self.recomputed, self.temporary)]
        if self.head:
            # At the head no block is gathered yet. The head's gradient is computed as a whole
            # before it is added to the accumulated one. At that moment the gradient of the logits
            # exists, and their log-softmax is freed.
            ends = self._gathered(self.layers if whole else 0)
            fresh = self._fresh(self.head_matrix, accumulated)
            without = replace(self.head, parts=self.head.parts[:-1])
            moments.append(self._moment(alive, ends, grown, self.head))
            moments.append(self._moment(alive, ends, grown, fresh, without))
        return moments

    def end(self, alive: int, *, accumulated: bool, whole: bool) -> list[Breakdown]:
        """Return the moments at the end of a backward: in the first block, and in the embedding."""
        gathered = self._gathered(self.layers, self.plan.reshard_after_forward and not whole)
        inside = Fraction(alive - 1) + Fraction(1, self.layers)
        # The gradients of the first block come last.
        grown = self._gradients(
            True, missing=0 if accumulated else self.ends * bool(self.table) + self.block
        )
        more = (self._gradients(True), self._fresh(self.table, accumulated), self.stream)
        return [
            self._moment(inside, gathered, grown, self.recomputed, self.temporary),
            self._moment(alive - 1, self._gathered(self.layers), *more),
        ]

    def reduction(self) -> list[Breakdown]:
        """Return the moments at which the first block and then the ends are reduced."""
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
        # Under mixed precision the first gradient is cast, so two copies exist.
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
        saved = times("activations", self.saved, in_flight=Fraction(alive))
        return total("moment", "B", *states, saved, *more)


def _states(
    model: Shape, plan: Plan, kind: Precision, stage: int, rank: int, targets: Sequence[str]
) -> list[Breakdown]:
    dense, routed = device_parameters(model, plan, stage)

    def states(count: int, ranks: int) -> Breakdown:
        offload = plan.offload == "optimizer"
        return model_states(count, data=ranks, zero=plan.zero, precision=kind, offload=offload)

    if rank:
        shards = [split(dense, plan.replicas), split(routed, plan.expert_replicas)]
        frozen = sum(shards) if plan.zero == 3 else dense + routed
        update = split(_lora(plan.stage_model(model, stage), rank, targets), plan.tensor)
        return [
            product("frozen weights", "B", parameters=frozen, bytes=bytes_of(kind.weights)),
            total("adapters", "B", *states(update, plan.replicas).parts),
        ]
    if not routed:
        return list(states(dense, plan.replicas).parts)
    # Dense weights and experts are sharded over different groups.
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
        raise TypeError(f"expected lora_targets to list names such as ('query',), got {targets!r}")
    candidates = [m for m in matrices(model) if m.kind == "matrix" and m.layers is not None]
    for target in targets:
        checks.choice("one of lora_targets", target, dict.fromkeys(m.name for m in candidates))
    count = 0
    for m in (m for m in candidates if m.name in targets):
        if rank > min(m.rows, m.columns):
            raise ValueError(
                f"expected lora_rank <= {min(m.rows, m.columns)} for {m.name} of {m.part} "
                f"({m.rows} x {m.columns}), got {rank}"
            )
        count += m.times * m.copies * lora_parameters(m.rows, m.columns, rank)
    return count


def times(name: str, part: Breakdown, **factor: Number) -> Breakdown | None:
    """Return a part that exists several times; each leaf is multiplied by a named factor."""
    ((label, count),) = factor.items()
    if not count:
        return None

    def scaled(node: Breakdown) -> Breakdown:
        if node.factors:
            return replace(node, factors=((label.replace("_", " "), count), *node.factors))
        return replace(node, parts=tuple(map(scaled, node.parts)))

    return replace(part if count == 1 else scaled(part), name=name, note="")
