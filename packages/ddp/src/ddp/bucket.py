"""Gradients lie side by side in a few flat buffers, so that one call sends many of them.

Notable:
- `parameter.grad` is a view of its bucket: the all-reduce works where the gradient lies;
- behind the gradients a bucket carries flags, so that ranks which disagree find out without
  another call:

      [ gradients | takes part | stepped | holds NaN | one flag a parameter: 1 where it is missing ]

- buckets are sent in one order, the same on every rank, whatever order autograd takes;
- a gradient of an earlier step that somebody still holds keeps its value.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from operator import add, attrgetter, is_, itemgetter, ne
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn

# Flags of the rank, before those of the parameters: does it take part, has its optimizer stepped
# since the last synchronization, does one of its gradients hold NaN.
RANK_FLAGS = 3

# Called as allocate(numel, dtype=..., group=...), like collectives.shared_empty.
Allocate = Callable[..., Tensor]

_grad, _kind = attrgetter("grad"), attrgetter("shape", "layout")


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
    names: tuple[str, ...] = ()
    # Whether `.grad` is the gradient's place here, not memory of its own.
    as_view: bool = True
    # Whether the memory was made by `allocate`.
    allocated: bool = False

    def __post_init__(self) -> None:
        self._given = [view.detach() for view in self.views]
        self.bytes_of = tuple(view.nbytes for view in self.views)
        self._shapes = tuple(view.shape for view in self.views)
        self._kinds = tuple((shape, torch.strided) for shape in self._shapes)
        self._addresses = tuple(map(Tensor.data_ptr, self.views))
        sizes = [self.buffer.numel() - RANK_FLAGS - len(self.views), RANK_FLAGS + len(self.views)]
        # The flat parts that hold gradients, and flags.
        self.gradients, self.flags = self.buffer.split(sizes)
        self._uses = _uses_of_memory(self.buffer)

    # ----- gradients come and go -----

    def part_with_held(self) -> None:
        """Before places are written to: what others still hold of earlier gradients stays."""
        for slot, uses in enumerate(_uses(self._given)):
            given = self._given[slot]
            if uses > _UNHELD and self.parameters[slot].grad is not given:
                given.data = given.clone()
                self._given[slot] = self.views[slot].detach()
        if self.allocated or _uses_of_memory(self.buffer) <= self._uses:
            return
        # Aliases cannot be told apart: they keep the memory, and the bucket goes.
        in_place = [slot for slot in range(len(self.views)) if self.holds(slot)]
        if len(in_place) < len(self.views):
            self.buffer = self.buffer.clone()
            place = self.buffer.untyped_storage()
            self.views = tuple(
                view.new_empty(0).set_(place, view.storage_offset(), view.shape, view.stride())
                for view in self.views
            )
            self.__post_init__()
            for slot in in_place:
                self.give(slot)

    def take(self, slot: int, share: float) -> None:
        """Scale a gradient into its place in one pass; `.grad` is that place from then on."""
        torch.mul(self._gradient(slot), share, out=self.views[slot])
        if self.as_view:
            self.give(slot)

    def take_waiting(self, share: float) -> None:
        """The same for all small gradients that wait, in one call for all."""
        slots, self.waiting = self.waiting, []
        if not slots:
            return
        # Pass by pass over all of them, each at C's speed: a loop over many small gradients would
        # take longer than moving them.
        pick = _all if len(slots) == len(self.views) else _only(slots)
        parameters, views, addresses = map(pick, (self.parameters, self.views, self._addresses))
        gradients = list(map(_grad, parameters))
        # Within a pass of create_graph=True autograd's graph is on.
        odd = torch.is_grad_enabled() or any(map(is_, gradients, repeat(None)))
        if odd or tuple(map(_kind, gradients)) != pick(self._kinds):
            gradients = [self._gradient(slot) for slot in pick(range(len(self.views)))]
        found = tuple(map(Tensor.data_ptr, gradients))
        if found != addresses:
            pairs = zip(views, gradients, map(ne, found, addresses), strict=True)
            into, fresh = zip(*((view, grad) for view, grad, moves in pairs if moves), strict=True)
            torch._foreach_copy_(into, fresh)
        if share != 1.0:
            if pick is _all:
                self.gradients.mul_(share)
            else:
                torch._foreach_mul_(views, share)
        if found == addresses or not self.as_view:
            return
        if tuple(map(Tensor.data_ptr, pick(self._given))) != addresses:
            for slot in slots:
                self.give(slot)
            return
        for parameter, given in zip(parameters, pick(self._given), strict=True):
            parameter.grad = given

    def lack(self, slot: int) -> None:
        """A parameter without a gradient counts as zero."""
        self.views[slot].zero_()
        self.missing.add(slot)
        self.arrived.add(slot)

    def adopt(self, slot: int) -> None:
        """Move a gradient, unscaled, to its place, to be added to by later backward passes."""
        if self.as_view and self.parameters[slot].grad is not None and not self.holds(slot):
            self.part_with_held()
            self.views[slot].copy_(self._gradient(slot))
            self.give(slot)

    def give(self, slot: int) -> None:
        """Make the place of a gradient the parameter's `.grad`."""
        # An alias, because `module.float()` and the like put other memory into `.grad` itself.
        given = self._given[slot]
        if given.data_ptr() != self._addresses[slot]:
            given = self._given[slot] = self.views[slot].detach()
        self.parameters[slot].grad = given

    def give_back(self, unused: Collection[int]) -> None:
        """Make `.grad` the mean where it is not this memory already, `unused` ones left out."""
        for slot in self.missing if self.as_view else range(len(self.views)):
            parameter, view = self.parameters[slot], self.views[slot]
            if self.indices[slot] in unused:
                continue
            if self.as_view:
                self.give(slot)
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)

    def release(self) -> None:
        """Let go: gradients that lie here get memory of their own."""
        for slot, parameter in enumerate(self.parameters):
            if self.holds(slot):
                parameter.grad = self.views[slot].clone()

    def holds(self, slot: int) -> bool:
        """Whether the parameter's `.grad` lies in its place."""
        gradient = self.parameters[slot].grad
        if gradient is None or gradient.layout is not torch.strided:
            return False
        return gradient.data_ptr() == self._addresses[slot]

    def _gradient(self, slot: int) -> Tensor:
        """A parameter's gradient; TypeError or RuntimeError where it has no place here."""
        gradient = self.parameters[slot].grad
        if gradient is None:
            raise RuntimeError(
                f"the gradient of {self.names[slot]!r} was taken away before it was averaged: a "
                "hook on the parameter may use it, but not set .grad to None; do that after "
                "backward()"
            )
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {self.names[slot]!r} is {gradient.layout}; buckets hold dense "
                "gradients: make that layer with sparse=False, or an nn.Embedding(sparse=True)"
            )
        if gradient.shape != self._shapes[slot]:
            raise RuntimeError(
                f"the gradient of {self.names[slot]!r} has shape {tuple(gradient.shape)}, not "
                f"{tuple(self._shapes[slot])} as when it was wrapped; wrap the changed model anew"
            )
        if gradient.requires_grad:
            warnings.warn(
                "backward(create_graph=True): the mean over the ranks has no graph, and `.grad` "
                "none either; take second derivatives with torch.autograd.grad",
                stacklevel=2,
            )
            return gradient.detach()
        return gradient

    # ----- flags -----

    @cached_property
    def _nothing_to_tell(self) -> tuple[Tensor, Tensor]:
        """The flags of a rank that takes part and has every gradient: not stepped, and stepped."""
        good = torch.zeros_like(self.flags)
        good[0] = 1.0
        stepped = torch.zeros_like(self.flags)
        stepped[:2] = 1.0
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
            rank = [taking_part, stepped and taking_part, bool(self.not_a_number)]
            self.flags.copy_(torch.tensor([*map(float, rank), *missing]))

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


