"""Parameters of an `nn.Module` by submodule."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from accounting.breakdown import Breakdown, product, total

if TYPE_CHECKING:
    from torch import nn

UNIT = "parameters"

#: Attributes that mark weights stored in fewer elements than the logical weight has, in torch's
#: quantized modules, GPTQ and AWQ, 4-bit bitsandbytes, DeepSpeed's ZeRO-3, and torch's FSDP1.
_PACKED = {
    "_fsdp_wrapped_module": "flattened by FullyShardedDataParallel",
    "qweight": "quantized and packed",
    "_packed_params": "quantized and packed",
    "quant_state": "quantized and packed",
    "ds_numel": "sharded by DeepSpeed",
}


def count_module(module: nn.Module) -> Breakdown:
    """Count parameters per direct child; a shared parameter counts for the first child."""
    _check(module)
    _refuse_packed(module)
    seen: set[int] = set()

    def child_parameters(name: str, child: nn.Module) -> Breakdown:
        fresh = {n: p for n, p in child.named_parameters() if id(p) not in seen}
        seen.update(map(id, fresh.values()))
        shapes = Counter(tuple(p.shape) for p in fresh.values())
        leaves = (
            product(
                "x".join(map(str, shape)) or "scalar", UNIT, tensors=count, entries=math.prod(shape)
            )
            for shape, count in shapes.items()
        )
        return total(name, UNIT, *leaves)

    children = [child_parameters(name, child) for name, child in module.named_children()]
    direct = [
        product(name, UNIT, entries=parameter.numel())
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) not in seen
    ]
    return total(f"parameters of {type(module).__name__}", UNIT, *children, *direct)


def _check(module: object) -> None:
    if not hasattr(module, "named_parameters"):
        raise TypeError(
            f"expected a model, a Transformer or an nn.Module, got {type(module).__name__}; "
            "a config.json is read with Transformer.from_hf"
        )


def _refuse_packed(module: nn.Module) -> None:
    """Raise `ValueError` if weights are packed or sharded: see `_PACKED`."""
    for name, child in module.named_modules():
        for attribute, reason in _PACKED.items():
            if any(hasattr(x, attribute) for x in (child, *child.parameters(recurse=False))):
                raise ValueError(
                    f"expected weights with one element per parameter, but those of {name!r} are "
                    f"{reason}; count the module before that, also on the meta device"
                )
