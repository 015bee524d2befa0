"""Import this to name "collectives" in init_process_group, and run torch's own trainers on it.

    import collectives.backend
    torch.distributed.init_process_group("cpu:collectives,cuda:nccl")   # or just "collectives"

Notable:
- CPU tensors go to this package. Tensors of another device go to the backend that torch uses for
  that device (NCCL for CUDA), which is made with the first of them, inside the same group: torch
  stops at the first Python group that it gets and never makes the second backend by itself;
- it is a `ProcessGroup`, not a `Backend` in Python as torch 2.15 knows it too: torch wraps what
  such a one returns in handles that never say `is_completed`, and a loop that polls never ends;
- what this package has no algorithm for (send and receive, sparse tensors, the monitored barrier)
  goes to gloo, over which the messages travel too;
- an asynchronous call from torch (DDP's buckets, FSDP2's prefetch) runs on the progress thread.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from collectives import collective, lists
from collectives.coalescing import coalesced
from collectives.communicator import Communicator
from collectives.faults import ROLL_SECONDS, fetch, fresh
from collectives.work import CoalescedWork, Work

NAME = "collectives"
CPU = torch.device("cpu")
SUM = dist.ReduceOp.SUM

# torch's options of a process group, except for its store. Not every version has all of them.
_OPTIONS = (
    "group_rank", "group_size", "timeout", "group_id", "global_ranks_in_group", "process_group",
)  # fmt: skip
# Its methods have several signatures each in torch's stubs; torch calls the ones given here.
_ProcessGroup: Any = dist.ProcessGroup
_GlooOptions: Any = ProcessGroupGloo._Options  # type: ignore[attr-defined]
_Method = Callable[..., Any]


def _by_device(method: _Method) -> _Method:
    """Let tensors that are not on the CPU go to their device's own backend."""
    name = method.__name__

    @wraps(method)
    def call(self: "CollectivesProcessGroup", *args: Any, **kwargs: Any) -> Any:
        tensor = _first_tensor(args)
        if tensor is not None and not tensor.is_cpu:
            return getattr(self.get_backend(tensor.device), name)(*args, **kwargs)
        work = method(self, *args, **kwargs)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    return call


def _on_gloo(name: str) -> _Method:
    """gloo's own method.

    The base class would find it too, but holds the interpreter while it calls: gloo may then wait
    for its own thread, and that for the interpreter, to drop the tensors of an earlier call.
    """

    def forward(self: "CollectivesProcessGroup", *args: Any, **kwargs: Any) -> Any:
        return getattr(self._gloo, name)(*args, **kwargs)

    forward.__name__ = name
    return _by_device(forward)


def _ours(name: str, tensors: int, others: list[str], function: Callable[..., Any]) -> _Method:
    """A method that takes so many arguments of tensors, and then either of two things.

    That is one of torch's objects of options, or (how the group's own methods are called by hand)
    what stands in it for `others`, in that order or by torch's names; all may be left out.
    """

    def call(self: "CollectivesProcessGroup", *args: Any, opts: Any = None, **named: Any) -> Any:
        lists, rest = [_list(each) for each in args[:tensors]], args[tensors:]
        if name == "allreduce" and lists[0][0].is_sparse:
            return self._gloo.allreduce(*args)
        opts, said = rest[0] if rest else opts, dict[str, Any]()
        for i, other in enumerate(others):
            # How torch's options and its methods call it, and what it is if it is not given.
            field, short, usual = (
                ("reduceOp", "op", SUM) if other == "op" else ("rootRank", "root", 0)
            )
            given = rest[i] if i < len(rest) else named.get(short)
            said[other] = getattr(opts, field, usual if given is None else given)
        waits = not getattr(opts, "asyncOp", True)
        work = function(lists, group=self, async_op=not waits, **said)
        return work if work is not None else Work.done(lists[0])

    call.__name__ = name
    call.__doc__ = f"torch.distributed.{name}, on this package's algorithms."
    return _by_device(call)


def _ones(function: Callable[..., Any]) -> Callable[..., Any]:
    """What takes lists that hold one tensor each, made of what takes tensors."""
    return lambda tensors, **others: function(*(each[0] for each in tensors), **others)


def _coalesced(name: str) -> _Method:
    """Return a method that takes lists and calls the method `name` for each of their elements."""

    def call(self: "CollectivesProcessGroup", *args: Any, **named: Any) -> Any:
        lists = [each for each in args if isinstance(each, (list, tuple))]
        lengths = [len(each) for each in lists]
        if len(set(lengths)) > 1:
            raise ValueError(f"{name}_coalesced expected lists of one length, got {lengths}")
        with coalesced(lengths[0]):
            works = [
                getattr(self, name)(*each, *args[len(lists) :], **named)
                for each in zip(*lists, strict=True)
            ]
        return CoalescedWork(works, list(lists[0]))

    call.__name__ = f"{name}_coalesced"
    return _by_device(call)


class CollectivesProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives on CPU tensors are this package's."""

    def __init__(self, options: Any, backend_options: Any = None) -> None:
        if isinstance(backend_options, _GlooOptions):
            raise TypeError(
                f"expected the options of another device's backend, got gloo's; {NAME} takes a "
                "timeout only: pass timeout="
            )
        rank, world, timeout = options.group_rank, options.group_size, options.timeout
        store = fresh(options.store, world, timeout.total_seconds())
        options = _copy(options, store=store)
        super().__init__(store, rank, world)
        # What torch needs to make a backend of another device, or a group from this one.
        self._options, self._backend_options = options, backend_options
        self._gloo: Any = _messages(store, rank, world, timeout)
        self._others: dict[str, Any] = {}
        self._making = threading.Lock()
        # The handles of the calls since `_start_coalescing`; None outside of it.
        self._coalescing: list[dist.Work] | None = None
        # torch asks the group which backend serves a device.
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(CPU, kind, self._gloo)
        self._set_default_backend(kind)
        replaced = getattr(options, "process_group", None)
        bound = getattr(replaced, "bound_device_id", None)
        if bound is not None:
            self.bound_device_id = bound
        self.communicator = Communicator(self._gloo, store=store, timeout=timeout)

    def getBackendName(self) -> str:
        """What get_backend says."""
        return NAME

    def split_group(
        self, ranks: list[int], timeout: timedelta | None = None, opts: Any = None,
        group_name: str | None = None, group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> "CollectivesProcessGroup | None":  # fmt: skip
        """Make a group of some of this group's ranks; return None on the other ranks.

        Every rank in `ranks` must call it; torch.distributed.split_group does.
        """
        if device_types and not any(device.type == CPU.type for device in device_types):
            raise ValueError(
                f"expected the cpu among the devices of a split of a {NAME} group, got "
                f"{device_types}; split a group of the other device's backend instead"
            )
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'.'.join(map(str, ranks))}"
        above = self._options.global_ranks_in_group or range(self.size())
        options = _copy(
            self._options,
            store=PrefixStore(f"split/{name}", self._options.store),
            group_rank=ranks.index(self.rank()),
            group_size=len(ranks),
            timeout=timeout or self._options.timeout,
            group_id=name,
            global_ranks_in_group=[above[rank] for rank in ranks],
        )
        group = CollectivesProcessGroup(options, opts or self._backend_options)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    # ----- other devices -----

    def get_backend(self, device: Any) -> Any:
        """The backend of a device: gloo (for messages) on the CPU, else torch's own for it."""
        device = torch.device(device)
        if device.type == CPU.type:
            return self._gloo
        with self._making:
            if device.type not in self._others:
                self._others[device.type] = self._make(device)
        return self._others[device.type]

    _get_backend = get_backend

    def _make(self, device: torch.device) -> Any:
        name = dist.Backend.default_device_backend_map.get(device.type)
        if name is None:
            raise ValueError(f"torch has no backend for tensors on {device.type}; move them to cpu")
        backend = _backend_by_name(name, device, self._options, self._backend_options)
        kind = dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM)
        # C++ callers (coalescing, functional collectives) find it by its device.
        self._register_backend(torch.device(device.type), kind, backend)
        return backend

    def _start_coalescing(self, device: torch.device) -> None:
        self.get_backend(device)
        if torch.device(device).type == CPU.type:
            self._coalescing = []
        else:
            super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if torch.device(device).type != CPU.type:
            there: dist.Work = super()._end_coalescing(device)
            return there
        works, self._coalescing = self._coalescing or [], None
        return CoalescedWork(works)

    # ----- this package's -----

    allreduce = _ours("allreduce", 1, ["op"], _ones(collective.all_reduce))
    broadcast = _ours("broadcast", 1, ["group_src"], _ones(collective.broadcast))
    reduce = _ours("reduce", 1, ["group_dst", "op"], _ones(lists.reduce))
    all_gather_single = _ours("all_gather_single", 2, [], _ones(collective.all_gather_into_tensor))
    reduce_scatter_single = _ours(
        "reduce_scatter_single", 2, ["op"], _ones(collective.reduce_scatter_tensor)
    )
    # Of what takes lists: t are the tensors' arguments.
    gather = _ours("gather", 2, ["group_dst"], lambda t, **go: lists.gather(t[1][0], t[0], **go))
    scatter = _ours("scatter", 2, ["group_src"], lambda t, **go: lists.scatter(t[0][0], t[1], **go))
    allgather = _ours("allgather", 2, [], lambda t, **go: lists.all_gather(t[0], t[1][0], **go))
    reduce_scatter = _ours(
        "reduce_scatter", 2, ["op"], lambda t, **go: lists.reduce_scatter(t[0][0], t[1], **go)
    )
    alltoall = _ours("alltoall", 2, [], lambda t, **go: lists.all_to_all(*t, **go))

    @_by_device
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: list[int],
        input_split_sizes: list[int], opts: Any = None,
    ) -> dist.Work:  # fmt: skip
        """torch.distributed.all_to_all_single."""
        splits = list(output_split_sizes), list(input_split_sizes)
        waits = not getattr(opts, "asyncOp", True)
        work = collective.all_to_all_single(output, input, *splits, self, not waits)
        return work if work is not None else Work.done([output])

    allreduce_coalesced = _coalesced("allreduce")
    all_gather_single_coalesced = _coalesced("all_gather_single")
    reduce_scatter_single_coalesced = _coalesced("reduce_scatter_single")

    @_by_device
    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """torch.distributed.all_gather_coalesced: output_lists[rank][i] = input_list[i] of rank."""
        lengths = [len(outputs) for outputs in output_lists]
        if lengths != [len(input_list)] * self.size():
            raise ValueError(
                f"all_gather_coalesced expected {self.size()} output lists of {len(input_list)} "
                f"tensors, one list per rank and one tensor per input, got lists of {lengths}"
            )
        with coalesced(len(input_list)):
            works = [
                self.allgather([list(outputs)], [tensor], opts)
                for outputs, tensor in zip(zip(*output_lists, strict=True), input_list, strict=True)
            ]
        return CoalescedWork(works, output_lists)

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        """torch.distributed.barrier."""
        device = getattr(opts, "device", None)
        if device is not None and device.type != CPU.type:
            there: dist.Work = self.get_backend(device).barrier(opts)
            return there
        work = collective.barrier(self, async_op=getattr(opts, "asyncOp", True))
        return work if work is not None else Work.done([])

    # torch up to 2.11 calls the same things by these names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ----- gloo's -----

    monitored_barrier = _on_gloo("monitored_barrier")
    recv = _on_gloo("recv")
    recv_anysource = _on_gloo("recv_anysource")
    send = _on_gloo("send")

    # ----- life and death -----

    def shutdown(self) -> None:
        """Stop the progress thread and the backends of other devices."""
        self.communicator.close()
        for backend in self._others.values():
            backend.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a rank is waited for from now on."""
        self._gloo._set_default_timeout(timeout)
        for backend in self._others.values():
            backend.set_timeout(timeout)

    def abort(self) -> None:
        """Give up what is under way: other ranks get an error that names this one."""
        self.communicator.abort()
        for backend in self._others.values():
            backend.abort()


def _messages(store: Store, rank: int, world: int, timeout: timedelta) -> Any:
    """A gloo group; RankLost with the numbers of the ranks that do not come, or die on the way."""
    deadline = time.monotonic() + timeout.total_seconds()

    def meet(what: str, deadline: float) -> None:
        fetch(store, {r: f"{what}/{r}" for r in range(world)}, deadline, {f"{what}/{rank}": ""})

    meet("here", deadline)
    try:
        return ProcessGroupGloo(store, rank, world, timeout)
    except RuntimeError:
        # It does not say who, so whoever is still here does.
        meet("still here", deadline + ROLL_SECONDS)
        raise


def _list(tensors: Any) -> list[Tensor]:
    """A group's methods take a tensor, a list of them, or a list of lists (one for each device)."""
    if isinstance(tensors, Tensor):
        return [tensors]
    return tensors if not tensors or isinstance(tensors[0], Tensor) else tensors[0]


