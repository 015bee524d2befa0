"""Forward and backward passes in a lower precision, over weights that stay as they are.

Each forward pass computes with copies of the parameters in `param_dtype`. A copy is an operation of
the graph, so that its gradient is the parameter's, in the parameter's precision, and everything
that happens to gradients afterwards is as ever.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class MixedPrecision(Protocol):
    """What torch's `_MixedPrecision` has: None leaves a dtype as it is."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None


def check_mixed_precision(given: Any) -> None:
    """Raise TypeError unless `given` says three dtypes."""
    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    dtypes = [getattr(given, name, "") for name in names]
    if not all(dtype is None or isinstance(dtype, torch.dtype) for dtype in dtypes):
        raise TypeError(
            f"mixed_precision is {given!r}; pass torch.nn.parallel.distributed._MixedPrecision("
            "param_dtype=torch.bfloat16), or anything that has its three dtypes"
        )


def travels_as(given: MixedPrecision | None) -> torch.dtype | None:
    """The dtype of gradients on the wire."""
    return None if given is None else given.reduce_dtype or given.param_dtype


@torch.no_grad()
def cast_buffers(module: nn.Module, given: MixedPrecision, ignored: Collection[str]) -> None:
    """Turn floating-point buffers into `buffer_dtype`, for good."""
    for name, buffer in module.named_buffers():
        if given.buffer_dtype and buffer.is_floating_point() and name not in ignored:
            buffer.data = buffer.to(given.buffer_dtype)


def call(
    module: nn.Module,
    given: MixedPrecision | None,
    ignored: Collection[str],
    args: Any,
    kwargs: Any,
) -> Any:
    """Call `module`, with floating-point inputs and parameters in `param_dtype`."""
    if given is None or given.param_dtype is None:
        return module(*args, **kwargs)
    dtype = given.param_dtype

    def low(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    weights = {name: low(p) for name, p in module.named_parameters() if name not in ignored}
    args, kwargs = tree_map_only(Tensor, low, (args, kwargs))
    return torch.func.functional_call(module, weights, args, kwargs)
