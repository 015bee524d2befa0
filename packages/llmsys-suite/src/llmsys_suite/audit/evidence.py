"""Measurements for the checks of `plan` and `train` that are missing from the run's own records.

The audit measures speed, FLOPs, initial weights and clocks by other means than the run.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from llmsys_suite.audit import peers
from llmsys_suite.audit.flops import count_flops
from llmsys_suite.audit.probe import probe, replay
from llmsys_suite.audit.text import batch_evidence, read_parts, split_evidence
from llmsys_suite.measure import network, reference_matmul
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants.initial_weights import initial_weights

#: Number of steps that the audit repeats in float64, and in float32.
REPLAYED, REPLAYED_IN_FLOAT32 = 3, 64
#: Number of rounds that time matmuls, and seconds of matmuls per round. Other programs can slow the
#: processor for longer than one matmul takes, so the minimum is taken over many rounds.
PRODUCT_ROUNDS, PRODUCT_SECONDS = 20, 0.02
#: Side of the matrices in the matmul, and in the matmul that the wall clock times. On a CPU the
#: second matmul is short enough to end before another program takes the core.
SIDE, WALL_CLOCK_SIDE = {"cpu": 1024, "cuda": 8192}, {"cpu": 512, "cuda": 8192}


def measure(run: Run) -> dict[str, Any]:
    """Collect probes, clocks and digests on rank 0; every rank takes part."""
    with run.in_float32():
        probed = probe(run)
    return {
        "probe": probed,
        "split": split_evidence(run),
        "peers": peers.time_peers(run, [*probed["variants"]]),
        **_product_rates(run),
        "reference_matmul_flops": reference_matmul.flops(run.device),
        "one_host": len(set(run.gather(platform.node()))) == 1,
        "stage_clocks": stage_clocks(run),
        "sockets_count": network.available() and run.config.backend == "gloo",
    }


def recompute(run: Run) -> dict[str, Any]:
    """Return the evidence that this rank computes alone; the first and the last rank divide it.

    The last rank repeats many steps in float32. Rank 0 repeats a few steps in float64 and counts
    parameters, FLOPs and saved bytes.
    """
    evidence: dict[str, Any] = {"probe": {}}
    with run.in_float32():
        if run.rank == 0:
            start = {name: w.double() for name, w in initial_weights(run).items()}
            evidence["probe"]["replayed_losses"] = replay(run, start, REPLAYED)
            evidence |= _counts(run)
        if run.rank == run.world - 1:
            trajectory = replay(run, initial_weights(run), REPLAYED_IN_FLOAT32)
            evidence["probe"]["trajectory"] = trajectory
    return evidence


def combine(measured: dict[str, Any], recomputed: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the measurements with the evidence that each rank has computed alone."""
    evidence = dict(measured)
    for part in recomputed:
        evidence |= part | {"probe": evidence["probe"] | part["probe"]}
    return evidence


def _counts(run: Run) -> dict[str, Any]:
    """Return the reference's counts, the digests of its batches and the scales of its weights."""
    return {
        "text": batch_evidence(run.config, read_parts(run.config)[0]),
        "initial_scales": initial_scales(run),
        "model_counts": count_model(run),
        "saved_bytes": count_saved_bytes(run),
    }


def count_model(run: Run) -> dict[str, int]:
    """Count parameters and the FLOPs of a training step of the reference on the meta device."""
    weights = initial_weights(run)
    flops = count_flops(weights, run.config.rows, run.config.context, run.model.num_heads)
    return {
        "parameters": sum(w.numel() for w in weights.values()),
        "tensors": len(weights),
        "flops_full": flops.executed,
        "flops_causal": flops.useful,
    }


def count_saved_bytes(run: Run) -> int:
    """Return the bytes of the tensors that autograd saves in one step, besides parameters."""
    model = Decoder(run.model).to(run.device)
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
        # The loss keeps all saved tensors alive, so that each storage has another address.
        loss = model.loss(tokens, tokens)
    del loss
    return sum(saved.values())


def initial_scales(run: Run) -> list[tuple[float, str]]:
    """Return (deviation, name) for each initial weight, relative to Glorot's initialization.

    A deviation compares standard deviations, in units of their standard error. Weights beyond three
    standard deviations are resampled, which narrows the distribution. Embeddings have a standard
    deviation of 1. Other tensors must consist of ones; otherwise their deviation is inf.
    """
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    narrowed = math.sqrt(1 - 6 * density / math.erf(3 / math.sqrt(2)))
    scales = []
    for name, weight in initial_weights(run).items():
        if weight.ndim == 2:
            scale = 1.0 if "embedding" in name else math.sqrt(2 / sum(weight.shape))
            away = float(weight.double().std()) / (narrowed * scale) - 1
            scales.append((abs(away) * math.sqrt(2 * weight.numel()), name))
        else:
            scales.append((math.inf if (weight != 1).any() else 0.0, name))
    return scales


def stage_clocks(run: Run) -> list[tuple[str, int, float, float | None]]:
    """Return (stage, rank, seconds that the rank reports, seconds by the launcher's clock).

    The launcher's seconds are None if one of its two stamps is missing. The list is empty without a
    launcher, as under torchrun.
    """
    reported = dict(run.seconds)
    if run.folder is not None:
        stored = run.folder.summary["stages"].items()
        reported |= {stage: result["stage_seconds"] for stage, result in stored}
    stamps = run.stamps()
    clocks = []
    for rank, seconds_by_stage in enumerate(run.gather(reported)):
        for stage, seconds in seconds_by_stage.items():
            start, stop = (stamps.get((rank, f"{stage} {event}")) for event in ("begins", "ends"))
            launcher_s = None if start is None or stop is None else stop - start
            clocks.append((stage, rank, seconds, launcher_s))
    return clocks if run.has_launcher else []


def _product_rates(run: Run) -> dict[str, float]:
    """Return a matmul's rate by the wall clock, and its rate relative to the reference matmul's.

    The first rate is in FLOPs per second and the best of all ranks. The second is the median of all
    ranks, timed by the clock of the stage `plan`.
    """
    device = run.device
    run.barrier()
    factors = _factors(run, SIDE[device.type])
    wall_clock_factors = _factors(run, WALL_CLOCK_SIDE[device.type])
    matmul_s = wall_clock_s = reference_s = math.inf
    for _ in range(PRODUCT_ROUNDS):
        stop_time = time.perf_counter() + PRODUCT_SECONDS
        while time.perf_counter() < stop_time:
            start_time = reference_matmul.clock(device)
            torch.mm(*factors)
            matmul_s = min(matmul_s, reference_matmul.clock(device) - start_time)
            start_time = peers.monotonic(run)
            torch.mm(*wall_clock_factors)
            wall_clock_s = min(wall_clock_s, peers.monotonic(run) - start_time)
        reference_s = min(reference_s, reference_matmul.core_seconds(device))
    rate = 2 * SIDE[device.type] ** 3 / matmul_s
    over_reference = rate / (reference_matmul.flops(device) / reference_s)
    wall_clock_rate = 2 * WALL_CLOCK_SIDE[device.type] ** 3 / wall_clock_s
    return {
        "product_flops_per_second": max(run.gather(wall_clock_rate)),
        "product_over_reference": float(statistics.median(run.gather(over_reference))),
    }


def _factors(run: Run, side: int) -> tuple[Tensor, Tensor]:
    """Return two matrices; the second is transposed, as in a linear layer."""
    a, b = (torch.randn(side, side, device=run.device).to(run.compute_dtype) for _ in range(2))
    return a, b.T
