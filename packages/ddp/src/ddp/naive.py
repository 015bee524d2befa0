"""The two designs without overlap: call one between `loss.backward()` and the optimizer.

Notable: both first agree, in one small call that the meter leaves out, on which parameters have a
gradient, because ranks that send different tensors would hang or add what does not belong together.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.collective import AllReduce, Link, link
from ddp.consistency.agreement import Missing, check_same_gradients
from ddp.metering.meter import Meter
from ddp.metering.records import BucketRecord


def all_reduce_gradients(
    module: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    all_reduce: AllReduce | None = None,
    meter: Meter | None = None,
) -> None:
    """Average every gradient over the ranks: one blocking all-reduce a parameter.

    Raises RuntimeError on every rank if a parameter has a gradient on some of them only.
    """
    over, begin, records = link(group, all_reduce), time.perf_counter(), []
    for name, gradient in _gradients(module, over).items():
        records.append(_mean(gradient, over, (name,)))
    if meter:
        meter.record(records, (begin, time.perf_counter()))


def all_reduce_gradients_flat(
    module: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    all_reduce: AllReduce | None = None,
    meter: Meter | None = None,
) -> None:
    """Average every gradient over the ranks: one blocking all-reduce for all (one a dtype).

    Costs a second copy of the gradients while it runs. Raises as `all_reduce_gradients` does.
    """
    over, begin, records = link(group, all_reduce), time.perf_counter(), []
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, gradient in _gradients(module, over).items():
        kinds.setdefault((gradient.dtype, gradient.device), {})[name] = gradient
    for gradients in kinds.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
        records.append(_mean(flat, over, tuple(gradients)))
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients.values()])
        for gradient, piece in zip(gradients.values(), pieces, strict=True):
            gradient.copy_(piece.view(gradient.shape))
    if meter:
        meter.record(records, (begin, time.perf_counter()))


def _mean(tensor: Tensor, over: Link, names: tuple[str, ...]) -> BucketRecord:
    tensor.mul_(1 / over.world)
    sent = time.perf_counter()
    over.all_reduce(tensor, async_op=False)
    done = time.perf_counter()
    return BucketRecord(
        names, 1, tensor.numel() * tensor.element_size(), 0, sent, done, done - sent
    )


def _gradients(module: nn.Module, over: Link) -> dict[str, Tensor]:
    """The gradients that all ranks have; RuntimeError where only some do."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        return {}
    missing = tuple(name for name, p in trained.items() if p.grad is None)
    device = next(iter(trained.values())).device
    flags = torch.tensor([float(name in missing) for name in trained], device=device)
    dist.all_reduce(flags, group=over.group)
    if flags.any():
        check_same_gradients(Missing(missing), over.group, allow=False)
    return {name: p.grad for name, p in trained.items() if p.grad is not None}
