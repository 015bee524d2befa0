"""The logging data that torch's own tests read, with the names and units of torch's DDP."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from ddp.metering.meter import Meter
from ddp.metering.records import StepRecord
from ddp.replica import Replica
from torch import nn

_DTYPE_NAMES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_GLOO_ENVIRONMENT = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
_DURATIONS = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


def collect_logging_data(replica: Replica, meter: Meter) -> dict[str, Any]:
    """Return options, bucket sizes and times in nanoseconds."""
    options = replica.options
    device = options.device
    has_sync_bn = any(isinstance(module, nn.SyncBatchNorm) for module in replica.module.modules())
    data: dict[str, Any] = {
        "module_name": type(replica.module).__name__,
        "device_ids": "" if device is None else str(device.index),
        "output_device": -1 if device is None else device.index,
        "broadcast_buffers": int(options.sync_buffers),
        "bucket_cap_bytes": int(options.bucket_bytes[-1]),
        "find_unused_parameters": int(options.find_unused_parameters),
        "gradient_as_bucket_view": int(options.gradient_as_bucket_view),
        "static_graph": int(options.static_graph),
        "is_multi_device_module": 0,
        "has_sync_bn": int(has_sync_bn),
    }
    if replica.comm_hook is not None:
        data["comm_hook"] = getattr(replica.comm_hook.hook, "__qualname__", "")
    for name in _ENVIRONMENT:
        data[name.lower()] = os.environ.get(name, "N/A")
    data |= _collect_group_data(replica) | _collect_bucket_data(replica)
    return data | _collect_time_data(replica.reducer.num_steps, meter)


def _collect_group_data(replica: Replica) -> dict[str, Any]:
    data: dict[str, Any] = {
        "world_size": replica.group.world_size,
        "rank": replica.group.rank,
        "backend_name": dist.get_backend(replica.group.process_group),
    }
    if data["backend_name"] == "gloo":
        for name in _GLOO_ENVIRONMENT:
            data[name.lower()] = os.environ.get(name, "N/A")
    return data


def _collect_bucket_data(replica: Replica) -> dict[str, Any]:
    trained = list(replica.tracked.trained.values())
    reducer = replica.reducer
    dtypes = {_DTYPE_NAMES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in trained}
    sizes = ", ".join(str(sum(bucket.slot_bytes)) for bucket in reducer.buckets)
    data: dict[str, Any] = {
        "num_parameter_tensors": len(trained),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in trained),
        "dtypes": ", ".join(sorted(dtypes)),
        "bucket_sizes": sizes,
        "has_rebuilt_buckets": int(reducer.num_steps > 1),
    }
    if reducer.num_steps > 1:
        data["rebuilt_bucket_sizes"] = sizes
        order = ", ".join(str(index) for index in reducer.assignment.order)
        data["prev_iteration_grad_ready_order_indices"] = order
        assignment = [" ".join(str(index) for index in b.indices) for b in reducer.buckets]
        data["rebuilt_per_bucket_param_indices"] = ", ".join(assignment)
    return data


def _collect_time_data(num_steps: int, meter: Meter) -> dict[str, Any]:
    if not num_steps:
        return {}
    records = list(meter.steps)
    data: dict[str, Any] = {"iteration": num_steps - 1} | _collect_step_times(records[-1])
    for name in _DURATIONS:
        durations = [_collect_step_times(record)[name] for record in records]
        data[f"avg_{name}"] = sum(durations) // len(durations)
    return data


def _collect_step_times(record: StepRecord) -> dict[str, int]:
    comm_start = min((bucket.sent for bucket in record.buckets), default=record.waiting[0])
    comm_end = max((bucket.done for bucket in record.buckets), default=record.waiting[0])
    forward_start = min((start for start, _ in record.forwards), default=record.backward[0])
    seconds = {
        "forward_compute_time": sum(stop - start for start, stop in record.forwards),
        "backward_compute_time": record.backward[1] - record.backward[0],
        "backward_comm_time": comm_end - comm_start,
        "backward_compute_comm_overlap_time": record.hidden_seconds,
        "forward_compute_time_start": forward_start,
        "backward_compute_time_start": record.backward[0],
        "backward_compute_time_end": record.backward[1],
        "backward_comm_time_start": comm_start,
        "backward_comm_time_end": comm_end,
    }
    return {name: round(1e9 * value) for name, value in seconds.items()}
