"""torch's backends in a group of the registered backend, and the options to create them.

gloo sends the messages between ranks. Other backends handle the tensors of other devices.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from collectives.algorithms.gloo import NO_TIMEOUT, connect_in_time, separate_store
from collectives.failure_detection import REPORT_SECONDS
from collectives.store import fetch

# torch's options of a process group, which not all versions of torch have.
_OPTIONS = (
    "store",
    "group_rank",
    "group_size",
    "timeout",
    "group_id",
    "global_ranks_in_group",
    "process_group",
)


def connect_gloo(store: Store, rank: int, world_size: int, deadline: float) -> Any:
    """Return a gloo group of all ranks when gloo has connected them.

    If a rank ends or hangs meanwhile, raise RankLost with that rank soon after `deadline`, a value
    of time.monotonic. If every rank still runs, raise gloo's error or TimeoutError.
    """
    try:
        return connect_in_time(
            lambda: ProcessGroupGloo(separate_store(store), rank, world_size, NO_TIMEOUT),
            deadline - time.monotonic(),
        )
    except (RuntimeError, TimeoutError):
        # gloo's error does not name a rank. The ranks that still run therefore write to the store,
        # and `fetch` raises an error with the ranks that do not.
        running = {r: f"still running/{r}" for r in range(world_size)}
        fetch(store, running, time.monotonic() + REPORT_SECONDS, {running[rank]: ""})
        raise


def copy_options(options: Any, **changes: Any) -> Any:
    """Return a copy of torch's options of a process group, with some of them changed."""
    copied = type(options)()
    for field in _OPTIONS:
        if field in changes or hasattr(options, field):
            setattr(copied, field, changes.get(field, getattr(options, field, None)))
    return copied


def split_options(options: Any, ranks: Sequence[int], name: str, timeout: timedelta) -> Any:
    """Return torch's options for the subgroup that consists of `ranks`.

    `options` are those of the parent group. `ranks` must contain the rank of this process.
    """
    global_ranks = options.global_ranks_in_group or range(options.group_size)
    return copy_options(
        options,
        store=PrefixStore(f"split/{name}", options.store),
        group_rank=list(ranks).index(options.group_rank),
        group_size=len(ranks),
        timeout=timeout,
        group_id=name,
        global_ranks_in_group=[global_ranks[rank] for rank in ranks],
    )


def create_backend(group: Any, device: torch.device, options: Any, backend_options: Any) -> Any:
    """Create torch's default backend for a device, register it with the group and return it.

    `options` are torch's options of the group. `backend_options` are the options of the new
    backend, or None. Raise ValueError if torch has no backend for the device.
    """
    name = dist.Backend.default_device_backend_map.get(device.type)
    if name is None:
        raise ValueError(f"torch has no backend for {device.type} tensors; move them to the CPU")
    backend = _create_backend_by_name(name, device, options, backend_options)
    kind = dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM)
    # torch's C++ code (coalescing, functional collectives) finds the backend by its device.
    group._register_backend(torch.device(device.type), kind, backend)
    return backend


def _create_backend_by_name(
    name: str, device: torch.device, options: Any, backend_options: Any
) -> Any:
    """Create one of torch's backends for the ranks of the group, as init_process_group does."""
    store: Store = PrefixStore(f"beside/{device.type}", options.store)
    rank = options.group_rank
    world_size = options.group_size
    timeout = options.timeout
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        # Up to torch 2.11, the list of plugins does not contain the built-in backends.
        if name != dist.Backend.NCCL:
            raise ValueError(
                f"expected a device whose backend is nccl or a plugin, got {device.type} with "
                f"{name}; create a separate group for this device"
            )
        settings = backend_options or dist.ProcessGroupNCCL.Options()
        settings._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, settings)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, world_size, timeout)
    return plugin.creator_fn(copy_options(options, store=store), backend_options)
