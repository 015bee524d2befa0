"""Averaging of all gradients in one backward of stage 3."""

from __future__ import annotations

import torch
from torch.autograd.graph import get_gradient_edge

from zero.fsdp.unit import Unit
from zero.process_groups import Communicator


class GradientSync:
    """The reductions of units, each of which starts when the unit's last gradient is ready."""

    def __init__(self, units: list[Unit], communicator: Communicator) -> None:
        self.units = units
        self.communicator = communicator
        #: False in `torch.autograd.grad()`, which does not change `.grad`.
        self.accumulates_gradients = False
        self._reducing_unit: Unit | None = None
        self._num_ready_gradients: dict[Unit, int] = {}

    def start(self) -> None:
        """Prepare for the gradients of a backward."""
        self.accumulates_gradients = self._will_accumulate_gradients()
        for unit in self.units:
            unit.gradients.discard_cleared()

    @torch.no_grad()
    def gradient_ready(self, unit: Unit) -> None:
        """Reduce a unit if its last gradient has been accumulated."""
        # In a backward within a backward (reentrant checkpointing), the outer graph does not show
        # that gradients are accumulated.
        self.accumulates_gradients = True
        num_ready = self._num_ready_gradients.get(unit, 0) + 1
        self._num_ready_gradients[unit] = num_ready
        if unit.gradients.sync and num_ready == unit.gradients.num_trainable():
            self._reduce(unit)

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce the remaining gradients, and set `.grad` of the same parameters on all ranks."""
        self._num_ready_gradients.clear()
        is_synced = any(unit.gradients.sync for unit in self.units)
        if is_synced and self.accumulates_gradients:
            self._finish_reductions()
        for unit in self.units:
            if not unit.gradients.sync:
                unit.gradients.mark_unreduced()

    def discard(self) -> None:
        """Discard the state of a backward that an exception interrupted."""
        self._num_ready_gradients.clear()
        self._reducing_unit = None

    def _reduce(self, unit: Unit) -> None:
        self._wait()
        unit.gradients.reduce_grads()
        self._reducing_unit = unit

    def _wait(self) -> None:
        """Wait for the reduction in progress."""
        if self._reducing_unit is not None:
            self._reducing_unit.gradients.wait_for_reduce_grads()
        self._reducing_unit = None

    def _will_accumulate_gradients(self) -> bool:
        """Return True in a `backward()` that reaches a parameter, False in `autograd.grad()`."""
        parameters = [p.full for unit in self.units for p in unit.parameters]
        try:
            # In a `backward()` this is true for every parameter of the graph.
            return any(
                torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
                for parameter in parameters
                if parameter.requires_grad
            )
        except RuntimeError:
            # torch's function raises for a leaf that is an input of `torch.autograd.grad`.
            return False

    def _finish_reductions(self) -> None:
        """Average the remaining gradients; a parameter gets `.grad` on all ranks or on none."""
        for unit in self.units:
            if unit.gradients.sync and unit.gradients.has_unreduced():
                self._reduce(unit)
        agreed = self.communicator.any_across_ranks(
            [used for unit in self.units for used in unit.gradients.is_used]
        )
        self._wait()
        used_anywhere = iter(agreed()[0])
        for unit in self.units:
            unit.gradients.assign_unclaimed_averages([next(used_anywhere) for _ in unit.parameters])
