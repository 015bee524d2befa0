"""A check, before a backward pass, that no two parameters share memory of `.grad`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from ddp.consistency.failure_attribution import FailureAttribution


def refuse_shared_gradients(
    parameters: Mapping[str, nn.Parameter], rank: int, failures: FailureAttribution
) -> None:
    """Raise `RuntimeError` if the `.grad` tensors of two parameters have overlapping memory ranges.

    Autograd would accumulate both gradients there, and a bucket could be reduced before the second
    gradient has been added. Gradients that alternate in one range, such as columns of one matrix,
    are refused too.
    """
    ranges = []
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        start = gradient.data_ptr()
        # The address is 0 if the gradient has no elements.
        if start:
            size = gradient.nbytes if gradient.is_contiguous() else _count_spanned_bytes(gradient)
            ranges.append((start, start + size, name))
    ranges.sort()
    for (_, stop, name), (start, _, other_name) in pairwise(ranges):
        if start < stop:
            first, second = sorted([name, other_name])
            reason = (
                f"expected a separate .grad of each parameter, but {first!r} and {second!r} "
                "share memory, or alternate in one range of it; set both to None, or clone one of "
                "them, before the backward pass"
            )
            failures.report_failure(reason)
            raise RuntimeError(f"rank {rank}: {reason}")


def _count_spanned_bytes(tensor: Tensor) -> int:
    """Return the number of bytes from the first to the last element of a tensor."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
