"""Gradients lie side by side in a few flat buffers, so that one call sends many of them.

Notable:
- `parameter.grad` is a view of its bucket: the all-reduce works where the gradient lies;
- behind the gradients a bucket carries one flag for the rank (does it take part?) and one for each
  parameter (is its gradient here?), so that ranks which disagree find out without another call;
- buckets are sent in one order, the same on every rank, whatever order autograd takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# One flag a parameter. Their sums are exact up to 256 ranks in bfloat16, and reach the number of
# ranks only where all of them say MISSING.
PRESENT, NOT_A_NUMBER, MISSING = 0.0, 0.5, 1.0

# Called as allocate(numel, dtype=..., group=...), like collectives.shared_empty.
Allocate = Callable[..., Tensor]


@dataclass(eq=False)
class Bucket:
    """Some parameters, and the buffer `[gradients | ranks that take part | a flag a parameter]`.

    `indices` are the parameters' places in the model, `flags` and `arrived` this rank's own: a flag
    a parameter, and the slots whose gradient is final.
    """

    indices: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    buffer: Tensor
    views: tuple[Tensor, ...]
    flags: list[float]
    arrived: set[int] = field(default_factory=set)

    @property
    def gradients(self) -> Tensor:
        """The flat part that holds gradients."""
        return self.buffer[: -1 - len(self.views)]

    @property
    def tail(self) -> Tensor:
        """The flat part behind it: how many ranks take part, then one flag a parameter."""
        return self.buffer[-1 - len(self.views) :]

    @property
    def complete(self) -> bool:
        """Whether every gradient is here."""
        return len(self.arrived) == len(self.indices)

    def write_flags(self, taking_part: bool) -> None:
        """Put this rank's flags behind the gradients."""
        self.tail.zero_()
        self.tail[:1].fill_(float(taking_part))
        if any(self.flags):
            self.tail[1:].copy_(torch.tensor(self.flags))


def assign_buckets(
    parameters: Sequence[nn.Parameter], order: Sequence[int], bucket_bytes: float
) -> list[tuple[int, ...]]:
    """Cut `order` into runs of one dtype and device that fill at most `bucket_bytes` each.

    A parameter larger than that gets a bucket of its own; so does every parameter when
    `bucket_bytes` is 0. Buckets are ordered by the parameter that completes them.
    """
    position = {index: place for place, index in enumerate(order)}
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index in order:
        parameter = parameters[index]
        kind = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
        members, used = filling.get(kind, ([], 0))
        if members and (used + size > bucket_bytes or not bucket_bytes):
            full.append(members)
            members, used = [], 0
        members.append(index)
        filling[kind] = (members, used + size)
    full += [members for members, _ in filling.values()]
    return [tuple(run) for run in sorted(full, key=lambda run: position[run[-1]])]


def make_bucket(
    indices: Sequence[int],
    parameters: Sequence[nn.Parameter],
    allocate: Allocate | None,
    group: Any,
) -> Bucket:
    """Allocate the buffer of `parameters[i] for i in indices` and cut it into views."""
    members = tuple(parameters[index] for index in indices)
    dtype, device = members[0].dtype, members[0].device
    sizes = [parameter.numel() for parameter in members]
    numel = sum(sizes) + 1 + len(members)
    if allocate is None:
        buffer = torch.empty(numel, dtype=dtype, device=device)
    else:
        buffer = allocate(numel, dtype=dtype, group=group)
    if (buffer.shape, buffer.dtype, buffer.device) != ((numel,), dtype, device):
        raise ValueError(
            f"allocate returned {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}; the "
            f"gradients need ({numel},) {dtype} on {device}"
        )
    pieces = torch.split(buffer[: sum(sizes)], sizes)
    views = tuple(
        piece.view(parameter.shape) for piece, parameter in zip(pieces, members, strict=True)
    )
    return Bucket(tuple(indices), members, buffer, views, [PRESENT] * len(members))
