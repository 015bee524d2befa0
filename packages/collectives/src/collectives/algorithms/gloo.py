"""gloo's own collectives as one more algorithm: between hosts they are sometimes the fastest.

Notable: gloo believes what it is sent. Ranks that make different calls get wrong sums or a process
that aborts. So every kind of call (collective, shape, dtype, op, root) has a gloo group of its own:
in it all ranks can only make the same call, and ranks that disagree are in different groups, where
they wait for each other until the timeout. Such a group shares the device that the process has, so
it costs two threads, n-1 connections and about 15 ms, once; there are at most `MOST_GROUPS`.
It is made on a thread that may be left behind: a connection that comes when gloo itself has given
up would end the process, so gloo is to wait for ever, and this package for the group's timeout.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ProcessGroupGloo, Store

from collectives.algorithms.point_to_point import first_line, hang_up
from collectives.algorithms.reduction import average
from collectives.errors import PeerError
from collectives.faults import cloned, within

MOST_GROUPS = 64
FOR_EVER = timedelta(days=365)
# What gloo sums as this package does: 16-bit floats it would round at every rank.
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
KINDS = {
    "all_reduce": dist.AllreduceOptions, "reduce": dist.ReduceOptions,
    "reduce_scatter": dist.ReduceScatterOptions, "all_gather": AllgatherOptions,
    "broadcast": dist.BroadcastOptions, "all_to_all": dist.AllToAllOptions,
}  # fmt: skip
OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PRODUCT", "MIN": "MIN", "MAX": "MAX"}


class GlooGroups:
    """Groups of gloo's for the ranks of a group, by the call that they serve."""

    def __init__(self, group: Any, store: Store) -> None:
        backend = group
        if isinstance(group, dist.ProcessGroup):
            with suppress(RuntimeError):
                backend = group._get_backend(torch.device("cpu"))
        # Under TORCH_DISTRIBUTED_DEBUG=DETAIL, and on NCCL alone, there is none to learn from.
        self.base = backend if isinstance(backend, ProcessGroupGloo) else None
        self._options: Any = None if self.base is None else self.base.options
        self._store = store
        self._seconds, self._limit = 0.0, timedelta(seconds=1e-3)
        # A group of gloo's, and what starts its call.
        self.groups: dict[bytes, tuple[Any, Callable[..., Any]]] = {}

    def timeout_seconds(self) -> float:
        """The timeout of the group that the ranks have; 0 if there is none to ask."""
        return 0.0 if self._options is None else float(self._options._timeout.total_seconds())

    def can(self, kind: str, dtype: torch.dtype, op: str) -> bool:
        """Whether gloo does this collective, with the result that this package's own give."""
        known = self.base is not None and kind in KINDS
        return known and (not op or (dtype in DTYPES and op in OPS))

    def has_room_for(self, call: bytes) -> bool:
        """Whether there is a group for this call, or may be one more."""
        return call in self.groups or len(self.groups) < MOST_GROUPS

    def run(
        self, kind: str, call: bytes, tensors: tuple[Tensor, ...], op: str, root: int,
        seconds: float,
    ) -> None:  # fmt: skip
        """Do the collective on flat tensors; raise PeerError where a rank does not come."""
        # Made once for all calls that come alone, whose seconds are the group's.
        if seconds != self._seconds:
            self._seconds, self._limit = seconds, timedelta(seconds=max(1e-3, seconds))
        try:
            if call not in self.groups:
                until = time.monotonic() + seconds
                group = self._make(call, seconds)
                self.groups[call] = group, starter(group, kind, op, root)
                self._seconds = max(1e-3, until - time.monotonic())
                self._limit = timedelta(seconds=self._seconds)
            group, start = self.groups[call]
            # gloo's own waits, inside, go by the group's timeout.
            group._set_default_timeout(self._limit)
            start(*tensors).wait(self._limit)
        except (RuntimeError, TimeoutError) as error:
            raise PeerError(None, first_line(error)) from error
        if op == "AVG":
            average(op, tensors[0], group.size())

    def hang_up(self) -> None:
        """Close all connections."""
        for group, _ in self.groups.values():
            hang_up(group, set(range(group.size())) - {group.rank()})

    def _make(self, call: bytes, seconds: float) -> Any:
        # torch's stubs know neither the options' names nor this constructor.
        gloo: Any = ProcessGroupGloo
        base: Any = self.base
        options = gloo._Options()
        options._devices = base.options._devices
        # Two by default: with one, a worker that has just gone to sleep is waited for.
        options._threads, options._timeout = base.options._threads, FOR_EVER

        def connect() -> Any:
            # Of its own: who waits in a store keeps the connection to it.
            store = cloned(self._store)
            if store is not self._store:
                store.set_timeout(FOR_EVER)
            return gloo(PrefixStore(f"gloo/{call.hex()}", store), base.rank(), base.size(), options)

        try:
            return within(seconds, connect)
        except TimeoutError as error:
            raise TimeoutError(f"gloo did not connect all ranks within {seconds:.3g} s") from error


def starter(group: Any, kind: str, op: str, root: int) -> Callable[..., Any]:
    """What starts such a collective on flat tensors: one, or (output, input)."""
    options: Any = KINDS[kind]()
    if op:
        options.reduceOp = getattr(dist.ReduceOp, OPS[op])
    if kind in ("reduce", "broadcast"):
        options.rootRank = root
    start: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda flat: group.allreduce([flat], options),
        "reduce": lambda flat: group.reduce([flat], options),
        "reduce_scatter": lambda out, flat: group._reduce_scatter_base(out, flat, options),
        "all_gather": lambda out, own: group._allgather_base(_known(out), _known(own), options),
        "broadcast": lambda flat: group.broadcast([_known(flat)], options),
        "all_to_all": lambda out, own: group.alltoall_base(_known(out), _known(own), [], []),
    }
    return start[kind]


def _known(flat: Tensor) -> Tensor:
    """What moves as it is: gloo need not know the dtype."""
    return flat if flat.dtype in DTYPES else flat.view(torch.uint8)
