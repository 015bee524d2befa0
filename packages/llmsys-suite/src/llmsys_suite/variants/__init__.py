"""Training variants, which a run compares with equal initial weights, tokens and optimizers."""

from __future__ import annotations

import torch

from llmsys_suite.measure.samples import VARIANT_NAMES
from llmsys_suite.variants.replicated import (
    Bucketed,
    Flat,
    Naive,
    Overlapped,
    SharedMemory,
    TorchDDP,
)
from llmsys_suite.variants.server import ParameterServer
from llmsys_suite.variants.sharded import FullySharded, ShardedGradients, ShardedState, TorchFSDP
from llmsys_suite.variants.single import Variant

#: Classes in the order of `VARIANT_NAMES`.
_CLASSES = (Variant, TorchDDP, Naive, Flat, Overlapped, Bucketed, SharedMemory, ShardedState,
            ShardedGradients, FullySharded, TorchFSDP, ParameterServer)  # fmt: skip
VARIANTS: dict[str, type[Variant]] = dict(zip(VARIANT_NAMES, _CLASSES, strict=True))


def list_variants(device: torch.device) -> list[str]:
    """Return the names of the variants that a type of device can run, in the order of a run."""
    return [name for name in VARIANTS if device.type == "cpu" or VARIANTS[name] is not SharedMemory]
