"""Activation patching, path patching and their first-order estimates.

A patch runs a corrupted prompt with an activation of a clean prompt. "How it works" in the README
of the package states the formulas and explains restarts, batches and the affected positions.

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
