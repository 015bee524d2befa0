"""The number of parameters on a device, and the bytes of weights, gradients and optimizer."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from accounting import checks
from accounting.breakdown import Breakdown, multiply, sum_parts
from accounting.model.records import Matrix
from accounting.model.transformer import Transformer, list_matrices
from accounting.plan import Plan, build_part, split
from accounting.precision import Precision, get_itemsize, get_recipe


@checks.validate(num_parameters=0, zero=(0, 1, 2, 3))
def count_state_bytes(
    num_parameters: int,
    *,
    data: int = 1,
    zero: int = 0,
    precision: str | Precision = "mixed_bf16",
) -> Breakdown:
    """Return the bytes per rank of weights, gradients and optimizer state.

    Let N be `data`, P be `num_parameters`, and w, g and o be the bytes per parameter of weights,
    gradients and optimizer state. ZeRO stages 0 to 3 store (w + g + o)P, (w + g)P + oP/N,
    wP + (g + o)P/N and (w + g + o)P/N bytes. Each shard is rounded up to an integer (Rajbhandari
    et al. 2020, section 5).
    """
    kind = get_recipe(precision)
    shard = split(num_parameters, data)

    def count_bytes(name: str, sharded_from: int, size: Fraction) -> Breakdown:
        parameters = shard if zero >= sharded_from else num_parameters
        return multiply(name, "B", parameters=parameters, bytes=size)

    master = get_itemsize(kind.master) if kind.master else Fraction(0)
    return sum_parts(
        "model states",
        "B",
        count_bytes("weights", 3, get_itemsize(kind.weights)),
        count_bytes("gradients", 2, get_itemsize(kind.gradients)),
        sum_parts(
            "optimizer",
            "B",
            count_bytes("master weights", 1, master),
            count_bytes("moments", 1, kind.moment_bytes),
        ),
    )


def count_device_parameters(model: Transformer, plan: Plan, stage: int = 0) -> tuple[int, int]:
    """Return the number of parameters per device outside and inside experts, before ZeRO shards."""
    dense = routed = 0
    for matrix in list_matrices(plan.build_stage_model(model, stage)):
        if matrix.routed:
            routed += _count_matrix_parameters(matrix, model, plan)
        else:
            dense += _count_matrix_parameters(matrix, model, plan)
    return dense, routed


def _count_matrix_parameters(matrix: Matrix, model: Transformer, plan: Plan) -> int:
    """Return the number of parameters of a matrix per device, before ZeRO shards them."""
    ranks = matrix.count_tensor_shards(plan.tensor, model.kv_heads)
    return split(matrix.size, ranks * (plan.expert if matrix.routed else 1))


def count_cast_weight_bytes(
    model: Transformer, plan: Plan, kind: Precision, stage: int = 0
) -> Breakdown | None:
    """Return the bytes of the matrix copies that autocast creates and the graph saves, if any.

    FSDP has no such copies, because it gathers its weights in the dtype of the copies.
    """
    if not kind.cast_weights or (plan.zero == 3 and plan.replicas > 1):
        return None
    stage_model = plan.build_stage_model(model, stage)
    count = sum(
        _count_matrix_parameters(matrix, model, plan)
        for matrix in list_matrices(stage_model)
        if matrix.kind == "matrix"
    )
    if stage_model.tied and stage_model.lm_head:
        count += split(stage_model.vocab_size * stage_model.embedding_dim, plan.tensor)
    return multiply("cast weights", "B", parameters=count, bytes=get_itemsize(kind.cast_weights))


def count_tied_gradient_bytes(model: Transformer, plan: Plan, kind: Precision) -> Breakdown | None:
    """Return the temporary bytes while a tied table's two gradients are added; None if untied.

    The gradient of the head, the gradient of the embedding, and their sum exist at once. The sum is
    temporary if ZeRO shards gradients, or if a step has several micro-batches. Otherwise the sum
    becomes the stored gradient and is not included.
    """
    if not (model.tied and model.lm_head):
        return None
    is_sharded = plan.zero >= 2 and plan.replicas > 1
    gathered = kind.cast_weights or kind.weights
    dtype = gathered if is_sharded and plan.zero == 3 else kind.gradients
    return multiply(
        "gradients of the tied table",
        "B",
        tensors=3 if is_sharded or plan.microbatches > 1 else 2,
        parameters=split(model.vocab_size * model.embedding_dim, plan.tensor),
        bytes=get_itemsize(dtype),
    )


def count_head_gradient_bytes(model: Transformer, plan: Plan, kind: Precision) -> Breakdown:
    """Return the bytes of the unsharded gradients of the head and the final norm.

    FSDP reduces them after the gradients of the blocks.
    """
    size = get_itemsize(kind.cast_weights or kind.weights)
    count = count_head_parameters(model, plan)
    return multiply("gradient of the head", "B", parameters=count, bytes=size)


def count_head_parameters(model: Transformer, plan: Plan) -> int:
    """Return the number of parameters after the blocks, such as the head, on a device."""
    after = (m for m in list_matrices(model) if m.layers is None and m.where == "last")
    count = sum(_count_matrix_parameters(matrix, model, plan) for matrix in after)
    if model.tied and model.lm_head:
        count += split(model.vocab_size * model.embedding_dim, plan.tensor)
    return count


def list_stage_states(
    model: Transformer, plan: Plan, kind: Precision, stage: int
) -> list[Breakdown]:
    """Return the bytes of weights, of gradients and of optimizer state on a device of a stage."""
    dense, routed = count_device_parameters(model, plan, stage)

    def count_states(num_parameters: int, ranks: int) -> Breakdown:
        return count_state_bytes(num_parameters, data=ranks, zero=plan.zero, precision=kind)

    if not routed:
        return list(count_states(dense, plan.replicas).parts)
    # Dense weights and experts are sharded over different groups.
    both = {
        "dense": count_states(dense, plan.replicas),
        "experts": count_states(routed, plan.expert_replicas),
    }
    return [
        sum_parts(name, "B", *(replace(s[name], name=of) for of, s in both.items() if name in s))
        for name in ("weights", "gradients", "optimizer")
    ]


def list_distinct_stages(model: Transformer, plan: Plan) -> list[int]:
    """Return the first stage of each group of stages with the same kinds of layers and ends.

    Later stages of a group have at most as many micro-batches in flight, so one of the returned
    stages is the fullest.
    """
    return list(group_stages_by_kind(model, plan).values())


#: The number of layers of each kind in a stage, and whether the stage is the first and the last.
StageKind = tuple[frozenset[tuple[tuple[bool, ...], int]], tuple[bool, bool]]


def group_stages_by_kind(model: Transformer, plan: Plan) -> dict[StageKind, int]:
    """Return the first stage of each kind; stages with the same layers and ends are of one kind."""
    kinds = classify_layers(model)
    first: dict[StageKind, int] = {}
    for stage in range(plan.pipeline):
        counts = Counter(kinds[layer] for layer in plan.list_stage_layers(model, stage))
        ends = stage == 0, stage == plan.pipeline - 1
        first.setdefault((frozenset(counts.items()), ends), stage)
    return first


@lru_cache
def classify_layers(model: Transformer) -> tuple[tuple[bool, ...], ...]:
    """Return a tuple of flags per layer, one per component: True if the layer has the component.

    The components are attention, MLP, experts, window, shared keys, and each mixer and extra
    matrix.
    """
    parts: list[Iterable[int]] = [
        model.attention_layers or (),
        model.mlp_layers or (),
        model.expert_layers,
        model.windowed_layers,
        model.shared_kv_layers,
        *(mixer.layers for mixer in model.mixers),
        *(matrix.layers or () for matrix in model.extra),
    ]
    sets = [frozenset(part) for part in parts]
    return tuple(tuple(layer in part for part in sets) for layer in range(model.layers))


@lru_cache
def build_single_layers(model: Transformer) -> tuple[Transformer, ...]:
    """Return one model per kind of layer: a single layer without a window.

    Each of them has the embedding and the head of `model`.
    """
    kinds = classify_layers(model)
    first = {kind: kinds.index(kind) for kind in kinds}
    layers = (build_part(model, (layer,), True, True) for layer in first.values())
    return tuple(replace(layer_model, window=None) for layer_model in layers)


def find_largest_single_layer(model: Transformer) -> Transformer:
    """Return the model of `build_single_layers` with the most parameters."""
    return max(build_single_layers(model), key=lambda layer_model: layer_model.size)


class FsdpGroups(NamedTuple):
    """Unsharded parameter counts of the FSDP groups on a pipeline stage.

    The dense weights of a block are sharded over all replicas, and its experts over the ranks with
    the same experts.
    """

    #: Parameters outside the blocks, such as the embedding, final norm and head.
    ends: int
    #: Parameters of the largest block.
    block: int
    #: Parameters of all blocks.
    blocks: int

    def count_gathered_bytes(
        self, blocks: int, size: Fraction, *others: Breakdown | None
    ) -> Breakdown:
        """Return the bytes of gathered weights of the ends and `blocks` blocks, and of `others`."""
        inside = min(blocks * self.block, self.blocks)
        return sum_parts(
            "gathered",
            "B",
            multiply("weights of the ends", "B", parameters=self.ends, bytes=size),
            multiply("weights of blocks", "B", parameters=inside, bytes=size),
            *others,
        )


def build_fsdp_groups(model: Transformer, plan: Plan, stage: int) -> FsdpGroups:
    """Return the sizes of FSDP's groups on a stage: one group per block, and one for the ends."""
    stage_model = plan.build_stage_model(model, stage)
    block = max(_count_block_parameters(layer, plan) for layer in build_single_layers(stage_model))
    blocks = _count_block_parameters(stage_model, plan)
    return FsdpGroups(sum(count_device_parameters(model, plan, stage)) - blocks, block, blocks)


def _count_block_parameters(model: Transformer, plan: Plan) -> int:
    """Return the parameters per device of all blocks of `model`, the model of a stage."""
    return sum(
        _count_matrix_parameters(matrix, model, plan)
        for matrix in list_matrices(model)
        if matrix.layers is not None
    )
