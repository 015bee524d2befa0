"""Attributes and private members of torch's DDP that other libraries read.

A comment above each private member names its reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.options import Options
from ddp.replica import Replica


class TorchCompatibility:
    """Mixin of `DDP` with members of torch's DDP that other libraries read."""

    module: nn.Module
    _options: Options

    if TYPE_CHECKING:

        @property
        def _replica(self) -> Replica:
            """The connection to the other ranks, which `DDP` defines."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group over which gradients are averaged."""
        return self._replica.group.process_group

    @property
    def forward_sync_buffers(self) -> bool:
        """True if buffers are synchronized."""
        return self._options.sync_buffers

    broadcast_buffers = forward_sync_buffers

    @property
    def static_graph(self) -> bool:
        """True if every step computes the same graph. Lightning reads it."""
        return self._options.static_graph

    @property
    def find_unused_parameters(self) -> bool:
        """True if a gradient that is missing on some ranks counts as zero. Lightning reads it."""
        return self._options.find_unused_parameters

    @property
    def gradient_as_bucket_view(self) -> bool:
        """True if `.grad` is a view of a bucket."""
        return self._options.gradient_as_bucket_view

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; the CPU without parameters."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def device_ids(self) -> list[int] | None:
        """A list with the index of the device that inputs are moved to; None if they stay."""
        device = self._options.device
        return None if device is None else [device.index]

    # Used by the callers of the methods of `ReducerFacade`.
    @property
    def reducer(self) -> ReducerFacade:
        """The part of torch's reducer that trainers call."""
        return ReducerFacade(self._replica)

    # Called by Lightning's `DDPStrategy.teardown`.
    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return log data that advises against `static_graph=True`, which is not faster here."""
        return {"can_set_static_graph": False}


@dataclass(frozen=True)
class ReducerFacade:
    """The methods of torch's reducer that trainers call."""

    _replica: Replica

    # Called by Lightning's `prepare_for_backward`.
    def _rebuild_buckets(self) -> bool:
        """Return False: buckets are rebuilt automatically after the first step."""
        return False

    # Called by Lightning's `DDPStrategy` after a manual backward pass with `static_graph=True`.
    def _delay_all_reduce(self) -> None:
        """Do nothing: `backward()` has already reduced the first step, unlike in torch's DDP."""

    # Called by Accelerate's `trigger_sync_in_backward`, Lightning's `prepare_for_backward` and
    # torch's `PipelineStage`.
    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Request that the next backward pass synchronizes gradients."""
        self._replica.backward_pass.is_sync_requested = True
        for node in collect_graph_nodes(outputs):
            node.register_prehook(partial(self._replica.enter_backward, True))


def collect_graph_nodes(output: Any) -> set[Any]:
    """Return the autograd nodes that computed the tensors in `output`.

    Tensors in mappings, lists, tuples and dataclasses are included.
    """
    if isinstance(output, Tensor):
        return {output.grad_fn} if output.grad_fn is not None else set()
    if isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name) for field in fields(output)]
    if isinstance(output, list | tuple):
        return set().union(*(collect_graph_nodes(value) for value in output))
    return set()