def _uses(tensors: Sequence[Tensor]) -> list[int]:
    """How many hold each tensor, in Python and below."""
    return list(map(add, map(getrefcount, tensors), map(Tensor._use_count, tensors)))


# Of a tensor that is in one list only.
_UNHELD = _uses([torch.empty(0)])[0]


def _uses_of_memory(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _all(of: Any) -> Any:
    return of


def _only(slots: Sequence[int]) -> Callable[[Any], Any]:
    # Of one place itemgetter makes no tuple.
    return itemgetter(*slots) if len(slots) > 1 else lambda of: (of[slots[0]],)


def assign_buckets(
    parameters: Sequence[nn.Parameter],
    order: Sequence[int],
    bucket_bytes: float | Sequence[float],
) -> list[tuple[int, ...]]:
    """Cut `order` into runs of one dtype and device that fill at most `bucket_bytes` each.

    A parameter larger than that gets a bucket of its own; so does every parameter when
    `bucket_bytes` is 0. Of several sizes each bucket takes the next, and the last ones the last.
    Buckets are ordered by the parameter that completes them.
    """
    sizes = list(bucket_bytes) if isinstance(bucket_bytes, Sequence) else [bucket_bytes]
    position = {index: place for place, index in enumerate(order)}
    full: list[list[int]] = []
    # For each kind the run that fills, and the room it has left.
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], float]] = {}
    for index in order:
        parameter = parameters[index]
        kind = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
        members, room = filling.get(kind, ([], 0.0))
        if not members or size > room or sizes[-1] == 0:
            if members:
                full.append(members)
            begun = len(full) + len(filling.keys() - {kind})
            members, room = [], sizes[min(begun, len(sizes) - 1)]
        members.append(index)
        filling[kind] = (members, room - size)
    full += [members for members, _ in filling.values()]
    return [tuple(run) for run in sorted(full, key=lambda run: position[run[-1]])]


