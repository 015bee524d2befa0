"""One rank's replica: its connection to the other ranks, and the start and end of each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto
from typing import Any, NoReturn, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.weak import WeakTensorKeyDictionary

from ddp.communication import Compression
from ddp.compression.comm_hook import CommHook
from ddp.compression.sparse import average_sparse
from ddp.consistency.buffers import BufferSynchronization
from ddp.consistency.failure_attribution import FailureAttribution
from ddp.consistency.gradient_agreement import GradientAgreement
from ddp.consistency.model_agreement import (
    broadcast_tensors,
    check_same_descriptions,
    check_same_model,
    check_same_weights,
    describe_model,
    named_state,
)
from ddp.consistency.tracked_parameters import TrackedParameters
from ddp.consistency.uneven_inputs import count_participants, highest_rank
from ddp.consistency.unused_parameters import UnusedParameters
from ddp.metering.meter import Meter
from ddp.options import Options
from ddp.parameter_hooks import GradientHook, ParameterHooks
from ddp.process_group import ReduceGroup, resolve_group
from ddp.reducer import Reducer
from ddp.weighting import GradientWeighting


class InitialBroadcast(Enum):
    """The state that is copied from rank 0 when a replica connects to the other ranks."""

    NONE = auto()
    WEIGHTS = auto()
    WEIGHTS_AND_BUFFERS = auto()


class Wrapper(Protocol):
    """Attributes of `DDP` that its replica reads. The replica references the wrapper weakly."""

    meter: Meter
    require_backward_grad_sync: bool
    _join_config: Any


class Replica:
    """Per-rank state that coordinates one `DDP` with the other ranks.

    A step starts with the first gradient of a synchronized backward pass. It ends when autograd
    calls back at the end of that pass. The replica of a copied wrapper is not connected: it
    connects to the other ranks when its first gradient is ready.
    """

    group: ReduceGroup
    failures: FailureAttribution
    agreement: GradientAgreement
    tracked: TrackedParameters
    reducer: Reducer

    def __init__(
        self,
        wrapper: Wrapper,
        module: nn.Module,
        options: Options,
        ignored: Collection[str],
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.module = module
        self.options = options
        self.ignored = ignored
        self.compression: Compression = options.selected_compression
        self.weighting: GradientWeighting | None = None
        self.hooks = ParameterHooks(self, wrapper)
        self.unused = UnusedParameters()
        self.buffers = BufferSynchronization()
        self.is_connected = False
        #: True if a pass was synchronized since the last `finish_gradient_synchronization`.
        self.is_synchronized = False
        self._wrapper = weakref.ref(wrapper)
        self._process_group = process_group
        #: True if a forward pass checked the parameters since the last step.
        self._has_checked_parameters = False
        self._is_finish_queued = False
        #: A weak reference to the queued `_end_backward`. The engine holds the only strong one, so
        #: this reference is dead once an error has ended that backward pass.
        self._finish_callback: Callable[[], object] = lambda: None
        #: True if the next backward pass is synchronized even after a forward pass in `no_sync`.
        self.is_sync_requested = False
        #: True if the backward pass of the last forward pass is synchronized. None while a forward
        #: pass runs and after a synchronized step.
        self._is_forward_synchronized: bool | None = None
        #: True if the current backward pass is synchronized. None outside of a backward pass, and
        #: until it reaches an output of the wrapper.
        self._is_backward_synchronized: bool | None = None
        #: Parameters with hooks that connect this replica.
        self._connecting_parameters: list[nn.Parameter] = []
        #: The parameters that the module had when it was connected, or when it last changed.
        self._adopted = WeakTensorKeyDictionary()

    # ----- connection -----

    def connect(
        self,
        *,
        check_model: bool,
        check_weights: bool = False,
        broadcast: InitialBroadcast = InitialBroadcast.NONE,
    ) -> None:
        """Connect to the other ranks.

        If this raises, the hooks and `is_connected` are unchanged, so that the first gradient of
        the next backward pass connects a copied wrapper, or raises again.
        """
        self.group = resolve_group(self._process_group, self.options.all_reduce)
        process_group = self.group.process_group
        self.failures = FailureAttribution(process_group)
        if check_model:
            with self.failures.attribute("the comparison of the models"):
                check_same_model(self.module, self.options.shared, process_group, self.ignored)
        if check_weights:
            with self.failures.attribute("the comparison of the weights"):
                check_same_weights(self.module, process_group, self.ignored)
        # The broadcast needs memory temporarily, so it precedes the allocation of buckets.
        if broadcast is not InitialBroadcast.NONE:
            has_buffers = broadcast is InitialBroadcast.WEIGHTS_AND_BUFFERS
            state = named_state(self.module, self.ignored, buffers=has_buffers)
            self._broadcast(state.values(), "the broadcast of the weights")
        self.tracked = TrackedParameters(self.module, self.ignored)
        self.agreement = GradientAgreement(
            self.group,
            self.failures,
            self.compression,
            find_unused_parameters=self.options.find_unused_parameters,
            check_nan=self.options.check_nan,
        )
        self.make_reducer()
        self._note_adopted_parameters()
        self.is_connected = True
        self._connecting_parameters = []

    def connect_copy(self) -> None:
        """Connect the replica of a copied wrapper. Raise `ValueError` if weights differ."""
        if not self.is_connected:
            self.connect(check_model=True, check_weights=True)

    def connect_at_first_gradient(self) -> None:
        """Register hooks that connect this replica when its first gradient is ready."""
        state = named_state(self.module, self.ignored, buffers=False)
        trained = [cast(nn.Parameter, p) for p in state.values() if p.requires_grad]
        known = [id(parameter) for parameter in self._connecting_parameters]
        if [id(parameter) for parameter in trained] == known:
            return
        # This is the first call, or parameters were unfrozen or replaced before the first gradient.
        self.hooks.remove()
        self._connecting_parameters = trained
        for parameter in trained:
            self.hooks.register(parameter, self._mark_first_ready, self.weighting)

    def use_compression(self, compression: Compression) -> None:
        """Reduce buckets with another method from now on."""
        self.compression = compression
        if self.is_connected:
            self.agreement.compression = compression
            self.reducer.compression = compression

    def make_reducer(self) -> None:
        """Allocate the buckets and replace the hooks.

        If the allocation fails, this replica and the other ranks refuse further steps: the hooks
        that remain belong to the earlier parameters.
        """
        options = self.options
        if options.average != "ranks" and self.weighting is None:
            # Successive reducers share the weighting, because it records which gradients are
            # already averaged.
            self.weighting = GradientWeighting(options.average, self.group, self.try_open_step)
        try:
            self.reducer = Reducer(
                self.tracked.dense,
                options,
                self.group,
                self.failures,
                self.compression,
                (self.failures, self.meter, self.agreement),
                try_open_step=self.try_open_step,
                before_reuse=self.weighting.unscale_average if self.weighting is not None else None,
            )
        except BaseException as error:
            self.failures.fail(f"the buckets could not be allocated: {error}")
            raise
        self.hooks.remove()
        for index, parameter in enumerate(self.tracked.dense.values()):
            self.hooks.take_over(parameter, self)
            hook = GradientHook(self.reducer.mark_ready, index)
            hook.replica = self
            self.hooks.register(parameter, hook, self.weighting)
        for parameter in self.tracked.sparse.values():
            self.hooks.take_over(parameter, self)
            self.hooks.register(parameter, self._mark_sparse_ready, self.weighting)

    @property
    def has_wrapper(self) -> bool:
        """True if the wrapper still exists."""
        return self._wrapper() is not None

    @property
    def meter(self) -> Meter:
        """The meter of the wrapper."""
        return self._ddp.meter

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, used for small collectives."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def _ddp(self) -> Wrapper:
        ddp = self._wrapper()
        assert ddp is not None, "the hooks are removed together with the wrapper"
        return ddp

    # ----- forward pass -----

    def prepare_forward(self, *, is_whole_module: bool = True) -> None:
        """Check before a forward pass that the last step ended, and adopt changed parameters.

        An older wrapper of a part of the module passes `is_whole_module=False`.
        """
        self._is_forward_synchronized = None
        self._discard_interrupted_pass()
        if not self.is_connected:
            self.connect_at_first_gradient()
            return
        self.failures.check()
        successor = self.hooks.find_successor()
        if successor is not None:
            successor.prepare_forward(is_whole_module=False)
            return
        if self.reducer.is_open and torch._C._current_graph_task_id() == -1:
            self._fail_open_step()
        if self.tracked.have_changed():
            self._adopt_changed_parameters()
        self.unused.is_whole_module = is_whole_module
        if self._ddp.require_backward_grad_sync:
            self.unused.check_unused(list(self.tracked.trained), self.group.rank)
        self._has_checked_parameters = True
        if self.options.broadcast_buffers and self.buffers.needs_checksum:
            self.buffers.record_checksum(self.tracked.named_buffers().values())

    def _discard_interrupted_pass(self) -> None:
        """Reset the state of a backward pass that raised and thus did not call `_end_backward`."""
        # Dynamo cannot trace the second condition, which is not evaluated in a usual forward pass.
        if not self._is_finish_queued:
            return
        if torch._C._current_graph_task_id() == -1 or self._finish_callback() is None:
            self._is_finish_queued = False
            self._is_backward_synchronized = None
            if self.weighting is not None:
                self.weighting.abandon_pass()

    def _fail_open_step(self) -> NoReturn:
        """Raise an error, because an earlier backward pass failed after it had opened a step."""
        reason = "the last backward pass raised an error before its gradients were averaged"
        self.failures.fail(reason)
        raise RuntimeError(
            f"rank {self.group.rank}: {reason}; this step cannot be completed, so restart from a "
            "checkpoint"
        )

    def _adopt_changed_parameters(self) -> None:
        if self._ddp._join_config.enable:
            raise RuntimeError("parameters changed inside join(); change them outside of it")
        cause = "parameters were unfrozen, replaced or added"
        description = describe_model(self.module, self.ignored)
        check_same_descriptions(self.failures.rendezvous(cause, description))
        trained = {id(parameter) for parameter in self.tracked.all}
        state = named_state(self.module, self.ignored, buffers=False).values()
        changed = []
        for parameter in state:
            is_new_to_average = parameter.requires_grad and id(parameter) not in trained
            if is_new_to_average or parameter not in self._adopted:
                changed.append(parameter)
        self._broadcast(changed, "the broadcast of new weights")
        # Record the change only now: if a comparison or broadcast above raises, the next forward
        # pass detects the change again.
        self.reducer.release()
        self.tracked.refresh()
        self.unused.names = []
        self.make_reducer()
        self._note_adopted_parameters()

    def _note_adopted_parameters(self) -> None:
        self._adopted.clear()
        for parameter in self.module.parameters():
            self._adopted[parameter] = True

    # ----- backward pass -----

    def end_forward(self) -> bool:
        """Decide whether the backward pass of this forward pass synchronizes gradients."""
        self._is_forward_synchronized = self._ddp.require_backward_grad_sync
        return self._is_forward_synchronized

    def enter_backward(self, is_synchronized: bool, _: Any = None) -> None:
        """Handle the start of a backward pass; this is a hook on the outputs of the module.

        A reentrant checkpoint runs an inner pass. If one of its gradients queued the end of the
        step, the step would end together with the inner pass, before most gradients are ready.
        """
        if self._wrapper() is None or self.hooks.are_replaced:
            return
        self._discard_interrupted_pass()
        if self.is_connected and self.reducer.is_open and not self._is_finish_queued:
            self._fail_open_step()
        # A pass through outputs of several forward passes is synchronized if one of them is.
        self._is_backward_synchronized = is_synchronized or bool(self._is_backward_synchronized)
        if not self._is_finish_queued:
            self.hooks.move_to_end()
        self._queue_finish()

    def _queue_finish(self) -> None:
        """Queue `_end_backward` for the end of the current backward pass."""
        if not self._is_finish_queued:
            self._is_finish_queued = True
            callback = self._end_backward
            self._finish_callback = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _is_current_pass_synchronized(self) -> bool | None:
        """Return True if the current backward pass is synchronized, or None if it is not known yet.

        As in torch's DDP, the forward pass decides. The same decision applies if a gradient is
        ready before the backward pass reaches an output, or if no output could be hooked.
        """
        if self.is_sync_requested:
            return True
        if self._is_backward_synchronized is None:
            return self._is_forward_synchronized
        return self._is_backward_synchronized

    def _end_backward(self) -> None:
        is_undecided = self._is_current_pass_synchronized() is None
        self._is_finish_queued = False
        self._is_backward_synchronized = None
        if self.is_connected and is_undecided and self._ddp.require_backward_grad_sync:
            # The pass reached no output since the last step: the module was called directly.
            self.start_step()
        if self.weighting is not None:
            self.weighting.end_pass()
        if self.is_connected and self.reducer.is_open:
            self.finish_step()
            self.is_synchronized = True

    def _mark_first_ready(self, parameter: Tensor) -> None:
        self.connect_copy()
        if self.weighting is not None and parameter.grad is not None:
            # The weighting hook was not registered when this gradient was accumulated.
            parameter.grad = self.weighting.weigh(cast(nn.Parameter, parameter), parameter.grad)
        if any(other is parameter for other in self.tracked.sparse.values()):
            self._mark_sparse_ready(parameter)
            return
        for index, other in enumerate(self.reducer.parameters):
            if other is parameter:
                self.reducer.mark_ready(index, parameter)

    def _mark_sparse_ready(self, _: Tensor) -> None:
        if not self.reducer.is_open:
            self.try_open_step()

    # ----- step -----

    def try_open_step(self) -> bool:
        """Open a step for the gradient that is ready; return False if it is not synchronized."""
        self._discard_interrupted_pass()
        ddp = self._ddp
        if not self._is_finish_queued and self.hooks.move_to_end():
            raise RuntimeError(
                "a parameter hook was registered after wrapping, and this backward pass did not "
                "start at an output of the wrapper; call the wrapper, not its .module"
            )
        self._queue_finish()
        if not self._is_current_pass_synchronized():
            # Rebuilding is a collective. With uneven inputs, ranks call collectives only at the
            # start of a synchronized step.
            if not ddp._join_config.enable:
                self.reducer.rebuild_buckets()
            return False
        self.start_step()
        return True

    def start_step(self) -> None:
        """Check the state of this rank, then open a step in which it participates."""
        self.failures.check()
        has_checked = self._has_checked_parameters
        self._has_checked_parameters = False
        if not has_checked and self.tracked.have_changed():
            reason = "parameters changed since the last forward pass of the wrapper"
            self.failures.fail(reason)
            raise RuntimeError(f"{reason}: call the wrapper, not its .module, to train")
        if self.reducer.num_steps == 0:
            for parameter in self.tracked.all:
                if hasattr(parameter, "_in_backward_optimizers"):
                    raise RuntimeError(
                        "an optimizer that steps within the backward pass uses gradients before "
                        "they are averaged; call step() after backward()"
                    )
        if self._ddp._join_config.enable:
            Join.notify_join_context(self._ddp)  # type: ignore[arg-type]
        self.open_step()

    def open_step(self, *, is_participating: bool = True) -> None:
        """Open a step; a rank that has run out of inputs passes `is_participating=False`."""
        scale = None
        if self.weighting is not None:
            scale = self.weighting.start_step(
                self.failures, self.device, is_participating=is_participating
            )
        self.reducer.start(scale)

    @torch.no_grad()
    def finish_step(self, *, is_participating: bool = True) -> None:
        """Wait for all gradients, then synchronize sparse gradients and buffers."""
        self._is_forward_synchronized = None
        self.is_sync_requested = False
        unused = self.reducer.finish(is_participating=is_participating)
        self.unused.record(self.reducer, unused, self.options)
        sparse = self.tracked.sparse
        weighting = self.weighting
        if weighting is not None:
            for parameter in sparse.values():
                weighting.unscale_average(parameter)
        hook = self.compression if isinstance(self.compression, CommHook) else None
        scale = self.reducer.scale
        if sparse and self._ddp._join_config.enable:
            scale *= self._participation_scale(is_participating=is_participating)
        average_sparse(
            sparse, self.group, self.failures, scale, hook, is_participating=is_participating
        )
        if weighting is not None:
            weighting.end_step([*self.reducer.parameters, *sparse.values()])
        if self.options.broadcast_buffers:
            self._synchronize_buffers(is_participating=is_participating)

    def _participation_scale(self, *, is_participating: bool) -> float:
        """Return the factor from a mean over all ranks to the mean that `join()` computes."""
        if self.agreement.divide_by_initial_world_size:
            return 1.0
        count = count_participants(self.group, self.device, is_participating=is_participating)
        return self.group.world_size / count

    def _synchronize_buffers(self, *, is_participating: bool) -> None:
        """Copy buffers to every rank from rank 0, or in `join()` from the last rank with inputs."""
        buffers = list(self.tracked.named_buffers().values())
        if not buffers:
            return
        source = 0
        if self._ddp._join_config.enable:
            source = highest_rank(self.group, self.device, is_candidate=is_participating)
        self.buffers.synchronize(buffers, self.group, self.failures, source)

    def _broadcast(self, tensors: Iterable[Tensor], description: str, source: int = 0) -> None:
        group = self.group.process_group
        broadcast_tensors(list(tensors), group, self.failures, description, source=source)
