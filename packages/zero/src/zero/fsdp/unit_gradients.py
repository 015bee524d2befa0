"""The gradients of a unit: accumulated locally, then averaged into the shards' `.grad`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from zero.fsdp.shard import as_plain_shard
from zero.gloo_collectives import Work
from zero.gradients.averaged import AveragedGradient
from zero.gradients.shard import as_plain, make_shard_gradient
from zero.process_groups import Communicator


class UnitGradients:
    """The local and the averaged gradients of one unit's parameters.

    Autograd accumulates into the `.grad` of full parameters. See Note [Lifetime of a unit]. Under
    `no_sync()`, a placeholder in a shard's `.grad` represents the local gradient.
    """

    def __init__(self, unit: Any, dtype: torch.dtype) -> None:
        #: The `Unit`; without a type, because `unit.py` imports this file.
        self.unit = unit
        #: The dtype in which gradients are sent, and accumulated under `no_sync()`.
        self.dtype = dtype
        #: False while gradients are accumulated locally.
        self.sync = True
        #: The reduction in progress: its work, output and input.
        self._reduction: tuple[Work, Tensor, Tensor] | None = None
        #: True for each parameter that this rank's backward pass has reached.
        self.is_used = [False] * len(unit.parameters)
        #: Averages of parameters that this rank has not used, until it is known whether another
        #: rank used them.
        self._unclaimed_averages: dict[int, Tensor] = {}
        #: The placeholders for gradients from `no_sync()` that are not averaged yet.
        self._placeholders: dict[int, AveragedGradient] = {}
        #: True if an interrupted backward pass has discarded gradients that placeholders represent.
        self._has_lost_gradients = False
        #: Gradients accumulated under `no_sync()` and cast to `dtype`. Gradients that are computed
        #: in this dtype are in the `.grad` of full parameters instead.
        self._accumulated: dict[int, Tensor] = {}

    @property
    def communicator(self) -> Communicator:
        """The collectives of the unit's ranks, which `FSDP` replaces if it takes over the unit."""
        return self.unit.communicator

    def has_unreduced(self) -> bool:
        """Return True if any full parameter has a gradient that is not averaged yet."""
        return bool(self._accumulated) or any(p.full.grad is not None for p in self.unit.parameters)

    @torch.no_grad()
    def gather_full(self) -> dict[str, Tensor]:
        """Return full averages by name, zeros if `.grad` is None; every rank must call it."""
        gradients = torch.zeros_like(self.unit.shard)
        for parameter, part in self.unit.split_by_parameter(gradients):
            if parameter.shard.grad is not None:
                part.copy_(as_plain(parameter.shard.grad))
        full: dict[str, Tensor] = self.unit.gather(gradients)
        return full

    def reduce_grads(self) -> None:
        """Start summing the gradients over ranks, and free the local gradients."""
        self.wait_for_reduce_grads()
        for index, parameter in enumerate(self.unit.parameters):
            if parameter.full.grad is not None or index in self._accumulated:
                self.is_used[index] = True
        buffer = self._pop_gradients()
        self.communicator.divide_before_sum(buffer)
        if self.communicator.sums_in_place:
            output = buffer.view(self.communicator.world, -1)[self.communicator.rank]
        else:
            output = buffer.new_empty(self.unit.shard.shape)
        work = self.communicator.reduce_scatter(output, buffer, self.unit.label)
        self._reduction = work, output, buffer

    def _pop_gradients(self) -> Tensor:
        """Return the local gradients as one flat tensor with padding, and free them."""
        first = self.unit.parameters[0].full
        if len(self.unit.parameters) == 1 and first.grad is not None and not self._accumulated:
            # A single gradient without padding need not be copied into a buffer.
            gradient = first.grad.reshape(-1).to(self.dtype)
            if gradient.numel() == self.unit.full.numel():
                first.grad = None
                return gradient
        buffer = self.unit.full.new_empty(self.unit.full.numel(), dtype=self.dtype)
        end = 0
        for index, parameter in enumerate(self.unit.parameters):
            offset = self.unit.partition.offsets[index]
            end = offset + prod(parameter.shape)
            target = buffer[offset:end]
            if parameter.full.grad is None:
                target.zero_()
            else:
                target.copy_(parameter.full.grad.reshape(-1))
                parameter.full.grad = None
            if index in self._accumulated:
                target += self._accumulated.pop(index).reshape(-1)
        buffer[end:].zero_()
        return buffer

    def wait_for_reduce_grads(self) -> None:
        """Wait for the reduction in progress, and add the average to the shards' `.grad`."""
        if self._reduction is None:
            return
        work, output, _ = self._reduction
        self._reduction = None
        work.wait()
        average = output.to(self.unit.shard.dtype)
        self.communicator.divide_after_sum(average, output.dtype)
        if average is output and self.communicator.sums_in_place:
            # A view would keep the gradients of all ranks' elements alive.
            average = average.clone()
        start = 0
        for index, parameter in enumerate(self.unit.parameters):
            part = average[start : start + parameter.stop - parameter.start]
            start += part.numel()
            if self.is_used[index]:
                self._accumulate_grad(index, part)
            else:
                # A reentrant checkpoint may reduce a unit several times per backward pass.
                earlier = self._unclaimed_averages.get(index)
                self._unclaimed_averages[index] = part if earlier is None else earlier + part

    def assign_unclaimed_averages(self, used_anywhere: Sequence[bool]) -> None:
        """Add averages to parameters that other ranks have used, and discard all other averages."""
        for index, part in self._unclaimed_averages.items():
            if used_anywhere[index]:
                self._accumulate_grad(index, part)
        self._unclaimed_averages.clear()
        self.is_used = [False] * len(self.unit.parameters)

    def mark_unreduced(self) -> None:
        """Set `.grad` of each shard with an unreduced gradient to a placeholder.

        Reading the placeholder raises an error.
        """
        for index, parameter in enumerate(self.unit.parameters):
            gradient = parameter.full.grad
            if gradient is None:
                continue
            if gradient.dtype != self.dtype:
                gradient = gradient.to(self.dtype)
                accumulated = self._accumulated.get(index)
                if accumulated is not None:
                    gradient = accumulated.add_(gradient)
                self._accumulated[index] = gradient
                parameter.full.grad = None
            if index not in self._placeholders:
                shard = parameter.shard
                # The key is the average of earlier passes, which `_accumulate_grad` restores.
                placeholder = AveragedGradient(shard, self, shard.grad)
                # Autograd adds gradients of penalties on the shard, which are averages already.
                placeholder.unreduced = torch.zeros_like(as_plain_shard(shard))
                self._placeholders[index] = placeholder
                shard.grad = placeholder

    def discard_cleared(self) -> None:
        """Discard unreduced gradients whose `.grad` the caller has cleared.

        Raise RuntimeError if an interrupted backward pass has lost any other unreduced gradient.
        """
        for index, placeholder in list(self._placeholders.items()):
            if self.unit.parameters[index].shard.grad is not placeholder:
                self.unit.parameters[index].full.grad = None
                self._accumulated.pop(index, None)
                del self._placeholders[index]
        if self._has_lost_gradients and self._placeholders:
            raise RuntimeError(
                f"rank {self.communicator.rank}: a backward pass raised an error, so the gradients "
                f"of {self.unit.label} from earlier backward passes under no_sync() are lost: "
                "clear all gradients with zero_grad(), and repeat the backward passes of this step"
            )
        self._has_lost_gradients = False

    def _accumulate_grad(self, index: int, part: Tensor) -> None:
        """Add an average to a shard's `.grad`, and run the hooks that autograd would run."""
        parameter = self.unit.parameters[index]
        shard = parameter.shard
        placeholder = self._placeholders.pop(index, None)
        if placeholder is not None and shard.grad is placeholder:
            shard.grad = placeholder.key
            assert placeholder.unreduced is not None
            part = part + placeholder.unreduced.reshape(-1)
        if not shard.requires_grad:
            return
        part = make_shard_gradient(part.view(shard.shape), self.communicator, parameter.elements)
        # Autograd accumulates only into the full parameter, so hooks of the shard run here.
        for hook in list((shard._backward_hooks or {}).values()):
            changed = hook(part)
            if changed is not None:
                part = changed
        if shard.grad is None:
            shard.grad = part
        else:
            shard.grad += part
        for hook in list((shard._post_accumulate_grad_hooks or {}).values()):
            hook(shard)

    def discard(self) -> None:
        """Discard the gradients of a backward pass that was interrupted."""
        self._has_lost_gradients = bool(self._placeholders)
        self._reduction = None
        self._unclaimed_averages.clear()
        self._accumulated.clear()
        self.is_used = [False] * len(self.unit.parameters)
        for parameter in self.unit.parameters:
            parameter.full.grad = None
