"""Checks of `inspect`: lens, attribution, heads and ablation, recomputed in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from llmsys_suite import results
from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, Sources, same_rows
from llmsys_suite.audit.inputs import compare_with_file, in_float64, num_heads
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.tolerances import REPLAYED_LOSS
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import inspect

#: Allowed error of a component's credit, relative to the sum of all magnitudes.
ATTRIBUTION = 1e-5


def checks(run: Run, result: results.Inspect) -> Iterator[Check]:
    """Check the last lens row, attributions, previous-token heads and the ablation in float64."""
    if not isinstance(run.trained, Decoder):
        return
    yield compare_with_file(run, run.trained)
    yield same_rows("kinds of heads", inspect.KINDS, [row["kind"] for row in result.heads])
    model = run.trained
    layers = ["embedding", *(f"blocks.{i}" for i in range(model.config.num_layers))]
    yield same_rows("layers of the lens", layers, [row["after"] for row in result.lens])
    heads = num_heads(run.config)
    weights = in_float64(model)
    heldout = reference.spread(read_parts(run.config)[1], 4, min(64, model.config.context))
    tokens, targets = (t.to(run.device) for t in heldout)
    loss = reference.mean_loss(weights, tokens, targets, heads)
    lens = result.lens[-1]["target_loss"]
    interps = Sources("interp", "the loss in float64")
    yield interps.equal("lens after the last layer", loss, lens, REPLAYED_LOSS)
    yield from _attribution(weights, tokens, targets, heads, result.attribution)
    yield from _scores(run, weights, heads, result.heads)
    ablation = result.ablation
    cut = [f"{ablation['layer']}.{ablation['head']}"]
    named = [f"{row['layer']}.{row['head']}" for row in result.heads if row["kind"] == "previous"]
    yield same_rows("ablated head", named, cut)
    without = reference.mean_loss(_cut(weights, ablation, heads), tokens, targets, heads)
    zeroed = Sources("interp", "its values set to zero in float64")
    yield zeroed.equal("loss without a head", without, ablation["loss"], REPLAYED_LOSS)


def _attribution(
    weights: dict[str, Tensor], tokens: Tensor, targets: Tensor, heads: int, rows: results.Rows
) -> Iterator[Check]:
    """Compare the credit of every component with the residual streams in float64."""
    before, *streams = reference.streams(weights, tokens, heads)
    final = streams[-1]
    rms = (final.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    directions = weights["head.weight"][targets] * weights["norm.weight"] / rms
    layers = range(len(streams) // 2)
    names = [f"blocks.{i}.{part}" for i in layers for part in ("attention", "ffn")]
    written = {"embedding": before}
    for name, after in zip(names, streams, strict=True):
        written[name] = after - before
        before = after
    exact = {name: float((x * directions).sum(-1).mean()) for name, x in written.items()}
    credits = {row["component"]: row["mean_logit"] for row in rows}
    spread = sum(map(abs, exact.values()))
    off = [
        (abs(credits.get(name, math.nan) - credit) / spread, name) for name, credit in exact.items()
    ]
    interps = Sources("interp", "differences of streams in float64")
    yield interps.all_near("attributions", off, ATTRIBUTION)


def _scores(
    run: Run, weights: dict[str, Tensor], heads: int, rows: results.Rows
) -> Iterator[Check]:
    """Compare the best previous-token head with the attention patterns of all heads in float64."""
    assert isinstance(run.trained, Decoder)
    config = run.trained.config
    repeated = inspect.repeated(min(64, config.context), config.vocabulary).to(run.device)
    patterns = reference.patterns(weights, repeated, heads)
    by_hand = [layer.diagonal(-1, 2, 3).mean((0, 2)) for layer in patterns]
    rows = [row for row in rows if row["kind"] == "previous"]
    name = "the head for the token before"
    scores = [(float(by_hand[row["layer"]][row["head"]]), row["score"], name) for row in rows]
    diagonal = Sources("interp", "its pattern's diagonal")
    yield diagonal.all_equal(f"score of {name}", scores, 1e-4)
    best = float(torch.stack(by_hand).max())
    largest = Sources("interp", "the largest of all heads")
    yield largest.all_equal(f"choice of {name}", [(best, row["score"], name) for row in rows], 1e-4)


def _cut(weights: dict[str, Tensor], ablation: results.Row, heads: int) -> dict[str, Tensor]:
    """Return the weights with the values of one head set to zero."""
    name = f"blocks.{ablation['layer']}.attention.v.weight"
    values = weights[name].clone()
    width = len(values) // heads
    values[ablation["head"] * width : (ablation["head"] + 1) * width] = 0
    return weights | {name: values}
