"""Averaging of sparse gradients, as computed by layers with `sparse=True`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.communication import run_collective
from ddp.compression.comm_hook import CommHook, GradBucket
from ddp.consistency.failure_attribution import FailureAttribution
from ddp.process_group import ReduceGroup


def average_sparse(
    parameters: Mapping[str, nn.Parameter],
    group: ReduceGroup,
    failures: FailureAttribution,
    scale: float,
    hook: CommHook | None = None,
    *,
    is_participating: bool = True,
) -> None:
    """Multiply each gradient by `scale` and sum it over the ranks, or let `hook` reduce it.

    A missing gradient counts as zero. With `is_participating=False` this rank contributes zeros
    instead of its gradients. As in torch's DDP, a communication hook receives each sparse gradient
    as a separate bucket. If the sum has no rows, a `.grad` of None stays None.
    """
    all_reduce = partial(dist.all_reduce, group=group.process_group)
    for index, (name, parameter) in enumerate(parameters.items()):
        gradient = _make_zero_gradient(parameter)
        if is_participating and parameter.grad is not None:
            gradient = _coalesce_gradient(parameter.grad) * scale
        if hook is not None:
            is_last = index == len(parameters) - 1
            bucket = GradBucket(index, [parameter], gradient, (), is_last=is_last)
            gradient = hook.reduce_sparse(bucket)
        else:
            description = f"the sum of the sparse gradient of {name!r}"
            run_collective(all_reduce, gradient, description, failures.attribute_errors)
        if parameter.grad is not None or not gradient.is_sparse or gradient._nnz():
            parameter.grad = gradient


def _make_zero_gradient(parameter: nn.Parameter) -> Tensor:
    """Return a sparse gradient without rows."""
    # torch 2.11 warns about the argument check_invariants, but not about this context.
    with torch.sparse.check_sparse_tensor_invariants():
        gradient = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.long, device=parameter.device),
            parameter.new_zeros(0, *parameter.shape[1:]),
            parameter.shape,
        )
    return gradient.coalesce()


def _coalesce_gradient(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    if not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    return gradient.coalesce()