def make_bucket(
    indices: Sequence[int],
    parameters: Sequence[nn.Parameter],
    allocate: Allocate | None,
    group: Any,
    *,
    names: Sequence[str] = (),
    as_view: bool = True,
) -> Bucket:
    """Allocate the buffer of `parameters[i] for i in indices` and cut it into views."""
    members = tuple(parameters[index] for index in indices)
    device, dtype = members[0].device, members[0].dtype.to_real()
    sizes = [parameter.numel() * (1 + parameter.is_complex()) for parameter in members]
    numel = sum(sizes) + RANK_FLAGS + len(members)
    called = tuple(names[index] if names else str(index) for index in indices)
    try:
        if allocate is None:
            buffer = torch.empty(numel, dtype=dtype, device=device)
        else:
            buffer = allocate(numel, dtype=dtype, group=group)
    except (RuntimeError, MemoryError, OSError) as error:
        more = f" and {len(called) - 1} more" if len(called) > 1 else ""
        raise RuntimeError(
            f"the bucket of {called[0]!r}{more} takes {numel * dtype.itemsize} bytes, which could "
            f"not be allocated ({error}); pass a smaller bucket_size_mb, or a smaller model"
        ) from error
    if (buffer.shape, buffer.dtype, buffer.device) != ((numel,), dtype, device):
        raise ValueError(
            f"allocate returned {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}; the "
            f"gradients need ({numel},) {dtype} on {device}"
        )
    pieces = torch.split(buffer[: sum(sizes)], sizes)
    views = tuple(_view(*pair) for pair in zip(pieces, members, strict=True))
    del pieces  # or the bucket would count them
    return Bucket(tuple(indices), members, buffer, views, names=called, as_view=as_view)


def _view(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """`piece` in the parameter's shape, and in its order of dimensions (channels last, say)."""
    if parameter.is_complex():
        piece = torch.view_as_complex(piece.view(-1, 2))
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides, piece.storage_offset())
