"""Buckets: flat buffers of several gradients, so that one call reduces all of them."""

# Note [Bucket layout]
# ~~~~~~~~~~~~~~~~~~~~
#     [ gradients | participating | stepped | suspect | one flag per parameter: 1 if missing ]
#
# The flags are summed together with the gradients. The sums show every rank, without another
# collective, whether all ranks participated, took an optimizer step and had gradients of the same
# parameters. A rank is suspect if its weights changed between the start of the last forward pass
# and the launch of the last bucket. The ranks exchange reports only if the sums are not the
# expected ones.
#
# By default, `parameter.grad` is a view of the buffer, so the all-reduce changes `.grad` itself.
# Complex gradients are stored as pairs of real numbers.

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

#: Number of flags per rank, before the flags of the parameters. See Note [Bucket layout].
RANK_FLAGS = 3

#: A function that allocates the buffer of a bucket, such as `collectives.shared_empty`. It is
#: called as `allocate(numel, dtype=..., group=...)`.
Allocate = Callable[..., Tensor]


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are reduced together. See Note [Bucket layout]."""

    #: Index of each parameter in the reducer. A position in this tuple is called a slot.
    indices: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    buffer: Tensor
    #: View of each gradient, in the shape and memory order of its parameter.
    views: tuple[Tensor, ...]
    #: Names of the parameters, used in messages.
    names: tuple[str, ...] = ()
    #: Position in the order of launches.
    index: int = 0
    #: True for the last bucket in the order of launches.
    is_last: bool = True
    #: True if `.grad` is a view of the buffer, False if it has separate memory.
    gradient_as_view: bool = True
    #: True if the caller's `allocate` provided the memory.
    has_custom_memory: bool = False
    #: Slots whose gradient is final in this step, or missing.
    ready: set[int] = field(default_factory=set)
    #: Slots without a gradient on this rank, which contribute zeros.
    missing: set[int] = field(default_factory=set)
    #: Slots of final gradients that are not copied into the buffer yet.
    deferred: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._index_views()

    def _index_views(self) -> None:
        #: The tensor that `.grad` becomes in each slot. It is an alias of the view, not the view:
        #: `module.float()` replaces the memory of `.grad`, and `views` must stay in the buffer.
        self.grad_views = [view.detach() for view in self.views]
        self.slot_bytes = tuple(view.nbytes for view in self.views)
        self._shapes = tuple(view.shape for view in self.views)
        self._strides = tuple(view.stride() for view in self.views)
        self._addresses = tuple(view.data_ptr() for view in self.views)
        num_flags = RANK_FLAGS + len(self.views)
        self.gradients, self.flags = self.buffer.split([len(self.buffer) - num_flags, num_flags])
        #: Number of references to the memory of the buffer if the caller has none.
        self.num_memory_references = count_memory_references(self.buffer)

    @property
    def description(self) -> str:
        """The names of the parameters, shortened for messages."""
        return _describe(self.names)

    def move_to_new_memory(self) -> None:
        """Copy the buffer to new memory; each `.grad` that was a view of the buffer stays one."""
        holding = [slot for slot in range(len(self.views)) if self.is_grad_view(slot)]
        self.buffer = self.buffer.clone()
        storage = self.buffer.untyped_storage()
        self.views = tuple(
            view.new_empty(0).set_(storage, view.storage_offset(), view.shape, view.stride())
            for view in self.views
        )
        self._index_views()
        for slot in holding:
            self.set_grad_view(slot)

    def copy_in(self, slot: int, scale: float) -> None:
        """Copy a scaled gradient into the buffer, and make `.grad` a view of the buffer."""
        torch.mul(self.get_checked_gradients([slot])[0], scale, out=self.views[slot])
        if self.gradient_as_view:
            self.set_grad_view(slot)

    def copy_in_deferred(self, scale: float) -> None:
        """Copy and scale all deferred gradients, with one call for each of the two operations."""
        slots: Sequence[int] = self.deferred
        self.deferred = []
        if not slots:
            return
        is_whole_bucket = len(slots) == len(self.views)
        views = [self.views[slot] for slot in slots]
        gradients = self.get_checked_gradients(slots)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for slot, view, gradient in zip(slots, views, gradients, strict=True):
            if gradient.data_ptr() != self._addresses[slot]:
                targets.append(view)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        if scale != 1.0 and is_whole_bucket:
            self.gradients.mul_(scale)
        elif scale != 1.0:
            torch._foreach_mul_(views, scale)
        if targets and self.gradient_as_view:
            for slot in slots:
                self.set_grad_view(slot)

    def is_undefined(self, slot: int) -> bool:
        """Return True if a `.grad` of None means that autograd computed None as the gradient.

        A custom function may return None. As in torch's DDP, such a gradient counts as zero.
        Returns False if the parameter has other hooks, which may have removed the gradient. This is
        an error.
        """
        hooks: Any = self.parameters[slot]._post_accumulate_grad_hooks
        return len(hooks) == 1

    def mark_missing(self, slot: int) -> None:
        """Contribute zeros for a parameter without a gradient."""
        self.views[slot].zero_()
        self.missing.add(slot)
        self.ready.add(slot)

    def set_grad_view(self, slot: int) -> None:
        """Make `.grad` of the parameter a view of the buffer."""
        if self.grad_views[slot].data_ptr() != self._addresses[slot]:
            self.renew_grad_view(slot)
        self.parameters[slot].grad = self.grad_views[slot]

    def renew_grad_view(self, slot: int) -> None:
        """Use a new tensor in `grad_views`: the caller has the current one, or moved its memory."""
        self.grad_views[slot] = self.views[slot].detach()

    def set_final_grads(self, unused: Collection[int]) -> None:
        """Store the mean in each `.grad` that is not a view, except at the indices in `unused`."""
        for slot in self.missing if self.gradient_as_view else range(len(self.views)):
            parameter = self.parameters[slot]
            if self.indices[slot] in unused:
                continue
            if self.gradient_as_view:
                self.set_grad_view(slot)
            elif parameter.grad is None or parameter.grad.requires_grad:
                parameter.grad = self.views[slot].clone()
            else:
                parameter.grad.copy_(self.views[slot])

    def release(self) -> list[int]:
        """Copy each `.grad` that is a view of the buffer; return the indices of the parameters."""
        released = []
        for slot, parameter in enumerate(self.parameters):
            if self.is_grad_view(slot):
                parameter.grad = self.views[slot].clone()
                released.append(self.indices[slot])
            else:
                self.renew_moved_grad_view(slot)
        return released

    def renew_moved_grad_view(self, slot: int) -> None:
        """Renew the view of a slot if `module.double()` or `.grad.data = ...` moved `.grad`."""
        if self.parameters[slot].grad is self.grad_views[slot]:
            self.renew_grad_view(slot)

    def is_grad_view(self, slot: int) -> bool:
        """Return True if `.grad` of the parameter is a view of its slot in the buffer."""
        gradient = self.parameters[slot].grad
        if gradient is None or gradient.layout is not torch.strided:
            return False
        # The caller may have replaced `.grad` with its transpose or its lazy conjugate.
        return (
            gradient.data_ptr() == self._addresses[slot]
            and gradient.stride() == self._strides[slot]
            and not gradient.is_conj()
            and not gradient.is_neg()
        )

    def has_separate_grads(self) -> bool:
        """Return True if a `.grad` exists that is not a view of its slot in the buffer."""
        return any(
            parameter.grad is not None and not self.is_grad_view(slot)
            for slot, parameter in enumerate(self.parameters)
        )

    def clear(self) -> None:
        """Reset `ready`, `missing` and `deferred` for the next step."""
        self.ready.clear()
        self.missing.clear()
        self.deferred.clear()

    def write_flags(self, *, is_participating: bool, has_stepped: bool, is_suspect: bool) -> None:
        """Write this rank's flags after the gradients."""
        self.flags.copy_(self._usual_flags[has_stepped])
        if self.missing or is_suspect or not is_participating:
            rank_flags = (is_participating, has_stepped and is_participating, is_suspect)
            missing = [slot in self.missing for slot in range(len(self.views))]
            self.flags.copy_(torch.tensor([float(flag) for flag in (*rank_flags, *missing)]))

    def has_usual_flags(self, world_size: int, *, has_stepped: bool) -> bool:
        """Return True if all ranks have all gradients and this `has_stepped`, without a suspect."""
        return torch.equal(self.flags, self._usual_flags[has_stepped] * world_size)

    @cached_property
    def _usual_flags(self) -> tuple[Tensor, Tensor]:
        """The flags of a participating rank with all gradients, without and with a step."""
        usual = torch.zeros_like(self.flags)
        stepped = torch.zeros_like(self.flags)
        usual[0] = 1.0
        stepped[:2] = 1.0
        return usual, stepped

    def get_checked_gradients(self, slots: Sequence[int]) -> list[Tensor]:
        """Return the gradients of `slots` without graphs; raise an error if one does not fit."""
        gradients: list[Tensor] = []
        for slot in slots:
            gradient = self.parameters[slot].grad
            if (
                gradient is None
                or gradient.layout is not torch.strided
                or gradient.shape != self._shapes[slot]
            ):
                raise self._make_gradient_error(slot)
            if (
                gradient is not self.grad_views[slot]
                and gradient.data_ptr() == self._addresses[slot]
                and not self.is_grad_view(slot)
            ):
                # `.grad` is another view of its slot, such as a transpose or a lazy conjugate.
                gradient = gradient.clone()
            # With create_graph=True, autograd would record the copy into the bucket.
            gradients.append(detach_gradient(gradient))
        return gradients

    def _make_gradient_error(self, slot: int) -> Exception:
        """Return the error for a gradient that does not fit its slot."""
        gradient = self.parameters[slot].grad
        name = self.names[slot]
        if gradient is None:
            return RuntimeError(
                f"expected a gradient of {name!r}, got None: a hook on the parameter removed the "
                "gradient before it was averaged; set .grad to None after backward() instead"
            )
        if gradient.layout is not torch.strided:
            return TypeError(
                f"expected a dense gradient of {name!r}, got {gradient.layout}; construct that "
                "layer with sparse=False, or use nn.Embedding or nn.EmbeddingBag instead"
            )
        return RuntimeError(
            f"expected the gradient of {name!r} to have the shape {tuple(self._shapes[slot])} "
            f"of the wrapped parameter, got {tuple(gradient.shape)}; wrap the changed model in a "
            "new DDP"
        )


