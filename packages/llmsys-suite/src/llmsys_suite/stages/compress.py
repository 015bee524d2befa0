"""The trained model, compressed by several methods: bytes, held-out loss and speed of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tinyml
import torch
from torch import nn

from llmsys_suite.measure.interleaved import time_interleaved
from llmsys_suite.model import Decoder, cross_entropy
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Compress

HELDOUT_ROWS = 16
ROUNDS = 7
BASELINE = "float32"
METHODS: dict[str, Callable[[nn.Module], nn.Module]] = {
    BASELINE: lambda model: model,
    "half pruned": lambda model: tinyml.prune(model, 0.5).model,
    "k-means, 4 bits": lambda model: tinyml.kmeans_quantize(model, 4),
    "k-means, 2 bits": lambda model: tinyml.kmeans_quantize(model, 2),
    "linear, 8 bits": lambda model: tinyml.quantize(model, 8),
    "linear, 4 bits": lambda model: tinyml.quantize(model, 4),
    "8 bits, activations too": lambda model: tinyml.quantize(model, 8, activations="dynamic"),
}


def run(run: Run) -> Compress | None:
    """Return the size, held-out loss and forward time of each method; None without a model."""
    if run.trained is None:
        return None
    tokens, targets = get_heldout_batch(run)
    with torch.no_grad(), run.in_float32():
        trained = run.trained.eval()
        run.compressed = {method: compress(trained) for method, compress in METHODS.items()}
        calls = {method: partial(model, tokens) for method, model in run.compressed.items()}
        interleaved = time_interleaved(calls, ROUNDS, run.device)
        rows = [
            _evaluate_method(name, model, tokens, targets) for name, model in run.compressed.items()
        ]
    for row in rows:
        row["smaller"] = rows[0]["size_bytes"] / row["size_bytes"]
        row["speedup_p50"] = 1 / interleaved.compute_ratio(BASELINE, row["method"])
    return Compress(rows, interleaved)


def get_heldout_batch(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the held-out tokens and targets on which every method is evaluated."""
    assert isinstance(run.trained, Decoder)
    context = run.trained.config.context
    tokens, targets = run.corpus.build_heldout_batch(rows=HELDOUT_ROWS, context=context)
    return tokens.to(run.device), targets.to(run.device)


def _evaluate_method(
    name: str, model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor
) -> dict[str, Any]:
    """Return the method, the bytes of the state dict and the held-out loss of one model."""
    sizes = tinyml.size_of(model).sparse_by_name
    state = model.state_dict()
    return {
        "method": name,
        # Count only state-dict tensors, because the file omits non-persistent buffers. A tensor is
        # counted as sparse if that is smaller.
        "size_bytes": sum(nbytes for tensor, nbytes in sizes.items() if tensor in state),
        "heldout_loss": float(cross_entropy(model(tokens), targets)),
    }
