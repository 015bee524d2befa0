"""Synchronization of buffers at stages 1 and 2, where the module is not wrapped."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn


class BufferHook:
    """A forward pre-hook that copies buffers to all ranks by the rule of torch's DDP.

    Rank 0's buffers are copied before a forward pass, unless the previous one ran without gradients
    or in `no_sync()`. Within `Join`, where rank 0 may have no inputs left, the source is the last
    rank with inputs.
    """

    def __init__(self, optimizer: Any = None) -> None:
        #: A weak reference, because the module may outlive its optimizer.
        self._optimizer = weakref.ref(optimizer) if optimizer else lambda: None
        self._buffers_may_differ = True

    def copy_before_forward(self, module: nn.Module, _: Any) -> None:
        """Copy the buffers of `module` before its forward pass, outside of compiled graphs."""
        torch.compiler.disable(self._copy_buffers)(module)

    def _copy_buffers(self, module: nn.Module) -> None:
        optimizer: Any = self._optimizer()
        # A checkpoint may recompute the module within the backward pass.
        if optimizer is None or torch._C._current_graph_task_id() != -1:
            return
        if self._buffers_may_differ and any(True for _ in module.buffers()):
            optimizer.copy_buffers()
        self._buffers_may_differ = torch.is_grad_enabled() and optimizer.reducer.enabled

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module, which another process may load, has no optimizer.
        return type(self), ()
