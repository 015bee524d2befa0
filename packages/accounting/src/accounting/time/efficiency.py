"""How close to its peak a device comes: matrix products by their shape, the rest by its bytes.

A product of (m, k) by (k, n) takes the time of its operations at a share of the peak, and the time
in which its three matrices pass through memory, one after the other: large products approach the
share, thin ones the bandwidth. Everything that is not a product is bound by bandwidth: norms,
activations, residual sums, the softmax where no kernel fuses it, the optimizer.
"""

from accounting.hardware import Hardware
from accounting.model.matrices import matrices
from accounting.model.shape import Shape
from accounting.plan import Plan
from accounting.precision import bytes_of
from accounting.time.measure import rate
from accounting.workload import Workload

MATMUL_SHARE = {"fp32": 0.9, "tf32": 0.8, "bf16": 0.8, "fp16": 0.8, "fp8": 0.55, "int8": 0.6}
"""Share of the dense peak that large products reach: .8 of an A100's 312 TFLOP/s. In fp8 the
scaling of tiles is counted in."""
POWER_SHARE = {"H100": 0.88, "H200": 0.95, "H800": 0.88, "B200": 0.85, "GB200": 0.9}
"""What power leaves of that on devices whose clock falls under a long load: 0.7 of the peak on an
H100 of 700 W. What else a step loses is learned from published runs as one factor
(`accounting.time.published`)."""
ATTENTION_SHARE = 0.5
"""The same of fused attention, forward and backward together (Shah et al. 2024, FlashAttention-3,
figures 5 and 6: .4 to .75; Dao 2023, FlashAttention-2: .5 to .7 on an A100)."""
BANDWIDTH_SHARE = 0.8
STREAM_PASSES = 34
"""How often a training step moves a tensor of the residual stream a layer: two norms, two residual
sums, the ins and outs of attention, forward and backward."""
HIDDEN_PASSES = 8
SCORE_PASSES = 14
"""Scores, mask, softmax, dropout and product, forward and backward, where they are not fused."""


def stage_seconds(
    model: Shape, plan: Plan, work: Workload, tokens: int, device: Hardware
) -> tuple[float, float, float]:
    """Seconds of a micro-batch of `tokens` on a stage: operations, what their thinness adds, and
    what passes through memory between them."""
    kind = work.kind
    share = MATMUL_SHARE.get(kind.compute, 0.8) * POWER_SHARE.get(device.name, 1.0)
    peak = device.peak(kind.compute) * share
    size, bandwidth = float(bytes_of(kind.activations)), device.memory_bandwidth * BANDWIDTH_SHARE
    table = device.products.get(kind.compute)
    busy = moved = slow = 0.0
    for matrix in matrices(model):
        head = matrix.kind == "table" and model.tied and model.lm_head and matrix.split == "rows"
        if matrix.kind != "matrix" and not head:
            continue
        # Forward, and twice that backward; full recomputation runs the blocks once more, a loss in
        # chunks the head.
        again = plan.recompute == "full" and matrix.layers is not None
        again |= work.loss_chunks > 1 and (head or matrix.meets == "last")
        passes = 4.0 if again else 3.0
        often = passes * matrix.times
        split = 1 if matrix.split == "none" else plan.tensor
        met = matrix.chosen if matrix.routed else 1
        entries = matrix.one / split
        busy += often * 2 * tokens * met * entries
        if table:
            # What was measured has the way of its matrices through memory in it.
            each = rate(table, tokens * met / matrix.copies, matrix.rows, matrix.columns / split)
            slow += often * 2 * tokens * met * entries / each
            continue
        # Each product reads its input and its matrix and writes its output.
        inside = matrix.copies / plan.expert if matrix.routed else 1
        width = matrix.rows + matrix.columns / split
        moved += often * size * (tokens * met * width + entries * inside)
    rest = tokens * _between(model, plan, work, size) * size
    return slow if table else busy / peak, moved / bandwidth, rest / bandwidth


def _between(model: Shape, plan: Plan, work: Workload, size: float) -> float:
    """Numbers a token that pass through memory between the products."""
    wide = model.d_model / (plan.tensor if plan.sequence_parallel else 1)
    hidden = len(model.mlp_layers or ()) * model.d_ff
    if model.experts:
        met = model.experts.per_token * model.experts.width + model.experts.shared
        hidden += len(model.expert_layers) * met
    again = 4 / 3 if plan.recompute == "full" else 1.0
    moved = STREAM_PASSES * model.layers * wide
    moved += HIDDEN_PASSES * hidden * model.mlp_matrices / plan.tensor
    if not work.flash:
        often = SCORE_PASSES * (1 if plan.recompute == "none" else 4 / 3)
        moved += often * len(model.attention_layers or ()) * model.heads / plan.tensor * work.seq
    if model.lm_head:
        # Logits, their softmax and its gradient, in fp32.
        moved += 4 * 4 / size * model.vocab_size / plan.tensor / again
    return again * moved
