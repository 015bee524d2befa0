"""Aliased gradients: memory of `.grad` that the caller still references."""

# Note [Aliased gradients]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# Without a wrapper, a gradient that the caller keeps after `zero_grad()` keeps its values, because
# the next backward pass allocates new memory. A bucket, however, overwrites the same memory in
# every step. A reference count above the expected one shows that the caller has an alias:
# - A former `.grad` is a tensor that the bucket knows. It receives new memory with a copy of its
#   values.
# - Other aliases, such as `.grad.view(-1)`, are unknown. They keep the old memory, and the bucket
#   moves to new memory. In memory from `allocate`, these aliases are overwritten instead.

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn

from ddp.bucket import Bucket, count_memory_references


def preserve_aliased_grads(bucket: Bucket, slots: Sequence[int] | None = None) -> None:
    """Preserve the values of earlier gradients in a bucket that the caller still references.

    Call this before `slots` of the bucket are overwritten, by default all. A gradient that is still
    the `.grad` of its parameter is not preserved. See Note [Aliased gradients].
    """
    if slots is None:
        slots = range(len(bucket.views))
    all_references = _count_references([bucket.grad_views[slot] for slot in slots])
    for slot, references in zip(slots, all_references, strict=True):
        former_grad = bucket.grad_views[slot]
        is_former = bucket.parameters[slot].grad is not former_grad
        if is_former and references > _UNSHARED_REFERENCES:
            former_grad.data = former_grad.clone()
            bucket.renew_grad_view(slot)
    if bucket.has_custom_memory:
        return
    if count_memory_references(bucket.buffer) <= bucket.num_memory_references:
        return
    # While all gradients accumulate, their aliases receive the new values, as without a wrapper.
    if not all(bucket.is_grad_view(slot) for slot in range(len(bucket.views))):
        bucket.move_to_new_memory()


def move_gradient_in(bucket: Bucket, slot: int) -> None:
    """Move an unscaled gradient into the buffer, and preserve an aliased earlier gradient there.

    Does nothing if `.grad` is None or a view of the buffer already, or should have separate memory.
    """
    has_gradient = bucket.parameters[slot].grad is not None
    if bucket.gradient_as_view and has_gradient and not bucket.is_grad_view(slot):
        preserve_aliased_grads(bucket, [slot])
        bucket.views[slot].copy_(bucket.get_checked_gradients([slot])[0])
        bucket.set_grad_view(slot)


def contribute_zeros(bucket: Bucket) -> None:
    """Contribute zeros for all slots. Each `.grad`, and each aliased gradient, keeps its values."""
    bucket.release()
    preserve_aliased_grads(bucket)
    bucket.gradients.zero_()
    bucket.ready.update(range(len(bucket.indices)))


def copy_misplaced_grads(buckets: Sequence[Bucket]) -> None:
    """Copy each `.grad` that is in the memory of a bucket, but is not a view of its slot.

    The caller may have swapped gradients. Copying into the buckets would overwrite them.
    """
    storages = {bucket.buffer.untyped_storage().data_ptr() for bucket in buckets}
    for bucket in buckets:
        for slot, parameter in enumerate(bucket.parameters):
            gradient = parameter.grad
            if gradient is None or bucket.is_grad_view(slot):
                continue
            bucket.renew_moved_grad_view(slot)
            is_dense = gradient.layout is torch.strided
            if is_dense and gradient.untyped_storage().data_ptr() in storages:
                parameter.grad = gradient.clone()


def warn_of_aliased_grad(buckets: Iterable[Bucket], rank: int) -> bool:
    """Warn if the caller references memory of `.grad` that will not receive the mean.

    Call this before a backward pass. Returns True if a warning was issued.
    """
    name = _find_aliased_grad(buckets)
    if name is None:
        return False
    warnings.warn(
        f"rank {rank}: before the backward pass, another tensor or variable had the memory of "
        f"{name!r}.grad. That memory does not receive the mean over the ranks, because .grad "
        "becomes a view of a bucket. torch's DDP writes the mean there by default; pass "
        "gradient_as_bucket_view=False, or read .grad after each backward pass",
        stacklevel=2,
    )
    return True


def _find_aliased_grad(buckets: Iterable[Bucket]) -> str | None:
    """Return the name of a parameter whose `.grad` has memory that the caller also references.

    Gradients that are views of their bucket do not count. Returns None if there is no such name.
    """
    for bucket in buckets:
        for slot, parameter in enumerate(bucket.parameters):
            # A local variable for `.grad` would count as a reference of the caller.
            if parameter.grad is None or parameter.grad.layout is not torch.strided:
                continue
            if bucket.is_grad_view(slot):
                continue
            references, memory_references = _count_grad_references(parameter)
            if references > _UNALIASED_REFERENCES or memory_references > _UNALIASED_MEMORY:
                return bucket.names[slot]
    return None


def _count_references(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of references to each tensor, from Python and from C++.

    The counts include the references of `tensors` and of this function.
    """
    return [getrefcount(tensor) + tensor._use_count() for tensor in tensors]


_tensors = [torch.empty(0)]
#: Result of `_count_references` for a tensor that is also in one other list, and nowhere else.
_UNSHARED_REFERENCES = _count_references(list(_tensors))[0]


def _count_grad_references(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the number of references to `.grad`, and to the storage of `.grad`."""
    gradient: Any = parameter.grad
    (references,) = _count_references([gradient])
    return references, count_memory_references(gradient)


_parameter = nn.Parameter(torch.empty(1))
_parameter.grad = torch.empty(1)
#: Result of `_count_grad_references` for a `.grad` that is referenced only by its parameter.
_UNALIASED_REFERENCES, _UNALIASED_MEMORY = _count_grad_references(_parameter)
