"""gloo's own collectives as another algorithm; between hosts they are sometimes the fastest."""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ProcessGroupGloo, Store

from collectives.algorithms.point_to_point import close_peers, get_first_line
from collectives.algorithms.reduction import average
from collectives.errors import PeerError
from collectives.store import clone_store, run_within

# Note [One gloo group per kind of call]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# gloo does not validate the messages that it receives. Ranks that make different calls get wrong
# results, or their processes abort. Every kind of call (collective, shape, dtype, op, root)
# therefore uses a separate gloo group, in which all ranks can only make the same call. Ranks that
# make different calls are in different groups, where they wait for each other until the timeout.
#
# All of these groups share the gloo device of the process. A group costs two threads, n-1
# connections and about 15 ms, so at most `MAX_GROUPS` are created.
#
# A connection that is accepted after gloo itself has timed out aborts the process. The group is
# therefore created with gloo's timeout disabled, on a thread that is abandoned at our timeout.
#
# A thread that waits in a store blocks all other calls on the same connection, so gloo groups are
# created over a separate connection. It is opened once, while the process group is set up. The
# server of a TCPStore looks up the host name of every client that connects, and answers no other
# client meanwhile. If the name server does not answer, that takes five seconds by default.

MAX_GROUPS = 64
NO_TIMEOUT = timedelta(days=365)
# Smallest timeout that is passed to gloo, which interprets zero as its default.
MIN_SECONDS = 1e-3
# The dtypes that gloo reduces in the same precision as this package. gloo rounds 16-bit floats at
# every rank.
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
OPTIONS = {
    "all_reduce": dist.AllreduceOptions,
    "reduce": dist.ReduceOptions,
    "reduce_scatter": dist.ReduceScatterOptions,
    "all_gather": AllgatherOptions,
    "broadcast": dist.BroadcastOptions,
    "all_to_all": dist.AllToAllOptions,
}
# The gloo op for each of our ops; AVG divides the sum afterwards.
OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PRODUCT", "MIN": "MIN", "MAX": "MAX"}


def get_gloo_backend(group: Any) -> Any:
    """Return the group's gloo backend.

    Return None if the group has no gloo backend, for example with MPI or with NCCL only. Return
    None also if TORCH_DISTRIBUTED_DEBUG=DETAIL is set, which wraps the backend.
    """
    backend = group
    if isinstance(group, dist.ProcessGroup):
        with suppress(RuntimeError):
            backend = group._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, ProcessGroupGloo) else None


class GlooGroups:
    """The gloo groups of one process group: see Note [One gloo group per kind of call]."""

    def __init__(self, group: Any, store: Store) -> None:
        #: The group's gloo backend, or None.
        self.base = get_gloo_backend(group)
        #: For each packed call, a gloo group and the function that starts its collective.
        self.groups: dict[bytes, tuple[Any, Callable[..., Any]]] = {}
        self._options: Any = None if self.base is None else self.base.options
        self._store = store
        self._separate_store: Store | None = None

    def open_store(self) -> Store:
        """Return the store over the connection that only `run` uses to create gloo groups."""
        if self._separate_store is None:
            self._separate_store = separate_store(self._store)
        return self._separate_store

    def get_timeout_seconds(self) -> float:
        """Return the current timeout of the group's gloo backend, or 0 if there is none."""
        return 0.0 if self._options is None else float(self._options._timeout.total_seconds())

    def can_run(self, kind: str, dtype: torch.dtype, op: str) -> bool:
        """Return True if gloo has this collective and rounds its result as this package does."""
        if self.base is None or kind not in OPTIONS:
            return False
        # gloo's MIN and MAX may drop a NaN, because comparisons with it are false.
        if op in ("MIN", "MAX") and dtype.is_floating_point:
            return False
        return not op or (dtype in DTYPES and op in OPS)

    def has_room_for(self, packed: bytes) -> bool:
        """Return True if a group for this call exists or can be created."""
        return packed in self.groups or len(self.groups) < MAX_GROUPS

    def run(
        self,
        kind: str,
        packed: bytes,
        tensors: tuple[Tensor, ...],
        op: str,
        root: int,
        seconds: float,
    ) -> None:
        """Run the collective on flat tensors; raise PeerError if it fails or times out."""
        try:
            if packed not in self.groups:
                deadline = time.monotonic() + seconds
                group = self._create_group(packed, seconds)
                self.groups[packed] = group, _start_function(group, kind, op, root)
                seconds = deadline - time.monotonic()
            timeout = timedelta(seconds=max(MIN_SECONDS, seconds))
            group, start = self.groups[packed]
            # gloo's internal waits use the timeout of its group.
            group._set_default_timeout(timeout)
            start(*tensors).wait(timeout)
        except (RuntimeError, TimeoutError) as error:
            raise PeerError(None, get_first_line(error)) from error
        average(op, tensors[0], group.size())

    def close_connections(self) -> None:
        """Close the connections of all groups that `run` has created."""
        for group, _ in self.groups.values():
            close_peers(group, set(range(group.size())) - {group.rank()})

    def _create_group(self, packed: bytes, seconds: float) -> Any:
        """Return a new group for a call; raise TimeoutError if not all ranks connect in time."""
        # torch's type stubs contain neither the names of the options nor this constructor.
        gloo: Any = ProcessGroupGloo
        base: Any = self.base
        options = gloo._Options()
        options._devices = base.options._devices
        # Use two threads, like the base group. With one, every call waits for a thread to wake up.
        options._threads = base.options._threads
        options._timeout = NO_TIMEOUT

        def create() -> Any:
            store = PrefixStore(f"gloo/{packed.hex()}", self.open_store())
            return gloo(store, base.rank(), base.size(), options)

        return connect_in_time(create, seconds)


def separate_store(store: Store) -> Store:
    """Return a clone of the store without a timeout, or the store itself if it cannot be cloned."""
    separate = clone_store(store)
    if separate is not store:
        separate.set_timeout(NO_TIMEOUT)
    return separate


def connect_in_time(create: Callable[[], Any], seconds: float) -> Any:
    """Return the gloo group that `create()` returns; raise TimeoutError after `seconds`.

    `create` must use a store without a timeout and disable gloo's own timeout: see Note [One gloo
    group per kind of call].
    """
    try:
        return run_within(seconds, create)
    except TimeoutError as error:
        raise TimeoutError(f"gloo did not connect all ranks within {seconds:.3g} s") from error


def _start_function(group: Any, kind: str, op: str, root: int) -> Callable[..., Any]:
    """Return the function that starts a collective on a flat tensor or on (output, input)."""
    options: Any = OPTIONS[kind]()
    if op:
        options.reduceOp = getattr(dist.ReduceOp, OPS[op])
    if kind in ("reduce", "broadcast"):
        options.rootRank = root
    functions: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda flat: group.allreduce([flat], options),
        "reduce": lambda flat: group.reduce([flat], options),
        "reduce_scatter": lambda out, flat: group._reduce_scatter_base(out, flat, options),
        "all_gather": lambda out, flat: group._allgather_base(_as_raw(out), _as_raw(flat), options),
        "broadcast": lambda flat: group.broadcast([_as_raw(flat)], options),
        "all_to_all": lambda out, flat: group.alltoall_base(_as_raw(out), _as_raw(flat), [], []),
    }
    return functions[kind]


def _as_raw(flat: Tensor) -> Tensor:
    """Return a view that gloo can copy: bytes, unless gloo knows the dtype."""
    return flat if flat.dtype in DTYPES else flat.view(torch.uint8)
