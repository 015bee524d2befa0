"""Gradient averaging without overlap: functions to call between `backward()` and the optimizer.

Both functions first compare across ranks which parameters have a gradient. Without this comparison,
ranks with different gradients would hang, or add gradients of different parameters. The time of the
comparison is part of the recorded step, but the meter does not count its all-reduce and bytes.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.bucket import detach_gradient
from ddp.consistency.gradient_agreement import GradientReport, check_same_gradients
from ddp.metering.meter import Meter
from ddp.metering.records import BucketRecord
from ddp.process_group import AllReduce, ReduceGroup, resolve_group


def all_reduce_gradients(
    module: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    all_reduce: AllReduce | None = None,
    meter: Meter | None = None,
) -> None:
    """Average every gradient over the ranks with one blocking all-reduce per parameter.

    Args:
        module: module whose gradients are averaged in place, after `backward()`.
        group: ranks to average over; all ranks by default.
        all_reduce: function to use instead of `torch.distributed.all_reduce`.
        meter: meter that records the bytes and times of this call.

    Raises `RuntimeError` on every rank if a parameter has a gradient on some ranks only.
    """
    reduce_group = resolve_group(group, all_reduce)
    start_time = time.perf_counter()
    records = []
    for name, gradient in _collect_common_gradients(module, reduce_group).items():
        records.append(_average(gradient, reduce_group, (name,)))
    if meter:
        meter.record(records, (start_time, time.perf_counter()))


def all_reduce_gradients_flat(
    module: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    all_reduce: AllReduce | None = None,
    meter: Meter | None = None,
) -> None:
    """Average all gradients over the ranks with one blocking all-reduce per dtype and device.

    The arguments and errors are those of `all_reduce_gradients`. Also raises `TypeError` if a
    gradient is sparse. The function needs memory for a second set of gradients.
    """
    reduce_group = resolve_group(group, all_reduce)
    start_time = time.perf_counter()
    records = []
    by_dtype_and_device: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, gradient in _collect_common_gradients(module, reduce_group).items():
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"expected a dense gradient of {name!r}, got {gradient.layout}; construct that "
                "layer with sparse=False, or use all_reduce_gradients"
            )
        by_dtype_and_device.setdefault((gradient.dtype, gradient.device), {})[name] = gradient
    for gradients in by_dtype_and_device.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
        records.append(_average(flat, reduce_group, tuple(gradients)))
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients.values()])
        for gradient, piece in zip(gradients.values(), pieces, strict=True):
            gradient.copy_(piece.view(gradient.shape))
    if meter:
        meter.record(records, (start_time, time.perf_counter()))


def _average(tensor: Tensor, group: ReduceGroup, names: tuple[str, ...]) -> BucketRecord:
    """Average a tensor over the ranks in place, and return the record of its all-reduce."""
    tensor.mul_(1 / group.world_size)
    # A backend sums elements in memory order, which may differ across ranks, so a contiguous tensor
    # is summed. The memory of a lazy conjugate does not contain its values.
    is_dense = tensor.layout is torch.strided
    summed = tensor.resolve_conj().resolve_neg().contiguous() if is_dense else tensor
    gradient_bytes = summed.nbytes if is_dense else summed._values().nbytes
    sent = time.perf_counter()
    group.all_reduce(summed, async_op=False)
    done = time.perf_counter()
    if is_dense:
        tensor.copy_(summed)
    return BucketRecord(
        parameters=names,
        calls=1,
        gradient_bytes=gradient_bytes,
        extra_bytes=0,
        sent=sent,
        done=done,
        exposed_seconds=done - sent,
    )


def _collect_common_gradients(module: nn.Module, group: ReduceGroup) -> dict[str, Tensor]:
    """Return the gradients by name; raise `RuntimeError` if one exists on some ranks only."""
    gradients = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            if parameter.grad.requires_grad:
                # The graph of this rank's gradient is not that of the mean.
                parameter.grad = detach_gradient(parameter.grad)
            gradients[name] = parameter.grad
    # Ranks may have frozen different parameters, so frozen parameters also have flags.
    names = [name for name, _ in module.named_parameters()]
    if not names:
        return {}
    missing = tuple(name for name in names if name not in gradients)
    device = next(module.parameters()).device
    flags = torch.tensor([float(name in missing) for name in names], device=device)
    dist.all_reduce(flags, group=group.process_group)
    if ((flags > 0) & (flags < group.world_size)).any():
        report = GradientReport(missing)
        check_same_gradients(report, group.process_group, find_unused_parameters=False)
    return gradients
