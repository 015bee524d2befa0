"""Checks of `inspect`: the lens after the last layer, and previous-token heads, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmsys_suite import results
from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, Sources, compare_rows
from llmsys_suite.audit.inputs import compare_with_file, get_float64_parameters, get_num_heads
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.tolerances import REPLAYED_LOSS
from llmsys_suite.config import get_size
from llmsys_suite.folder import RunFolder
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run

#: The kinds of heads that the stage must report, listed here independently of the stage.
KINDS = ("previous", "duplicate", "induction", "first")


def check_records(folder: RunFolder, result: results.Inspect) -> Iterator[Check]:
    """Check that the tables of heads and of layers are complete."""
    yield compare_rows("kinds of heads", KINDS, [row["kind"] for row in result.heads])
    num_layers = get_size(folder.config.size).num_layers
    layers = ["embedding", *(f"blocks.{i}" for i in range(num_layers))]
    yield compare_rows("layers of the lens", layers, [row["after"] for row in result.lens])


def check_stage(run: Run, result: results.Inspect) -> Iterator[Check]:
    """Check the analyzed model, the last row of the lens and the previous-token head."""
    if not isinstance(run.trained, Decoder):
        return
    model = run.trained
    yield compare_with_file(run, model)
    heads = get_num_heads(run.config)
    weights = get_float64_parameters(model)
    heldout = reference.build_evenly_spaced_batch(
        read_parts(run.config)[1], 4, min(64, model.config.context)
    )
    tokens, targets = (t.to(run.device) for t in heldout)
    loss = reference.compute_mean_loss(weights, tokens, targets, heads)
    lens = result.lens[-1]["target_loss"]
    float64 = Sources("interp", "the loss in float64")
    name = "lens after the last layer"
    yield float64.check_loss(name, loss, lens, REPLAYED_LOSS)
    yield from _check_scores(run, weights, heads, result.heads)


def _check_scores(
    run: Run, weights: dict[str, Tensor], heads: int, rows: results.Rows
) -> Iterator[Check]:
    """Compare the best previous-token head with the float64 attention patterns of all heads."""
    assert isinstance(run.trained, Decoder)
    config = run.trained.config
    repeated = _draw_repeated_rows(min(64, config.context), config.vocabulary).to(run.device)
    patterns = reference.compute_patterns(weights, repeated, heads)
    # The mean attention of each head to the previous token, one tensor (heads,) per layer.
    expected = [pattern.diagonal(-1, 2, 3).mean((0, 2)) for pattern in patterns]
    rows = [row for row in rows if row["kind"] == "previous"]
    name = "the head for the token before"
    scores = [(float(expected[row["layer"]][row["head"]]), row["score"], name) for row in rows]
    diagonal = Sources("interp", "its pattern's diagonal")
    yield diagonal.check_all_equal(f"score of {name}", scores, 1e-4)
    best = float(torch.stack(expected).max())
    largest = Sources("interp", "the largest of all heads")
    chosen = [(best, row["score"], name) for row in rows]
    yield largest.check_all_equal(f"choice of {name}", chosen, 1e-4)


def _draw_repeated_rows(context: int, vocabulary: int) -> Tensor:
    """Return the rows of the stage: four permutations, each cut off and followed by its copy."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(vocabulary, generator=generator)[: context // 2] for _ in range(4)]
    return torch.stack([row.repeat(2) for row in rows])
