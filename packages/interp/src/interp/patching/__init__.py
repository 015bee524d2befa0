"""Which activation carries the answer: patches of streams and paths, exact and to first order."""

from interp.patching.restart import Metric
from interp.patching.streams import (
    StreamScan,
    attribution_patching,
    drop_heads,
    logit_difference,
    patch_parts,
    patch_streams,
    path_patching,
)

__all__ = [
    "Metric",
    "StreamScan",
    "attribution_patching",
    "drop_heads",
    "logit_difference",
    "patch_parts",
    "patch_streams",
    "path_patching",
]
