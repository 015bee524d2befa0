"""The bytes that a variant stores on one rank, counted by following references between objects.

The count does not rely on reports of a package. The storage of every tensor to which the variant
refers, directly or through other objects, is counted once. Tensors to which only C++ code refers
are not found.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants.single import Variant

#: Types that are not followed, because they refer to the whole program or the state of the run.
NOT_FOLLOWED = (types.ModuleType, types.FrameType, type, Run)


def count_stored_bytes(variant: Variant) -> dict[str, int]:
    """Return the bytes of this rank's parameters, of AdamW's moments, and of all tensors."""
    states = variant.optimizer.state.values() if hasattr(variant, "optimizer") else ()
    moments = (t for state in states for t in iter_reachable_tensors(state) if t.ndim)
    return {
        "parameters": count_storage_bytes(variant.model.parameters()),
        "moments": count_storage_bytes(moments),
        "all": count_storage_bytes(iter_reachable_tensors(variant)),
    }


def count_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of the tensors' distinct storages.

    A DTensor counts as its local shard, and a tensor on the meta device does not count.
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != "meta":
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def iter_reachable_tensors(start: Any) -> Iterator[Tensor]:
    """Yield every tensor to which `start` refers, directly or through other objects."""
    visited_ids = {id(start)}
    pending = [start]
    while pending:
        visited = pending.pop()
        if isinstance(visited, Tensor):
            yield visited
            if visited.is_leaf and visited.grad is not None:
                pending.append(visited.grad)
        for inner in _list_references(visited):
            if id(inner) not in visited_ids and not isinstance(inner, NOT_FOLLOWED):
                visited_ids.add(id(inner))
                pending.append(inner)


def _list_references(owner: Any) -> list[Any]:
    if isinstance(owner, types.FunctionType):
        # Follow only the closure, because a function also refers to the globals of its module.
        return list(owner.__closure__ or ())
    return gc.get_referents(owner) if not isinstance(owner, torch.dtype) else []
