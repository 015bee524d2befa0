"""Activation patching, path patching and their first-order estimates.

A patch runs a corrupted prompt with an activation of a clean prompt. "How it works" in the README
of the package states the formulas and explains restarts, batches and the affected positions.

- `patch_streams` computes one patch per layer and position of the residual stream. `patch_parts`
  computes one patch per layer, head and position of queries, keys, values, outputs or MLPs. Both
  return the metric after each patch, the metric of the clean run and that of the corrupted run.
- `drop_heads` returns a replacement for `interp.patch` that ablates heads at all positions.
- `patch_edges` measures the effect of each sender through each receiver.
- `attribution_patching` and `edge_attribution` estimate effects from one backward pass.
  `edge_attribution` also measures the edges with the largest estimates, and its result contains the
  errors of these estimates.
- `pairs_of` returns pairs of prompts and their metrics from a table.

Patching needs a `Decoder`: call `describe` on the model first. `patch_streams`, `patch_parts`,
`patch_edges` and `edge_attribution` accept several pairs of prompts, (pairs, seq), and return
means. Such a result also has the result of each pair in `pairs` and the `standard_error` of its
values. `standard_error_of` computes the standard error of any quantity:

    result.standard_error_of(lambda mean: mean.recovered)
"""

from interp.patching.activation import (
    PatchingResult,
    drop_heads,
    logit_difference,
    patch_parts,
    patch_streams,
)
from interp.patching.attribution import attribution_patching, edge_attribution
from interp.patching.pairs import pairs_of
from interp.patching.paths import EdgeEffects, Node, patch_edges
from interp.prompts import Metric, Prompt

__all__ = [
    "EdgeEffects",
    "Metric",
    "Node",
    "PatchingResult",
    "Prompt",
    "attribution_patching",
    "drop_heads",
    "edge_attribution",
    "logit_difference",
    "pairs_of",
    "patch_edges",
    "patch_parts",
    "patch_streams",
]
