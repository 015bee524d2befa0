"""The replica of one rank: its connection to other ranks, and the start and end of each step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from ddp.aliased_gradients import copy_misplaced_grads, warn_of_aliased_grad
from ddp.autograd.backward_pass import BackwardPass
from ddp.autograd.parameter_hooks import ParameterHooks
from ddp.compression.cast import Cast
from ddp.compression.comm_hook import CommHook
from ddp.compression.sparse import average_sparse
from ddp.consistency.buffers import copy_buffers
from ddp.consistency.failure_attribution import FailureAttribution
from ddp.consistency.gradient_agreement import GradientAgreement, check_unused
from ddp.consistency.model_agreement import (
    broadcast_tensors,
    check_same_model,
)
from ddp.consistency.shared_gradients import refuse_shared_gradients
from ddp.consistency.tracked_parameters import TrackedParameters, is_in_functional_call
from ddp.consistency.uneven_inputs import compute_join_scale
from ddp.extensions import Extension
from ddp.metering.meter import Meter
from ddp.options import Options
from ddp.process_group import resolve_group
from ddp.reducer import Reducer


class Wrapper(Protocol):
    """The attributes of `DDP` that its replica uses."""

    module: nn.Module
    meter: Meter
    require_backward_grad_sync: bool
    require_forward_param_sync: bool
    _join_config: Any
    _modules: dict[str, Any]


class Replica:
    """The state that coordinates one `DDP` with the other ranks.

    A step starts with the first gradient of a synchronized backward pass, and ends together with
    this pass. `finish_gradient_synchronization` starts and ends a step without a backward pass.

    The constructor compares the model with the models of the other ranks if `check_model` is True.
    The tensors in `broadcast_from_rank0` receive the values of rank 0. This is a collective.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        options: Options,
        ignored: Collection[str],
        process_group: dist.ProcessGroup | None,
        *,
        check_model: bool,
        broadcast_from_rank0: Sequence[Tensor],
    ) -> None:
        self.options = options
        self.ignored = ignored
        self.comm_hook: CommHook | None = None
        self.hooks = ParameterHooks(wrapper)
        self.backward_pass = BackwardPass(self._end_backward)
        #: Parameters that no rank used in the last step, by name. Empty if the options allow them.
        self.unused: dict[str, nn.Parameter] = {}
        #: True if the last backward pass was synchronized. False after the next forward pass with
        #: gradients, and after `finish_gradient_synchronization`.
        self.has_synchronized = False
        self._wrapper = weakref.ref(wrapper)
        #: True until `warn_of_aliased_grad` has issued a warning. Always False if `.grad` does not
        #: become a view.
        self._should_warn_of_alias = options.gradient_as_bucket_view
        #: True if a forward pass has checked the parameters since the last step started.
        self._has_checked_parameters = False
        #: True if the ranks without inputs were notified of the current step of `join()`.
        self._has_notified_join = False
        self.group = resolve_group(process_group, options.all_reduce)
        process_group = self.group.process_group
        self.failures = FailureAttribution(process_group)
        if check_model:
            with self.failures.attribute_errors("the comparison of the models"):
                check_same_model(self.module, options.shared, process_group, ignored)
        # The broadcast needs memory temporarily, so it precedes the allocation of buckets.
        broadcast_tensors(
            broadcast_from_rank0, process_group, self.failures, "the broadcast of the weights"
        )
        self.tracked = TrackedParameters(wrapper._modules, ignored)
        refuse_shared_gradients(self.tracked.dense, self.group.rank, self.failures)
        self.agreement = GradientAgreement(
            self.group, self.failures, find_unused_parameters=options.find_unused_parameters
        )
        self.reducer = self._make_reducer()

    def use_comm_hook(self, comm_hook: CommHook) -> None:
        """Reduce buckets with a communication hook in all later steps."""
        self.comm_hook = comm_hook
        self.reducer.extensions = self._make_extensions()

    def _make_reducer(self) -> Reducer:
        """Allocate the buckets, and replace the hooks with the hooks of the returned reducer.

        If the allocation fails, all ranks refuse further steps, because the remaining hooks belong
        to the earlier parameters.
        """
        try:
            reducer = Reducer(
                self.tracked.dense,
                self.options,
                self.group,
                self._make_extensions(),
                try_open_step=self.try_open_step,
                on_failure=self.failures.report_failure,
            )
        except BaseException as error:
            self.failures.report_failure(f"the buckets could not be allocated: {error}")
            raise
        self.hooks.remove()
        for index, parameter in enumerate(self.tracked.dense.values()):
            self.hooks.take_over(parameter)
            self.hooks.register(parameter, reducer.mark_ready, index)
        for parameter in self.tracked.sparse.values():
            self.hooks.take_over(parameter)
            self.hooks.register(parameter, self._mark_sparse_ready)
        return reducer

    def _make_extensions(self) -> list[Extension]:
        # The meter precedes the agreement check, so that it records steps that fail the check too.
        extensions: list[Extension] = [self.failures, self.ddp.meter, self.agreement]
        if self.options.gradient_dtype is not None:
            extensions.append(Cast(self.options.gradient_dtype))
        if self.comm_hook is not None:
            extensions.append(self.comm_hook)
        return extensions

    @property
    def module(self) -> nn.Module:
        """The wrapped module, which the caller may replace."""
        return self.ddp.module

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, which small collectives use."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def ddp(self) -> Wrapper:
        """The wrapper. The reference is weak, so that parameter hooks do not keep it alive."""
        ddp = self._wrapper()
        assert ddp is not None, "the hooks are removed together with the wrapper"
        return ddp

    @property
    def is_joining(self) -> bool:
        """True inside `join()`, where ranks may have different numbers of inputs."""
        return bool(self.ddp._join_config.enable)

    def prepare_forward(self) -> None:
        """Check before a forward pass that the last step ended, and adopt changed parameters."""
        self.has_synchronized = False
        self.backward_pass.start_forward()
        self.hooks.check_not_replaced()
        self.failures.check_not_failed()
        if self.reducer.is_open and torch._C._current_graph_task_id() == -1:
            self._fail_open_step()
        if self.tracked.detect_changes():
            adopt = self._adopt_changed_parameters
            # Dynamo may fail to trace the allocation. `DDP.forward` explains the condition.
            if "torch._dynamo" in sys.modules:
                adopt = torch.compiler.disable(adopt)
            adopt()
        if self.ddp.require_backward_grad_sync:
            check_unused(self.unused, list(self.tracked.trained), self.group.rank)
        self._has_checked_parameters = True
        # Dynamo cannot trace the version counters.
        self.agreement.record_weights(
            [] if torch.compiler.is_compiling() else self.tracked.parameters
        )

    def notify_join(self) -> None:
        """Let the ranks without inputs take part in the current step of `join()`."""
        if not self._has_notified_join:
            self._has_notified_join = True
            Join.notify_join_context(self.ddp)  # type: ignore[arg-type]
            copy_buffers(self)

    def _fail_open_step(self) -> NoReturn:
        """Raise `RuntimeError`, because an earlier backward pass failed after it opened a step."""
        reason = "the last backward pass raised an error before its gradients were averaged"
        self.failures.report_failure(reason)
        raise RuntimeError(
            f"rank {self.group.rank}: {reason}; this step cannot be completed, so restart from a "
            "checkpoint"
        )

    def _adopt_changed_parameters(self) -> None:
        # These parameters belong to one call. The broadcast would overwrite the caller's values.
        if is_in_functional_call(self.module):
            return
        if self.is_joining:
            raise RuntimeError("parameters changed inside join(); change them outside of join()")
        self.tracked.adopt_changes(self.group, self.failures)
        for bucket in self.reducer.buckets:
            bucket.release()
        self.unused = {}
        self.reducer = self._make_reducer()

    def end_forward(self) -> bool:
        """Record the end of a forward pass; return True if its backward pass is synchronized."""
        is_synchronized = self.ddp.require_backward_grad_sync
        self.backward_pass.end_forward(is_synchronized=is_synchronized)
        self.ddp.require_forward_param_sync = is_synchronized
        return is_synchronized

    def enter_backward(self, is_synchronized: bool, _: Any = None) -> None:
        """Check the gradients at the start of a backward pass, and queue the end of the step.

        This is the hook on the outputs of the module. It queues the end because a reentrant
        checkpoint may compute the first gradient in an inner backward pass. If that gradient queued
        the end, the step would end with the inner pass, before other gradients are ready.
        """
        if self._wrapper() is None or self.hooks.are_replaced:
            return
        self.backward_pass.discard_interrupted()
        if not self.backward_pass.is_running:
            if self.reducer.is_open:
                self._fail_open_step()
            # Views of the slots share no memory, so they need none of these checks.
            if any(bucket.has_separate_grads() for bucket in self.reducer.buckets):
                refuse_shared_gradients(self.tracked.dense, self.group.rank, self.failures)
                copy_misplaced_grads(self.reducer.buckets)
                if self._should_warn_of_alias:
                    self._should_warn_of_alias = not warn_of_aliased_grad(
                        self.reducer.buckets, self.group.rank
                    )
            self.hooks.move_to_end()
        self.backward_pass.reach_output(is_synchronized=is_synchronized)
        self.backward_pass.queue_end()

    def _end_backward(self, is_synchronized: bool | None) -> None:
        if is_synchronized is None and self.ddp.require_backward_grad_sync:
            # No forward pass of the wrapper ran since the last step, only one of its `.module`.
            self.start_step()
        if self.reducer.is_open:
            self.finish_step()
            self.has_synchronized = True
        elif is_synchronized is False:
            self.has_synchronized = False

    def _mark_sparse_ready(self, _: Tensor) -> None:
        if not self.reducer.is_open:
            self.try_open_step()

    def try_open_step(self) -> bool:
        """Open a step for a gradient. Return False if the backward pass is not synchronized."""
        self.backward_pass.discard_interrupted()
        if not self.backward_pass.is_running:
            copy_misplaced_grads(self.reducer.buckets)
            if self.hooks.move_to_end():
                raise RuntimeError(
                    "a parameter hook was registered after wrapping, and this backward pass did "
                    "not start at an output of the wrapper; register the hook before wrapping"
                )
        self.backward_pass.queue_end()
        if not self.backward_pass.is_synchronized:
            # Rebuilding is a collective. With uneven inputs, ranks call collectives only at the
            # start of a synchronized step.
            if not self.is_joining:
                self.reducer.rebuild_buckets()
            return False
        self.start_step()
        return True

    def start_step(self) -> None:
        """Open a step in which this rank participates.

        Raises `RuntimeError` if this rank cannot complete the step.
        """
        self.failures.check_not_failed()
        has_checked = self._has_checked_parameters
        self._has_checked_parameters = False
        if not has_checked and self.tracked.detect_changes():
            reason = "parameters changed since the last forward pass of the wrapper"
            self.failures.report_failure(reason)
            raise RuntimeError(f"{reason}: call the wrapper, not its .module, to train")
        if self.reducer.num_steps == 0:
            for parameter in self.tracked.parameters:
                if hasattr(parameter, "_in_backward_optimizers"):
                    raise RuntimeError(
                        "an optimizer that steps within the backward pass uses gradients before "
                        "they are averaged; call step() after backward()"
                    )
        if self.is_joining:
            self.notify_join()
        self.reducer.start()

    @torch.no_grad()
    def finish_step(self, *, is_participating: bool = True) -> None:
        """Wait for the gradients in buckets, then average sparse gradients and copy buffers."""
        self.backward_pass.end_step()
        self._has_notified_join = False
        unused = self.reducer.finish(is_participating=is_participating)
        self.unused = {}
        if not (self.options.find_unused_parameters or self.options.static_graph):
            for index in sorted(unused):
                # Frozen parameters are not expected to have a gradient.
                if self.reducer.parameters[index].requires_grad:
                    self.unused[self.reducer.names[index]] = self.reducer.parameters[index]
        sparse = self.tracked.sparse
        scale = self.reducer.step.scale
        if sparse and self.is_joining:
            scale *= compute_join_scale(self, is_participating=is_participating)
        average_sparse(
            sparse,
            self.group,
            self.failures,
            scale,
            self.comm_hook,
            is_participating=is_participating,
        )
        copy_buffers(self, is_participating=is_participating)
