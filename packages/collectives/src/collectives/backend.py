"""The backend "collectives" of torch.distributed, which lets torch's trainers use this package.

    import collectives.backend
    torch.distributed.init_process_group("cpu:collectives,cuda:nccl")   # or just "collectives"

`CollectivesProcessGroup` covers every method of torch's `ProcessGroup`. Most methods are
implemented below by this package. Methods in `GLOO` are forwarded to gloo, and methods in `REFUSED`
raise an error. torch's base class implements the remaining methods, such as those for names.

Tensors of another device go to the backend that torch uses for that device (NCCL for CUDA). That
backend is created when it is first needed, because torch never adds a second backend to a group
that is implemented in Python.

The class is a `ProcessGroup`, not a Python `Backend`. torch 2.15 supports Python backends too, but
wraps their handles in handles whose `is_completed` never returns True.
"""

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from collectives import collective, lists
from collectives.coalesced import run_coalesced
from collectives.communicator import Communicator
from collectives.execution.timeouts import check_timeout
from collectives.execution.work import CoalescedWork, Work
from collectives.process_group.device_backends import (
    connect_gloo,
    copy_options,
    create_backend,
    split_options,
)
from collectives.process_group.method_arguments import Options, unwrap_list, unwrap_tensor
from collectives.process_group.methods import (
    OptionalWork,
    collective_method,
    make_gloo_method,
    make_refused_method,
)
from collectives.store import create_fresh_store

NAME = "collectives"
CPU = torch.device("cpu")

# torch's stubs declare several signatures per method, which a single method cannot override.
_ProcessGroup: Any = dist.ProcessGroup
_GlooOptions: Any = ProcessGroupGloo._Options  # type: ignore[attr-defined]


class CollectivesProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group of this package for CPU tensors; its collective methods return handles."""

    def __init__(self, options: Any, backend_options: Any = None) -> None:
        if isinstance(backend_options, _GlooOptions):
            raise TypeError(
                f"expected no pg_options, because the {NAME} backend accepts only a timeout, got "
                f"{type(backend_options).__name__}; pass timeout= to init_process_group"
            )
        rank = options.group_rank
        world_size = options.group_size
        timeout = options.timeout
        check_timeout(timeout)
        deadline = time.monotonic() + timeout.total_seconds()
        # Up to torch 2.11, the constructor with a store cannot create a Python subclass.
        super().__init__(rank, world_size)
        self._backend_options = backend_options
        self._others: dict[str, Any] = {}
        self._creating = threading.Lock()
        # The handles of the calls since `_start_coalescing`, or None outside of a coalesced block.
        self._coalescing: list[dist.Work] | None = None
        bound = getattr(getattr(options, "process_group", None), "bound_device_id", None)
        if bound is not None:
            self.bound_device_id = bound
        store = create_fresh_store(options.store, rank, world_size, deadline)
        # The options for backends of other devices, and for groups of some of the ranks.
        self._options = copy_options(options, store=store)
        self._gloo: Any = connect_gloo(store, rank, world_size, deadline)
        self._gloo._set_default_timeout(timeout)
        # torch's C++ code reads the backend of a device from the base class.
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(CPU, kind, self._gloo)
        self._set_default_backend(kind)
        #: The state of this group's collectives.
        self.communicator = Communicator(
            self._gloo, store=store, timeout=timeout, deadline=deadline
        )

    # ----- this package: collectives of one tensor per rank -----

    @collective_method("op")
    def allreduce(self, tensors: Any, options: Options) -> OptionalWork:
        """Reduce a tensor over all ranks, in place; gloo reduces sparse tensors."""
        tensor = unwrap_tensor(tensors)
        if tensor.is_sparse:
            gloo_options = dist.AllreduceOptions()
            gloo_options.reduceOp = options.op
            return self._gloo.allreduce([tensor], gloo_options)
        return collective.all_reduce(tensor, options.op, self, options.async_op)

    @collective_method("root")
    def broadcast(self, tensors: Any, options: Options) -> OptionalWork:
        """Copy the root's tensor to every rank."""
        return collective.broadcast(
            unwrap_tensor(tensors), group=self, async_op=options.async_op, group_src=options.root
        )

    @collective_method("root", "op")
    def reduce(self, tensors: Any, options: Options) -> OptionalWork:
        """Reduce over all ranks into the root's tensor."""
        return lists.reduce(
            unwrap_tensor(tensors),
            op=options.op,
            group=self,
            async_op=options.async_op,
            group_dst=options.root,
        )

    @collective_method()
    def all_gather_single(self, output: Any, input: Any, options: Options) -> OptionalWork:
        """Write the inputs of all ranks to `output`, in rank order."""
        return collective.all_gather_into_tensor(
            unwrap_tensor(output), unwrap_tensor(input), self, options.async_op
        )

    @collective_method("op")
    def reduce_scatter_single(self, output: Any, input: Any, options: Options) -> OptionalWork:
        """Reduce `input` over all ranks and write this rank's slice to `output`."""
        return collective.reduce_scatter_tensor(
            unwrap_tensor(output), unwrap_tensor(input), options.op, self, options.async_op
        )

    @collective_method()
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        options: Options,
    ) -> OptionalWork:
        """Send the i-th part of `input` to rank i; write the received parts to `output`."""
        return collective.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, self, options.async_op
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Return a handle whose `wait` returns when every rank has called this method."""
        device = getattr(opts, "device", None)
        if device is not None and device.type != CPU.type:
            work: dist.Work = self.get_backend(device).barrier(opts)
            return work
        options = Options.parse((), [] if opts is None else [opts], {"timeout": timeout})
        started = collective.barrier(self, options.async_op, timeout=options.timeout)
        return Work.make_completed([]) if started is None else started

    # ----- this package: collectives of lists of tensors -----

    @collective_method()
    def allgather(self, output_tensors: Any, input_tensors: Any, options: Options) -> OptionalWork:
        """Copy the tensors of all ranks to the output list."""
        outputs = unwrap_list(output_tensors)
        return lists.all_gather(outputs, unwrap_tensor(input_tensors), self, options.async_op)

    @collective_method("root")
    def gather(self, output_tensors: Any, input_tensors: Any, options: Options) -> OptionalWork:
        """Copy the tensors of all ranks to the root's list."""
        return lists.gather(
            unwrap_tensor(input_tensors),
            unwrap_list(output_tensors),
            group=self,
            async_op=options.async_op,
            group_dst=options.root,
        )

    @collective_method("root")
    def gather_single(self, output: Any, input: Any, options: Options) -> OptionalWork:
        """Write every rank's input to the root's output, in rank order."""
        outputs: list[Tensor] = []
        if self.rank() == options.root:
            # Only a contiguous tensor can be flattened without a copy.
            whole = unwrap_tensor(output)
            has_equal_parts = whole.dim() > 0 and whole.shape[0] % self.size() == 0
            parts = whole if has_equal_parts else whole.view(-1)
            outputs = list(parts.tensor_split(self.size()))
        return lists.gather(
            unwrap_tensor(input),
            outputs,
            group=self,
            async_op=options.async_op,
            group_dst=options.root,
        )

    gather_into_tensor = gather_single

    @collective_method("root")
    def scatter(self, output_tensors: Any, input_tensors: Any, options: Options) -> OptionalWork:
        """Copy the i-th tensor of the root's list to rank i."""
        return lists.scatter(
            unwrap_tensor(output_tensors),
            unwrap_list(input_tensors),
            group=self,
            async_op=options.async_op,
            group_src=options.root,
        )

    @collective_method("op")
    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, options: Options
    ) -> OptionalWork:
        """Reduce the i-th tensors of all ranks' lists into the output of rank i."""
        output = unwrap_tensor(output_tensors)
        inputs = unwrap_list(input_tensors)
        return lists.reduce_scatter(output, inputs, options.op, self, options.async_op)

    @collective_method()
    def alltoall(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], options: Options
    ) -> OptionalWork:
        """Send the i-th input to rank i; write the received tensors to the outputs."""
        return lists.all_to_all(output_tensors, input_tensors, self, options.async_op)

    # ----- this package: coalesced calls -----

    @collective_method("op")
    def allreduce_coalesced(self, tensors: Any, options: Options) -> OptionalWork:
        """Reduce several tensors in place, in one call."""
        return run_coalesced(
            "all_reduce", [[t] for t in tensors], tensors, options.op, self, options.async_op
        )

    @collective_method()
    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, options: Options
    ) -> OptionalWork:
        """Run `all_gather_single` on several pairs of tensors, in one call."""
        return run_coalesced(
            "all_gather", [[out] for out in outputs], inputs, None, self, options.async_op
        )

    @collective_method("op")
    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, options: Options
    ) -> OptionalWork:
        """Run `reduce_scatter_single` on several pairs of tensors, in one call."""
        return run_coalesced(
            "reduce_scatter", [[out] for out in outputs], inputs, options.op, self, options.async_op
        )

    @collective_method()
    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], options: Options
    ) -> OptionalWork:
        """Copy input_list[i] of each rank to output_lists[rank][i], in one call."""
        lengths = [len(outputs) for outputs in output_lists]
        if lengths != [len(input_list)] * self.size():
            raise ValueError(
                f"all_gather_coalesced expected {self.size()} output lists of {len(input_list)} "
                f"tensors, one list per rank and one tensor per input, got lists of {lengths}"
            )
        outputs = [list(of_ranks) for of_ranks in zip(*output_lists, strict=True)]
        return run_coalesced("all_gather", outputs, input_list, None, self, options.async_op)

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the handles of the following calls, until `_end_coalescing` is called."""
        self.get_backend(device)
        if torch.device(device).type == CPU.type:
            self._coalescing = []
        else:
            super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Return one handle for the calls since `_start_coalescing`."""
        if torch.device(device).type != CPU.type:
            work: dist.Work = super()._end_coalescing(device)
            return work
        works = self._coalescing or ()
        self._coalescing = None
        return CoalescedWork(works)

    # ----- this package: names of the same methods in torch up to 2.11 -----

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ----- this package: life cycle -----

    def shutdown(self) -> None:
        """Leave the group after the queued calls; shut down the backends of other devices."""
        self.communicator.close()
        for backend in self._others.values():
            backend.shutdown()

    def abort(self) -> None:
        """Leave the group at once; the other ranks get an error that names this rank."""
        self.communicator.abort()
        for backend in self._others.values():
            backend.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the following calls on all devices, and of groups split off later."""
        check_timeout(timeout)
        self._gloo._set_default_timeout(timeout)
        for backend in self._others.values():
            backend.set_timeout(timeout)

    def _wait_for_pending_works(self) -> None:
        """Wait until all asynchronous calls so far have finished."""
        self.communicator.progress.wait_for_last()

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of calls so far on CPU tensors."""
        return self.communicator.operation.number

    def get_group_store(self) -> Store:
        """Return the store of the group."""
        store: Store = self._options.store
        return store

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    def get_backend(self, device: Any) -> Any:
        """Return gloo for the CPU; otherwise create or return torch's default for the device."""
        device = torch.device(device)
        if device.type == CPU.type:
            return self._gloo
        with self._creating:
            if device.type not in self._others:
                # torch may have changed the timeout of the gloo group alone.
                options = copy_options(self._options, timeout=self._gloo.options._timeout)
                self._others[device.type] = create_backend(
                    self, device, options, self._backend_options
                )
        return self._others[device.type]

    _get_backend = get_backend

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> "CollectivesProcessGroup | None":
        """Return a new group of some of this group's ranks, or None on the other ranks.

        Every rank in `ranks` must call this method; the other ranks may call it too.
        """
        if device_types and not any(device.type == CPU.type for device in device_types):
            raise ValueError(
                f"expected the cpu among the devices of a split of a {NAME} group, got "
                f"{device_types}; split a group of the other device's backend instead"
            )
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size())):
            raise ValueError(
                f"expected distinct ranks between 0 and {self.size() - 1}, got {ranks}; pass the "
                "ranks in this group, not the global ranks"
            )
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'.'.join(str(rank) for rank in ranks)}"
        if timeout is None:
            timeout = self._gloo.options._timeout
        options = split_options(self._options, ranks, name, timeout)
        group = CollectivesProcessGroup(options, opts or self._backend_options)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group


# Methods that gloo runs, on the backend that also sends the messages of this package.
GLOO = ("monitored_barrier", "recv", "recv_anysource", "send")

# Methods that raise NotImplementedError, and the alternative that the error names.
REFUSED = {
    "_enable_collectives_timing": "use torch.profiler",
    "_register_on_completion_hook": "use the handle's get_future().then()",
    "get_reconfigure_handle": "use collectives.rebuild",
    "merge_remote_group": "create a new group",
    "new_window": "use collectives.shared_empty on one host",
    "reconfigure": "use collectives.rebuild",
    "register_abort_hook": "catch collectives.RankLost",
    "register_post_hook": "use the handle's get_future().then()",
    "register_pre_hook": "wrap the call",
    "unregister_abort_hook": "no hook can be registered",
    "unregister_post_hook": "no hook can be registered",
    "unregister_pre_hook": "no hook can be registered",
}

for _name in GLOO:
    setattr(CollectivesProcessGroup, _name, make_gloo_method(_name))
for _name, _remedy in REFUSED.items():
    setattr(CollectivesProcessGroup, _name, make_refused_method(_name, NAME, _remedy))
dist.Backend.register_backend(NAME, CollectivesProcessGroup, extended_api=True, devices=["cpu"])
