"""The trained model in fewer bytes: what each way costs in held-out loss and gains in time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tinyml
import torch
from torch import nn

from llmsys_suite.model import Decoder

if TYPE_CHECKING:
    from llmsys_suite.worker import Run

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


def run(run: Run) -> dict[str, Any]:
    """Bytes, held-out loss and forward time of each way, on rank 0."""
    if run.trained is None:
        return {}
    model = run.trained.eval()
    assert isinstance(model, Decoder)
    tokens, targets = (
        t.to(run.device)
        for t in run.corpus.heldout_batch(rows=HELDOUT_ROWS, context=model.config.context)
    )
    with torch.no_grad():
        models = {method: compress(model) for method, compress in METHODS.items()}
        seconds = _rounds(models, tokens)
        rows = [_row(name, small, tokens, targets) for name, small in models.items()]
    for row in rows:
        name = row["method"]
        row["smaller"] = rows[0]["size_bytes"] / row["size_bytes"]
        row["speedup_p50"] = statistics.median(
            a / b for a, b in zip(seconds[BASELINE], seconds[name], strict=True)
        )
    return {"rows": rows}


def _row(
    name: str, model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor
) -> dict[str, Any]:
    logits = model(tokens)
    size = tinyml.size_of(model)
    return {
        "method": name,
        # Zeros are only saved where a file leaves them out.
        "size_bytes": size.sparse_bytes if "pruned" in name else size.bytes,
        "heldout_loss": float(
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        ),
    }


def _rounds(models: dict[str, nn.Module], tokens: torch.Tensor) -> dict[str, list[float]]:
    """Forward time of each model, taking turns, the first turn left out."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(ROUNDS + 1):
        for name, model in models.items():
            begin = time.perf_counter()
            model(tokens)
            if tokens.device.type == "cuda":
                torch.cuda.synchronize()
            if turn > 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds
