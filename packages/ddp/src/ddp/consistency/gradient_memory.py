"""Checks of the memory of `.grad` before a backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ddp.bucket import Bucket
from ddp.consistency.failure_attribution import FailureAttribution


def refuse_shared_gradients(
    parameters: Mapping[str, nn.Parameter], rank: int, failures: FailureAttribution
) -> None:
    """Raise `RuntimeError` if two parameters share the memory of `.grad`.

    Autograd would add both gradients to this memory, and the reduction of the first could be
    launched before the second is added.
    """
    owners: dict[int, str] = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided or not gradient.numel():
            continue
        owner = owners.setdefault(gradient.data_ptr(), name)
        if owner != name:
            reason = (
                f"expected a separate .grad of each parameter, but {owner!r} and {name!r} share "
                "memory; set both to None, or clone one of them, before the backward pass"
            )
            failures.fail(reason)
            raise RuntimeError(f"rank {rank}: {reason}")


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
