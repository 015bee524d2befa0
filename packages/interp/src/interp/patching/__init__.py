r"""Activation patching, path patching and their first-order estimates.

Notation. A *clean* and a *corrupted* prompt have the same number of tokens and different answers. A
metric m maps a final residual stream to a number, usually a difference of two logits. A *site* is
an activation inside the model. Consider one layer, head and position of a site. Write a for its
value in the corrupted run and a' for its value in the clean run.

**Activation patching** runs the corrupted prompt with a' in place of a and measures

    effect = m(corrupted run with a := a') - m(corrupted run)

`patch_streams` runs one patch per layer and position of the residual stream. `patch_parts` runs one
per layer, head and position of queries, keys, values, outputs or MLPs. Both return the metric after
each patch, of the clean run and of the corrupted run. `drop_heads` ablates heads at all positions,
for `interp.patch`.

**Restarts.** A patch in layer l does not change the blocks before l. The corrupted run is therefore
recorded once, and a patch restarts at the recorded input of block l. For patches in all
layers, about half of the block computations remain.

**Batching.** Up to `batch` patches run together. A batch starts with the patches of its lowest
layer, and the patches of layer l join at block l. Each block is called once per batch:

    block 0   patch patch                          patches in layer 0
    block 1   patch patch patch                    and patches in layer 1
    block 2   patch patch patch patch patch        and patches in layer 2

**Causality.** A patch at position t cannot change positions before t. The projections and
the MLPs therefore compute only position t and later positions. The attention between its
projections computes all positions, with the recorded queries, keys and values of earlier ones.

**Path patching** measures the effect of a *sender* through one *receiver*. A sender is the
embedding, a head or an MLP. A receiver is a head's queries, keys or values, an MLP, or the final
norm. The residual stream is a sum of the senders' outputs s_i. The edge from i to r is therefore
patched by adding s_i' - s_i to the input of r only:

    effect(i -> r) = m(corrupted run with input_r := input_r + s_i' - s_i) - m(corrupted run)

Components between i and r keep their corrupted values; components after r are computed.
`patch_edges` measures this effect for all edges and restarts at the receiver.

**Attribution patching** estimates all effects from one backward pass of the corrupted run:

    effect ~ (a' - a) * dm/da        with an error of second order in a' - a

A saturated softmax has almost no gradient. `edge_attribution` therefore recomputes the softmax of
patched queries and keys and linearizes only the computation after it (AtP*). The edges with the
largest estimates are also measured, and the errors of their estimates are reported.

Patching needs a `Decoder`: call `describe` on the model first. `patch_streams`, `patch_parts`,
`patch_edges` and `edge_attribution` accept several pairs of prompts, (pairs, seq), and return
means. Such a result also has the result of each pair in `pairs` and the `standard_error` of its
values. `standard_error_of` computes the standard error of any quantity:

    result.standard_error_of(lambda mean: mean.recovered)

`pairs_of` makes pairs and metrics from a table.

References: Goldowsky-Dill et al. 2023, "Localizing Model Behavior with Path Patching"; Nanda 2023,
"Attribution Patching"; Syed et al. 2023, "Attribution Patching Outperforms Automated Circuit
Discovery"; Kramár et al. 2024, "AtP*".
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
