"""What ranks must agree on before their gradients may be added, and who disagrees if not."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Weights travel together up to this size.
BROADCAST_BYTES = 25 * 2**20


def check_same_model(
    module: nn.Module,
    settings: Mapping[str, object],
    group: dist.ProcessGroup,
    ignored: Collection[str] = (),
) -> None:
    """Raise ValueError on every rank, naming rank and parameter, if models or settings differ."""
    told = {name: str(value) for name, value in settings.items()}
    everyone = _gather((describe(module, ignored), told), group)
    _, first_told = everyone[0]
    for rank, (_, their_told) in enumerate(everyone):
        for name, value in first_told.items():
            if their_told[name] != value:
                raise ValueError(
                    f"{name} is {their_told[name]} on rank {rank} and {value} on rank 0; "
                    "pass the same on every rank"
                )
    check_same([described for described, _ in everyone])


def check_same(everyone: Sequence[Sequence[str]]) -> None:
    """Raise ValueError, naming rank and parameter, if one rank's description is not rank 0's."""
    for rank, theirs in enumerate(everyone):
        for ours, other in zip_longest(everyone[0], theirs, fillvalue="nothing"):
            if ours != other:
                raise ValueError(
                    f"the models differ across ranks: rank {rank} has {other} where rank 0 has "
                    f"{ours}; build the same module on every rank"
                )


def check_same_weights(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank, naming rank and parameter, if weights differ in any bit."""
    own = [f"{name!r} with checksum {checksum([p])}" for name, p in module.named_parameters()]
    check_same(_gather(own, group))


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that differs where any bit does."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(_as_bytes(tensor).cpu().numpy().tobytes(), total)
    return total


def broadcast_state(
    module: nn.Module,
    group: dist.ProcessGroup,
    source: int = 0,
    *,
    ignored: Collection[str] = (),
    buffers: bool = True,
) -> None:
    """Give every rank the parameters and buffers of rank `source` of the group."""
    named = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    broadcast_tensors([tensor for name, tensor in named if name not in ignored], group, source)


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[Tensor],
    group: dist.ProcessGroup,
    source: int = 0,
    *,
    at_once: int = BROADCAST_BYTES,
) -> None:
    """Give every rank the tensors of rank `source`, small ones side by side in one message."""
    runs: dict[torch.device, list[list[Tensor]]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        here = runs.setdefault(tensor.device, [[]])
        if here[-1] and sum(one.nbytes for one in here[-1]) + tensor.nbytes > at_once:
            here.append([])
        here[-1].append(tensor)
    for run in (run for here in runs.values() for run in here):
        # As bytes: every dtype travels, bool and float8 included.
        pieces = [_as_bytes(tensor) for tensor in run]
        flat = pieces[0] if len(run) == 1 else torch.cat(pieces)
        dist.broadcast(flat, group=group, group_src=source)
        for tensor, piece in zip(run, flat.split([tensor.nbytes for tensor in run]), strict=True):
            if piece.data_ptr() != tensor.data_ptr():
                # A copy, because `view` wants an offset that is a multiple of the element's size.
                tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


@dataclass(frozen=True)
class Missing:
    """Parameters without a gradient on this rank, those whose gradient holds NaN, and whether the
    weights were changed since the last synchronization, with a checksum of what they are now."""

    missing: tuple[str, ...] = ()
    not_a_number: tuple[str, ...] = ()
    stepped: bool = False
    weights: int = 0


def check_same_gradients(own: Missing | None, group: dist.ProcessGroup, *, allow: bool) -> set[str]:
    """Compare what is missing on each rank; return the parameters without a gradient on any.

    A collective: every rank calls it; a rank that has run out of inputs passes None. Raises
    RuntimeError on every rank where a gradient holds NaN, where the weights were changed on some
    ranks only (and not back, as by who looks at other weights for a moment), or (unless `allow`)
    where a parameter got a gradient on some ranks only.
    """
    gathered: list[Missing | None] = _gather(own, group)
    everyone = {rank: theirs for rank, theirs in enumerate(gathered) if theirs is not None}
    for rank, theirs in everyone.items():
        if theirs.not_a_number:
            raise RuntimeError(
                f"the gradient of {_names(theirs.not_a_number)} holds NaN on rank {rank}; skip the "
                "optimizer's step on every rank, or look at that rank's batch"
            )
    stepped = [rank for rank, theirs in everyone.items() if theirs.stepped]
    differ = len({theirs.weights for theirs in everyone.values()}) > 1
    if stepped and len(stepped) < len(everyone) and differ:
        others = [rank for rank in everyone if rank not in stepped]
        raise RuntimeError(
            f"the weights were changed between this backward pass and the one before on ranks "
            f"{stepped}, but not on ranks {others}: some rank ran one backward pass or one "
            "optimizer step more than the others; take as many on every rank, or use join()"
        )
    unused = set.intersection(*(set(theirs.missing) for theirs in everyone.values()))
    for rank, theirs in everyone.items():
        partly = [name for name in theirs.missing if name not in unused]
        if partly and not allow:
            other = next(r for r, them in everyone.items() if partly[0] not in them.missing)
            raise RuntimeError(
                f"{_names(partly)} got no gradient on rank {rank}, but did on rank {other}; use it "
                "on every rank, or pass find_unused_parameters=True to count a missing gradient as "
                "zero"
            )
    return unused


def describe(module: nn.Module, ignored: Collection[str] = ()) -> list[str]:
    """A line for each parameter and buffer: name, shape, dtype, whether it is frozen."""
    parameters = [
        f"parameter {name!r} {tuple(p.shape)} {p.dtype}" + " frozen" * (not p.requires_grad)
        for name, p in module.named_parameters()
        if name not in ignored
    ]
    buffers = [
        f"buffer {name!r} {tuple(b.shape)} {b.dtype}"
        for name, b in module.named_buffers()
        if name not in ignored
    ]
    return parameters + buffers


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
