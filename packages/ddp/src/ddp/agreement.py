"""What ranks must agree on before their gradients may be added, and who disagrees if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def check_same_model(
    module: nn.Module, settings: Mapping[str, object], group: dist.ProcessGroup
) -> None:
    """Raise ValueError on every rank, naming rank and parameter, if models or settings differ."""
    told = {name: str(value) for name, value in settings.items()}
    everyone = _gather((_describe(module), told), group)
    first, first_told = everyone[0]
    for rank, (theirs, their_told) in enumerate(everyone):
        for name, value in first_told.items():
            if their_told[name] != value:
                raise ValueError(
                    f"{name} is {their_told[name]} on rank {rank} and {value} on rank 0; "
                    "pass the same on every rank"
                )
        for ours, other in zip_longest(first, theirs, fillvalue="nothing"):
            if ours != other:
                raise ValueError(
                    f"the models differ across ranks: rank {rank} has {other} where rank 0 has "
                    f"{ours}; build the same module on every rank"
                )


def broadcast_state(module: nn.Module, group: dist.ProcessGroup, source: int = 0) -> None:
    """Give every rank the parameters and buffers of rank `source` of the group."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.numel() == 0:
                continue
            # As bytes: every dtype travels, bool and float8 included.
            whole = tensor.detach().contiguous()
            dist.broadcast(whole.reshape(-1).view(torch.uint8), group=group, group_src=source)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


@dataclass(frozen=True)
class Lack:
    """Parameters without a gradient on this rank, and those whose gradient holds NaN."""

    missing: tuple[str, ...] = ()
    not_a_number: tuple[str, ...] = ()


def check_same_gradients(lack: Lack | None, group: dist.ProcessGroup, *, allow: bool) -> set[str]:
    """Compare what each rank lacks; return the parameters that have no gradient on any.

    A collective: every rank calls it; a rank that has run out of inputs passes None. Raises
    RuntimeError on every rank where a gradient holds NaN, or (unless `allow`) where a parameter got
    a gradient on some ranks only.
    """
    gathered: list[Lack | None] = _gather(lack, group)
    everyone = {rank: theirs for rank, theirs in enumerate(gathered) if theirs is not None}
    for rank, theirs in everyone.items():
        if theirs.not_a_number:
            raise RuntimeError(
                f"the gradient of {_names(theirs.not_a_number)} holds NaN on rank {rank}; skip the "
                "optimizer's step on every rank, or look at that rank's batch"
            )
    nowhere = set.intersection(*(set(theirs.missing) for theirs in everyone.values()))
    for rank, theirs in everyone.items():
        partly = [name for name in theirs.missing if name not in nowhere]
        if partly and not allow:
            other = next(r for r, them in everyone.items() if partly[0] not in them.missing)
            raise RuntimeError(
                f"{_names(partly)} got no gradient on rank {rank}, but did on rank {other}; use it "
                "on every rank, or pass find_unused_parameters=True to count a missing gradient as "
                "zero"
            )
    return nowhere


def _describe(module: nn.Module) -> list[str]:
    parameters = [
        f"parameter {name!r} {tuple(p.shape)} {p.dtype}" + " frozen" * (not p.requires_grad)
        for name, p in module.named_parameters()
    ]
    buffers = [f"buffer {name!r} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]
    return parameters + buffers


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
