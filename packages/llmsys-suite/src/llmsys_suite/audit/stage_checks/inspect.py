"""Checks of `inspect`: the lens and the heads, recomputed in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmsys_suite import results
from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, Sources, same_rows
from llmsys_suite.audit.inputs import compare_with_file, in_float64, num_heads
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.tolerances import LOSS_SCALE, REPLAYED_LOSS
from llmsys_suite.config import size_of
from llmsys_suite.folder import RunFolder
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import inspect


def recorded(folder: RunFolder, result: results.Inspect) -> Iterator[Check]:
    """Check that the tables of heads and of layers are complete."""
    yield same_rows("kinds of heads", inspect.KINDS, [row["kind"] for row in result.heads])
    num_layers = size_of(folder.config.size).num_layers
    layers = ["embedding", *(f"blocks.{i}" for i in range(num_layers))]
    yield same_rows("layers of the lens", layers, [row["after"] for row in result.lens])


def checks(run: Run, result: results.Inspect) -> Iterator[Check]:
    """Check the last row of the lens and the previous-token heads in float64."""
    if not isinstance(run.trained, Decoder):
        return
    model = run.trained
    yield compare_with_file(run, model)
    heads = num_heads(run.config)
    weights = in_float64(model)
    heldout = reference.spread(read_parts(run.config)[1], 4, min(64, model.config.context))
    tokens, targets = (t.to(run.device) for t in heldout)
    loss = reference.mean_loss(weights, tokens, targets, heads)
    lens = result.lens[-1]["target_loss"]
    interps = Sources("interp", "the loss in float64")
    name = "lens after the last layer"
    yield interps.equal(name, loss, lens, REPLAYED_LOSS, scale=LOSS_SCALE)
    yield from _scores(run, weights, heads, result.heads)


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
