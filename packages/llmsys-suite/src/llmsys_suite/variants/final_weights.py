"""The trained weights of a variant, compared between ranks and with one process."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from llmsys_suite.measure.distance import distances
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants.single import Variant
from llmsys_suite.variants.stored_tensors import stored_bytes

Weights = dict[str, Tensor]


def final_weights(run: Run, start: Weights, variant: Variant) -> dict[str, Any]:
    """Return a comparison of the trained weights, and the bytes that each rank stores.

    All ranks' weights are compared bit by bit with the first rank's. `from_one_process` contains
    the distance of each weight change from the change in one process, on a rank that has the model
    of one process.
    """
    run.barrier()
    alone = variant.alone
    takes_part = not (alone and run.rank)
    stored = [b for b in run.gather(stored_bytes(variant) if takes_part else None) if b]
    after = variant.weights() if takes_part else {}
    bits = {name: _bits(w) for name, w in after.items()}
    everyone = [digests for digests in run.gather(bits) if digests]
    differ = [
        f"rank {rank} {name}"
        for rank, digests in enumerate(everyone)
        for name, value in digests.items()
        if value != everyone[0].get(name)
    ]
    from_one_process = {}
    if run.trained is not None and not alone:
        from_one_process = distances(
            {name: w.double() - start[name].double() for name, w in after.items()},
            {
                name: w.detach().double() - start[name].double()
                for name, w in run.trained.named_parameters()
            },
        )
    return {
        "ranks": len(everyone),
        "differ": differ,
        "from_one_process": from_one_process,
        "stored": stored,
    }


def _bits(weight: Tensor) -> str:
    plain = weight.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(plain.tobytes()).hexdigest()[:16]
