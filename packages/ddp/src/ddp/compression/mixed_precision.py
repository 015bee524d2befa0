"""Forward and backward passes in a lower precision than the weights.

Each forward pass computes with copies of the parameters in `param_dtype`. The copy is part of the
autograd graph, so the gradient of the parameter has the precision of the parameter.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class MixedPrecision(Protocol):
    """The attributes of torch's `_MixedPrecision`; None leaves a dtype unchanged."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None


def check_mixed_precision(value: Any) -> None:
    """Raise `TypeError` unless `value` has three dtypes."""
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(value, name, "")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(
                "expected mixed_precision to have the attributes param_dtype, reduce_dtype and "
                f"buffer_dtype, got {value!r}; pass "
                "torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)"
            )


def communication_dtype(policy: MixedPrecision | None) -> torch.dtype | None:
    """Return the dtype in which gradients are sent, or None for the dtype that they have."""
    return None if policy is None else policy.reduce_dtype or policy.param_dtype


@torch.no_grad()
def cast_buffers(module: nn.Module, policy: MixedPrecision, ignored: Collection[str]) -> None:
    """Convert floating-point buffers to `buffer_dtype` permanently."""
    for name, buffer in module.named_buffers():
        if policy.buffer_dtype and buffer.is_floating_point() and name not in ignored:
            buffer.data = buffer.to(policy.buffer_dtype)


def call_module(
    module: nn.Module,
    policy: MixedPrecision | None,
    ignored: Collection[str],
    args: Any,
    kwargs: Any,
) -> Any:
    """Call `module` with floating-point inputs and parameters in `param_dtype`."""
    if policy is None or policy.param_dtype is None:
        return module(*args, **kwargs)
    dtype = policy.param_dtype

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    weights = {name: cast(p) for name, p in module.named_parameters() if name not in ignored}
    args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
    return torch.func.functional_call(module, weights, args, kwargs)
