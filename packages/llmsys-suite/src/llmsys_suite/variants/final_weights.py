"""The state of a variant after the training: its weights, and the bytes that each rank stores.

The weights are compared between ranks and with one process. Bytes are counted by following
references between objects, so that nothing that a package reports is used. Tensors that only C++
code refers to are not found.
"""

from __future__ import annotations

import gc
import hashlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from llmsys_suite.measure.distance import furthest
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants.single import Variant

Weights = dict[str, Tensor]
#: Types that are not followed, because they refer to the whole program or the state of the run.
BEYOND = (types.ModuleType, types.FrameType, type, Run)


def final_weights(run: Run, start: Weights, variant: Variant) -> dict[str, Any]:
    """Return a comparison of the trained weights, and the bytes that each rank stores.

    All ranks' weights are compared bit by bit with the first rank's. The weight changes of a rank
    that has a trained model of one process are compared with that model's.
    """
    run.barrier()
    alone = variant.alone
    takes_part = not (alone and run.rank)
    stored = [b for b in run.gather(stored_bytes(variant) if takes_part else None) if b]
    after = variant.weights() if takes_part else {}
    bits = {name: _bits(w) for name, w in after.items()}
    everyone = [digests for digests in run.gather(bits) if digests]
    differ = [
        f"rank {rank} {name}"
        for rank, digests in enumerate(everyone)
        for name, value in digests.items()
        if value != everyone[0].get(name)
    ]
    distance = (0.0, "")
    if run.trained is not None and not alone:
        distance = furthest(
            {name: w.double() - start[name].double() for name, w in after.items()},
            {
                name: w.detach().double() - start[name].double()
                for name, w in run.trained.named_parameters()
            },
        )
    return {
        "ranks": len(everyone),
        "differ": differ,
        "from_one_process": distance,
        "stored": stored,
    }


def _bits(weight: Tensor) -> str:
    plain = weight.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(plain.tobytes()).hexdigest()[:16]


def stored_bytes(variant: Variant) -> dict[str, int]:
    """Return the bytes of this rank's parameters, of AdamW's moments, and of all tensors."""
    states = variant.optimizer.state.values() if hasattr(variant, "optimizer") else ()
    moments = (t for state in states for t in reachable(state) if t.ndim)
    return {
        "parameters": storage_bytes(variant.model.parameters()),
        "moments": storage_bytes(moments),
        "all": storage_bytes(reachable(variant)),
    }


def storage_bytes(tensors: Iterable[Tensor]) -> int:
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


def reachable(start: Any) -> Iterator[Tensor]:
    """Yield every tensor to which `start` refers, directly or through other objects."""
    seen = {id(start)}
    todo = [start]
    while todo:
        visited = todo.pop()
        if isinstance(visited, Tensor):
            yield visited
            if visited.is_leaf and visited.grad is not None:
                todo.append(visited.grad)
        for inner in _references(visited):
            if id(inner) not in seen and not isinstance(inner, BEYOND):
                seen.add(id(inner))
                todo.append(inner)


def _references(owner: Any) -> list[Any]:
    if isinstance(owner, types.FunctionType):
        # Follow only the closure, because a function also refers to the globals of its module.
        return list(owner.__closure__ or ())
    return gc.get_referents(owner) if not isinstance(owner, torch.dtype) else []
