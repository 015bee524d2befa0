"""Gradients lie side by side in a few flat buffers, so that one call sends many of them.

Notable:
- `parameter.grad` is a view of its bucket: the all-reduce works where the gradient lies;
- behind the gradients a bucket carries flags, so that ranks which disagree find out without
  another call:

      [ gradients | takes part | stepped | holds NaN | one flag a parameter: 1 where it is missing ]

- buckets are sent in one order, the same on every rank, whatever order autograd takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

# Flags of the rank, before those of the parameters: does it take part, has its optimizer stepped
# since the last synchronisation, does one of its gradients hold NaN.
RANK_FLAGS = 3

# Called as allocate(numel, dtype=..., group=...), like collectives.shared_empty.
Allocate = Callable[..., Tensor]


@dataclass(eq=False)
class Bucket:
    """Some parameters, and the buffer that holds their gradients and the flags.

    `indices` are the parameters' places in the model, `views` the places of their gradients in
    `buffer`. `arrived` and `missing` are this rank's own: the slots whose gradient is final, and
    those that have none, or one that holds NaN. Complex gradients lie in a real buffer, as pairs.
    """

    indices: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    buffer: Tensor
    views: tuple[Tensor, ...]
    arrived: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    not_a_number: set[int] = field(default_factory=set)
    # Small gradients that are final but wait to be moved together, in one call for all.
    waiting: list[int] = field(default_factory=list)
    _expected: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    place: int = 0
    is_last: bool = True

    @cached_property
    def gradients(self) -> Tensor:
        """The flat part that holds gradients."""
        return self.buffer[: -RANK_FLAGS - len(self.views)]

    @cached_property
    def flags(self) -> Tensor:
        """The flat part behind it."""
        return self.buffer[-RANK_FLAGS - len(self.views) :]

    @cached_property
    def bytes_of(self) -> tuple[int, ...]:
        """The size of each gradient."""
        return tuple(view.nbytes for view in self.views)

    @cached_property
    def _given(self) -> list[Tensor]:
        return [view.detach() for view in self.views]

    def give(self, slot: int) -> None:
        """Make the place of a gradient the parameter's `.grad`."""
        # An alias, because `module.float()` and the like put other memory into `.grad` itself.
        given = self._given[slot]
        if given.data_ptr() != self.views[slot].data_ptr():
            given = self._given[slot] = self.views[slot].detach()
        self.parameters[slot].grad = given

    def holds(self, slot: int) -> bool:
        """Whether the parameter's `.grad` lies in its place."""
        gradient = self.parameters[slot].grad
        if gradient is None or gradient.layout is not torch.strided:
            return False
        return gradient.data_ptr() == self.views[slot].data_ptr()

    @property
    def complete(self) -> bool:
        """Whether every gradient is final."""
        return len(self.arrived) == len(self.indices)

    @cached_property
    def _nothing_to_tell(self) -> tuple[Tensor, Tensor]:
        """The flags of a rank that takes part and has every gradient: not stepped, and stepped."""
        good = torch.zeros_like(self.flags)
        good[0] = 1.0
        stepped = good.clone()
        stepped[1] = 1.0
        return good, stepped

    def look_for_nan(self) -> None:
        """Note the slots whose gradient holds NaN."""
        # The sum is NaN if any is, or if infinities cancel: then look closer.
        if bool(self.gradients.sum().isnan()):
            nan = (slot for slot, view in enumerate(self.views) if bool(view.isnan().any()))
            self.not_a_number.update(nan)

    def write_flags(self, *, taking_part: bool, stepped: bool) -> None:
        """Put this rank's flags behind the gradients."""
        self.flags.copy_(self._nothing_to_tell[stepped])
        if self.missing or self.not_a_number or not taking_part:
            missing = [float(slot in self.missing) for slot in range(len(self.views))]
            rank = [
                float(taking_part),
                float(stepped and taking_part),
                float(bool(self.not_a_number)),
            ]
            told = [*rank, *missing]
            self.flags.copy_(torch.tensor(told))

    def clear(self) -> None:
        """Forget what this step brought."""
        self.arrived.clear()
        self.missing.clear()
        self.not_a_number.clear()
        self.waiting.clear()

    def says_nothing(self, world: int, *, stepped: bool) -> bool:
        """Whether the summed flags say that all ranks had everything, as this one."""
        if world not in self._expected:
            self._expected[world] = tuple(flags * world for flags in self._nothing_to_tell)
        return torch.equal(self.flags, self._expected[world][stepped])


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
    device, dtype = members[0].device, members[0].dtype.to_real()
    sizes = [parameter.numel() * (1 + parameter.is_complex()) for parameter in members]
    numel = sum(sizes) + RANK_FLAGS + len(members)
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
    views = tuple(_view(*pair) for pair in zip(pieces, members, strict=True))
    return Bucket(tuple(indices), members, buffer, views)


def _view(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """`piece` in the parameter's shape, and in its order of dimensions (channels last, say)."""
    if parameter.is_complex():
        piece = torch.view_as_complex(piece.view(-1, 2))
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides, piece.storage_offset())