def _first_tensor(args: Any) -> Tensor | None:
    """The first tensor in nested lists of them."""
    for each in args:
        if isinstance(each, Tensor):
            return each
        if isinstance(each, (list, tuple)) and (found := _first_tensor(each)) is not None:
            return found
    return None


def _copy(options: Any, **changes: Any) -> Any:
    """Return torch's options of a process group with some of them changed."""
    copied = type(options)()
    for field in ("store", *_OPTIONS):
        if field in changes or hasattr(options, field):
            setattr(copied, field, changes.get(field, getattr(options, field, None)))
    return copied


def _backend_by_name(name: str, device: torch.device, options: Any, own_options: Any) -> Any:
    """A backend of torch's for the ranks of our group, as init_process_group makes it."""
    store: Store = PrefixStore(f"beside/{device.type}", options.store)
    rank, world, timeout = options.group_rank, options.group_size, options.timeout
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        # Up to torch 2.11 the built-in ones are not in that list.
        if name != dist.Backend.NCCL:
            raise ValueError(f"cannot make backend {name} for {device.type} beside {NAME}")
        settings = own_options or dist.ProcessGroupNCCL.Options()
        settings._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, settings)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, world, timeout)
    return plugin.creator_fn(_copy(options, store=store), own_options)


dist.Backend.register_backend(NAME, CollectivesProcessGroup, extended_api=True, devices=["cpu"])
