"""The trained weights of a variant, compared between ranks and with one process."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from llmsys_suite.measure.distance import compute_distances
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants.single import Variant
from llmsys_suite.variants.stored_tensors import count_stored_bytes

Weights = dict[str, Tensor]


def compare_final_weights(run: Run, start: Weights, variant: Variant) -> dict[str, Any]:
    """Return a comparison of the trained weights, and the bytes that each rank stores.

    The weights of every rank are compared bit by bit with those of rank 0. On rank 0, the change
    of each weight since `start` is also compared with its change in one process.
    """
    run.barrier()
    takes_part = run.rank == 0 or not variant.alone
    stored = [b for b in run.gather(count_stored_bytes(variant) if takes_part else None) if b]
    weights = variant.gather_weights() if takes_part else {}
    digests = {name: _compute_digest(weight) for name, weight in weights.items()}
    gathered = [rank_digests for rank_digests in run.gather(digests) if rank_digests]
    differ = []
    for rank, rank_digests in enumerate(gathered):
        for name, digest in rank_digests.items():
            if digest != gathered[0].get(name):
                differ.append(f"rank {rank} {name}")
    from_one_process = {}
    if run.trained is not None and not variant.alone:
        trained = {name: p.detach() for name, p in run.trained.named_parameters()}
        from_one_process = compute_distances(
            _compute_changes(weights, start), _compute_changes(trained, start)
        )
    return {
        "ranks": len(gathered),
        "differ": differ,
        "from_one_process": from_one_process,
        "stored": stored,
    }


def _compute_changes(weights: Weights, start: Weights) -> Weights:
    return {name: weight.double() - start[name].double() for name, weight in weights.items()}


def _compute_digest(weight: Tensor) -> str:
    weight_bytes = weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(weight_bytes).hexdigest()[:16]
