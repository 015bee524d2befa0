"""The backend "collectives" of torch.distributed, with which torch's trainers run on this package.

    import collectives.backend
    torch.distributed.init_process_group("cpu:collectives,cuda:nccl")   # or just "collectives"

CPU tensors are handled by this package. Tensors of another device are handled by the backend that
torch uses for that device (NCCL for CUDA). It is created with the first of these tensors, inside
the same group: torch itself never creates a second backend in a group that is implemented in
Python.

`CollectivesProcessGroup` lists every method of torch's `ProcessGroup` under the part of the program
that implements it: this package, gloo, torch's bookkeeping, or nothing (the method is refused).

It is a `ProcessGroup`, not a Python `Backend`, which torch 2.15 supports too: torch wraps the
handles of such a backend in handles whose `is_completed` never returns True.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from collectives import collective, lists
from collectives.algorithms.gloo import NO_TIMEOUT, connect_in_time
from collectives.communicator import Communicator
from collectives.failure_detection import REPORT_SECONDS
from collectives.store import fetch, fresh_store
from collectives.work import CoalescedWork, Work

NAME = "collectives"
CPU = torch.device("cpu")

# torch's options of a process group, except for its store. Not every version has all of them.
_OPTIONS = (
    "group_rank",
    "group_size",
    "timeout",
    "group_id",
    "global_ranks_in_group",
    "process_group",
)
# The arguments that follow the tensors of a method: the field of torch's options object, and the
# default value.
_ARGUMENTS = {"op": ("reduceOp", dist.ReduceOp.SUM), "root": ("rootRank", 0)}
# torch's stubs declare several signatures per method, which a single method cannot override.
_ProcessGroup: Any = dist.ProcessGroup
_GlooOptions: Any = ProcessGroupGloo._Options  # type: ignore[attr-defined]
_Method = Callable[..., Any]


def _by_device(method: _Method) -> _Method:
    """Forward calls with tensors that are not on the CPU to the backend of their device."""
    name = method.__name__

    @wraps(method)
    def call(self: "CollectivesProcessGroup", *args: Any, **kwargs: Any) -> Any:
        tensor = _first_tensor([*args, *kwargs.values()])
        if tensor is not None and not tensor.is_cpu:
            return getattr(self.get_backend(tensor.device), name)(*args, **kwargs)
        work = method(self, *args, **kwargs)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    return call


def _on_gloo(name: str) -> _Method:
    """Return a method that calls gloo's method of the same name.

    The inherited method would deadlock: it holds the interpreter while it calls gloo, which may
    wait for its own thread, which needs the interpreter to free the tensors of an earlier call.
    """

    def forward(self: "CollectivesProcessGroup", *args: Any, **kwargs: Any) -> Any:
        return getattr(self._gloo, name)(*args, **kwargs)

    forward.__name__ = name
    return _by_device(forward)


def _refused(name: str, remedy: str) -> _Method:
    """Return a method that raises NotImplementedError.

    The inherited method would address the gloo backend only, without any effect on our calls.
    """

    def refuse(self: "CollectivesProcessGroup", *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"the {NAME} backend does not support {name}; {remedy}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raise NotImplementedError: {remedy}."
    return refuse


@dataclass(frozen=True)
class _Options:
    """The arguments of a method that are not tensors."""

    op: Any
    root: int
    async_op: bool

    @staticmethod
    def parse(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> "_Options":
        """Read the arguments that follow the tensors.

        torch passes an options object. Users may pass the op and the root instead, by keyword or in
        the order of `names`. All of them may be omitted.
        """
        options = args[0] if args else kwargs.get("opts")
        values: dict[str, Any] = {name: default for name, (_, default) in _ARGUMENTS.items()}
        for i, name in enumerate(names):
            field, default = _ARGUMENTS[name]
            passed = args[i] if i < len(args) else kwargs.get(name)
            values[name] = getattr(options, field, default if passed is None else passed)
        return _Options(values["op"], values["root"], getattr(options, "asyncOp", True))


class CollectivesProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives on CPU tensors are this package's."""

    def __init__(self, options: Any, backend_options: Any = None) -> None:
        if isinstance(backend_options, _GlooOptions):
            raise TypeError(
                f"expected the options of another device's backend, got gloo's; {NAME} takes a "
                "timeout only: pass timeout="
            )
        rank = options.group_rank
        world = options.group_size
        timeout = options.timeout
        deadline = time.monotonic() + timeout.total_seconds()
        store = fresh_store(options.store, world, deadline)
        options = _copy_options(options, store=store)
        super().__init__(store, rank, world)
        # Needed to create a backend of another device, or a group from this one.
        self._options = options
        self._backend_options = backend_options
        self._gloo: Any = _connect_gloo(store, rank, world, deadline)
        self._gloo._set_default_timeout(timeout)
        self._others: dict[str, Any] = {}
        self._creating = threading.Lock()
        # The handles of the calls since `_start_coalescing`; None outside of it.
        self._coalescing: list[dist.Work] | None = None
        # torch's C++ code obtains the backend of a device from the base class.
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(CPU, kind, self._gloo)
        self._set_default_backend(kind)
        replaced = getattr(options, "process_group", None)
        bound = getattr(replaced, "bound_device_id", None)
        if bound is not None:
            self.bound_device_id = bound
        #: The state of this group's collectives.
        self.communicator = Communicator(
            self._gloo, store=store, timeout=timeout, deadline=deadline
        )

    # ----- ours: collectives of one tensor per rank -----

    @_by_device
    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce a tensor over all ranks, in place; gloo reduces sparse tensors."""
        tensor = _single(tensors)
        if tensor.is_sparse:
            work: dist.Work = self._gloo.allreduce(tensors, *args, **kwargs)
            return work
        options = _Options.parse(["op"], args, kwargs)
        return _handle(collective.all_reduce(tensor, options.op, self, options.async_op), [tensor])

    @_by_device
    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Copy the root's tensor to every rank."""
        tensor = _single(tensors)
        options = _Options.parse(["root"], args, kwargs)
        work = collective.broadcast(
            tensor, group=self, async_op=options.async_op, group_src=options.root
        )
        return _handle(work, [tensor])

    @_by_device
    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce over all ranks into the root's tensor."""
        tensor = _single(tensors)
        options = _Options.parse(["root", "op"], args, kwargs)
        work = lists.reduce(
            tensor, op=options.op, group=self, async_op=options.async_op, group_dst=options.root
        )
        return _handle(work, [tensor])

    @_by_device
    def all_gather_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Write the inputs of all ranks to `output`, in rank order."""
        result = _single(output)
        options = _Options.parse([], args, kwargs)
        work = collective.all_gather_into_tensor(result, _single(input), self, options.async_op)
        return _handle(work, [result])

    @_by_device
    def reduce_scatter_single(
        self, output: Any, input: Any, *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Reduce `input` over all ranks and write this rank's slice to `output`."""
        result = _single(output)
        options = _Options.parse(["op"], args, kwargs)
        work = collective.reduce_scatter_tensor(
            result, _single(input), options.op, self, options.async_op
        )
        return _handle(work, [result])

    @_by_device
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send the i-th part of `input` to rank i; write the received parts to `output`."""
        options = _Options.parse([], [], {"opts": opts})
        work = collective.all_to_all_single(
            output,
            input,
            list(output_split_sizes),
            list(input_split_sizes),
            self,
            options.async_op,
        )
        return _handle(work, [output])

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Return a handle whose `wait` returns when every rank has called this method."""
        device = getattr(opts, "device", None)
        if device is not None and device.type != CPU.type:
            work: dist.Work = self.get_backend(device).barrier(opts)
            return work
        return _handle(collective.barrier(self, async_op=getattr(opts, "asyncOp", True)), [])

    # ----- ours: collectives of lists of tensors -----

    @_by_device
    def allgather(self, output_lists: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Fill every rank's list with every rank's tensor."""
        outputs = _single_list(output_lists)
        options = _Options.parse([], args, kwargs)
        work = lists.all_gather(outputs, _single(inputs), self, options.async_op)
        return _handle(work, outputs)

    @_by_device
    def gather(self, output_lists: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Fill the root's list with every rank's tensor."""
        outputs = _single_list(output_lists)
        options = _Options.parse(["root"], args, kwargs)
        work = lists.gather(
            _single(inputs),
            outputs,
            group=self,
            async_op=options.async_op,
            group_dst=options.root,
        )
        return _handle(work, outputs)

    @_by_device
    def gather_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Write every rank's input to the root's output, in rank order."""
        result = _single(output)
        options = _Options.parse(["root"], args, kwargs)
        is_root = self.rank() == options.root
        outputs = result.view(-1).tensor_split(self.size()) if is_root else []
        work = lists.gather(
            _single(input), outputs, group=self, async_op=options.async_op, group_dst=options.root
        )
        return _handle(work, [result])

    gather_into_tensor = gather_single

    @_by_device
    def scatter(self, outputs: Any, input_lists: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Copy the i-th tensor of the root's list to rank i."""
        output = _single(outputs)
        options = _Options.parse(["root"], args, kwargs)
        work = lists.scatter(
            output,
            _single_list(input_lists),
            group=self,
            async_op=options.async_op,
            group_src=options.root,
        )
        return _handle(work, [output])

    @_by_device
    def reduce_scatter(
        self, outputs: Any, input_lists: Any, *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Reduce the i-th tensors of all ranks' lists into the output of rank i."""
        output = _single(outputs)
        options = _Options.parse(["op"], args, kwargs)
        work = lists.reduce_scatter(
            output, _single_list(input_lists), options.op, self, options.async_op
        )
        return _handle(work, [output])

    @_by_device
    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Send the i-th input to rank i; write the received tensors to the outputs."""
        options = _Options.parse([], args, kwargs)
        return _handle(lists.all_to_all(outputs, inputs, self, options.async_op), list(outputs))

    # ----- ours: coalesced calls -----

    @_by_device
    def allreduce_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce several tensors in place, in one call."""
        options = _Options.parse(["op"], args, kwargs)
        return _run_coalesced(
            self, "all_reduce", [[tensor] for tensor in tensors], tensors, options, options.op
        )

    @_by_device
    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Run `all_gather_single` on several pairs of tensors, in one call."""
        options = _Options.parse([], args, kwargs)
        return _run_coalesced(self, "all_gather", [[output] for output in outputs], inputs, options)

    @_by_device
    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Run `reduce_scatter_single` on several pairs of tensors, in one call."""
        options = _Options.parse(["op"], args, kwargs)
        return _run_coalesced(
            self, "reduce_scatter", [[output] for output in outputs], inputs, options, options.op
        )

    @_by_device
    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy input_list[i] of each rank to output_lists[rank][i], in one call."""
        lengths = [len(outputs) for outputs in output_lists]
        if lengths != [len(input_list)] * self.size():
            raise ValueError(
                f"all_gather_coalesced expected {self.size()} output lists of {len(input_list)} "
                f"tensors, one list per rank and one tensor per input, got lists of {lengths}"
            )
        options = _Options.parse([], [], {"opts": opts})
        outputs = [list(of_ranks) for of_ranks in zip(*output_lists, strict=True)]
        return _run_coalesced(self, "all_gather", outputs, input_list, options)

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the handles of the following calls."""
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
        works, self._coalescing = self._coalescing or [], None
        return CoalescedWork(works)

    # ----- ours: names of the same methods in torch up to 2.11 -----

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ----- ours: life cycle -----

    def shutdown(self) -> None:
        """Announce that this rank leaves; stop the threads and the backends of other devices."""
        self.communicator.close()
        for backend in self._others.values():
            backend.shutdown()

    def abort(self) -> None:
        """Leave the group at once; the other ranks get an error that names this rank."""
        self.communicator.abort()
        for backend in self._others.values():
            backend.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the following calls."""
        self._gloo._set_default_timeout(timeout)
        for backend in self._others.values():
            backend.set_timeout(timeout)

    def _wait_for_pending_works(self) -> None:
        """Return when all asynchronous calls so far have finished."""
        self.communicator.progress.wait_for_last()

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of calls so far."""
        return self.communicator.operation.number

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    def get_backend(self, device: Any) -> Any:
        """Return the backend of a device: gloo for the CPU, otherwise torch's default for it."""
        device = torch.device(device)
        if device.type == CPU.type:
            return self._gloo
        with self._creating:
            if device.type not in self._others:
                self._others[device.type] = _create_backend(self, device)
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
        """Create a group of some of this group's ranks; return None on the other ranks.

        Every rank in `ranks` must call this method. `torch.distributed.split_group` does.
        """
        if device_types and not any(device.type == CPU.type for device in device_types):
            raise ValueError(
                f"expected the cpu among the devices of a split of a {NAME} group, got "
                f"{device_types}; split a group of the other device's backend instead"
            )
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'.'.join(map(str, ranks))}"
        global_ranks = self._options.global_ranks_in_group or range(self.size())
        options = _copy_options(
            self._options,
            store=PrefixStore(f"split/{name}", self._options.store),
            group_rank=ranks.index(self.rank()),
            group_size=len(ranks),
            timeout=timeout or self._options.timeout,
            group_id=name,
            global_ranks_in_group=[global_ranks[rank] for rank in ranks],
        )
        group = CollectivesProcessGroup(options, opts or self._backend_options)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group


# Methods that gloo runs. Messages between our ranks use the same gloo backend.
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


def _connect_gloo(store: Store, rank: int, world: int, deadline: float) -> Any:
    """Return a gloo group; raise RankLost with the ranks that do not join, or end meanwhile."""

    def synchronize(key: str, deadline: float) -> None:
        fetch(store, {r: f"{key}/{r}" for r in range(world)}, deadline, {f"{key}/{rank}": ""})

    synchronize("joined", deadline)
    try:
        return connect_in_time(
            store,
            lambda store: ProcessGroupGloo(store, rank, world, NO_TIMEOUT),
            deadline - time.monotonic(),
        )
    except (RuntimeError, TimeoutError):
        # gloo's error names no rank. The ranks that still run write to the store once more.
        synchronize("still running", time.monotonic() + REPORT_SECONDS)
        raise


def _handle(work: dist.Work | None, result: Sequence[Tensor]) -> dist.Work:
    """Return the handle of a call, also if the call was synchronous."""
    return Work.completed(list(result)) if work is None else work


def _single(tensors: Any) -> Tensor:
    """Return the tensor of a method's argument: a tensor, or a list of one tensor per device."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(
            f"expected one tensor, because a rank has one CPU device, got {len(tensors)}; use a "
            "coalesced call for several tensors"
        )
    return _single(tensors[0])


def _single_list(tensor_lists: Any) -> list[Tensor]:
    """Return the argument as a flat list of tensors; `[[t1, t2]]` is accepted as `[t1, t2]`."""
    if not tensor_lists or isinstance(tensor_lists[0], Tensor):
        return list(tensor_lists)
    if len(tensor_lists) != 1:
        raise ValueError(
            f"expected one list of tensors, because a rank has one CPU device, got "
            f"{len(tensor_lists)} lists; make one call per list"
        )
    return list(tensor_lists[0])


def _run_coalesced(
    group: CollectivesProcessGroup,
    kind: str,
    outputs: list[list[Tensor]],
    inputs: Sequence[Tensor],
    options: _Options,
    op: Any = None,
) -> dist.Work:
    if not inputs or len(outputs) != len(inputs):
        raise ValueError(
            f"a coalesced {kind} expected lists of one length that is not zero, got "
            f"{len(outputs)} outputs and {len(inputs)} inputs"
        )
    work = lists.coalesced(kind, outputs, inputs, op, group, options.async_op)
    return _handle(work, [tensor for tensors in outputs for tensor in tensors])


def _first_tensor(values: Any) -> Tensor | None:
    """Return the first tensor in nested lists, or None."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (list, tuple)):
            tensor = _first_tensor(value)
            if tensor is not None:
                return tensor
    return None


def _copy_options(options: Any, **changes: Any) -> Any:
    """Return a copy of torch's options of a process group, with some of them changed."""
    copied = type(options)()
    for field in ("store", *_OPTIONS):
        if field in changes or hasattr(options, field):
            setattr(copied, field, changes.get(field, getattr(options, field, None)))
    return copied


def _create_backend(group: CollectivesProcessGroup, device: torch.device) -> Any:
    """Create torch's default backend for a device and register it with the group."""
    name = dist.Backend.default_device_backend_map.get(device.type)
    if name is None:
        raise ValueError(f"torch has no backend for tensors on {device.type}; move them to cpu")
    backend = _backend_by_name(name, device, group._options, group._backend_options)
    kind = dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM)
    # C++ callers (coalescing, functional collectives) obtain the backend by its device.
    group._register_backend(torch.device(device.type), kind, backend)
    return backend


def _backend_by_name(name: str, device: torch.device, options: Any, backend_options: Any) -> Any:
    """Create one of torch's backends for the ranks of our group, as init_process_group does."""
    store: Store = PrefixStore(f"beside/{device.type}", options.store)
    rank = options.group_rank
    world = options.group_size
    timeout = options.timeout
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        # Up to torch 2.11 the list of plugins does not contain the built-in backends.
        if name != dist.Backend.NCCL:
            raise ValueError(
                f"cannot create backend {name} for {device.type} in a {NAME} group; create a "
                "separate group for this device"
            )
        settings = backend_options or dist.ProcessGroupNCCL.Options()
        settings._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, settings)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, world, timeout)
    return plugin.creator_fn(_copy_options(options, store=store), backend_options)


for _name in GLOO:
    setattr(CollectivesProcessGroup, _name, _on_gloo(_name))
for _name, _remedy in REFUSED.items():
    setattr(CollectivesProcessGroup, _name, _refused(_name, _remedy))
dist.Backend.register_backend(NAME, CollectivesProcessGroup, extended_api=True, devices=["cpu"])
