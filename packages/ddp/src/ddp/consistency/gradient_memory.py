"""Checks of the memory of `.grad` before a backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ddp.bucket import Bucket
from ddp.consistency.failure_attribution import FailureAttribution


def refuse_shared_gradients(
    parameters: Mapping[str, nn.Parameter], rank: int, failures: FailureAttribution
) -> None:
    """Raise `RuntimeError` if two parameters share memory of `.grad`.

    Autograd would add both gradients to this memory, and the reduction of the first could be
    launched before the second is added.
    """
    gradients = []
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided and gradient.numel():
            gradients.append((gradient.data_ptr(), name, gradient))
    gradients.sort(key=lambda item: item[0])
    # The gradients whose memory extends beyond the start of the next one.
    open_gradients: list[tuple[int, str, Tensor]] = []
    for start, name, gradient in gradients:
        open_gradients = [other for other in open_gradients if other[0] > start]
        for _, owner, other in open_gradients:
            if _share_elements(gradient, other):
                names = sorted([owner, name])
                reason = (
                    f"expected a separate .grad of each parameter, but {names[0]!r} and "
                    f"{names[1]!r} share memory; set both to None, or clone one of them, before "
                    "the backward pass"
                )
                failures.report_failure(reason)
                raise RuntimeError(f"rank {rank}: {reason}")
        open_gradients.append((_end_of_memory(gradient), name, gradient))


def _end_of_memory(tensor: Tensor) -> int:
    """Return the address of the byte after the last element."""
    if tensor.is_contiguous():
        return tensor.data_ptr() + tensor.nbytes
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _share_elements(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors share an element; the ranges of their memory overlap."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    # Columns of one matrix, for example, share no element.
    return bool(torch.isin(_addresses(first), _addresses(second)).any())


def _addresses(tensor: Tensor) -> Tensor:
    """Return the address of each element."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + step * torch.arange(size)).view(-1)
    return tensor.data_ptr() + tensor.element_size() * offsets


def warn_of_aliased_gradient(buckets: Iterable[Bucket], rank: int) -> bool:
    """Warn if the caller references memory of `.grad` that will not receive the mean.

    Returns True if a warning was issued.
    """
    for bucket in buckets:
        name = bucket.find_aliased_grad()
        if name is None:
            continue
        warnings.warn(
            f"rank {rank}: before the backward pass, another tensor or variable had the memory of "
            f"{name!r}.grad. That memory does not receive the mean over the ranks, because .grad "
            "becomes a view of a bucket. torch's DDP writes the mean there by default; pass "
            "gradient_as_bucket_view=False, or read .grad after each backward pass",
            stacklevel=2,
        )
        return True
    return False
