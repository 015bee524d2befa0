"""Sparse gradients, of embeddings made with `sparse=True`, are averaged one by one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.collective import Link
from ddp.compression.comm_hook import CommHook, SparseGradBucket
from ddp.consistency.blame import Blame


def average_sparse(
    parameters: Mapping[str, nn.Parameter],
    link: Link,
    blame: Blame,
    share: float,
    hook: CommHook | None = None,
) -> None:
    """Sum each gradient, times `share`, over the ranks; one that is missing counts as zero.

    A communication hook is handed each as a bucket of its own, as by torch's DDP.
    """
    for place, (name, parameter) in enumerate(parameters.items()):
        doing = f"the sum of the sparse gradient of {name!r}"
        gradient = _gradient(parameter) * share
        if hook is not None:
            last = place == len(parameters) - 1
            gradient = hook.sum_sparse(SparseGradBucket(place, parameter, gradient, last))
        else:
            with blame.naming(doing):
                handle = dist.all_reduce(gradient, group=link.group, async_op=True)
            blame.wait(handle, doing, poll=gradient.device.type == "cpu")
        if parameter.grad is not None or not gradient.is_sparse or gradient._nnz():
            parameter.grad = gradient


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.long, device=parameter.device),
            parameter.new_zeros(0, *parameter.shape[1:]),
            parameter.shape,
            check_invariants=True,
        )
    return (
        gradient.detach().to_sparse(1).coalesce()
        if not gradient.is_sparse
        else gradient.detach().coalesce()
    )
