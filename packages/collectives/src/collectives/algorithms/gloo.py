"""gloo's own collectives as one more algorithm: between hosts they are sometimes the fastest.

Notable: gloo believes what it is sent. Ranks that make different calls get wrong sums or a process
that aborts. So every kind of call (collective, shape, dtype, op, root) has a gloo group of its own:
in it all ranks can only make the same call, and ranks that disagree are in different groups, where
they wait for each other until the timeout. Such a group shares the device that the process has, so
it costs two threads, n-1 connections and about 15 ms, once; there are at most `MOST_GROUPS`.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from collectives.algorithms.point_to_point import first_line, hang_up
from collectives.algorithms.reduction import average
from collectives.errors import PeerError
from collectives.faults import STORE_SECONDS, within

MOST_GROUPS = 64
# What gloo sums as this package does: 16-bit floats it would round at every rank.
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PRODUCT", "MIN": "MIN", "MAX": "MAX"}


class GlooGroups:
    """Groups of gloo's for the ranks of a group, by the call that they serve."""

    def __init__(self, group: Any, store: Store) -> None:
        backend = group
        if isinstance(group, dist.ProcessGroup):
            with suppress(RuntimeError):
                backend = group._get_backend(torch.device("cpu"))
        # Under TORCH_DISTRIBUTED_DEBUG=DETAIL, and on NCCL alone, there is none to learn from.
        self._base = backend if isinstance(backend, ProcessGroupGloo) else None
        self._options: Any = None if self._base is None else self._base.options
        self._store = store
        self.groups: dict[bytes, Any] = {}

    def timeout_seconds(self) -> float:
        """The timeout of the group that the ranks have; 0 if there is none to ask."""
        if self._options is None:
            return 0.0
        timeout: timedelta = self._options._timeout
        return timeout.total_seconds()

    def can(self, kind: str, dtype: torch.dtype, op: str) -> bool:
        """Whether gloo does this collective, with the result that this package's own give."""
        if self._base is None or kind not in RUN:
            return False
        return not op or (dtype in DTYPES and op in OPS)

    def has_room_for(self, call: bytes) -> bool:
        """Whether there is a group for this call, or may be one more."""
        return call in self.groups or len(self.groups) < MOST_GROUPS

    def run(
        self, kind: str, call: bytes, tensors: tuple[Tensor, ...], op: str, root: int,
        seconds: float,
    ) -> None:  # fmt: skip
        """Do the collective on flat tensors; raise PeerError where a rank does not come."""
        timeout = timedelta(seconds=max(1e-3, seconds))
        try:
            if call not in self.groups:
                self.groups[call] = self._make(call, timeout)
            # gloo's own waits, inside, go by the group's timeout.
            self.groups[call]._set_default_timeout(timeout)
            RUN[kind](self.groups[call], tensors, op, root).wait(timeout)
        except (RuntimeError, TimeoutError) as error:
            raise PeerError(None, first_line(error)) from error
        if op:
            average(op, tensors[0], self.groups[call].size())

    def hang_up(self) -> None:
        """Close all connections."""
        for group in self.groups.values():
            hang_up(group, set(range(group.size())) - {group.rank()})

    def _make(self, call: bytes, timeout: timedelta) -> Any:
        # torch's stubs know neither the options' names nor this constructor.
        gloo: Any = ProcessGroupGloo
        base: Any = self._base
        options = gloo._Options()
        options._devices = base.options._devices
        # Two by default: with one, a worker that has just gone to sleep is waited for.
        options._threads, options._timeout = base.options._threads, timeout
        store = PrefixStore(f"gloo/{call.hex()}", self._store)
        seconds = timeout.total_seconds() + STORE_SECONDS
        return within(seconds, lambda: gloo(store, base.rank(), base.size(), options))


def _all_reduce(group: Any, tensors: tuple[Tensor, ...], op: str, _: int) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, OPS[op])
    return group.allreduce([tensors[0]], options)


def _reduce_scatter(group: Any, tensors: tuple[Tensor, ...], op: str, _: int) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, OPS[op])
    return group._reduce_scatter_base(*tensors, options)


def _broadcast(group: Any, tensors: tuple[Tensor, ...], _: str, root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return group.broadcast([tensors[0].view(torch.uint8)], options)


RUN = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": lambda group, t, _, __: group._allgather_base(*(x.view(torch.uint8) for x in t)),
    "broadcast": _broadcast,
}