def count_memory_references(tensor: Tensor) -> int:
    """Return the number of references to the storage of a tensor.

    Each tensor that uses the storage counts as one. The count includes one of this function.
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def detach_gradient(gradient: Tensor) -> Tensor:
    """Return a gradient without its graph; issue a warning if it has one."""
    if not gradient.requires_grad:
        return gradient
    warnings.warn(
        "backward(create_graph=True): the mean over the ranks has no graph, so `.grad` has no "
        "graph either; compute second derivatives with torch.autograd.grad",
        stacklevel=2,
    )
    return gradient.detach()


def make_bucket(
    indices: Sequence[int],
    parameters: Sequence[nn.Parameter],
    allocate: Allocate | None,
    process_group: Any,
    *,
    names: Sequence[str] = (),
    gradient_as_view: bool = True,
) -> Bucket:
    """Allocate the bucket of the parameters with these indices.

    Raises `RuntimeError` if the memory cannot be allocated, and `ValueError` if `allocate` does not
    return a contiguous tensor of the requested shape and dtype on the device of the parameters.
    """
    members = tuple(parameters[index] for index in indices)
    member_names = tuple(names[index] if names else str(index) for index in indices)
    sizes = [p.numel() * 2 if p.is_complex() else p.numel() for p in members]
    numel = sum(sizes) + RANK_FLAGS + len(members)
    buffer = _allocate_buffer(
        numel, members[0].dtype.to_real(), members[0].device, allocate, process_group, member_names
    )
    pieces = torch.split(buffer[: sum(sizes)], sizes)
    views = tuple(_view_as(piece, member) for piece, member in zip(pieces, members, strict=True))
    del pieces  # `Bucket` counts the references to the memory.
    return Bucket(
        tuple(indices),
        members,
        buffer,
        views,
        names=member_names,
        gradient_as_view=gradient_as_view,
        has_custom_memory=allocate is not None,
    )


def _allocate_buffer(
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    allocate: Allocate | None,
    process_group: Any,
    names: Sequence[str],
) -> Tensor:
    try:
        if allocate is None:
            buffer = torch.empty(numel, dtype=dtype, device=device)
        else:
            buffer = allocate(numel, dtype=dtype, group=process_group)
    except (RuntimeError, MemoryError, OSError) as error:
        raise RuntimeError(
            f"the bucket of {_describe(names)} takes {numel * dtype.itemsize} bytes, which could "
            f"not be allocated ({error}); pass a smaller bucket_size_mb, or use a smaller model"
        ) from error
    has_properties = (buffer.shape, buffer.dtype, buffer.device) == ((numel,), dtype, device)
    if not has_properties or not buffer.is_contiguous():
        raise ValueError(
            f"expected allocate to return a contiguous tensor of shape ({numel},), {dtype}, on "
            f"{device}, got {tuple(buffer.shape)} with strides {buffer.stride()}, {buffer.dtype}, "
            f"on {buffer.device}"
        )
    return buffer


def check_separate_memory(buckets: Iterable[Bucket]) -> None:
    """Raise `ValueError` if `allocate` returned overlapping memory for two buckets."""
    by_address = sorted(buckets, key=lambda bucket: bucket.buffer.data_ptr())
    for bucket, following in pairwise(by_address):
        if bucket.buffer.data_ptr() + bucket.buffer.nbytes > following.buffer.data_ptr():
            raise ValueError(
                "expected allocate to return separate memory in each call, got overlapping memory "
                f"for the bucket of {bucket.description} and the bucket of {following.description}"
            )


def _view_as(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return `piece` in the parameter's shape and memory order, such as channels last."""
    if parameter.is_complex():
        piece = torch.view_as_complex(piece.view(-1, 2))
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides, piece.storage_offset())


def _describe(names: Sequence[str]) -> str:
    if len(names) == 1:
        return repr(names[0])
    return f"{names[0]!r} and {len(names) - 1} more"
