"""The backward pass of a wrapper: its end, and whether it synchronizes gradients."""

# Note [Synchronized backward passes]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# As in torch's DDP, the forward pass decides: a backward pass is synchronized if the forward pass
# that computed its loss ran outside of `no_sync`. Hooks on the outputs of the wrapper carry this
# decision to the backward pass. If a gradient is ready before the backward pass reaches a hooked
# output, the decision of the last forward pass applies. If no forward pass of the wrapper ran since
# the last step, gradients are accumulated. They are averaged at the end of the backward pass unless
# it runs inside `no_sync`.
#
# Autograd has no hook for the end of a backward pass. `queue_callback` adds a function that the
# engine calls once at the end. If an error ends the pass, the engine drops its reference to the
# function without a call, which a weak reference detects.

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class BackwardPass:
    """State of the current backward pass. See Note [Synchronized backward passes].

    `on_end` is called at the end of each backward pass with the value of `is_synchronized`.
    """

    def __init__(self, on_end: Callable[[bool | None], None]) -> None:
        #: True from the first hook that a backward pass calls until its end.
        self.is_running = False
        #: True if the next backward pass is synchronized even after a forward pass in `no_sync`.
        self.is_sync_requested = False
        self._on_end = on_end
        self._end_callback: Callable[[], object] = lambda: None
        #: True if the last forward pass requests synchronization, False if it ran in `no_sync`.
        #: None while a forward pass with gradients runs and after a synchronized step.
        self._forward_decision: bool | None = None
        #: True if a reached output belongs to a forward pass that requests synchronization, False
        #: if no reached output does. None before this backward pass reaches an output.
        self._output_decision: bool | None = None

    @property
    def is_synchronized(self) -> bool | None:
        """True if the current backward pass is synchronized, False if it is not.

        None if it reached no output, and no forward pass of the wrapper ran since the last step.
        """
        if self.is_sync_requested:
            return True
        return self._forward_decision if self._output_decision is None else self._output_decision

    def start_forward(self) -> None:
        """Discard the decision of the last forward pass, and an interrupted backward pass."""
        self._forward_decision = None
        self.discard_interrupted()

    def end_forward(self, *, is_synchronized: bool) -> None:
        """Record the decision of a forward pass."""
        self._forward_decision = is_synchronized

    def reach_output(self, *, is_synchronized: bool) -> None:
        """Record that the backward pass reached an output, and the decision of its forward pass.

        A backward pass through outputs of several forward passes is synchronized if one of these
        forward passes requests it.
        """
        self._output_decision = is_synchronized or bool(self._output_decision)

    def queue_end(self) -> None:
        """Request a call of `on_end` at the end of the current backward pass."""
        if not self.is_running:
            self.is_running = True
            callback = self._end
            self._end_callback = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def end_step(self) -> None:
        """Discard the decision of the last forward pass and the request to synchronize."""
        self._forward_decision = None
        self.is_sync_requested = False

    def discard_interrupted(self) -> None:
        """Reset the state of a backward pass that an error ended."""
        # Dynamo cannot trace the second condition, which usual forward passes do not evaluate.
        if not self.is_running:
            return
        if torch._C._current_graph_task_id() == -1 or self._end_callback() is None:
            self.is_running = False
            self._output_decision = None

    def _end(self) -> None:
        decision = self.is_synchronized
        self.is_running = False
        self._output_decision = None
        self._on_end(decision)
