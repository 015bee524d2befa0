"""Evidence: the audit's own measurements for `plan` and `train`, by other methods than theirs."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import collectives
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from llmsys_suite.audit import peers, reference
from llmsys_suite.audit.inputs import draw_global_batch, get_num_heads
from llmsys_suite.audit.probe import probe, replay
from llmsys_suite.audit.text import collect_split_evidence, read_parts
from llmsys_suite.audit.training_checks.data import get_json_values
from llmsys_suite.measure import network
from llmsys_suite.measure.samples import compute_needed_seconds
from llmsys_suite.plain import Weights
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants.initial_weights import build_seeded_model, draw_initial_weights

#: Maximum number of steps that the audit repeats.
REPLAYED = 64
#: Seconds of matrix products, long enough that other programs slow only some of the products.
PRODUCT_SECONDS = 1.0
#: Number of rows and columns of the matrices by type of device. On a CPU the product is so short
#: that most products end before another program uses the core.
SIDE = {"cpu": 512, "cuda": 8192}


def measure_evidence(run: Run) -> dict[str, Any]:
    """Return the evidence for which all ranks must work together."""
    with run.in_float32():
        probed = probe(run)
    return {
        "config": get_json_values(run.config),
        "threads": torch.get_num_threads(),
        "probe": probed,
        "split": collect_split_evidence(run),
        "peers": peers.time_peers(run, [*probed]),
        "product_flops_per_second": measure_product_rate(run),
        "shares_memory": run.device.type == "cpu" and collectives.describe().shared_memory,
        "sockets_count": network.is_available() and run.config.backend == "gloo",
    }


def compute_evidence(run: Run) -> dict[str, Any]:
    """Return the evidence that this rank computes alone.

    The last rank repeats training steps. Rank 0 draws batches, and counts FLOPs and bytes.
    """
    evidence: dict[str, Any] = {}
    with run.in_float32():
        if run.rank == 0:
            train, _ = read_parts(run.config)
            evidence |= {
                "row_digests": [
                    reference.compute_row_digests(draw_global_batch(train, run.config, step))
                    for step in range(run.config.warmup + run.config.steps)
                ],
                "initial_scales": compute_scale_deviations(run),
                "model_counts": count_model(run),
            }
        if run.rank == run.world - 1:
            losses, rounding_factors = replay(run, draw_initial_weights(run), REPLAYED)
            evidence |= {"trajectory": losses, "rounding_factors": rounding_factors}
    if run.rank == 0:
        # The dtype of the run determines the size of activations.
        evidence["saved_bytes"] = count_saved_bytes(run)
    return evidence


def count_model(run: Run) -> dict[str, int]:
    """Return the numbers of parameters, tensors and FLOPs per training step of the reference."""
    weights = draw_initial_weights(run)
    config = run.config
    full, causal = count_flops(weights, config.rows, config.context, get_num_heads(config))
    return {
        "parameters": sum(w.numel() for w in weights.values()),
        "block_parameters": sum(w.numel() for n, w in weights.items() if n.startswith("blocks.")),
        "tensors": len(weights),
        "flops_full": full,
        "flops_causal": causal,
    }


def count_flops(weights: Weights, rows: int, context: int, heads: int) -> tuple[int, int]:
    """Return the FLOPs of a training step, with and without the masked attention scores.

    FLOPs are counted on the meta device. Only attention uses batched matrix products. A causal mask
    leaves T (T + 1) / 2 of the T^2 pairs of positions in these products.
    """
    leaves = {name: w.detach().to("meta").requires_grad_() for name, w in weights.items()}
    tokens = torch.zeros(rows, context, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        loss = reference.compute_loss(leaves, tokens, tokens, heads)
        loss.backward()
    total = counter.get_total_flops()
    by_operator = counter.get_flop_counts()["Global"]
    batched = sum(n for operator, n in by_operator.items() if "bmm" in str(operator))
    return total, total - batched * (context - 1) // (2 * context)


def count_saved_bytes(run: Run) -> int:
    """Return the bytes of the tensors, except parameters, that autograd saves in a forward pass.

    The pass is over one of `RunConfig.parts` parts of the rows.
    """
    model = build_seeded_model(run, run.model)
    rows = run.config.rows // run.config.parts
    tokens = torch.zeros(rows, run.config.context, dtype=torch.long, device=run.device)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), run.autocast():
        # The loss keeps all saved tensors alive, so that no two storages have the same address.
        loss = model.compute_loss(tokens, tokens)
    del loss
    return sum(saved.values())


def compute_scale_deviations(run: Run) -> list[tuple[float, str]]:
    """Return (deviation, name) for each initial weight.

    For a matrix, it is the distance, in standard errors, between the standard deviation of its
    elements and the expected one: Glorot's, or 1 for embeddings. Both are lower by a known factor,
    because weights beyond three standard deviations are resampled. For other tensors, the deviation
    is 0 if all elements are 1, and inf otherwise.
    """
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    narrowed = math.sqrt(1 - 6 * density / math.erf(3 / math.sqrt(2)))
    scales = []
    for name, weight in draw_initial_weights(run).items():
        if weight.ndim == 2:
            scale = 1.0 if "embedding" in name else math.sqrt(2 / sum(weight.shape))
            difference = float(weight.double().std()) / (narrowed * scale) - 1
            scales.append((abs(difference) * math.sqrt(2 * weight.numel()), name))
        else:
            scales.append((math.inf if (weight != 1).any() else 0.0, name))
    return scales


def measure_product_rate(run: Run) -> float:
    """Return the best rate of a matrix product on any rank, in FLOPs per second.

    The time of a product is its wall time without waiting for a core. The second matrix is
    transposed, as in a linear layer.
    """
    side = SIDE[run.device.type]
    a, b = (torch.randn(side, side, device=run.device).to(run.compute_dtype) for _ in range(2))
    run.barrier()
    shortest_s = math.inf
    stop_time = time.perf_counter() + PRODUCT_SECONDS
    while time.perf_counter() < stop_time:
        product = peers.time_call(run, partial(torch.mm, a, b.T))
        shortest_s = min(shortest_s, compute_needed_seconds(product))
    return max(run.gather(2 * side**3 / shortest_s))
