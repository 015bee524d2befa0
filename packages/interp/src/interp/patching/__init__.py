"""Which activation carries the answer: patches of streams and paths, exact and to first order."""

from interp.patching.attribution import attribute_parts, attribution_patching, edge_attribution
from interp.patching.paths import Edges, Node, patch_edges, path_patching
from interp.patching.restart import Metric, Prompt
from interp.patching.streams import (
    Ablations,
    StreamScan,
    ablate_parts,
    drop_heads,
    logit_difference,
    patch_parts,
    patch_streams,
)

__all__ = [
    "Ablations",
    "Edges",
    "Metric",
    "Node",
    "Prompt",
    "StreamScan",
    "ablate_parts",
    "attribute_parts",
    "attribution_patching",
    "drop_heads",
    "edge_attribution",
    "logit_difference",
    "patch_edges",
    "patch_parts",
    "patch_streams",
    "path_patching",
]
