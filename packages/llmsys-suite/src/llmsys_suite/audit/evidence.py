"""Measurements for the checks of `plan` and `train` that are missing from the run's own records.

The audit measures speed, FLOPs, initial weights and clocks by other means than the run.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from functools import partial
from typing import Any

import torch
from scipy.stats import truncnorm

from llmsys_suite.audit import peers
from llmsys_suite.audit.flops import count_flops
from llmsys_suite.audit.probe import probe
from llmsys_suite.audit.text import batch_evidence, read_parts, split_evidence
from llmsys_suite.measure import network, reference_matmul
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants.initial_weights import initial_weights

#: Number of rounds of matmuls and of the reference matmul, and seconds of matmuls per round. Other
#: programs slow the processor for longer than one matmul takes, so the minimum needs many rounds.
PRODUCT_TURNS, PRODUCT_SECONDS = 20, 0.02


def gather_evidence(run: Run) -> dict[str, Any]:
    """Collect probes, counts, clocks and digests on all ranks."""
    with run.in_float32():
        probed = probe(run)
    return {
        "probe": probed,
        "text": batch_evidence(run.config, read_parts(run.config)[0]),
        "split": split_evidence(run),
        "initial_scales": initial_scales(run),
        "peer_ratios": peers.peer_ratios(run),
        "counted": counted(run),
        **_product_rates(run),
        "reference_matmul_flops": reference_matmul.flops(run.device),
        "one_host": len(set(run.gather(platform.node()))) == 1,
        "stage_clocks": stage_clocks(run),
        "sockets_count": network.available() and run.config.backend == "gloo",
    }


def counted(run: Run) -> dict[str, int]:
    """Count parameters and the FLOPs of a training step of the reference on the meta device."""
    weights = initial_weights(run)
    flops = count_flops(weights, run.config.rows, run.config.context, run.model.num_heads)
    return {
        "parameters": sum(w.numel() for w in weights.values()),
        "tensors": len(weights),
        "flops_full": flops.executed,
        "flops_causal": flops.useful,
    }


def initial_scales(run: Run) -> list[tuple[float, str]]:
    """Return how far the standard deviation of each initial matrix is from Glorot's, and its name.

    The unit is the standard error of a standard deviation. Weights beyond three standard deviations
    are resampled, which narrows the distribution. Embeddings have a standard deviation of 1. Other
    tensors must consist of ones; otherwise their deviation is inf.
    """
    narrowed = truncnorm.std(-3, 3)
    scales = []
    for name, weight in initial_weights(run).items():
        if weight.ndim == 2:
            scale = 1.0 if "embedding" in name else math.sqrt(2 / sum(weight.shape))
            away = float(weight.double().std()) / (narrowed * scale) - 1
            scales.append((abs(away) * math.sqrt(2 * weight.numel()), name))
        else:
            scales.append((math.inf if (weight != 1).any() else 0.0, name))
    return scales


def stage_clocks(run: Run) -> list[tuple[str, int, float, float]]:
    """Return (stage, rank, seconds by the clock of the rank, seconds by that of the launcher)."""
    stage_seconds = run.gather(run.seconds)
    stamps = run.stamps()
    return [
        (stage, rank, seconds, stamps[rank, f"{stage} ends"] - stamps[rank, f"{stage} begins"])
        for rank, results in enumerate(stage_seconds)
        for stage, seconds in results.items()
        if (rank, f"{stage} ends") in stamps
    ]


def _product_rates(run: Run) -> dict[str, float]:
    """Return the peak rate of a matmul, and its ratio to the rate of the small reference matmul.

    The first is the best of all ranks in FLOPs per second, the second is the median of the ranks.
    """
    on_cpu = run.device.type == "cpu"
    clock = time.thread_time if on_cpu else partial(peers.monotonic, run)
    run.barrier()
    n = 1024 if on_cpu else 8192
    a, b = (torch.randn(n, n, device=run.device).to(run.compute_dtype) for _ in range(2))
    product = separate = beside = math.inf
    for _ in range(PRODUCT_TURNS):
        end = time.perf_counter() + PRODUCT_SECONDS
        while time.perf_counter() < end:
            began = clock()
            begin = reference_matmul.clock(run.device)
            torch.mm(a, b.T)
            product = min(product, reference_matmul.clock(run.device) - begin)
            separate = min(separate, clock() - began)
        beside = min(beside, reference_matmul.core_seconds(run.device))
    over_reference = 2 * n**3 / product / (reference_matmul.flops(run.device) / beside)
    return {
        "product_flops_per_second": max(run.gather(2 * n**3 / separate)),
        "product_over_reference": float(statistics.median(run.gather(over_reference))),
    }
