"""`DDP`: data parallelism with the interface of torch's DistributedDataParallel.

The algorithm is in `reducer.py`; `plain.py` is its minimal implementation.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils._pytree import tree_map_only

from ddp.aliased_gradients import copy_misplaced_grads
from ddp.autograd.parameter_hooks import ParameterHooks
from ddp.bucket import Allocate
from ddp.compat import TorchCompatibility, collect_graph_nodes
from ddp.compression.comm_hook import CommHook, Hook, check_hook
from ddp.consistency.buffers import copy_buffers_before_forward, should_copy_buffers
from ddp.consistency.gradient_agreement import MAX_EXACT_RANKS
from ddp.consistency.model_agreement import collect_state
from ddp.consistency.uneven_inputs import ZeroContribution
from ddp.metering.meter import Meter
from ddp.options import (
    BucketSize,
    Options,
    check_module,
    check_restricted_arguments,
    select_bucket_size,
    select_buffer_synchronization,
    select_device,
    select_group,
)
from ddp.process_group import AllReduce
from ddp.replica import Replica

#: Attributes that a copy does not receive. It has no connection, and a new meter. As in torch,
#: a copy of a compiled module is not compiled: the compiled function would call the original.
_PROCESS_STATE = ("_connection", "meter", "_compiled_call_impl")


class DDP(TorchCompatibility, nn.Module, Joinable):
    """A replica of `module` whose gradients are averaged over the ranks during `backward()`.

        model = DDP(module)
        loss(model(batch)).backward()
        optimizer.step()

    By default, the constructor copies weights and buffers from rank 0 to every rank. Buffers are
    copied again before forward passes, as in torch's DDP, and after each synchronized backward
    pass. If parameters are unfrozen, replaced or added later, their gradients are averaged from the
    next forward pass on. A copy made by `copy.deepcopy` or `torch.load` can be evaluated, but its
    forward passes with gradients raise `RuntimeError`.

    Args:
        module: module to replicate.
        bucket_size_mb: largest size of a bucket, in units of 2**20 bytes. None reduces each
            gradient separately. With 25, the default, the first bucket of a model that is larger
            than 25 is limited to 1. torch's `bucket_cap_mb` and `bucket_cap_mb_list` also work.
        group: ranks to average over; all ranks by default. torch's `process_group` and
            `device_mesh` also work.
        all_reduce: function with the signature of `torch.distributed.all_reduce`.
        allocate: function that returns the memory of a bucket, called as
            `allocate(numel, dtype=..., group=...)`.
        gradient_dtype: dtype in which gradients are sent, such as bfloat16. They are added in the
            dtype of the parameters, or in `gradient_dtype` if this is wider. A custom `all_reduce`
            receives gradients in `gradient_dtype` and chooses the precision of the sum.
        find_unused_parameters: count a gradient that is missing on some ranks as zero, and allow
            parameters that no rank uses. By default, both are errors.
        sync_buffers: copy the buffers of rank 0 to every rank in each step, which is the default.
            torch's `forward_sync_buffers` and `broadcast_buffers` also work. As in torch, the
            constructor does not copy buffers if `broadcast_buffers=False` is passed without
            `forward_sync_buffers`.
        init_sync: compare the models, and copy weights and buffers from rank 0.
        static_graph: declare that every step computes the same graph. A backward pass may then
            compute a gradient in several parts, as with reentrant checkpoints of a shared layer.
        gradient_as_bucket_view: make each `.grad` a view of its bucket. A warning is issued if the
            caller references the earlier memory of `.grad`, which then does not receive the mean.
            False, torch's default, writes the mean into the earlier memory. It needs memory for a
            second set of gradients.
        restricted_arguments: other arguments of torch's DDP. Only values that change nothing are
            accepted.

    Raises `ValueError` or `RuntimeError` if the module cannot be replicated or the value of an
    argument is not supported, and `TypeError` for an unknown argument. Raises `ValueError` on every
    rank if modules or options differ across ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | Sequence[Any] | BucketSize | None = BucketSize.DEFAULT,
        *,
        group: dist.ProcessGroup | None = None,
        all_reduce: AllReduce | None = None,
        allocate: Allocate | None = None,
        gradient_dtype: torch.dtype | None = None,
        find_unused_parameters: bool = False,
        sync_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: Any = None,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        **restricted_arguments: Any,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        check_restricted_arguments(restricted_arguments)
        if isinstance(bucket_size_mb, Sequence):
            # The second positional argument of torch's DDP is `device_ids`.
            device_ids = bucket_size_mb
            bucket_size_mb = BucketSize.DEFAULT
        sync_buffers, init_sync_buffers = select_buffer_synchronization(
            sync_buffers, forward_sync_buffers, broadcast_buffers
        )
        # Set by torch's `_set_params_and_buffers_to_ignore_for_model`.
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        copies_buffers = sync_buffers or (init_sync and init_sync_buffers)
        check_module(module, self._ignored, copies_buffers=copies_buffers)
        self._options = Options(
            bucket_size_mb=select_bucket_size(bucket_size_mb, bucket_cap_mb, bucket_cap_mb_list),
            all_reduce=all_reduce,
            allocate=allocate,
            gradient_dtype=gradient_dtype,
            find_unused_parameters=find_unused_parameters,
            sync_buffers=sync_buffers,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            device=select_device(device_ids, output_device, module),
        )
        self.module = module
        self.require_backward_grad_sync = True
        #: True if the next forward pass copies buffers. Accelerate's `trigger_sync_in_backward` and
        #: Lightning's `prepare_for_backward` set it.
        self.require_forward_param_sync = True
        self.device_mesh = device_mesh
        copied = {}
        if init_sync:
            copied = collect_state(module, self._ignored, buffers=init_sync_buffers)
        self.meter = Meter()
        #: The connection to the other ranks; None in a copy of the wrapper.
        self._connection: Replica | None = Replica(
            self,
            self._options,
            self._ignored,
            select_group(group, process_group, device_mesh),
            check_model=init_sync,
            broadcast_from_rank0=list(copied.values()),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Outside of `no_sync()`, the backward pass averages the gradients."""
        if self._options.device is not None:
            move = partial(Tensor.to, device=self._options.device)
            args, kwargs = tree_map_only(Tensor, move, (args, kwargs))
        has_gradients = torch.is_grad_enabled()
        if self._connection is None and not has_gradients:
            return self._call_module(args, kwargs)
        replica = self._replica
        if has_gradients:
            replica.prepare_forward()
        with self.meter.forward() if has_gradients else nullcontext():
            if should_copy_buffers(replica):
                copy_buffers = copy_buffers_before_forward
                # The broadcast would break the graph if Dynamo traced it. Importing Dynamo takes
                # seconds, so tracing is disabled only if Dynamo has been imported already.
                if "torch._dynamo" in sys.modules:
                    copy_buffers = torch.compiler.disable(copy_buffers)
                copy_buffers(replica)
            output = self._call_module(args, kwargs)
        if not has_gradients:
            self.require_forward_param_sync = False
            return output
        is_synchronized = replica.end_forward()
        enter_backward = partial(replica.enter_backward, is_synchronized)
        for node in collect_graph_nodes(output):
            node.register_prehook(enter_backward)
        return output

    def _call_module(self, args: Any, kwargs: Any) -> Any:
        # `torch.compile` skips the frame of `forward`, which reads a clock, and compiles this one.
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of forward passes in the context, without synchronization.

        As with torch's DDP, the gradients of a forward pass are synchronized if it ran outside of
        the context, wherever its backward pass runs.

        If the block raises an exception, its gradients are incomplete. The failure is reported to
        the other ranks, and every rank refuses to continue.
        """
        replica = self._replica
        previous = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        except BaseException as error:
            reason = f"no_sync() was left by {type(error).__name__}: {error}"
            replica.failures.report_failure(reason)
            raise
        finally:
            self.require_backward_grad_sync = previous

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Average the gradients if no backward pass since the last forward pass has done so.

        `backward()` averages gradients by itself. Call this method if every backward pass of
        the step ran under `no_sync`, or on a rank whose backward pass reached no parameter. Raises
        the errors that `backward()` would raise.
        """
        replica = self._replica
        replica.hooks.check_not_replaced()
        replica.failures.check_not_failed()
        if not replica.has_synchronized:
            copy_misplaced_grads(replica.reducer.buckets)
            replica.start_step()
            replica.finish_step()
        replica.has_synchronized = False

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Reduce buckets with `hook(state, bucket)` in all later steps.

        The hook must not resize `bucket.buffer()`, because flags follow it in memory. Raises
        `RuntimeError` on a second call, and `TypeError` or `ValueError` if the hook cannot be used.
        """
        check_hook(hook)
        if self._options.gradient_dtype or self._options.all_reduce:
            raise ValueError(
                "expected one method to reduce buckets, got a communication hook in addition to "
                "gradient_dtype or all_reduce; pass one of them"
            )
        if self._replica.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self._replica.use_comm_hook(CommHook(state, hook))

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may take different numbers of steps.

        A rank that reaches the end of the context early contributes zeros to the steps of the other
        ranks. At the end, it receives the weights of a rank that took all steps, and its buffers
        if buffers are synchronized. `divide_by_initial_world_size=False` averages over the ranks
        that still have inputs. The arguments are those of torch's DDP.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
        """Return the hook that `torch.distributed.algorithms.Join` calls."""
        replica = self._replica
        replica.hooks.check_not_replaced()
        replica.prepare_forward()
        world_size = replica.group.world_size
        if not divide_by_initial_world_size and world_size > MAX_EXACT_RANKS:
            raise ValueError(
                f"expected at most {MAX_EXACT_RANKS} ranks with divide_by_initial_world_size="
                f"False, got {world_size}: the number of participating ranks may be rounded in "
                "bfloat16; pass divide_by_initial_world_size=True"
            )
        replica.agreement.divide_by_initial_world_size = divide_by_initial_world_size
        return ZeroContribution(replica)

    @property
    def join_device(self) -> torch.device:
        """The device that `torch.distributed.algorithms.Join` uses."""
        return self._replica.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group that `torch.distributed.algorithms.Join` uses."""
        return self._replica.group.process_group

    @property
    def _replica(self) -> Replica:
        if self._connection is None:
            _refuse_copy()
        return self._connection

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _PROCESS_STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.meter = Meter()
        self._connection = None
        # A backward pass that started at an output of `.module` would not average gradients.
        hooks = ParameterHooks(self)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                hooks.register(parameter, _refuse_copy)

    def __copy__(self) -> DDP:
        raise TypeError(
            "expected a deep copy of a DDP, got copy.copy(), whose result would average the "
            "gradients of the same parameters; call copy.deepcopy() to evaluate a copy, or wrap "
            ".module again"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DDP:
        result = self.__new__(type(self))
        memo[id(self)] = result
        # Options may refer to process groups, which cannot be copied.
        state = {name: value for name, value in self.__getstate__().items() if name != "_options"}
        result.__setstate__(copy.deepcopy(state, memo) | {"_options": self._options})
        return result


def _refuse_copy(*_: Tensor) -> NoReturn:
    raise RuntimeError(
        "a copy of a DDP does not average gradients; wrap the .module of the copy in a new DDP, or "
        "use torch.no_grad() to evaluate the copy"
    )


# `isinstance(model, torch.nn.parallel.DistributedDataParallel)` is then True, so that checkpoints
# and trainers unwrap `.module`.
nn.parallel.DistributedDataParallel.register(DDP)
