"""The time of the matrix products and the other operations of a pipeline stage.

The time of a product of (m, k) by (k, n) is the sum of two terms: the time of its operations at a
fraction of the peak, and the time to move its three matrices through memory. Large products
therefore approach that fraction of the peak, and thin products are bound by bandwidth. All other
operations are bound by bandwidth: norms, activations, residual sums, and an unfused softmax.
"""

from typing import NamedTuple

from accounting.hardware import Hardware
from accounting.model.transformer import Transformer, list_matrices
from accounting.plan import Plan
from accounting.precision import get_itemsize
from accounting.workload import Workload

#: Fraction of the dense peak that large matrix products reach, by dtype: 0.8 of the 312 TFLOP/s of
#: an A100 in bf16. The fp8 value includes the scaling of tiles.
MATMUL_FRACTION = {"fp32": 0.9, "tf32": 0.8, "bf16": 0.8, "fp16": 0.8, "fp8": 0.55, "int8": 0.6}
#: Fraction of the memory bandwidth that all operations reach.
BANDWIDTH_FRACTION = 0.8
#: Number of times that a training step moves a tensor of the residual stream per layer: two norms,
#: two residual sums, inputs and outputs of attention, forward and backward.
STREAM_PASSES = 34
#: Number of times that a training step moves a hidden tensor of the MLP, per matrix of the MLP.
HIDDEN_PASSES = 8
#: Number of passes over unfused scores: product of queries and keys, mask, softmax, dropout and
#: product with values, forward and backward.
SCORE_PASSES = 14


class StageRates(NamedTuple):
    """Seconds of a stage's forward and backward without attention, per token or micro-batch."""

    #: Arithmetic of the matrix products and of recurrent states, per token.
    arithmetic: float
    #: Inputs and outputs of the matrix products that move through memory, per token.
    traffic: float
    #: Memory traffic of the operations between the matrix products, per token.
    elementwise: float
    #: Matrices outside the experts that are read per micro-batch.
    dense_weights: float
    #: Matrices of all experts that are read per micro-batch; expert parallelism divides this time.
    routed_weights: float


def compute_stage_rates(
    model: Transformer, plan: Plan, work: Workload, device: Hardware
) -> StageRates:
    """Return the rates of a stage; `model` is the stage's model.

    The rates depend on three fields of `plan`: `tensor`, `sequence_parallel` and `recompute`.
    """
    kind = work.kind
    utilization = MATMUL_FRACTION.get(kind.compute, 0.8) * device.power_factor
    peak = device.peak(kind.compute) * utilization
    size = float(get_itemsize(kind.activations))
    bandwidth = device.memory_bandwidth * BANDWIDTH_FRACTION
    # The backward costs twice the forward. Full recomputation repeats the forward of blocks.
    block_passes = 4.0 if plan.recompute == "full" else 3.0
    values = dense = routed = 0.0
    operations = block_passes / plan.tensor * sum(len(m.layers) * m.scan for m in model.mixers)
    for matrix in list_matrices(model):
        # A tied head multiplies by the embedding, the only table that is split along its rows.
        is_head = model.tied and model.lm_head and matrix.split == "rows"
        if matrix.kind != "matrix" and not (matrix.kind == "table" and is_head):
            continue
        # A pooler multiplies one vector per sequence; a patch embedding skips class tokens.
        used = 1 / work.seq if matrix.applies_to == "sequence" else 1 - matrix.skips / work.seq
        passes = block_passes if matrix.layers is not None else 3.0
        repeats = passes * matrix.count * used
        ranks = matrix.count_tensor_shards(plan.tensor, model.kv_heads)
        entries = matrix.entries / ranks
        operations += repeats * 2 * matrix.chosen * entries
        # Each product reads its input and writes its output; the matrix is counted below.
        is_split_by_rows = matrix.split == "rows"
        inputs = matrix.rows / (ranks if is_split_by_rows else 1)
        outputs = matrix.columns / (1 if is_split_by_rows else ranks)
        values += repeats * matrix.chosen * (inputs + outputs)
        if matrix.routed:
            routed += passes * matrix.count * entries * matrix.copies
        else:
            dense += passes * matrix.count * entries
    seconds_per_value = size / bandwidth
    return StageRates(
        arithmetic=operations / peak,
        traffic=values * seconds_per_value,
        elementwise=_count_elementwise_values(model, plan, work, size) * seconds_per_value,
        dense_weights=dense * seconds_per_value,
        routed_weights=routed * seconds_per_value,
    )


def _count_elementwise_values(model: Transformer, plan: Plan, work: Workload, size: float) -> float:
    """Return the number of values per token that operations between matrix products move.

    These are norms, activations, residual sums, unfused scores and the loss.
    """
    wide = model.d_model / (plan.tensor if plan.sequence_parallel else 1)
    hidden = len(model.mlp_layers or ()) * model.d_ff
    if model.experts:
        expert_width = model.experts.per_token * model.experts.width + model.experts.shared
        hidden += len(model.expert_layers) * expert_width
    forward_factor = 4 / 3 if plan.recompute == "full" else 1.0
    moved = STREAM_PASSES * model.layers * wide
    moved += HIDDEN_PASSES * hidden * model.mlp_matrices / plan.tensor
    if not work.flash:
        often = SCORE_PASSES * (1 if plan.recompute == "none" else 4 / 3)
        moved += often * len(model.attention_layers or ()) * model.heads / plan.tensor * work.seq
    if model.lm_head:
        # The logits, their softmax and its gradient are in fp32.
        moved += 4 * 4 / size * model.vocab_size / plan.tensor / forward_factor
    return forward_factor * moved
